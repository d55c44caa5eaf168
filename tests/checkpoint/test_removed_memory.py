"""Somebody removes the memory for checkpoints under a live run: what is saved after that gets memory anew."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import everstep  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.sessions import session  # noqa: E402
from tests.checkpoint.writers import until  # noqa: E402

pytestmark = pytest.mark.torch


def remove_slots(memory: Path) -> None:
    for slot in memory.glob("[0-9]"):
        shutil.rmtree(slot)


def remove_content(memory: Path) -> None:
    for path in memory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


REMOVALS: dict[str, Callable[[Path], None]] = {
    "all of it": shutil.rmtree,
    "what is in it": remove_content,
    "its slots": remove_slots,
    "a slot": lambda memory: shutil.rmtree(memory / "0"),
    "its layouts": lambda memory: shutil.rmtree(memory / "layouts"),
}


def save_before_and_after(rank: int, folder: Path, removal: str) -> list[float]:
    """Return what a run that goes on from the newest checkpoint has after each save."""
    found = []
    state = {"weights": torch.zeros(1000), "step": torch.tensor(0)}
    with session(folder, every_steps=1000) as ckpt:
        ckpt.track(state=state)
        for step in range(1, 7):
            state["weights"].fill_(step)
            state["step"].fill_(step)
            if step == 3:
                if torch.distributed.is_initialized():
                    torch.distributed.barrier()
                if rank == 0:
                    REMOVALS[removal](folder / "memory")
                if torch.distributed.is_initialized():
                    torch.distributed.barrier()
            assert ckpt.save(step).saves
            ckpt.wait()
            loaded = everstep.load(folder / "store")
            assert loaded.step == step
            found.append(float(loaded["state"]["weights"].unique()))
    until(lambda: not (folder / "memory").exists(), "the memory is given back when the run has ended")
    return found


@pytest.mark.parametrize("removal", REMOVALS)
def test_saves_go_on_when_the_memory_was_removed(removal: str, tmp_path: Path) -> None:
    assert ranks.run(1, save_before_and_after, tmp_path, removal) == [[1, 2, 3, 4, 5, 6]]


def test_saves_of_several_ranks_go_on_when_the_memory_was_removed(tmp_path: Path) -> None:
    assert ranks.run(2, save_before_and_after, tmp_path, "all of it") == [[1, 2, 3, 4, 5, 6]] * 2
