"""All ranks save at the same steps, whatever their skew, and nobody waits for ever."""

from __future__ import annotations

import itertools
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch.distributed as dist

from everstep.checkpoint.errors import AgreementLost
from everstep.checkpoint.save.step_agreement import MOST_CALLS, Agreement, NotAsked, Pace, SaveDecision
from everstep.coordination.kv_store import KVStore, LocalKVStore, SharedKVStore
from tests.checkpoint.ranks import run, world_group

pytestmark = pytest.mark.torch


def every_third(step: int, ahead: int) -> SaveDecision:
    return SaveDecision(save=step % 3 == 0, next=step + max(1, min(ahead, 3 - step % 3)))


def nobody_waits(seconds: float) -> None:
    """Ranks that wait long say so here."""


def saved_steps(agreement: Agreement, steps: int, pause: float = 0.0) -> list[int]:
    """The steps at which this rank saves."""
    saved = []
    for step in range(1, steps + 1):
        time.sleep(pause)  # this is the work of a step
        decision = agreement.arrive(step, every_third, nobody_waits)
        if decision is not None and decision.save:
            saved.append(step)
        agreement.prepare(step, every_third)
    return saved


def open_store() -> Any:
    return SharedKVStore.open(world_group(), 30.0)


def skewed(rank: int, pauses: list[float]) -> list[int]:
    place = open_store()
    saved = saved_steps(Agreement(place, rank, 30.0), 30, pauses[rank])
    dist.barrier()  # rank 0 has the store
    del place
    return saved


@pytest.mark.parametrize(
    "pauses", [[0.0, 0.0, 0.0], [0.02, 0.0, 0.0], [0.0, 0.02, 0.005]], ids=["even", "rank 0 is slow", "others are slow"]
)
def test_ranks_save_at_the_same_steps_without_a_collective(pauses: list[float]) -> None:
    assert run(3, skewed, pauses) == [list(range(3, 31, 3))] * 3


def many(rank: int) -> int:
    place = open_store()
    agreement = Agreement(place, rank, 30.0)
    for step in range(1, 1001):
        agreement.arrive(step, every_third, nobody_waits)
        agreement.prepare(step, every_third)
        if step % 30 == 0:
            dist.barrier()  # as the gradients of a step: what a rank has not come to yet is kept, however slow it is
    dist.barrier()
    kept: int = place._store.num_keys()
    dist.barrier()
    return kept


def test_decisions_that_all_ranks_know_are_not_kept() -> None:
    assert max(run(2, many)) < 150
    alone = LocalKVStore()
    assert len(saved_steps(Agreement(alone, 0, 1.0), 1000)) == 333
    assert len(alone._messages) + len(alone._counts) < 70


def never_decides(rank: int) -> str:
    place = open_store()
    if rank == 0:
        dist.barrier()
        return ""
    heard: list[float] = []
    began = time.monotonic()
    with pytest.raises(AgreementLost, match=r"rank 0 has not decided in 0.5 s") as caught:
        Agreement(place, rank, 0.5).arrive(1, every_third, heard.append)
    assert time.monotonic() - began < 10
    assert heard
    dist.barrier()
    return str(caught.value)


def test_a_decision_that_does_not_come_is_waited_for_only_so_long() -> None:
    assert all(run(2, never_decides)[1:])


def late(rank: int) -> int | None:
    """Rank 0 comes to the boundary long after the others."""
    place = open_store()
    if rank == 0:
        until = time.monotonic() + 20
        while place.count("waiting") < 1:
            assert time.monotonic() < until
            time.sleep(0.01)
    else:
        place.count("waiting", 1)
    decision = Agreement(place, rank, 20.0).arrive(3, every_third, nobody_waits)
    dist.barrier()
    assert decision is not None
    return 3 if decision.save else None


def test_a_late_decision_is_waited_for() -> None:
    assert run(2, late) == [3, 3]


def waits_for_a_store(rank: int) -> bool:
    """Rank 0 decides long after the others' patience, but says meanwhile that it lives."""
    place = open_store()
    agreement = Agreement(place, rank, 0.8)
    until = time.monotonic() + 2.0
    while rank == 0 and time.monotonic() < until:
        agreement.busy()
        time.sleep(0.02)  # this is the store
    decision = agreement.arrive(3, every_third, nobody_waits)
    dist.barrier()
    return decision is not None and decision.save


def test_while_rank_0_waits_for_a_store_nobody_gives_it_up() -> None:
    assert run(2, waits_for_a_store) == [True, True]


def waits_in_silence(rank: int, folder: Path) -> str:
    """Errors of torch's C++ code go past sys.stderr."""
    place = open_store()
    said = folder / f"stderr-{rank}"
    before, file = os.dup(2), os.open(said, os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 2)
    try:
        assert place.read("never", 3.0) is None
    finally:
        os.dup2(before, 2)
    dist.barrier()
    return said.read_text()


def test_a_rank_that_waits_prints_nothing(tmp_path: Path) -> None:
    assert run(2, waits_in_silence, tmp_path) == ["", ""]


def leader_dies(rank: int) -> str:
    place = open_store()
    dist.barrier()
    if rank == 0:
        os._exit(1)
    began = time.monotonic()
    with pytest.raises(AgreementLost) as caught:
        Agreement(place, rank, 60.0).arrive(1, every_third, nobody_waits)
    assert time.monotonic() - began < 10
    return str(caught.value)


def test_when_rank_0_dies_the_others_know_at_once() -> None:
    assert "rank 0, which decides for all, cannot be reached" in run(2, leader_dies, dies=[0])[1]


def strided(rank: int) -> list[int]:
    """A script that counts in tens, beginning anywhere."""
    agreement = Agreement(open_store(), rank, 30.0)
    saved = []
    for step in range(37, 400, 10):
        decision = agreement.arrive(step, lambda step, ahead: SaveDecision(save=True, next=step + ahead), nobody_waits)
        if decision is not None and decision.save:
            saved.append(step)
        agreement.prepare(step, lambda step, ahead: SaveDecision(save=True, next=step + ahead))
    dist.barrier()
    return saved


def test_steps_may_be_counted_in_strides() -> None:
    first, second = run(2, strided)
    assert first == second
    assert first[0] == 37


def test_one_process_agrees_with_itself() -> None:
    assert saved_steps(Agreement(LocalKVStore(), 0, 1.0), 12) == [3, 6, 9, 12]


class Unreadable(LocalKVStore):
    """Fails the test if it is asked."""

    def read(self, name: str, timeout: float = 0.0) -> None:
        raise AssertionError("between boundaries nobody is asked")


def test_between_boundaries_nobody_is_asked() -> None:
    place: KVStore = Unreadable()
    agreement = Agreement(place, 1, 1.0)
    agreement.boundary = 100
    assert all(agreement.arrive(step, every_third, nobody_waits) is None for step in range(1, 100))


def test_boundaries_are_about_a_second_apart() -> None:
    pace = Pace()
    for step in range(200):
        pace.tick(step, step * 0.1)
        pace.ahead()
    assert pace.ahead() in (9, 10)


def test_a_run_that_slows_down_is_asked_again_soon() -> None:
    pace = Pace()
    for step in range(1000):
        pace.tick(step, step * 0.0001)
        pace.ahead()
    assert pace.ahead() == MOST_CALLS
    pace.tick(1000, 1000 * 0.0001 + 30.0)
    assert pace.ahead() == 1


def test_a_run_that_skips_steps_once_is_asked_again_as_soon_as_before() -> None:
    pace = Pace()
    for step in range(1000):
        pace.tick(step, step * 0.0001)
        pace.ahead()
    pace.tick(50_000, 1000 * 0.0001)
    assert pace.ahead() == MOST_CALLS  # and not a hundred times what was skipped


def test_what_is_decided_one_step_before_counts_no_jump_of_the_steps_either() -> None:
    agreement = Agreement(LocalKVStore(), 0, 1.0)
    calls, asked = 0, [0]  # calls after which rank 0 looked for requests

    def look(step: int, ahead: int) -> SaveDecision:
        asked.append(calls)
        return SaveDecision(save=False, next=step + ahead)

    for step in (*range(220), *range(1000, 1220)):
        calls += 1
        agreement.arrive(step, look, nobody_waits)
        agreement.prepare(step, look)
    assert max(later - earlier for earlier, later in itertools.pairwise([*asked, calls])) <= MOST_CALLS


def test_the_time_of_a_save_is_no_step() -> None:
    pace = Pace()
    for step in range(200):
        pace.tick(step, step * 1.1)
        pace.pause(step * 1.1 + 1.0)
        pace.ahead()
    assert pace.ahead() in (9, 10)


def comes_late_once(rank: int, dies: bool) -> list[object]:
    """Rank 1 comes to the first save when rank 0 waits for it no more; to the second both come, and rank 1 says yes."""
    place = open_store()
    agreement = Agreement(place, rank, 1.0 if rank == 0 and not dies else 30.0)
    heard: list[object] = []
    reasons = {1: "rank 1 left"} if dies else {}
    if rank == 1:
        assert place.read("a/1", 30.0) is not None
    for number in (1, 2):
        try:
            heard.append(agreement.ask_all(number, rank == 1, nobody_waits, partial(reasons.get, number)))
        except NotAsked as error:
            heard.append(str(error).partition(" in ")[0])
    dist.barrier()  # rank 0 has the store
    del place
    return heard


@pytest.mark.parametrize("dies", [False, True], ids=["after a while", "at once where it is known why"])
def test_a_rank_that_does_not_come_to_a_save_is_not_waited_for_and_the_next_save_is_asked_about_anew(
    dies: bool,
) -> None:
    why = "rank 1 left" if dies else "1 of 2 ranks have not come to this save"
    assert run(2, comes_late_once, dies) == [[why, True]] * 2
