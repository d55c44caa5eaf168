"""A job hangs when no rank makes a step for too long, and is not in a phase that may take its time."""

from __future__ import annotations

from everstep.agent.leader.commands import DumpStacks
from everstep.agent.leader.hang_watch import DUMP_SECONDS, HangWatch
from everstep.agent.wire.checkpoint_request import CheckpointRequest
from everstep.agent.wire.protocol import ProcessExit, RankProgress

from .bench import Bench, running


def step(rank: int, number: int | None, phase: str = "train") -> RankProgress:
    return RankProgress(rank, number, phase=phase)


def watch(*ranks: RankProgress, seconds: float = 60.0) -> HangWatch:
    made = HangWatch(seconds)
    made.update(0.0, ranks)
    return made


def test_a_rank_that_stays_behind_is_named() -> None:
    found = watch(step(0, 5), step(1, 5), step(2, 4))
    assert not found.wants_dump(59.9)
    assert found.wants_dump(60.0)
    assert not found.wants_dump(60.1), "once"
    assert found.find_hang(60.1) is None, "the stacks need a moment"
    told = found.find_hang(60.0 + DUMP_SECONDS)
    assert told is not None
    assert told[0] == 2
    assert told[1].startswith("no step for 60 s (timeouts.hang): rank 2 is at step 4, others at 5; their stacks")


def test_ranks_that_hang_together_are_told_together() -> None:
    found = watch(step(0, 5), step(1, 5))
    assert found.wants_dump(60.0)
    told = found.find_hang(62.0)
    assert told is not None
    assert "all ranks are at step 5" in told[1]


def test_a_step_of_any_rank_is_no_hang() -> None:
    found = watch(step(0, 5), step(1, 5))
    found.update(50.0, [step(1, 6)])
    assert not found.wants_dump(100.0)
    assert found.due() == 110.0


def test_a_rank_that_goes_on_while_its_stacks_are_dumped_is_left_alone() -> None:
    found = watch(step(0, 5))
    assert found.wants_dump(60.0)
    found.update(61.0, [step(0, 6)])
    assert not found.wants_dump(61.5)
    assert found.find_hang(63.0) is None


def test_nobody_hangs_before_the_first_step_or_in_another_phase() -> None:
    assert watch(step(0, None, "startup")).due() is None
    found = watch(step(0, 5), step(1, 5))
    found.update(10.0, [step(0, 5, "eval")])
    assert not found.wants_dump(1000.0)
    found.update(2000.0, [step(0, 5, "train")])
    assert not found.wants_dump(2059.0)
    assert found.wants_dump(2060.0)


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    found = watch(step(0, 5), step(1, 9))
    found.update(50.0, [step(1, 10)])
    found.forget(1)
    assert found.wants_dump(60.0)


def test_a_time_in_which_the_leader_stood_still_does_not_count() -> None:
    found = watch(step(0, 5))
    found.pause(1000.0)
    assert not found.wants_dump(1059.0)
    assert found.wants_dump(1060.0)


def test_without_a_time_no_hang_is_looked_for() -> None:
    assert not watch(step(0, 5), seconds=0.0).wants_dump(1e9)


def test_a_hang_ends_the_generation_for_the_application_and_the_next_one_begins_at_once() -> None:
    bench: Bench = running(hang_timeout=60.0)
    bench.leader.take_heartbeat(bench.now, 1, 1, [step(rank, 7 - rank) for rank in range(4)])
    bench.later(60.0)
    assert DumpStacks() in bench.take()
    assert bench.phase == "running"
    bench.later(DUMP_SECONDS)
    assert bench.stops()
    bench.clean(0, 1)
    entry = bench.leader.budget.history[-1]
    assert (entry.cause, entry.rank, entry.index, entry.application) == ("Hang", 3, 1, True)
    assert bench.phase == "starting"
    bench.report(0).report(1)
    bench.later(600.0)
    assert bench.phase == "running", "the next one has not made a step yet"


def test_a_rank_that_exits_well_is_no_part_of_a_hang() -> None:
    bench: Bench = running(hang_timeout=60.0)
    bench.leader.take_heartbeat(bench.now, 1, 1, [step(rank, 7) for rank in range(4)])
    bench.report(0, [ProcessExit(0, 0), ProcessExit(1, 0)]).report(1, [ProcessExit(2, 0), ProcessExit(3, 0)])
    assert bench.phase == "ended"


def test_ranks_that_wait_after_a_checkpoint_for_a_node_that_goes_away_do_not_hang() -> None:
    bench: Bench = running(hang_timeout=60.0)
    bench.leader.take_heartbeat(bench.now, 1, 1, [step(rank, 7) for rank in range(4)])
    bench.leader.request_checkpoint(bench.now, CheckpointRequest("1", 120.0))
    bench.later(119.0)
    assert DumpStacks() not in bench.take()
    bench.later(62.0)
    assert DumpStacks() in bench.take(), "nobody told them to stop"


def test_a_node_that_is_not_heard_for_less_than_the_fence_timeout_is_no_hang() -> None:
    """Its machine stands still, or the network to it is cut: all ranks wait for its own, and go on with them."""
    bench: Bench = running(hang_timeout=30.0)
    steps = [step(rank, 7) for rank in range(4)]
    bench.leader.take_heartbeat(bench.now, 1, 1, steps)
    end = bench.now + bench.leader.config.fence_timeout - 2.0
    while bench.now < end:
        bench.now += 1.0
        bench.leader.note_sign_of_life(bench.now, 0)
        bench.leader.take_heartbeat(bench.now, 1, 1, steps[:2])
        bench.leader.tick(bench.now)
        assert DumpStacks() not in bench.take()
    bench.later(10.0)
    bench.leader.take_heartbeat(bench.now, 1, 1, [step(rank, 8) for rank in range(4)])
    bench.later(29.0)
    assert (bench.phase, bench.history) == ("running", [])
    bench.later(1.0 + DUMP_SECONDS)
    assert bench.stops(), "now all are heard, and none makes a step"


def test_what_arrived_while_the_leader_stood_still_is_read_before_ranks_are_said_to_hang() -> None:
    bench: Bench = running(hang_timeout=60.0)
    bench.leader.take_heartbeat(bench.now, 1, 1, [step(rank, 7) for rank in range(4)])
    bench.later(60.0)
    assert DumpStacks() in bench.take()
    bench.now += 5.0
    bench.leader.take_heartbeat(bench.now, 1, 1, [step(2, None)])
    bench.leader.take_heartbeat(bench.now, 1, 1, [step(0, 8)])
    bench.leader.tick(bench.now)
    bench.later(10.0)
    assert (bench.phase, bench.history) == ("running", [])
