"""An image's key changes when something that enters the image does, and at no other time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.images import catalogue
from e2e.images.catalogue import Image, image, images
from e2e.images.errors import ImageError

DOCKERFILE = """
FROM scratch
COPY one.txt folder/ /there/
COPY --chown=1000 two.txt /there/
COPY --from=other /built /built
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "folder" / "__pycache__").mkdir(parents=True)
    for name in ("one.txt", "two.txt", "folder/inner.py", "folder/__pycache__/inner.pyc", "beside.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    monkeypatch.setattr(catalogue, "REPOSITORY", tmp_path)
    return tmp_path


def test_what_the_dockerfile_copies_is_what_enters(tree: Path) -> None:
    entering = {str(path.relative_to(tree)) for path in Image("x:1", "Dockerfile").inputs()}
    assert entering == {"one.txt", "two.txt", "folder/inner.py"}


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (lambda tree: (tree / "one.txt").write_text("other"), True),
        (lambda tree: (tree / "folder" / "new.py").write_text(""), True),
        (lambda tree: (tree / "folder" / "inner.py").chmod(0o755), True),
        (lambda tree: (tree / "Dockerfile").write_text(DOCKERFILE + "USER 1\n"), True),
        (lambda tree: (tree / "beside.txt").write_text("other"), False),
        (lambda tree: (tree / "folder" / "__pycache__" / "inner.pyc").write_text("other"), False),
    ],
    ids=["file", "new file", "mode", "Dockerfile", "file beside it", "bytecode"],
)
def test_the_key_follows_the_content(tree: Path, change: Callable[[Path], object], differs: bool) -> None:
    built = Image("x:1", "Dockerfile")
    before = built.key
    change(tree)
    assert (built.key != before) is differs


def test_an_image_changes_with_the_image_that_it_starts_from(tree: Path) -> None:
    (tree / "Derived").write_text("ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\n")
    derived = Image("y:1", "Derived", Image("x:1", "Dockerfile"))
    before = derived.key
    (tree / "two.txt").write_text("other")
    assert derived.key != before


def test_a_missing_source_is_named(tree: Path) -> None:
    (tree / "two.txt").unlink()
    with pytest.raises(ImageError, match=r"Dockerfile copies two\.txt, which does not exist"):
        _ = Image("x:1", "Dockerfile").key


def test_every_image_of_the_catalogue_has_a_key_of_its_own() -> None:
    assert len({each.key for each in images()}) == len(images())
    assert image("trainer") == image("docker.io/everstep/trainer:0.1.0")
    with pytest.raises(ImageError, match="there is no image trainee"):
        image("trainee")
