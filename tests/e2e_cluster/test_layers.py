"""A containerd holds a builder's layers by links: the same image, and no second copy on the disk."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from e2e.cluster import golden, layers, oci
from e2e.cluster.layers import UnpackedImage

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0, reason="containerd needs root"),
]

NAME = "docker.io/everstep/linked:1"


@pytest.fixture
def image(tmp_path: Path) -> UnpackedImage:
    """Two layers; the upper one deletes a file of the lower one and hides a whole folder of it."""
    lower, upper = tmp_path / "store" / "lower", tmp_path / "store" / "upper"
    for folder in (lower / "hidden", upper / "hidden"):
        folder.mkdir(parents=True)
    (lower / "program").write_text("one")
    (lower / "deleted").write_text("two")
    (lower / "hidden" / "old").write_text("three")
    (upper / "hidden" / "new").write_text("four")
    (upper / "link").symlink_to("program")
    os.chown(lower / "program", 1000, 1000)
    os.mknod(upper / "deleted", stat.S_IFCHR, os.makedev(0, 0))
    os.setxattr(upper / "hidden", "trusted.overlay.opaque", b"y")
    diff_ids = [oci.digest(b"lower"), oci.digest(b"upper")]
    config = {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": diff_ids}}
    return UnpackedImage(json.dumps(config).encode(), (lower, upper))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVERSTEP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def test_a_linked_image_is_the_builders_and_takes_no_disk(cache: Path, image: UnpackedImage) -> None:
    assert golden.ensure_linked({NAME: image}, {NAME: "key-1"}) == [NAME]
    assert golden.ensure_linked({NAME: image}, {NAME: "key-1"}) == []
    with golden.unpacked(NAME) as found:
        assert found.config == image.config
        for folder, original in zip(found.layers, image.layers, strict=True):
            assert folder != original
            assert _entries(folder) == _entries(original)
        assert os.getxattr(found.layers[1] / "hidden", "trusted.overlay.opaque") == b"y"
        assert (found.layers[0] / "program").stat().st_ino == (image.layers[0] / "program").stat().st_ino


def test_a_store_that_is_mounted_on_itself_is_linked_as_any(cache: Path, image: UnpackedImage) -> None:
    """As buildah leaves it when it is killed, and as it is while another build runs."""
    store = image.layers[0].parent
    subprocess.run(["mount", "--bind", store, store], check=True)
    try:
        golden.ensure_linked({NAME: image}, {NAME: "key-1"})
    finally:
        subprocess.run(["umount", store], check=True)
    with golden.unpacked(NAME) as found:
        assert [_entries(folder) for folder in found.layers] == [_entries(folder) for folder in image.layers]


def test_the_layers_of_a_replaced_image_go_with_it(cache: Path, image: UnpackedImage) -> None:
    golden.ensure_linked({NAME: image}, {NAME: "key-1"})
    (image.layers[1].parent / "other").mkdir()
    changed = json.loads(image.config)
    changed["rootfs"]["diff_ids"][1] = oci.digest(b"other")
    other = UnpackedImage(json.dumps(changed).encode(), (image.layers[0], image.layers[1].parent / "other"))
    golden.ensure_linked({NAME: other}, {NAME: "key-2"})
    # Nodes might have used the former one until now; the next import frees it.
    golden.ensure_linked({"docker.io/everstep/second:1": other}, {"docker.io/everstep/second:1": "key-2"})
    with golden._containerd() as socket:
        ctr = ["ctr", "--address", str(socket), "--namespace", "k8s.io"]
        listed = subprocess.run([*ctr, "snapshots", "list"], check=True, capture_output=True, text=True).stdout
    assert {line.split()[0] for line in listed.splitlines()[1:]} == set(other.chain_ids)


def test_killed_before_the_commit_a_layer_is_linked_again(
    cache: Path, image: UnpackedImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with golden._containerd() as socket:
        ctr = ["ctr", "--address", str(socket), "--namespace", "k8s.io"]
        run = layers._run
        with monkeypatch.context() as patch:
            patch.setattr(layers, "_run", lambda *command: _die() if "commit" in command else run(*command))
            with pytest.raises(KeyboardInterrupt):
                layers.link(ctr, image, cache / "archive", NAME)
        golden.link_image(ctr[:3], NAME, image)
        assert _entries(layers.find(ctr, golden._listed([*ctr, "images"])[NAME]).layers[1]) == _entries(image.layers[1])


def _die() -> str:
    raise KeyboardInterrupt


def _entries(folder: Path) -> dict[str, tuple[int, int, int, int]]:
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {
        str(path.relative_to(folder)): (entry.st_mode, entry.st_uid, entry.st_size, entry.st_mtime_ns)
        for path, entry in found.items()
    }
