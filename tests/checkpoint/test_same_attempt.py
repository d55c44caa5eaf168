"""A launcher starts ranks again under the attempt that they were given: nothing is mixed with what a save has left."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.catalog.candidates import list_candidates  # noqa: E402
from everstep.checkpoint.errors import StoreError  # noqa: E402
from everstep.checkpoint.save.outcomes import SaveFailed  # noqa: E402
from everstep.checkpoint.save.snapshots import Snapshots  # noqa: E402
from everstep.checkpoint.session import claiming  # noqa: E402
from everstep.checkpoint.session.checkpointer import Checkpointer  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from everstep.checkpoint.writer import control  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.writers import until  # noqa: E402

pytestmark = pytest.mark.torch

BEFORE, LOST = ranks.key(10), ranks.key(20)  # the former was committed, the latter by one of two nodes alone
AFTER = ranks.key(30)
OLD, NEW = 20.0, 20.5  # values of the same step: a run that goes on may compute them in another order


def model(fill: float) -> Any:
    made = torch.nn.ModuleList([torch.nn.Linear(200, 200) for _ in range(4)])
    set_all(made, fill)
    return made


def set_all(made: Any, fill: float) -> None:
    with torch.no_grad():
        for param in made.parameters():
            param.fill_(fill)


def values(tensors: Any) -> set[float]:
    return {value.item() for tensor in tensors for value in tensor.unique()}


def session(rank: int, folder: Path, peers: Literal[0, 1], machine: int | None = None) -> Checkpointer:
    """Each rank is a node of its own, and the attempt is the same each time."""
    os.environ["NODE_RANK"] = str(rank)
    return everstep.checkpointer(
        folder / "store",
        attempt=(BEFORE.attempt.epoch, BEFORE.attempt.generation),
        every_steps=1000,
        memory=everstep.MemoryOptions(directory=folder / f"memory-{rank if machine is None else machine}", peers=peers),
        times=everstep.TimeOptions(timeout=60.0, commit_timeout=30.0, linger=60.0),
    )


def kill_writer(memory: Path) -> None:
    link = control.WriterLink.connect(memory)
    os.kill(link.pid, signal.SIGKILL)
    link.close()


def is_announced(folder: Path) -> bool:
    return (folder / "store" / LOST.node_name(1)).exists()


def save_in_part_and_die(rank: int, folder: Path, peers: Literal[0, 1]) -> None:
    made = model(0)
    ckpt = session(rank, folder, peers)
    ckpt.restore(model=made)
    set_all(made, BEFORE.step)
    ckpt.save(BEFORE.step)
    ckpt.wait()
    dist.barrier()

    def lose_node(step: int) -> dict[str, Any]:
        kill_writer(folder / "memory-0")
        until(partial(is_announced, folder), "node 1 has stored its share", 30.0)
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    if rank == 0:
        ckpt.metadata = lose_node  # it is called when this rank has copied its part
    set_all(made, OLD)
    ckpt.save(LOST.step)
    until(partial(is_announced, folder), "node 1 has stored its share", 30.0)
    os.kill(os.getpid(), signal.SIGKILL)


def go_on(rank: int, folder: Path, peers: Literal[0, 1]) -> tuple[int, set[float]]:
    made = model(-1)
    with session(rank, folder, peers) as ckpt:
        start = ckpt.restore(model=made)
        found = values(made.parameters())
        set_all(made, NEW)
        ckpt.save(LOST.step)
    return start.step, found


@pytest.mark.parametrize("peers", [0, 1])
@pytest.mark.parametrize("memory", ["of node 1 is there, with its writer", "is gone"])
def test_a_save_is_not_completed_by_what_ranks_before_had_stored_of_the_same_step(
    memory: str, peers: Literal[0, 1], tmp_path: Path
) -> None:
    try:
        ranks.run(2, save_in_part_and_die, tmp_path, peers, dies=[0, 1])
        shutil.rmtree(tmp_path / "memory-0")
        if memory == "is gone":
            kill_writer(tmp_path / "memory-1")
            shutil.rmtree(tmp_path / "memory-1")
        assert list_candidates(PosixStore(tmp_path / "store")) == [BEFORE]
        assert ranks.run(2, go_on, tmp_path, peers) == [(BEFORE.step, {float(BEFORE.step)})] * 2
        loaded = everstep.load(tmp_path / "store")
        assert (loaded.key, loaded.fell_back) == (LOST, {})
        assert values(loaded["model"].values()) == {NEW}
    finally:
        for rank in (0, 1):
            try:
                kill_writer(tmp_path / f"memory-{rank}")
            except OSError:
                continue


def save_on_one_node_and_die(rank: int, folder: Path) -> None:
    """Rank 1 runs on another machine than before, and dies before it has copied its part. Rank 0 copies its own."""
    made = model(-1)
    ckpt = session(rank, folder, 1, machine=2 if rank else 0)
    ckpt.restore(model=made)
    if rank == 1:
        pytest.MonkeyPatch().setattr(Snapshots, "take", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    set_all(made, NEW)
    with suppress(Exception):  # of whatever kind: rank 1 is lost
        ckpt.save(LOST.step)
    until(partial(is_whole, folder / "memory-0"), "node 0 has its share", 30.0)
    kill_writer(folder / "memory-0")
    os.kill(os.getpid(), signal.SIGKILL)


def is_whole(memory: Path) -> bool:
    return any(path.read_text() == str(LOST) for path in memory.rglob("whole"))


def restore(rank: int, folder: Path) -> tuple[int, set[float]]:
    made = model(-1)
    with session(rank, folder, 1) as ckpt:
        start = ckpt.restore(model=made)
    return start.step, values(made.parameters())


def test_shares_of_different_starts_of_an_attempt_are_no_checkpoint(tmp_path: Path) -> None:
    """A machine of the first start is back at the third, beside one of the second: their memories together would have
    a step of which each start has saved a half."""
    try:
        ranks.run(2, save_in_part_and_die, tmp_path, 1, dies=[0, 1])
        shutil.rmtree(tmp_path / "memory-0")
        ranks.run(2, save_on_one_node_and_die, tmp_path, dies=[0, 1])
        assert is_whole(tmp_path / "memory-0")
        assert is_whole(tmp_path / "memory-1")
        assert ranks.run(2, restore, tmp_path) == [(BEFORE.step, {float(BEFORE.step)})] * 2
    finally:
        for machine in range(3):
            try:
                kill_writer(tmp_path / f"memory-{machine}")
            except OSError:
                continue


def go_on_without_store_at_first(rank: int, folder: Path) -> list[Any]:
    """The store is away when the attempt is claimed, and back for the saves."""
    made = model(-1)

    def is_away(*_: Any) -> None:
        raise StoreError("store", "is away")

    away = pytest.MonkeyPatch()
    ckpt = session(rank, folder, 0)
    ckpt.restore(model=made)
    for name in ("_check_goes_on", "remove_uncommitted"):
        away.setattr(claiming, name, is_away)
    set_all(made, NEW)
    ckpt.save(LOST.step)
    with suppress(SaveFailed):
        ckpt.wait()
    away.undo()
    set_all(made, AFTER.step)
    ckpt.save(AFTER.step)
    with suppress(SaveFailed):  # that of the step before is told once more
        ckpt.close()
    return list_candidates(PosixStore(folder / "store"))


def test_what_could_not_be_dropped_at_the_start_makes_no_checkpoint_together_with_what_is_new(tmp_path: Path) -> None:
    try:
        ranks.run(2, save_in_part_and_die, tmp_path, 0, dies=[0, 1])
        kill_writer(tmp_path / "memory-1")
        for machine in (0, 1):
            shutil.rmtree(tmp_path / f"memory-{machine}")
        candidates = ranks.run(2, go_on_without_store_at_first, tmp_path)
        loaded = everstep.load(tmp_path / "store")
        assert (loaded.key, loaded.fell_back) == (AFTER, {})
        assert values(loaded["model"].values()) == {float(AFTER.step)}
        if LOST in candidates[0]:
            assert values(everstep.load(tmp_path / "store", step=LOST.step)["model"].values()) == {NEW}
    finally:
        for machine in (0, 1):
            try:
                kill_writer(tmp_path / f"memory-{machine}")
            except OSError:
                continue
