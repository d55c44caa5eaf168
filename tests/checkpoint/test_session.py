"""What a script sees: saves by steps, time or notice, an end that waits, and errors that do not end training."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

import everstep
from everstep.checkpoint import control
from everstep.checkpoint.attempts import Superseded
from everstep.checkpoint.board import AgreementLost
from everstep.checkpoint.candidates import candidates, verify
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.events import Event
from everstep.checkpoint.keys import HINT
from everstep.checkpoint.session import Checkpointer, SaveFailed
from everstep.checkpoint.slots import Slots
from everstep.checkpoint.store.posix import PosixStore
from tests.checkpoint.ranks import run

pytestmark = pytest.mark.torch


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where stores and memory of a test are; writers that still run there are ended."""
    yield tmp_path
    for directory in tmp_path.glob("*memory*"):
        with suppress(OSError):
            link = control.Link.connect(directory)
            os.kill(link.pid, signal.SIGKILL)
            link.close()


def session(folder: Path, **options: Any) -> Checkpointer:
    """A session whose waits end within a test's patience."""
    common: dict[str, Any] = {"memory": folder / "memory", "timeout": 20.0, "commit_timeout": 20.0, "linger": 20.0}
    if "every" not in options:
        common["every_steps"] = 10
    return everstep.checkpointer(folder / "store", **{**common, **options})


def state(step: int) -> dict[str, Any]:
    return {"weights": torch.full((1000,), float(step)), "step": torch.tensor(step)}


class Model:
    """Its state follows from the step that it has trained."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return state(self.at)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = int(state["step"])
        assert torch.equal(state["weights"], torch.full((1000,), float(self.at)))


def steps_in(folder: Path) -> list[int]:
    return sorted(key.step for key in candidates(PosixStore(folder / "store")))


def train(ckpt: Checkpointer, model: Model, until: int, pause: float = 0.0) -> None:
    for step in range(model.at + 1, until + 1):
        time.sleep(pause)  # this is the work of a step
        model.at = step
        ckpt.step(step)


def test_a_run_is_saved_and_goes_on_where_it_was(folder: Path) -> None:
    model = Model()
    with session(folder, policy="wait") as ckpt:
        assert ckpt.restore(model=model).step == 0
        train(ckpt, model, 25)
    assert steps_in(folder) == [10, 20]
    again = Model()
    with session(folder) as ckpt:
        assert ckpt.restore(model=again).step == 20
        assert again.at == 20
        assert ckpt.attempt.generation == 2


def test_the_end_waits_for_the_last_commit_and_leaves_no_memory(folder: Path) -> None:
    model = Model()
    with session(folder) as ckpt:
        ckpt.track(model=model)
        train(ckpt, model, 10)
    assert steps_in(folder) == [10]
    until = time.monotonic() + 10
    while (folder / "memory").exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_session_that_names_nothing_leaves_no_memory_either(folder: Path) -> None:
    session(folder).close()
    until = time.monotonic() + 10
    while (folder / "memory").exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_an_error_in_the_script_is_not_delayed_and_what_was_filled_is_still_saved(folder: Path) -> None:
    def script() -> None:
        model = Model()
        with session(folder) as ckpt:
            ckpt.track(model=model)
            train(ckpt, model, 10)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        script()
    until = time.monotonic() + 20
    while steps_in(folder) != [10]:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("code", [None, 0])
def test_a_script_that_exits_well_waits_for_the_last_commit(folder: Path, code: int | None) -> None:
    told: list[Event] = []

    def script() -> None:
        with session(folder) as ckpt:
            ckpt.on("saved", told.append)
            ckpt.track(model=Model())
            ckpt.save(10)
            sys.exit(code)

    with pytest.raises(SystemExit):
        script()
    assert len(told) == 1


def test_a_script_that_exits_because_it_failed_waits_for_nothing(folder: Path) -> None:
    def script() -> None:
        with session(folder) as ckpt:
            ckpt.track(model=Model())
            link = control.Link.connect(folder / "memory")
            pid = link.pid
            link.close()
            ckpt.save(10)
            os.kill(pid, signal.SIGSTOP)
            stopped.append(pid)
            sys.exit(1)

    stopped: list[int] = []
    began = time.monotonic()
    with pytest.raises(SystemExit):
        script()
    assert time.monotonic() - began < 10  # it would have waited for 40 s
    os.kill(stopped[0], signal.SIGCONT)


def test_a_save_by_time_needs_no_step_count(folder: Path) -> None:
    model = Model()
    with session(folder, every=0.1, policy="wait") as ckpt:
        ckpt.track(model=model)
        train(ckpt, model, 40, pause=0.01)
    assert len(steps_in(folder)) >= 2


def test_auto_saves_once_to_measure_and_then_by_the_optimum(folder: Path) -> None:
    model = Model()
    with session(folder, every="auto", time_between_failures=1e9) as ckpt:
        ckpt.track(model=model)
        train(ckpt, model, 30, pause=0.005)
        assert ckpt.metrics()["saved"] in (0, 1)
    assert len(steps_in(folder)) == 1


@pytest.mark.parametrize(("policy", "saved"), [("wait", [1, 2, 3, 4]), ("queue", None), ("skip", None)])
def test_policies_for_a_save_that_comes_too_soon(folder: Path, policy: Any, saved: list[int] | None) -> None:
    model = Model()
    with session(folder, every_steps=1, policy=policy, keep_last=10) as ckpt:
        ckpt.track(model=model)
        train(ckpt, model, 4)
        skipped = ckpt.metrics()["skipped"]
    found = steps_in(folder)
    assert found[0] == 1
    if saved is not None:
        assert found == saved
    if policy == "skip":
        assert len(found) + int(skipped or 0) in (4, 5)  # rank 0 has decided about step 5 already


def test_a_save_that_is_asked_for_comes_at_the_next_boundary(folder: Path) -> None:
    model = Model()
    with session(folder, every="1h") as ckpt:
        ckpt.track(model=model)
        train(ckpt, model, 5)
        signal.signal(signal.SIGUSR1, lambda *_: ckpt.request(deadline=60))
        os.kill(os.getpid(), signal.SIGUSR1)
        train(ckpt, model, 200, pause=0.001)
    assert len(steps_in(folder)) == 1
    assert 5 < steps_in(folder)[0] < 200


def test_a_deadline_that_cannot_be_met_is_told_beforehand(folder: Path) -> None:
    model = Model()
    with session(folder, every="1h") as ckpt:
        ckpt.track(model=model)
        first = ckpt.save(1, deadline=60)
        assert first.saves
        assert first.seconds is None  # nothing was measured yet
        ckpt.wait()
        refused = ckpt.save(2, deadline=1e-9)
        assert not refused.saves
        assert refused.seconds is not None
        assert ckpt.save(3, deadline=60).saves
    assert steps_in(folder) == [1, 3]


def test_a_save_that_is_asked_for_and_cannot_be_there_in_time_is_not_begun(folder: Path) -> None:
    model = Model()
    told: list[Event] = []
    with session(folder, every="1h") as ckpt:
        ckpt.on("stalled", told.append)
        ckpt.track(model=model)
        ckpt.save(1)
        ckpt.wait()
        model.at = 1
        ckpt.request(deadline=1e-9)
        train(ckpt, model, 50)
    assert steps_in(folder) == [1]
    assert ["asked for cannot be stored" in event.why for event in told] == [True]


def test_a_save_that_is_asked_for_waits_for_an_earlier_one_while_training_goes_on(folder: Path) -> None:
    model = Model()
    with session(folder, every="1h") as ckpt:
        ckpt.track(model=model)
        link = control.Link.connect(folder / "memory")
        tell = ckpt._node.tell

        def stopped(verb: str, **fields: Any) -> int:
            if verb == "filled":
                os.kill(link.pid, signal.SIGSTOP)
                ckpt._node.tell = tell  # type: ignore[method-assign]
            return tell(verb, **fields)

        ckpt._node.tell = stopped  # type: ignore[method-assign]
        ckpt.save(1)
        model.at = 1
        ckpt.request(deadline=60)
        began = time.monotonic()
        train(ckpt, model, 50)
        assert time.monotonic() - began < 10
        os.kill(link.pid, signal.SIGCONT)
        link.close()
        ckpt.wait()
        train(ckpt, model, 100)
    assert steps_in(folder)[0] == 1
    assert len(steps_in(folder)) == 2


def test_the_same_step_is_not_saved_twice(folder: Path) -> None:
    model = Model()
    with session(folder, every_steps=1) as ckpt:
        ckpt.track(model=model)
        train(ckpt, model, 1)
        assert not ckpt.save(1).saves
    assert steps_in(folder) == [1]


def saved_before_its_step(rank: int, folder: Path) -> list[str]:
    """Every fifth step is due, and the script saves one of them itself just before."""
    model = Model()
    failed: list[str] = []
    with session(folder, every_steps=5, policy="wait", keep_last=10) as ckpt:
        ckpt.on("failed", lambda event: failed.append(event.why))
        ckpt.track(model=model)
        train(ckpt, model, 4)
        model.at = 5
        assert ckpt.save(5).saves
        ckpt.step(5)
        train(ckpt, model, 10)
    return failed


@pytest.mark.parametrize("world", [1, 2])
def test_a_save_just_before_one_that_was_due_stays_good(folder: Path, world: int) -> None:
    assert run(world, saved_before_its_step, folder) == [[]] * world
    assert steps_in(folder) == [5, 10]


def tracks_anew(rank: int, folder: Path) -> list[str]:
    failed: list[str] = []
    with session(folder, every_steps=5, policy="wait", keep_last=10) as ckpt:
        ckpt.on("failed", lambda event: failed.append(event.why))
        first, second = Model(), {"other": torch.ones(50)}
        ckpt.restore(model=first)
        train(ckpt, first, 3)
        ckpt.restore(model=first)
        assert first.at == 3  # nothing was saved
        for step in range(1, 5):
            ckpt.step(step)
        ckpt.track(state=second)  # when rank 0 has decided about step 5
        ckpt.step(5)
        ckpt.save(6)
        ckpt.track(state=second, model=first)
        with pytest.raises(CheckpointError, match="has saved already"):
            ckpt.restore(state=second)
        for step in range(7, 11):
            ckpt.step(step)
        assert ckpt.save(11).saves
    return failed


def test_other_objects_may_be_named_while_all_ranks_go_on_together(folder: Path) -> None:
    assert run(2, tracks_anew, folder) == [[], []]
    assert steps_in(folder) == [5, 6, 10, 11]
    store = PosixStore(folder / "store")
    named = [{name.partition(".")[0] for name in verify(store, key).tensors} for key in candidates(store)]
    assert named == [{"model", "state"}, {"model", "state"}, {"state"}, {"state"}]


def test_a_state_that_changes_its_layout_is_planned_again(folder: Path) -> None:
    state: dict[str, Any] = {"a": torch.ones(10)}
    failures: list[Event] = []
    with session(folder, every_steps=1, policy="wait", keep_last=10) as ckpt:
        ckpt.on("failed", failures.append)
        ckpt.track(state=state)
        ckpt.step(1)
        state["b"] = torch.ones(100_000)
        for step in (2, 3, 4):
            ckpt.step(step)
    assert [event.key.step for event in failures if event.key] == [2]
    assert "other tensors" in failures[0].why
    assert steps_in(folder) == [1, 3, 4]
    assert "state.b" in verify(PosixStore(folder / "store"), candidates(PosixStore(folder / "store"))[0]).tensors


def test_a_state_that_finds_no_room_costs_its_own_saves_alone(folder: Path) -> None:
    state: dict[str, Any] = {"a": torch.ones(10)}
    failures: list[Event] = []
    with session(folder, every_steps=1, policy="wait", keep_last=10) as ckpt:
        ckpt.on("failed", failures.append)
        ckpt.track(state=state)
        state["huge"] = torch.zeros(1).expand(1 << 40)
        for step in (1, 2):
            ckpt.step(step)
        del state["huge"]
        for step in (3, 4):
            ckpt.step(step)
    assert [event.key.step for event in failures if event.key] == [1, 2]
    assert all("GB more memory" in event.why for event in failures)
    assert steps_in(folder) == [3, 4]


def test_room_for_what_an_optimizer_will_hold_is_asked_for_at_the_start(folder: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(1000))
    with session(folder) as ckpt:
        ckpt.track(weight=weight, optimizer=torch.optim.Adam([weight]))
        part = Slots(folder / "memory")[0].part(0)
        until = time.monotonic() + 10
        while not (part.exists() and part.stat().st_size > 3 * weight.nbytes):
            assert time.monotonic() < until
            time.sleep(0.01)


def test_a_store_that_fails_ends_no_training_but_is_told_at_the_end(folder: Path) -> None:
    model = Model()
    failures: list[Event] = []
    ckpt = session(folder)
    ckpt.on("failed", failures.append)
    ckpt.track(model=model)
    (folder / "store" / "data").write_text("no folder")
    train(ckpt, model, 15)
    with pytest.raises(SaveFailed, match="step 10 was not saved"):
        ckpt.close()
    assert len(failures) == 1


def test_a_killed_writer_is_replaced_and_loses_nothing(folder: Path) -> None:
    model = Model()
    with session(folder, policy="wait") as ckpt:
        ckpt.track(model=model)
        train(ckpt, model, 10)
        ckpt.wait()
        link = control.Link.connect(folder / "memory")
        pid = link.pid
        link.close()
        os.kill(pid, signal.SIGKILL)
        train(ckpt, model, 40)
        ckpt.wait()
    assert steps_in(folder)[-1] == 40


def test_what_cannot_be_saved_is_refused_at_the_start(folder: Path) -> None:
    with session(folder) as ckpt, pytest.raises(CheckpointError, match="thing"):
        ckpt.track(thing=threading.Lock())


def test_too_little_memory_is_told_at_the_start(folder: Path) -> None:
    with (
        session(folder) as ckpt,
        pytest.raises(CheckpointError, match=r"2 slots for checkpoints need .* GB more memory"),
    ):
        ckpt.track(huge=torch.zeros(1).expand(1 << 40))


def test_an_older_attempt_is_refused(folder: Path) -> None:
    with session(folder, attempt=(2, 1)) as ckpt:
        ckpt.track(model=Model())
        ckpt.save(1)
    with pytest.raises(Superseded, match=r"belongs to attempt 0000000002\.0000000001"):
        session(folder, attempt=(1, 7))


def test_a_callback_that_raises_ends_nothing(folder: Path) -> None:
    def careless(event: Event) -> None:
        raise RuntimeError("careless")

    with session(folder) as ckpt:
        ckpt.on("saved", careless)
        ckpt.track(model=Model())
        ckpt.save(1)
    assert steps_in(folder) == [1]


def test_figures_are_there_after_a_save(folder: Path) -> None:
    with session(folder) as ckpt:
        ckpt.track(model=Model())
        ckpt.save(1)
        ckpt.wait()
        figures = ckpt.metrics()
    assert figures["saved"] == 1
    assert (figures["bytes"] or 0) > 4000
    assert (figures["bandwidth"] or 0) > 0
    assert 0 <= (figures["age_seconds"] or 0) < 60


def two_ranks(rank: int, folder: Path, nodes: int) -> tuple[list[int], list[str]]:
    os.environ["NODE_RANK"] = str(rank % nodes)
    torch.manual_seed(rank)
    model = Model()
    told: list[str] = []
    memory = folder / f"memory-{rank % nodes}"
    with session(folder, policy="wait", every_steps=5, keep_last=10, memory=memory) as ckpt:
        ckpt.on("saved", lambda event: told.append(f"{event.key.step}" if event.key else ""))
        ckpt.track(model=model)
        train(ckpt, model, 12, pause=0.01 * rank)
    return steps_in(folder), told


@pytest.mark.parametrize("nodes", [1, 2])
def test_two_ranks_save_together_on_one_node_or_two(folder: Path, nodes: int) -> None:
    for steps, told in run(2, two_ranks, folder, nodes):
        assert steps == [5, 10]
        assert told == ["5", "10"]
    store = PosixStore(folder / "store")
    manifest = verify(store, candidates(store)[0])
    assert (manifest.world, manifest.nodes, len(manifest.parts)) == (2, nodes, 2)
    assert {f"rank.{rank}.rng" for rank in (0, 1)} <= {".".join(name.split(".")[:3]) for name in manifest.values}


def one_cannot(rank: int, folder: Path) -> list[str]:
    """Rank 1's state changes once, between two saves."""
    state: dict[str, Any] = {"common": torch.ones(8)}
    failed: list[str] = []
    with session(folder, policy="wait", every_steps=1, keep_last=10) as ckpt:
        ckpt.on("failed", lambda event: failed.append(f"{event.key.step} {event.why}" if event.key else ""))
        ckpt.track(state=state)
        for step in range(1, 5):
            if rank == 1 and step == 2:
                state["own"] = torch.ones(3)
            dist.barrier()
            ckpt.step(step)
    return failed


def test_one_rank_that_cannot_voids_the_save_for_all_and_the_next_is_planned_anew(folder: Path) -> None:
    for failed in run(2, one_cannot, folder):
        assert len(failed) == 1
        assert failed[0].startswith("2 the state has other tensors")
    assert steps_in(folder) == [1, 3, 4]


def killed_after_filling(rank: int, folder: Path) -> None:
    model = Model()
    ckpt = session(folder, every_steps=5)
    ckpt.track(model=model)
    train(ckpt, model, 5)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_that_are_killed_right_after_the_copy_lose_nothing(folder: Path) -> None:
    run(2, killed_after_filling, folder, dies=[0, 1])
    until = time.monotonic() + 20
    while steps_in(folder) != [5]:
        assert time.monotonic() < until
        time.sleep(0.01)
    verify(PosixStore(folder / "store"), candidates(PosixStore(folder / "store"))[0])


def killed_before_filling(rank: int, folder: Path, saves: int) -> str:
    """The first save is planned together, later ones are not: it shows in different ways that a rank is gone."""
    model = Model()
    ckpt = session(folder, every_steps=5, policy="wait")
    ckpt.track(model=model)
    last = 5 * saves + 5
    train(ckpt, model, last - 1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    train(ckpt, model, last)
    with pytest.raises(SaveFailed) as caught:
        ckpt.wait(20)
    ckpt.close(wait=False)
    return str(caught.value)


@pytest.mark.parametrize(("saves", "how"), [(0, "while ranks planned this save together"), (1, "before its part")])
def test_a_rank_that_is_killed_before_its_copy_is_named_and_nothing_is_committed(
    saves: int, how: str, folder: Path
) -> None:
    words, _ = run(2, killed_before_filling, folder, saves, dies=[1])
    assert f"step {5 * saves + 5} was not saved: rank 1 left {how}" in words
    assert words.endswith("all ranks have to be started again")
    assert steps_in(folder) == [5] * saves


def writer_is_killed_in_the_last_save(rank: int, folder: Path) -> None:
    os.environ["NODE_RANK"] = str(rank)
    memory = folder / f"memory-{rank}"
    # A session that has just begun looks for its writer again after ten seconds.
    with session(folder, memory=memory, commit_timeout=35.0) as ckpt:
        ckpt.track(model=Model())
        if rank == 1:
            link = control.Link.connect(memory)
            tell = ckpt._node.tell

            def unheard(verb: str, **fields: Any) -> int:
                if verb != "filled":
                    return tell(verb, **fields)
                ckpt._node.tell = tell  # type: ignore[method-assign]
                os.kill(link.pid, signal.SIGSTOP)
                told = tell(verb, **fields)
                os.kill(link.pid, signal.SIGKILL)
                return told

            ckpt._node.tell = unheard  # type: ignore[method-assign]
        ckpt.save(10)


def test_the_end_replaces_a_writer_that_is_killed_in_the_last_save_on_any_node(folder: Path) -> None:
    run(2, writer_is_killed_in_the_last_save, folder)
    assert steps_in(folder) == [10]


def leaves_when_rank_0_is_gone(rank: int, folder: Path) -> None:
    ckpt = session(folder)
    ckpt.track(model=Model())
    ckpt.save(10)
    assert ckpt._pilot is not None
    if rank == 0:
        ckpt.wait()
        ckpt._pilot.timeout = 0.1
        began = time.monotonic()
        ckpt.close()
        assert time.monotonic() - began < 5  # it waits for the others as long as it was told, and no other time
        os._exit(0)
    with suppress(AgreementLost):
        while ckpt._board.count("gone") < 2:
            time.sleep(0.01)
    ckpt.close()


def test_a_rank_that_leaves_after_rank_0_learns_from_the_store_that_the_last_save_is_there(folder: Path) -> None:
    run(2, leaves_when_rank_0_is_gone, folder, dies=[0])
    assert steps_in(folder) == [10]


def one_cannot_start(rank: int, folder: Path) -> str:
    if rank == 1:
        os.environ["NODE_RANK"] = "1"
        (folder / "blocked").mkdir(mode=0o755)
    else:
        os.environ["NODE_RANK"] = "0"
    memory = folder / ("blocked" if rank else "memory")
    with pytest.raises(CheckpointError) as caught:
        session(folder, memory=memory)
    return str(caught.value)


def test_a_node_that_cannot_start_ends_all_ranks_at_once(folder: Path) -> None:
    for words in run(2, one_cannot_start, folder):
        assert "not a directory of our own" in words


def test_slots_outlive_a_killed_rank_and_serve_the_next(folder: Path) -> None:
    run(2, killed_after_filling, folder, dies=[0, 1])
    until = time.monotonic() + 20
    while not Slots(folder / "memory").whole():
        assert time.monotonic() < until
        time.sleep(0.01)
    results = run(2, restored_from_memory, folder)
    assert results == [("memory", 5)] * 2


def test_a_deleted_store_is_a_fresh_start_whatever_the_memory_holds(folder: Path) -> None:
    run(1, killed_after_filling_alone, folder, dies=[0])
    until = time.monotonic() + 20
    while steps_in(folder) != [5] or not (folder / "store" / HINT).exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    assert Slots(folder / "memory").whole()
    # In one call: the writer, which outlived its rank, may still be reading the checkpoint back.
    (folder / "store").rename(folder / "deleted")
    model = Model()
    with session(folder, every_steps=3) as ckpt:
        assert ckpt.restore(model=model).key is None
        train(ckpt, model, 3)
    assert steps_in(folder) == [3]


def killed_after_filling_alone(rank: int, folder: Path) -> None:
    model = Model()
    ckpt = session(folder, every_steps=5)
    ckpt.track(model=model)
    train(ckpt, model, 5)
    os.kill(os.getpid(), signal.SIGKILL)


def restored_from_memory(rank: int, folder: Path) -> tuple[str, int]:
    model = Model()
    with session(folder) as ckpt:
        found = ckpt.restore(model=model)
    assert model.at == 5
    return found.tier, found.step
