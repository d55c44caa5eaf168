"""An evaluation reads the store of a live run, wherever and whenever it likes, and the run does not notice.

The live run is two ranks, each a node of its own with a writer of its own; it stops at every moment of a save, and
evaluations come and go meanwhile.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch.distributed as dist

import everstep
from everstep.checkpoint.catalog.candidates import list_candidates, verify_checkpoint
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.keys import ATTEMPTS, Attempt
from everstep.checkpoint.save.saver import WriterConnection
from everstep.checkpoint.session.checkpointer import Checkpointer, SaveFailed
from everstep.checkpoint.slots.slot_files import MEMORY_VARIABLE
from everstep.checkpoint.slots.slots import Slots, SlotState
from everstep.checkpoint.store.posix import PosixStore
from everstep.checkpoint.writer import control
from tests.checkpoint.grouping import group_session
from tests.checkpoint.ranks import run
from tests.checkpoint.sessions import Model, claim, steps_in, train
from tests.checkpoint.writers import until

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

MOMENTS = ("before", "filling", "filled", "before commit", "after")
PATIENCE = 200.0
HERE, ELSEWHERE = "memory", "memory elsewhere"


def on(folder: Path, memory: str, *, inherits: bool) -> None:
    """Return what the environment of a process says about its machine, and about the run that it belongs to."""
    (folder / memory).mkdir(exist_ok=True)
    os.environ[MEMORY_VARIABLE] = str(folder / memory)
    for name in ("EVERSTEP_EPOCH", "EVERSTEP_GENERATION"):
        os.environ.pop(name, None)
        if inherits:
            os.environ[name] = "1"


def session(folder: Path, **options: Any) -> Checkpointer:
    common = {"every": "1h", "keep_last": 100, "timeout": PATIENCE, "commit_timeout": PATIENCE, "linger": 5.0}
    return everstep.checkpointer(folder / "store", **group_session(**common | options))


def pause(folder: Path, name: str) -> None:
    """All ranks of the live run, until the test lets them go on."""
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / f"at {name}").touch()
        until((folder / f"go {name}").exists, f"the test goes on after {name}", PATIENCE)
    dist.barrier()


def hold(node: WriterConnection, rank: int, moment: str, folder: Path) -> None:
    """The next save stops at this moment."""
    tell = node.tell
    link = control.WriterLink.connect(node.directory)
    writer = link.pid
    link.close()
    stops = moment == "filled" or (moment == "before commit" and rank == 1)

    def held(verb: str, **fields: Any) -> int:
        if verb != "filled":
            return tell(verb, **fields)
        node.tell = tell  # type: ignore[method-assign]
        if moment == "filling" and rank == 1:
            pause(folder, moment)
        if stops:
            os.kill(writer, signal.SIGSTOP)
        number = tell(verb, **fields)
        if moment == "before commit" and rank == 0:
            stored = lambda: any(slot.state is SlotState.STORED for slot in Slots(node.directory))  # noqa: E731
            until(stored, "node 0 has written its part", PATIENCE)
        if not (moment == "filling" and rank == 1):
            pause(folder, moment)
        if stops:
            os.kill(writer, signal.SIGCONT)
        return number

    if moment in ("filling", "filled", "before commit"):
        node.tell = held  # type: ignore[method-assign]


def live(rank: int, folder: Path) -> tuple[list[str], dict[str, Any]]:
    os.environ["NODE_RANK"] = str(rank)
    on(folder, HERE, inherits=True)
    model, failed = Model(), []
    with session(folder) as ckpt:
        ckpt.on("failed", lambda event: failed.append(event.why))
        ckpt.restore(model=model)
        for step, moment in enumerate(MOMENTS, start=1):
            model.at = step
            hold(claim(ckpt), rank, moment, folder)
            if moment == "before":
                ckpt.save(step)
                ckpt.wait()
                pause(folder, moment)
                continue
            ckpt.save(step)
            ckpt.wait()
            if moment == "after":
                pause(folder, moment)
    return failed, ckpt.metrics()


def evaluate(rank: int, folder: Path, memory: str, inherits: bool, dies: bool = False) -> tuple[int, str]:
    on(folder, memory, inherits=inherits)
    os.environ.pop("NODE_RANK", None)

    class Evaluated(Model):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            super().load_state_dict(state)

    model = Evaluated()
    with session(folder) as ckpt:
        found = ckpt.restore(model=model)
    assert model.at == found.step
    assert ckpt.attempt is None
    return found.step, found.tier


def begins_to_save(rank: int, folder: Path, memory: str, inherits: bool) -> str:
    on(folder, memory, inherits=inherits)
    model = Model()
    with session(folder) as ckpt:
        ckpt.restore(model=model)
        try:
            ckpt.save(model.at + 1)
        except CheckpointError as error:
            return str(error)
    return "saved"


def test_a_live_run_saves_as_if_alone_whoever_reads_at_whatever_moment(folder: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        training = pool.submit(run, 2, live, folder, timeout=PATIENCE)
        for number, moment in enumerate(MOMENTS):
            there = lambda name=moment: training.done() or (folder / f"at {name}").exists()  # noqa: E731
            until(there, f"the run is at {moment}", PATIENCE)
            assert not training.done(), training.result()
            committed = number + 1 if moment in ("before", "after") else number
            # Two at once: one process and two ranks, here and elsewhere, with and without the run's environment.
            memories = (HERE, ELSEWHERE) if number % 2 else (ELSEWHERE, HERE)
            readers = [
                pool.submit(run, world, evaluate, folder, memory, inherits, timeout=PATIENCE)
                for world, memory, inherits in ((1, memories[0], number % 3 == 0), (2, memories[1], number % 3 != 0))
            ]
            for reader in readers:
                assert set(reader.result()) == {(committed, "store")}
            if moment == "before":
                run(1, evaluate, folder, HERE, True, True, dies=[0], timeout=PATIENCE)
            if moment == "after":
                [words] = run(1, begins_to_save, folder, HERE, False, timeout=PATIENCE)
                assert "which is alive: process" in words
                assert "to restore from this store needs neither" in words
            (folder / f"go {moment}").touch()
        for failed, metrics in training.result():
            assert failed == []
            assert (metrics["saved"], metrics["failed"]) == (len(MOMENTS), 0)
    assert steps_in(folder) == list(range(1, len(MOMENTS) + 1))
    store = PosixStore(folder / "store")
    for key in list_candidates(store):
        assert (verify_checkpoint(store, key).world, str(key.attempt)) == (2, "0000000001.0000000001")
    # Its writers remove it, once the connections of their ranks have ended.
    until(lambda: not list(Path(folder / HERE).glob("everstep-*")), "the run has given its memory back", PATIENCE)


def with_defaults(folder: Path) -> Checkpointer:
    return everstep.checkpointer(folder / "store", every_steps=10)


def trains_to_60(rank: int, folder: Path) -> tuple[int, list[int], list[str], dict[str, Any]]:
    on(folder, HERE, inherits=False)
    model, saved, failed = Model(), list[Any](), list[str]()
    with with_defaults(folder) as ckpt:
        ckpt.on("saved", lambda event: saved.append(event.key))
        ckpt.on("failed", lambda event: failed.append(event.why))
        nodes = ckpt._topology.nodes
        assert ckpt.restore(model=model).step == 0
        for step in range(1, 61):
            train(ckpt, model, step)
            if step % 10 == 0:
                ckpt.wait()  # steps of no length would be due before the last save is stored
            if step in (25, 35):
                pause(folder, str(step))
    return nodes, [key.step for key in saved], failed, ckpt.metrics()


def evaluates_around_25(rank: int, folder: Path) -> list[int]:
    on(folder, HERE, inherits=False)
    found, model = [], Model()
    with with_defaults(folder) as ckpt:
        found.append(ckpt.restore(model=model).step)
        (folder / "go 25").touch()
        until((folder / "at 35").exists, "the run has saved beside the evaluation", PATIENCE)
        found.append(ckpt.restore(model=model).step)
    (folder / "go 35").touch()
    return found


def resumes(rank: int, folder: Path) -> int:
    on(folder, HERE, inherits=False)
    model = Model()
    with with_defaults(folder) as ckpt:
        ckpt.restore(model=model)
    return model.at


def test_with_all_defaults_an_evaluation_at_step_25_costs_a_run_on_the_same_machine_nothing(folder: Path) -> None:
    """Two ranks share a node, and so a writer, which the evaluation meets in the same memory."""
    with ThreadPoolExecutor(2) as pool:
        training = pool.submit(run, 2, trains_to_60, folder, timeout=PATIENCE)
        until(lambda: training.done() or (folder / "at 25").exists(), "the run is at step 25", PATIENCE)
        assert not training.done(), training.result()
        assert run(1, evaluates_around_25, folder, timeout=PATIENCE) == [[20, 30]]
        for nodes, saved, failed, metrics in training.result():
            assert nodes == 1
            assert (saved, failed) == ([10, 20, 30, 40, 50, 60], [])
            assert (metrics["saved"], metrics["failed"]) == (6, 0)
    until(lambda: steps_in(folder) == [40, 50, 60], "retention has kept the newest three", PATIENCE)
    store = PosixStore(folder / "store")
    assert [verify_checkpoint(store, key).world for key in list_candidates(store)] == [2, 2, 2]
    assert run(2, resumes, folder) == [60, 60]


def taken_over(rank: int, folder: Path) -> str:
    on(folder, HERE, inherits=False)
    model, failed = Model(), []
    ckpt = session(folder)
    ckpt.on("failed", lambda event: failed.append(event.why))
    ckpt.restore(model=model)
    for step in (1, 2):
        model.at = step
        ckpt.save(step)
        ckpt.wait()
    (folder / "at take-over").touch()
    until((folder / "go take-over").exists, "another run has saved", PATIENCE)
    ckpt.save(3)
    with pytest.raises(SaveFailed):
        ckpt.wait()
    ckpt.close(wait=False)
    return failed[0]


def test_a_run_on_another_machine_takes_over_and_the_old_one_commits_and_removes_nothing(folder: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(run, 1, taken_over, folder, timeout=PATIENCE)
        until(lambda: training.done() or (folder / "at take-over").exists(), "the run has saved", PATIENCE)
        assert run(1, begins_to_save, folder, ELSEWHERE, False, timeout=PATIENCE) == ["saved"]
        (folder / "go take-over").touch()
        assert "attempt 0000000000.0000000002 has taken over this store" in training.result()[0]
    found = [(key.attempt.generation, key.step) for key in list_candidates(PosixStore(folder / "store"))]
    assert found == [(2, 3), (1, 2), (1, 1)]


def restores_and_ends(rank: int, folder: Path, generation: int) -> int:
    on(folder, HERE, inherits=False)
    with session(folder, attempt=(0, generation) if generation else None) as ckpt:
        step = ckpt.restore(model=Model()).step
        if generation:
            train(ckpt, Model(), 1)
    return step


def test_readers_use_up_no_attempt_of_the_next_generation(folder: Path) -> None:
    on_disk = PosixStore(folder / "store")
    for _ in range(3):
        assert run(1, restores_and_ends, folder, 0) == [0]
    assert not (folder / "store").exists()  # they have written nothing
    for generation in (1, 2):
        run(1, restores_and_ends, folder, generation)
        claimed = [Attempt.parse(entry.name.removeprefix(ATTEMPTS)) for entry in on_disk.list(ATTEMPTS)]
        assert sorted(claimed) == [Attempt(0, each + 1) for each in range(generation)]


def reads_only(rank: int, folder: Path) -> tuple[int, str]:
    """Every call that writes into the store fails, as on a mount that is read-only."""
    from everstep.checkpoint.errors import StoreError
    from everstep.checkpoint.store import posix

    def refused(*_: Any, **__: Any) -> Any:
        raise StoreError("read-only file system", "the store")

    for name in ("put", "put_if_absent", "replace", "delete", "sweep"):
        setattr(posix.PosixStore, name, refused)
    model = Model()
    on(folder, ELSEWHERE, inherits=False)
    with session(folder) as ckpt:
        found = ckpt.restore(model=model)
    return found.step, found.tier


@pytest.mark.parametrize("world", [1, 2])
def test_a_store_that_may_only_be_read_is_restored(folder: Path, world: int) -> None:
    assert run(1, begins_to_save, folder, HERE, False) == ["saved"]
    # The writer reads back what it stored, and marks that, after the run has ended.
    until(lambda: len(list((folder / "store" / "verified").glob("*/*"))) == 1, "the mark of what was read back")
    before = sorted(path for path in (folder / "store").rglob("*"))
    assert run(world, reads_only, folder) == [(1, "store")] * world
    assert sorted(path for path in (folder / "store").rglob("*")) == before


def with_many_descriptors(rank: int, folder: Path) -> int:
    on(folder, HERE, inherits=False)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1200)]
    model = Model()
    with session(folder) as ckpt:
        ckpt.restore(model=model)
        ckpt.save(1)
    return len(files)


def test_a_process_with_1200_open_descriptors_saves_and_restores(folder: Path) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2000:
        pytest.skip("this machine gives a process fewer descriptors")
    assert run(2, with_many_descriptors, folder) == [1200] * 2
    assert steps_in(folder) == [1]


def killed_on_its_machine(rank: int, folder: Path) -> None:
    on_machine(rank, rank, folder)
    model = Model()
    ckpt = session(folder, linger=PATIENCE)
    ckpt.restore(model=model)
    model.at = 5
    ckpt.save(5)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def on_machine(number: int, node: int, folder: Path) -> None:
    on(folder, f"memory-{number}", inherits=False)
    os.environ["NODE_RANK"] = str(node)


def restores_on(rank: int, folder: Path, machine_of: list[int]) -> tuple[str, int]:
    on_machine(machine_of[rank], rank, folder)
    model = Model()
    with session(folder, peers=0) as ckpt:
        found = ckpt.restore(model=model)
        ckpt.save(6)  # so that it has the slots, and leaves none when it ends
    return found.tier, model.at


def test_nodes_find_their_memory_again_when_a_launcher_numbers_them_anew(folder: Path) -> None:
    run(2, killed_on_its_machine, folder, dies=[0, 1])
    until(lambda: steps_in(folder) == [5], "the writers have stored it", PATIENCE)
    assert run(2, restores_on, folder, [1, 0]) == [("memory", 5)] * 2


def tracks(rank: int, folder: Path, call: Callable[[Checkpointer], None]) -> str:
    on(folder, HERE, inherits=False)
    with session(folder, keep_last=3) as ckpt:
        try:
            call(ckpt)
        except CheckpointError as error:
            return str(error)
        ckpt.save(1)
    return "saved"


def by_track(ckpt: Checkpointer) -> None:
    ckpt.track(model=Model())


def by_starting_over(ckpt: Checkpointer) -> None:
    ckpt.start_over(model=Model())


def at_step_100000(ckpt: Checkpointer) -> None:
    ckpt.track(model=Model())
    ckpt.save(100_000)


def test_a_run_that_would_begin_beside_an_older_one_is_told_what_it_leaves_behind(folder: Path) -> None:
    assert run(1, tracks, folder, at_step_100000) == ["saved"]
    for words in run(2, tracks, folder, by_track):
        assert "holds a checkpoint of step 100000" in words
        assert "call restore(…)" in words
        assert "start_over(…)" in words
    assert steps_in(folder) == [100_000]
    assert run(1, tracks, folder, by_starting_over) == ["saved"]
    assert steps_in(folder) == [1, 100_000]
