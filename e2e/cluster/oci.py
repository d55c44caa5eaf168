"""Small images written directly as OCI archives, without a builder: for one static program FROM scratch."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_LAYER = "application/vnd.oci.image.layer.v1.tar"


def write_archive(
    path: Path,
    name: str,
    files: Mapping[str, bytes],
    entrypoint: Sequence[str],
    links: Mapping[str, str] | None = None,
    user: str = "",
) -> None:
    """Write an image of one layer with executable ``files`` and symbolic ``links``; the same input, the same bytes.

    It runs as ``user``, by default as root.
    """
    layer = _layer(files, links or {})
    as_user = {"User": user} if user else {}
    config = _json(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": list(entrypoint), "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"], **as_user},
            "rootfs": {"type": "layers", "diff_ids": [digest(layer)]},
        }
    )
    _write(path, name, config, [_descriptor(_LAYER, layer)], [layer])


def write_index(path: Path, name: str, config: bytes, layer_sizes: Sequence[int]) -> None:
    """Write an archive that names an image and describes it, without the uncompressed layers that the config lists."""
    diff_ids = json.loads(config)["rootfs"]["diff_ids"]
    sizes = zip(diff_ids, layer_sizes, strict=True)
    _write(path, name, config, [{"mediaType": _LAYER, "digest": diff_id, "size": size} for diff_id, size in sizes], [])


def _write(path: Path, name: str, config: bytes, layers: Sequence[Mapping[str, Any]], blobs: Sequence[bytes]) -> None:
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": _descriptor("application/vnd.oci.image.config.v1+json", config),
            "layers": layers,
        }
    )
    entry = _descriptor("application/vnd.oci.image.manifest.v1+json", manifest)
    entry["annotations"] = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
    with tarfile.open(path, "w") as archive:
        _add(archive, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        _add(archive, "index.json", _json({"schemaVersion": 2, "manifests": [entry]}))
        for blob in (config, manifest, *blobs):
            _add(archive, f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}", blob)


def content_key(path: Path) -> str:
    """Return a digest of what an image archive holds, by its index: read in an instant whatever the size of the
    layers."""
    with tarfile.open(path) as archive:
        for member in archive:
            # index.json is OCI's, manifest.json Docker's; both name every blob by its digest.
            if member.name in ("index.json", "manifest.json"):
                content = archive.extractfile(member)
                assert content is not None
                return hashlib.sha256(content.read()).hexdigest()
    raise ValueError(f"{path} is no image archive: it has neither index.json nor manifest.json")


def _layer(files: Mapping[str, bytes], links: Mapping[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        folders = {str(parent) for name in (*files, *links) for parent in Path(name).parents} - {"."}
        for folder in sorted(folders):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for name, content in sorted(files.items()):
            _add(archive, name, content)
        for name, target in sorted(links.items()):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o755
    archive.addfile(entry, io.BytesIO(content))


def _json(document: object) -> bytes:
    return json.dumps(document, sort_keys=True).encode()


def digest(blob: bytes) -> str:
    """Return the name of a blob, as the OCI image specification computes it."""
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest(blob), "size": len(blob)}
