"""An export leaves what it replaces until it is there itself, whatever that was, also where it is interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from everstep.checkpoint.exchange import exporting  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def store(tmp_path: Path) -> Path:
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(1), {"model": torch.nn.Linear(2, 2)})
    return tmp_path / "store"


def test_a_folder_takes_the_place_of_a_file(store: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old")
    exporting.export_safetensors(store, tmp_path / "out", replace=True)
    assert {each.name for each in tmp_path.iterdir()} == {"store", "out"}
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_export_leaves_the_old_folder(
    when: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    rename = Path.rename

    def interrupt(path: Path, target: Path) -> Path:
        """The old folder is about to be moved away, or has just been."""
        if path.name != "out":
            return rename(path, target)
        monkeypatch.undo()
        if when == "after":
            rename(path, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt):
        exporting.export_safetensors(store, tmp_path / "out", replace=True)
    assert {each.name for each in tmp_path.iterdir()} == {"store", "out"}
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
