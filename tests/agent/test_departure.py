"""A pod that is told to stop lets all ranks save first, if they can: then a TERM costs no step."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from everstep.agent.leader.commands import AskForCheckpoint
from everstep.agent.ranks.events import RankProgressed
from everstep.agent.wire.checkpoint_request import CheckpointRequest, compute_save_seconds
from everstep.agent.wire.protocol import ProcessExit, RankProgress
from everstep.agent.wire.rank_checkpoint import RankCheckpoint

from .bench import Bench, running
from .fakes import Agent, gang, until

GRACE = 110.0


def train(bench: Bench, step: int, saved: int) -> Bench:
    told = RankProgress(0, step, checkpoint=RankCheckpoint(checkpoint=saved, restored=0))
    bench.leader.take_heartbeat(bench.now, 1, bench.leader.generation, [told])
    return bench


def leave(bench: Bench, index: int = 1, grace: float = GRACE) -> Bench:
    bench.leader.node_leaving(bench.now, index, grace)
    return bench


def asked(bench: Bench) -> list[tuple[str, float | None]]:
    bench.take()
    return [(c.request.id, c.request.seconds) for c in bench.commands if isinstance(c, AskForCheckpoint)]


def test_ranks_save_before_they_are_stopped() -> None:
    bench = leave(train(running(), 20, saved=10))
    assert (bench.phase, bench.stops(), asked(bench)) == ("running", [], [("leaving-1.1", 80.0)])
    train(bench, 21, saved=10)
    assert bench.phase == "running"
    train(bench, 21, saved=21)
    assert bench.phase == "stopping"
    assert bench.stops()[-1].grace == GRACE
    bench.clean()
    assert bench.history == [("1.1", "Leaving", 1)]


def test_a_save_that_does_not_come_leaves_the_ranks_time_for_their_own_end() -> None:
    bench = leave(train(running(), 20, saved=10)).later(79)
    assert bench.phase == "running"
    assert bench.later(1).phase == "stopping"


def test_a_job_that_is_stopped_saves_first() -> None:
    bench = train(running(), 20, saved=10)
    bench.leader.stop(bench.now, "suspended")
    assert (bench.phase, asked(bench)) == ("running", [("leaving-1.1", 80.0)])
    assert train(bench, 21, saved=21).phase == "stopping"
    bench.clean()
    assert [(each.outcome.result, each.outcome.message) for each in bench.ends()] == [("stopped", "suspended")]


def test_who_repeats_a_stop_on_a_laptop_is_in_a_hurry() -> None:
    bench = train(running(), 20, saved=10)
    bench.leader.stop(bench.now, "Ctrl-C")
    leave(leave(bench, 0, grace=2.0), 1, grace=2.0).later(1.0)
    assert [each.outcome.result for each in bench.ends()] == ["stopped"]


def test_of_two_pods_the_one_with_less_time_counts() -> None:
    bench = leave(leave(train(running(), 20, saved=10)), index=0, grace=10.0)
    assert bench.later(4.9).phase == "running"
    assert bench.later(0.1).phase == "forming", "nobody waits for pods that leave"
    assert bench.history == [("1.1", "Leaving", 1)], "the first one is why"


def test_of_several_saves_the_one_behind_which_nobody_trains_counts() -> None:
    """Ranks that save every few steps have some under way when they are asked, and train on meanwhile."""
    bench = leave(train(running(), 20, saved=10))
    assert train(bench, 27, saved=25).phase == "running"
    assert train(bench, 29, saved=25).phase == "running"
    assert train(bench, 29, saved=30).phase == "stopping", "the step at which they wait is told when it is done"


def test_ranks_that_never_spoke_of_checkpoints_get_their_whole_grace_at_once() -> None:
    assert leave(running()).phase == "stopping"
    assert leave(Bench().join_all()).phase == "stopping", "they do not run yet"


def test_ranks_whose_checkpoints_nobody_can_ask_for_get_their_whole_grace_at_once() -> None:
    """A framework saves when it likes to, and its folders are published."""
    said = RankCheckpoint(checkpoint=10, restored=0, takes_requests=0)
    bench = running()
    bench.leader.take_heartbeat(bench.now, 1, 1, [RankProgress(0, 20, checkpoint=said)])
    assert leave(bench).phase == "stopping"


@pytest.mark.parametrize("progress", [50, 20_000, 5_002, None], ids=["epochs", "batches", "one ahead", "none"])
def test_what_is_reported_as_progress_may_count_something_else_than_steps_of_checkpoints(progress: int | None) -> None:
    def train(step: int, saved: int) -> str:
        said = RankCheckpoint(checkpoint=saved, restored=0, trained_step=step, takes_requests=1)
        bench.leader.take_heartbeat(bench.now, 1, 1, [RankProgress(0, progress, checkpoint=said)])
        return bench.phase

    bench = running()
    train(5000, saved=4500)
    leave(bench)
    assert train(5000, saved=4500) == "running", "that one was saved before"
    assert train(5001, saved=4500) == "running"
    assert train(5001, saved=5001) == "stopping"


def test_ranks_that_have_saved_for_a_notice_are_not_asked_again() -> None:
    bench = train(running(), 20, saved=10)
    bench.leader.request_checkpoint(bench.now, CheckpointRequest("notice", 120.0))
    train(bench, 21, saved=21)
    assert leave(bench).phase == "stopping"
    assert [name for name, _ in asked(bench)] == ["notice"]


def test_a_save_for_a_notice_that_is_under_way_is_waited_for() -> None:
    bench = train(running(), 20, saved=10)
    bench.leader.request_checkpoint(bench.now, CheckpointRequest("notice", 120.0))
    assert leave(bench).phase == "running"
    assert train(bench, 21, saved=21).phase == "stopping"
    assert [name for name, _ in asked(bench)] == ["notice"]


def test_a_pool_of_nodes_that_is_cordoned_and_then_drained_costs_no_step() -> None:
    """The operator asks for the cordon's checkpoint again until the leader's state tells of it."""
    cordon = CheckpointRequest("cordon", None)
    bench = train(running(), 10, saved=9)
    bench.leader.request_checkpoint(bench.now, cordon)
    train(train(bench, 11, saved=11), 60, saved=11)
    leave(bench)
    assert (bench.leader.state()["checkpointRequest"] or {})["id"] == "cordon"
    bench.leader.request_checkpoint(bench.now, cordon)
    assert asked(bench) == [("cordon", None), ("leaving-1.1", 80.0)]
    assert train(bench, 61, saved=11).phase == "running"
    assert train(bench, 61, saved=61).phase == "stopping"


def test_ranks_that_went_on_after_a_save_for_a_notice_that_was_withdrawn_save_again() -> None:
    bench = train(running(), 10, saved=9)
    bench.leader.request_checkpoint(bench.now, CheckpointRequest("notice", 600.0))
    train(bench, 11, saved=11).later(200)
    assert leave(train(bench, 500, saved=11)).phase == "running"
    assert asked(bench)[1:] == [("leaving-1.1", 80.0)]
    assert train(bench, 501, saved=501).phase == "stopping"


def test_a_node_that_is_gone_before_the_grace_of_its_pod_bounds_the_wait() -> None:
    """Pods leave shortly before the deadline of a notice, also where the save for it has not come."""
    bench = train(running(), 20, saved=10)
    bench.leader.request_checkpoint(bench.now, CheckpointRequest("notice", 30.0))
    assert leave(bench).later(14).phase == "running"
    assert bench.later(1).phase == "stopping", "ranks that handle TERM have the rest"


@pytest.mark.parametrize("end", ["a rank fails", "the pod is gone", "all ranks end"])
def test_what_happens_meanwhile_counts(end: str) -> None:
    bench = leave(train(running(), 20, saved=10))
    if end == "a rank fails":
        bench.fail(0, 0).clean()
        assert bench.history == [("1.1", "Application", 0)]
    elif end == "the pod is gone":
        bench.leader.link_lost(bench.now, 1)
        bench.clean(0)
        assert bench.history == [("1.1", "Leaving", 1)]
    else:
        for index in range(2):
            bench.report(index, [ProcessExit(2 * index, 0), ProcessExit(2 * index + 1, 0)])
        assert [each.outcome.result for each in bench.ends()] == ["succeeded"]


@pytest.mark.parametrize(
    ("message", "code", "signal"),
    [("Connection reset by peer", 1, None), ("killed by SIGKILL", 137, 9), ("exited with code 143", 143, None)],
)
def test_what_the_end_of_the_pod_does_to_ranks_is_no_failure_of_theirs(
    message: str, code: int, signal: int | None
) -> None:
    """A kubelet that shuts down gives pods less time than they have, and tells nobody."""
    bench = leave(train(running(), 20, saved=10)).later(15)
    bench.fail(0, 0, code, message, signal=signal).later(1)
    bench.clean(0).clean(1)
    assert bench.history == [("1.1", "Leaving", 1)]
    assert bench.stops()[-1].grace == (GRACE if code == 143 else bench.config.restart_grace)


def test_the_next_generation_is_not_ended_for_the_pod_that_has_left() -> None:
    bench = leave(train(running(max_backoff=0.0), 20, saved=10)).fail(0, 0).clean()
    bench.join(1, pod="b").run().later(200)
    assert bench.phase == "running"


@pytest.mark.parametrize(("grace", "expected"), [(110.0, 80.0), (60.0, 30.0), (20.0, 10.0), (0.0, 0.0)])
def test_ranks_keep_some_of_the_grace_for_themselves(grace: float, expected: float) -> None:
    assert compute_save_seconds(grace) == expected


def read_request(agent: Agent) -> str | None:
    path = agent.fence.with_name("checkpoint-request.json")
    return str(json.loads(path.read_text())["id"]) if path.exists() else None


async def test_an_agent_stops_its_ranks_when_its_leader_says_that_they_have_saved(tmp_path: Path) -> None:
    async with gang(tmp_path, 2) as agents:
        leader = agents[0].leader
        assert leader is not None
        await until(lambda: leader.phase == "running")
        said = RankCheckpoint(checkpoint=3, restored=0)
        agents[0].node.emit(RankProgressed(1, 0, 5, None, "train", {}, said))
        await until(lambda: leader.checkpoints.ranks_save)
        leaving = asyncio.create_task(agents[1].node.leave(60.0))
        await until(lambda: read_request(agents[0]) == read_request(agents[1]) == "leaving-1.1")
        assert [agent.processes.stops for agent in agents] == [[], []]
        agents[0].node.emit(RankProgressed(1, 0, 6, None, "train", {}, RankCheckpoint(checkpoint=6, restored=0)))
        await leaving
        ((grace,),) = [agent.processes.stops for agent in agents[1:]]
        assert read_request(agents[1]) is None, "ranks that wait after their save need not wait any longer"
        assert 0 < grace < 60, "what is left of its pod's"
        await until(lambda: leader.state()["generationHistory"])
        assert leader.state()["generationHistory"][0]["cause"] == "Leaving"


async def test_an_agent_whose_leader_is_gone_stops_its_ranks_by_itself(tmp_path: Path) -> None:
    async with gang(tmp_path, 2) as agents:
        leader = agents[0].leader
        assert leader is not None
        await until(lambda: leader.phase == "running")
        agents[0].node.emit(RankProgressed(1, 0, 5, None, "train", {}, RankCheckpoint(restored=0)))
        await until(lambda: leader.checkpoints.ranks_save)
        leaving = asyncio.create_task(agents[1].node.leave(60.0))
        await until(lambda: read_request(agents[1]) is not None)
        await agents[0].vanish()
        await leaving
        assert len(agents[1].processes.stops) == 1
