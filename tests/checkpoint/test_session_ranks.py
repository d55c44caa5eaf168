"""Sessions of several ranks, and what is left of one when a rank, or its writer, is killed."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

from everstep.checkpoint.catalog.candidates import list_candidates, verify_checkpoint
from everstep.checkpoint.errors import AgreementLost, CheckpointError
from everstep.checkpoint.format.keys import HINT
from everstep.checkpoint.session.checkpointer import SaveFailed
from everstep.checkpoint.slots.slots import Slots
from everstep.checkpoint.store.posix import PosixStore
from everstep.checkpoint.writer import control
from tests.checkpoint.ranks import run
from tests.checkpoint.sessions import Model, claim, session, steps_in, train

pytestmark = pytest.mark.torch


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
    named = [
        {name.partition(".")[0] for name in verify_checkpoint(store, key).tensors} for key in list_candidates(store)
    ]
    own = {"rank"}  # the generators
    assert [each - own for each in named] == [{"model", "state"}, {"model", "state"}, {"state"}, {"state"}]


def two_ranks(rank: int, folder: Path, nodes: int) -> tuple[list[int], list[str]]:
    os.environ["NODE_RANK"] = str(rank % nodes)
    torch.manual_seed(rank)
    model = Model()
    told: list[str] = []
    memory = folder / f"memory-{rank % nodes}"
    with session(folder, policy="wait", every_steps=5, keep_last=10, directory=memory) as ckpt:
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
    manifest = verify_checkpoint(store, list_candidates(store)[0])
    assert (manifest.world, manifest.nodes, len(manifest.parts)) == (2, nodes, 2)
    assert {f"rank.{rank}.rng" for rank in (0, 1)} <= {".".join(name.split(".")[:3]) for name in manifest.values}


def grows(rank: int, folder: Path, grow: list[int], cannot: list[int]) -> list[str]:
    """The state gets another tensor between two saves, or something that cannot be saved for the next one alone."""
    state: dict[str, Any] = {"common": torch.ones(8)}
    failed: list[str] = []
    with session(folder, policy="wait", every_steps=1, keep_last=10) as ckpt:
        ckpt.on("failed", lambda event: failed.append(f"{event.key.step} {event.why}" if event.key else ""))
        ckpt.track(state=state)
        for step in range(1, 5):
            if step == 2 and rank in grow:
                state["new"] = torch.ones(3)
            if step == 2 and rank in cannot:
                state["bad"] = object()
            dist.barrier()
            ckpt.step(step)
            state.pop("bad", None)
    return failed


@pytest.mark.parametrize("grow", [[0, 1], [1], [0]], ids=["on both ranks", "on rank 1", "on rank 0"])
def test_a_state_that_grows_is_saved_at_every_step_by_a_plan_that_all_ranks_make_anew(
    folder: Path, grow: list[int]
) -> None:
    assert run(2, grows, folder, grow, []) == [[], []]
    assert steps_in(folder) == [1, 2, 3, 4]
    store = PosixStore(folder / "store")
    found = ["state.new" in verify_checkpoint(store, key).tensors for key in sorted(list_candidates(store))]
    assert found == [False, True, True, True]


@pytest.mark.parametrize("grow", [[], [0]], ids=["as the other's is", "while the other's grows"])
def test_one_rank_whose_state_cannot_be_saved_voids_the_save_for_all_and_the_next_is_good(
    folder: Path, grow: list[int]
) -> None:
    for failed in run(2, grows, folder, grow, [1]):
        assert len(failed) == 1
        assert failed[0].startswith("2 ")
        assert "state.bad" in failed[0]
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
    verify_checkpoint(PosixStore(folder / "store"), list_candidates(PosixStore(folder / "store"))[0])


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
    with session(folder, directory=memory, commit_timeout=35.0) as ckpt:
        ckpt.track(model=Model())
        node = claim(ckpt)
        if rank == 1:
            link = control.WriterLink.connect(memory)
            tell = node.tell

            def unheard(verb: str, **fields: Any) -> int:
                if verb != "filled":
                    return tell(verb, **fields)
                node.tell = tell  # type: ignore[method-assign]
                os.kill(link.pid, signal.SIGSTOP)
                told = tell(verb, **fields)
                os.kill(link.pid, signal.SIGKILL)
                return told

            node.tell = unheard  # type: ignore[method-assign]
        ckpt.save(10)


def test_the_end_replaces_a_writer_that_is_killed_in_the_last_save_on_any_node(folder: Path) -> None:
    run(2, writer_is_killed_in_the_last_save, folder)
    assert steps_in(folder) == [10]


def leaves_when_rank_0_is_gone(rank: int, folder: Path) -> None:
    ckpt = session(folder)
    ckpt.track(model=Model())
    ckpt.save(10)
    assert ckpt._coordinator is not None
    if rank == 0:
        ckpt.wait()
        ckpt._coordinator.timeout = 0.1
        began = time.monotonic()
        ckpt.close()
        assert time.monotonic() - began < 20  # it waits for the others as long as it was told, and no other time
        os._exit(0)
    with suppress(AgreementLost):
        while True:
            ckpt._kv_store.count("anything")
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
    with session(folder, directory=memory) as ckpt:
        ckpt.restore(model=Model())
        with pytest.raises(CheckpointError) as caught:
            ckpt.step(1)
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


def saves_often(rank: int, folder: Path, policy: Any) -> list[int]:
    """Ten steps each; with "skip" each save is over when the next step is made."""
    skipped = []
    for every_steps in (1, 2, 3):
        model = Model()
        with session(folder / str(every_steps), every_steps=every_steps, policy=policy, keep_last=20) as ckpt:
            ckpt.track(model=model)
            for step in range(1, 11):
                model.at = step
                ckpt.step(step)
                if policy == "skip":
                    ckpt.wait()
            skipped.append(int(ckpt.metrics()["skipped"] or 0))
    return skipped


@pytest.mark.parametrize("policy", ["wait", "queue", "skip"])
@pytest.mark.parametrize("world", [1, 2])
def test_every_step_that_is_due_is_saved(folder: Path, world: int, policy: str) -> None:
    for every_steps in (1, 2, 3):
        (folder / str(every_steps)).mkdir()
    assert run(world, saves_often, folder, policy) == [[0, 0, 0]] * world
    for every_steps in (1, 2, 3):
        assert steps_in(folder / str(every_steps)) == list(range(every_steps, 11, every_steps))


def asks_by_a_wrong_clock(rank: int, folder: Path, hours: int) -> tuple[list[int], list[str]]:
    """Rank 1 asks twice: for a save that there is time for, and for one that there is none for."""
    if rank == 1:
        right = time.time
        time.time = lambda: right() + 3600 * hours
    told: list[str] = []
    with session(folder, every="1h") as ckpt:
        ckpt.on("stalled", lambda event: told.append(event.why.partition(" left")[0]))
        ckpt.track(model=Model())
        for step in range(1, 600):
            if rank == 1 and step in (2, 300):
                ckpt.request(deadline=60 if step == 2 else 1e-9)
            ckpt.step(step)
            if step == 290:
                ckpt.wait()
            dist.barrier()
    return steps_in(folder), told


@pytest.mark.parametrize("hours", [-5, 5])
def test_the_time_that_a_rank_gives_a_save_is_counted_by_no_clock_that_may_be_wrong(folder: Path, hours: int) -> None:
    for steps, told in run(2, asks_by_a_wrong_clock, folder, hours):
        assert len(steps) == 1
        assert told == ["the save that was asked for cannot be stored in the 0 s"]
