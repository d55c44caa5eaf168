"""An export leaves what it replaces until it is there itself, whatever that was, also where it is interrupted or fails.

What is not there as a whole is not imported.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from everstep.checkpoint.errors import CheckpointError  # noqa: E402
from everstep.checkpoint.exchange import exporting, importing  # noqa: E402
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


@pytest.mark.parametrize("target", ["out", "out.safetensors"])
def test_an_export_can_be_read_by_whom_the_user_lets_read_new_files(target: str, store: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    exporting.export_safetensors(store, tmp_path / target)
    written = tmp_path / target / "model.safetensors" if target == "out" else tmp_path / target
    assert written.stat().st_mode == (tmp_path / "mine").stat().st_mode


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


@pytest.mark.parametrize("kind", ["file", "folder", "dcp"])
def test_a_place_that_takes_no_more_is_named_and_left_as_it_was(kind: str, tmp_path: Path) -> None:
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(1), {"model": torch.nn.Linear(64, 64)})
    target = tmp_path / ("x.safetensors" if kind == "file" else "x")
    export = exporting.export_dcp if kind == "dcp" else exporting.export_safetensors
    with limited_files(4096), pytest.raises(CheckpointError, match=rf"{target.name} cannot be written: .*too large"):
        export(tmp_path / "store", target)
    assert {each.name for each in tmp_path.iterdir()} == {"store"}


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    """Files larger than `size` bytes fail meanwhile, as those on a full disk do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_folder_of_which_a_download_has_not_brought_all_is_not_imported(store: Path, tmp_path: Path) -> None:
    exporting.export_safetensors(store, tmp_path / "out", max_shard_bytes=10)
    first, second = sorted((tmp_path / "out").glob("*.safetensors"))
    first.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=rf"out does not have {first.name}, which model.safetensors.index.json"):
        importing.import_safetensors(tmp_path / "out", tmp_path / "new")
    second.rename(tmp_path / "out" / "consolidated.safetensors")
    importing.import_safetensors(tmp_path / "out", tmp_path / "new")  # of files that the index does not speak of
    (tmp_path / "out" / "model.safetensors.index.json").write_text('{"weight_')
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json is no index"):
        importing.import_safetensors(tmp_path / "out", tmp_path / "new")


def test_a_folder_of_dcp_that_lacks_a_file_is_named(store: Path, tmp_path: Path) -> None:
    exporting.export_dcp(store, tmp_path / "out")
    next((tmp_path / "out").glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match=r"out cannot be read by DCP: .*No such file.*distcp"):
        importing.import_dcp(tmp_path / "out", tmp_path / "new")


def test_a_rename_of_what_is_not_there_is_told(store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    export, imported = partial(exporting.export_safetensors, store), importing.import_safetensors
    export(tmp_path / "x.safetensors", rename={"wei": "w", "bias": None})
    imported(tmp_path / "x.safetensors", tmp_path / "one", rename={"model.": "net."})
    assert not caplog.records
    export(tmp_path / "y.safetensors", rename={"wei": "w", "model.": "net."})
    imported(tmp_path / "x.safetensors", tmp_path / "two", rename={"wght": "weight"})
    assert [each.message.partition(",")[0] for each in caplog.records] == [
        "rename: no name begins with model.",
        "rename: no name begins with wght",
    ]


def test_an_import_from_dcp_tells_of_keys_that_may_have_been_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import torch.distributed.checkpoint as dcp

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    dcp.save(states, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    importing.import_dcp(tmp_path / "dcp", tmp_path / "store")
    (said,) = [each.message for each in caplog.records if each.name == "everstep.checkpoint"]
    assert said.startswith("scheduler.milestones has the keys '2', '5': DCP makes text of numbers")
