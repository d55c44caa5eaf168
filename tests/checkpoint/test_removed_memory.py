"""Somebody removes the memory for checkpoints under a live run: what is saved after that gets memory anew."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import everstep  # noqa: E402
from everstep.checkpoint.save import saver  # noqa: E402
from everstep.checkpoint.save.outcomes import SaveFailed  # noqa: E402
from everstep.checkpoint.save.saver import WriterConnection  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.sessions import session  # noqa: E402
from tests.checkpoint.writers import until  # noqa: E402

pytestmark = pytest.mark.torch


def remove_tree(folder: Path) -> None:
    """Remove a folder in which the writer may write meanwhile."""
    while folder.exists():
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
            return


def remove_slots(memory: Path) -> None:
    for slot in memory.glob("[0-9]"):
        remove_tree(slot)


def remove_content(memory: Path) -> None:
    for path in memory.iterdir():
        remove_tree(path) if path.is_dir() else path.unlink(missing_ok=True)


REMOVALS: dict[str, Callable[[Path], None]] = {
    "all of it": remove_tree,
    "what is in it": remove_content,
    "its slots": remove_slots,
    "a slot": lambda memory: remove_tree(memory / "0"),
    "its layouts": lambda memory: remove_tree(memory / "layouts"),
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


def remove_parts(memory: Path) -> None:
    for part in memory.glob("[0-9]/*.part"):
        part.unlink(missing_ok=True)


def remove_during(rank: int, folder: Path, moment: str, removal: str) -> tuple[list[str], list[int]]:
    """Return what is told of a save whose slot is removed while rank 0 takes part in it, and the steps that are."""
    told: list[str] = []
    saved: list[int] = []

    def remove() -> None:
        memory = folder / "memory"
        remove_parts(memory) if removal == "its parts" else REMOVALS[removal](memory)

    with session(folder, every_steps=1000, timeout=3600.0, commit_timeout=3600.0) as ckpt:
        ckpt.on("failed", lambda event: told.append(event.why))
        ckpt.on("saved", lambda event: saved.append(event.key.step if event.key is not None else -1))
        ckpt.track(state={"weights": torch.zeros(1000)})
        for step in (1, 2, 3):
            if step == 2 and rank == 0:
                before(ckpt._claimed().node if moment == "it is announced" else ckpt._claimed().saver, remove)
            assert ckpt.save(step).saves
            with contextlib.suppress(SaveFailed):
                ckpt.wait()
    return told, saved


def before(patched: Any, remove: Callable[[], None]) -> None:
    """Remove the slots right before they are told to be filled, or before that is recorded there; once."""
    name = "tell" if isinstance(patched, WriterConnection) else "finish_copy"
    method = getattr(patched, name)

    def patch(*args: Any, **fields: Any) -> Any:
        if args == ("filled",) or (name == "finish_copy" and patched.copying is not None):
            setattr(patched, name, method)
            remove()
        return method(*args, **fields)

    setattr(patched, name, patch)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("removal", ["all of it", "its slots", "its parts"])
@pytest.mark.parametrize("moment", ["it is copied", "it is announced"])
def test_a_save_whose_slot_is_removed_meanwhile_fails_at_once_and_the_next_one_is_taken(
    moment: str, removal: str, world: int, tmp_path: Path
) -> None:
    """Before, all waited until the limit of a commit."""
    for told, saved in ranks.run(world, remove_during, tmp_path, moment, removal):
        assert len(told) == 1
        assert saved == [1, 3]
        if removal == "all of it" and "its writer died before all had copied" in told[0]:
            continue  # the writer has seen it first, and ended; the next one knows no more
        assert "was removed by another process while the run saved there" in told[0]
        assert str(tmp_path / "memory") in told[0]


def save_after_writer_was_replaced(rank: int, folder: Path) -> tuple[list[str], list[int]]:
    """Return what is told of two saves, between which the memory is removed; rank 0 comes to the second one first."""
    told: list[str] = []
    saved: list[int] = []
    saver._AGAIN = 0.0  # the next look for a lost writer finds or starts another one, as it does after a while
    with session(folder, every_steps=1000) as ckpt:
        ckpt.on("failed", lambda event: told.append(event.why))
        ckpt.on("saved", lambda event: saved.append(event.key.step if event.key is not None else -1))
        ckpt.track(state={"weights": torch.zeros(1000)})
        ckpt.save(1)
        ckpt.wait()
        torch.distributed.barrier()
        if rank == 0:
            remove_tree(folder / "memory")
            mark_first_look(ckpt, folder / "looked")
        else:
            until((folder / "looked").exists, "rank 0, which waits for this rank, has looked for another writer")
        ckpt.save(2)
        with contextlib.suppress(SaveFailed):
            ckpt.wait()
    return told, saved


def mark_first_look(ckpt: Any, mark: Path) -> None:
    """Make a file as soon as a rank that waits for others has heard another writer than the first one."""
    outcomes, node = ckpt._claimed()._outcomes, ckpt._claimed().node
    poll = outcomes.poll

    def patch(timeout_seconds: float) -> None:
        poll(timeout_seconds)
        if node.connections > 1 and outcomes.pending and node.is_connected:
            mark.touch()

    outcomes.poll = patch


def test_a_save_that_no_rank_had_begun_did_not_die_with_the_writer_before_it(tmp_path: Path) -> None:
    """Before, rank 0 asked the new writer how the save had ended, while it waited for the others to begin it."""
    assert ranks.run(2, save_after_writer_was_replaced, tmp_path) == [([], [1, 2])] * 2


def test_a_run_that_begins_anew_finds_the_writer_whose_socket_was_removed(folder: Path) -> None:
    """Before, nobody could connect, or start another writer, for as long as that one stayed: ten minutes."""
    state = {"weights": torch.zeros(1000)}
    for begins in (0, 2):
        ckpt = session(folder, every_steps=1000, linger=3600.0)
        assert ckpt.restore(state=state).step == begins
        ckpt.save(begins + 1)
        ckpt.wait()
        (folder / "memory" / "control").unlink()
        ckpt.save(begins + 2)
        ckpt.wait()
        ckpt.close(wait=False)  # as a run that fails: its writer stays
    with session(folder) as ckpt:
        restored = ckpt.restore(state=state)
    assert (restored.step, restored.tier) == (4, "memory")
