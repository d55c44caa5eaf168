"""Another user on the same machine reads the store, if it may, and never the memory of a run that is not its own."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch.distributed as dist

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.session.checkpointer import Checkpointer
from everstep.checkpoint.writer import control
from tests.checkpoint.ranks import run
from tests.checkpoint.sessions import Model, session, train

pytestmark = [pytest.mark.torch, pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes other users")]

OWNER, STRANGER = 1234, 4321


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all users may write into, as /dev/shm; a writer that still runs there is ended."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o1777)
        yield folder
        end_writer(folder)


def end_writer(folder: Path) -> None:
    with suppress(OSError, CheckpointError), closing(control.WriterLink.connect(folder / "memory")) as link:
        os.kill(link.pid, signal.SIGKILL)


def save_and_live_on(folder: Path) -> Checkpointer:
    """Step 10 is in the store and in memory, and the run has not ended."""
    ckpt = session(folder, linger=60.0)
    ckpt.track(model=(model := Model()))
    train(ckpt, model, 10)
    ckpt.wait()
    return ckpt


def give_memory_away(folder: Path) -> None:
    """As a killed run of another user leaves it: slots, and nobody who serves them."""
    end_writer(folder)
    for path in [folder / "memory", *(folder / "memory").rglob("*")]:
        os.chown(path, OWNER, OWNER)


def become(user: int) -> None:
    """All ranks are this user's from here on, and the file by which they meet."""
    if dist.is_initialized():
        dist.barrier()
        store = dist.distributed_c10d._get_default_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        os.chown(store.path, user, user)
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    if dist.is_initialized():
        dist.barrier()


def restore_as(rank: int, folder: Path, user: int, begin: bool = False) -> tuple[int, str, str]:
    """The step that user restores, from where, and what its first step is answered."""
    with session(folder / "rehearsal") as ckpt:  # who may not enter the interpreter's folder imports nothing more
        ckpt.restore(model=(model := Model()))
        train(ckpt, model, 10)
    with session(folder / "rehearsal") as ckpt:
        ckpt.restore(model=Model())
    become(user)
    said = ""
    with session(folder) as ckpt:
        found = ckpt.restore(model=Model())
        if begin:
            try:
                ckpt.step(11)
            except CheckpointError as error:
                said = str(error)
    return found.step, found.tier, said


@pytest.mark.parametrize("world", [1, 2])
def test_another_user_restores_from_the_store_of_a_live_run(shared: Path, world: int) -> None:
    ckpt = save_and_live_on(shared)
    assert run(world, restore_as, shared, STRANGER) == [(10, "store", "")] * world
    ckpt.close()


def test_memory_of_another_user_is_not_read_even_by_root(shared: Path) -> None:
    save_and_live_on(shared).close(wait=False)
    give_memory_away(shared)
    assert run(1, restore_as, shared, 0) == [(10, "store", "")]
    assert run(1, restore_as, shared, STRANGER) == [(10, "store", "")]


@pytest.mark.parametrize("user", [0, STRANGER])
def test_a_run_that_goes_on_from_another_users_hears_on_all_ranks_whose_memory_is_in_its_way(
    shared: Path, user: int
) -> None:
    save_and_live_on(shared).close(wait=False)
    give_memory_away(shared)
    for path in [shared / "store", *(shared / "store").rglob("*")]:
        os.chown(path, user, user)
    for step, tier, said in run(2, restore_as, shared, user, True):
        assert (step, tier) == (10, "store")
        assert f"{shared / 'memory'} belongs to user {OWNER}" in said
        assert "let its owner or root remove it, or name another memory" in said


def test_a_run_that_begins_anew_beside_another_users_memory_hears_the_same(shared: Path) -> None:
    save_and_live_on(shared).close(wait=False)
    give_memory_away(shared)
    with session(shared) as ckpt, pytest.raises(CheckpointError, match=f"belongs to user {OWNER}"):
        ckpt.start_over(model=Model())


def cannot_start_its_writer(rank: int, folder: Path) -> str:
    os.environ["PYTHONPATH"] = str(folder)
    (folder / "asyncio.py").write_text("raise ImportError('no asyncio today')")
    with session(folder, timeout=15.0) as ckpt:
        ckpt.restore(model=Model())
        with pytest.raises(CheckpointError) as caught:
            ckpt.step(1)
    return str(caught.value)


def test_why_a_writer_does_not_start_is_heard_by_all_ranks_before_any_of_them_gives_up(folder: Path) -> None:
    for said in run(2, cannot_start_its_writer, folder):
        assert "no asyncio today" in said
