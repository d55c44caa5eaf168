"""Images whose layers lie unpacked on this machine's disk, given to a containerd without a copy.

A builder's store holds each layer as a folder, in the form in which the kernel's overlay wants it, and containerd keeps
its layers in the same form. Neither changes a layer in place, so both can hold the same files by hard links: the
gigabytes of a trainer image are then stored once, and are neither packed nor unpacked.
"""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster import oci
from e2e.cluster.errors import ClusterError

# As long as it bears this label, a snapshot needs no image. It is taken off when the image is there.
_ROOT_LABEL = "containerd.io/gc.root"


@dataclass(frozen=True)
class UnpackedImage:
    """An image as a builder stores it.

    Attributes:
        config: The image's configuration, as bytes: its digest names the image.
        layers: One folder for each entry of the configuration's `rootfs.diff_ids`, the lowest first.
    """

    config: bytes
    layers: tuple[Path, ...]

    @property
    def chain_ids(self) -> list[str]:
        """Return the name of each layer on top of those below it, as the OCI image specification computes it."""
        names: list[str] = []
        for diff_id in json.loads(self.config)["rootfs"]["diff_ids"]:
            names.append(oci.digest(f"{names[-1]} {diff_id}".encode()) if names else diff_id)
        return names


def link(ctr: Sequence[str], image: UnpackedImage, archive: Path, name: str) -> None:
    """Give a containerd the layers of ``image``, and write the archive that names it, for ``ctr images import``.

    Args:
        ctr: The command line of `ctr` for that containerd, with its namespace.
        image: Its layers must lie on the file system of the containerd's root.
        archive: Where the archive is written. It holds no layer: containerd reads a layer's content only to unpack it,
            and finds all of them unpacked.
        name: The image's name in the archive.
    """
    parent = ""
    for chain_id, folder in zip(image.chain_ids, image.layers, strict=True):
        if not _has_snapshot(ctr, chain_id):
            _link_layer(ctr, chain_id, parent, folder)
        parent = chain_id
    oci.write_index(archive, name, image.config, [_size(folder) for folder in image.layers])


def release(ctr: Sequence[str], image: UnpackedImage) -> None:
    """Leave the layers to the image that refers to them now: they go when it goes."""
    for chain_id in image.chain_ids:
        _run(*ctr, "snapshots", "label", chain_id, f"{_ROOT_LABEL}=")


def find(ctr: Sequence[str], digest: str) -> UnpackedImage:
    """Return an image that a containerd holds, by the digest of its manifest."""
    manifest = json.loads(_run(*ctr, "content", "get", digest))
    if "manifests" in manifest:
        manifest = json.loads(_run(*ctr, "content", "get", manifest["manifests"][0]["digest"]))
    config = _run(*ctr, "content", "get", manifest["config"]["digest"]).encode()
    top = UnpackedImage(config, ()).chain_ids[-1]
    # Of all that shows its layers, a snapshot for writing is what no garbage collection takes away meanwhile.
    active = f"find-{uuid.uuid4()}"
    mounts = json.loads(_run(*ctr, "snapshots", "prepare", "--mounts", active, top))
    _run(*ctr, "snapshots", "remove", active)
    return UnpackedImage(config, tuple(reversed(_folders(mounts, "lowerdir"))))


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))


def _has_snapshot(ctr: Sequence[str], chain_id: str) -> bool:
    command = [*ctr, "snapshots", "info", chain_id]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _link_layer(ctr: Sequence[str], chain_id: str, parent: str, folder: Path) -> None:
    # Killed before the commit, it leaves a snapshot under a name that nobody asks for.
    active = f"link-{uuid.uuid4()}"
    mounts = json.loads(_run(*ctr, "snapshots", "prepare", "--mounts", active, *([parent] if parent else [])))
    (target,) = _folders(mounts, "upperdir")
    # Everything that is no folder is linked; folders keep their owner, mode, times and overlay's own attributes.
    # A builder mounts its store on itself while it runs, and for ever when it is killed; there are no links from one
    # mount into another: over both folders lies one mount here, which only the copying process sees.
    place = str(Path(os.path.commonpath((folder, target))))
    script = 'mount --bind "$1" "$1" && exec cp --archive --link "$2/." "$3"'
    _run("unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", place, str(folder), str(target))
    _run(*ctr, "snapshots", "commit", chain_id, active)


def _folders(mounts: list[dict[str, Any]], option: str) -> list[Path]:
    """Return the folders behind an overlay's ``option``; a mount of a single layer is a bind mount of its folder."""
    (mount,) = mounts
    found = {name.lower(): value for name, value in mount.items()}
    if found["type"] != "overlay":
        return [Path(found["source"])]
    options = dict(each.partition("=")[::2] for each in found["options"])
    return [Path(folder) for folder in options[option].split(":")]


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ClusterError(f"{' '.join(command[:8])}: {result.stderr.strip()[-2000:]}")
    return result.stdout
