"""The memory for checkpoints goes when its runs have ended: it is a directory of its own, or it is rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import everstep  # noqa: E402
from everstep.checkpoint.errors import CheckpointError  # noqa: E402
from everstep.checkpoint.slots.slot_files import list_files  # noqa: E402
from tests.checkpoint.sessions import session, steps_in  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", ["notes.txt", "store/run", "2024/notes.txt", "0/notes.txt", ".profile"])
def test_a_directory_in_which_something_else_lies_is_rejected_at_once(name: str, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir(mode=0o700)
    path = memory / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("theirs")
    with pytest.raises(CheckpointError, match=rf"holds what is no slot: {name.split('/')[0]}\. .*name another one"):
        session(tmp_path)
    assert path.read_text() == "theirs"


@pytest.mark.parametrize("store", [".", "runs/1"], ids=["the same folder", "a folder in it"])
def test_a_store_in_the_memory_is_rejected_at_once(store: str, tmp_path: Path) -> None:
    memory = everstep.MemoryOptions(directory=tmp_path)
    with pytest.raises(CheckpointError, match=r"is in .*, the memory for checkpoints, which is removed"):
        everstep.checkpointer(tmp_path / store, memory=memory)


def test_a_run_begins_while_the_writer_of_another_removes_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that looked into the directory at this moment was rejected: its slots were no folders any more."""
    memory = tmp_path / "memory"
    for name in ("0", "1", "layouts"):
        (memory / name).mkdir(mode=0o700, parents=True)

    def list_and_remove(folder: Path) -> list[Path]:
        found = list_files(folder)
        if folder == memory:
            memory.rename(tmp_path / "removed")
        return found

    with monkeypatch.context() as patched:
        patched.setattr("everstep.checkpoint.slots.own_files.list_files", list_and_remove)
        session(tmp_path).close()
    assert (tmp_path / "removed").is_dir()


def test_runs_one_after_the_other_have_one_memory(folder: Path) -> None:
    for until in (2, 4):
        state: dict[str, Any] = {"weights": torch.zeros(1000)}
        with session(folder, every_steps=1, policy="wait") as ckpt:
            for step in range(ckpt.restore(state=state).step, until):
                ckpt.step(step + 1)
    assert steps_in(folder)[-1] == 4
