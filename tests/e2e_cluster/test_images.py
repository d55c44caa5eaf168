"""Archives are described by their content, and images found under the name that pods use."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from e2e.cluster import golden, oci
from e2e.cluster.errors import ClusterError


def test_same_input_same_archive(tmp_path: Path) -> None:
    for name in ("a", "b"):
        oci.write_archive(tmp_path / name, "x:1", {"bin/x": b"program"}, ["/bin/x"], {"bin/y": "x"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_key_follows_the_content(tmp_path: Path) -> None:
    oci.write_archive(tmp_path / "a", "x:1", {"x": b"one"}, ["/x"])
    oci.write_archive(tmp_path / "b", "x:1", {"x": b"two"}, ["/x"])
    assert oci.content_key(tmp_path / "a") != oci.content_key(tmp_path / "b")


def test_an_archive_of_something_else_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a", "w"):
        pass
    with pytest.raises(ValueError, match="no image archive"):
        oci.content_key(tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("busybox", "docker.io/library/busybox:latest"),
        ("everstep/trainer:0.1.0", "docker.io/everstep/trainer:0.1.0"),
        ("localhost/everstep/pause:1", "localhost/everstep/pause:1"),
        ("registry.example:5000/a/b", "registry.example:5000/a/b:latest"),
        ("ghcr.io/a/b:1", "ghcr.io/a/b:1"),
    ],
)
def test_names_are_completed_as_the_runtime_does(name: str, expected: str) -> None:
    assert golden.reference(name) == expected


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("EVERSTEP_CACHE", str(tmp_path))
    (tmp_path / "containerd").mkdir()
    (tmp_path / "containerd" / "golden.json").write_text('{"x:1": "key-1"}')
    return golden.images()


def test_an_image_that_is_there_needs_no_archive(held: dict[str, str]) -> None:
    assert golden.holds("x:1", "key-1")
    gone = Path("/nonexistent")
    assert golden.ensure({"x:1": gone}) == []
    assert golden.ensure({"x:1": gone}, {"x:1": "key-1"}) == []


def test_other_content_under_the_same_name_needs_its_archive(held: dict[str, str]) -> None:
    assert not golden.holds("x:1", "key-2")
    with pytest.raises(ClusterError, match="no archive"):
        golden.ensure({"x:1": Path("/nonexistent")}, {"x:1": "key-2"})
