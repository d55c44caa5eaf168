"""The end of a job, also one that happens while no operator runs."""

from __future__ import annotations

import dataclasses
import json

import pytest

from everstep_operator.plan.leader_view import LeaderOutcome
from everstep_operator.plan.observation import TerminationMessage, parse_termination_message
from tests.builders import job
from tests.plan.world import World


def running(nodes: int = 2, **restart: object) -> World:
    return World(job().nodes(nodes).restart(**restart).build()).run("Running")


def test_pod_0s_last_word_is_enough() -> None:
    world = running()
    world.end()
    world.leader, world.answered_at = None, None
    world.reconcile()
    assert world.phase == "Succeeded"


def test_so_is_another_agents_if_pod_0_is_gone() -> None:
    world = running()
    world.end()
    world.leader = None
    world.vanish(0)
    world.reconcile()
    assert world.phase == "Succeeded"


def test_a_word_of_an_older_epoch_ends_nothing() -> None:
    world = running()
    world.vanish(0)
    world.run("Running")
    assert world.status.epoch == 2
    world.exit(1, 0, word=TerminationMessage("succeeded", epoch=1))
    world.reconcile()
    assert world.phase != "Succeeded"


def test_a_failure_in_the_operators_absence_keeps_its_words() -> None:
    world = running()
    world.exit(
        0, 3, word=TerminationMessage("failed", 1, 1, rank=1, exit_code=3, message="ValueError", log_tail=("a", "b"))
    )
    world.leader = None
    world.reconcile()
    assert world.phase == "Failed"
    failure = world.status.last_failure
    assert failure is not None
    assert (failure.rank, failure.exit_code, failure.message, failure.log_tail) == (1, 3, "ValueError", ["a", "b"])


def test_restarts_that_no_operator_saw_are_counted_by_the_last_word() -> None:
    world = running()
    word = parse_termination_message(
        '{"result": "succeeded", "epoch": 1, "generation": 3, "generationHistory": ["1.1 Application", "1.2 PodLost"]}'
    )
    world.exit(0, 0, word=word)
    world.leader = None
    world.reconcile()
    assert world.phase == "Succeeded"
    assert [(c.id, c.cause.value) for c in world.status.restarts.charges] == [
        ("1.1", "Application"),
        ("1.2", "Infrastructure"),
    ]


def test_progress_that_no_operator_saw_is_told_by_the_last_word() -> None:
    world = running()
    word = parse_termination_message(
        '{"result": "succeeded", "epoch": 1, "generation": 1, "progress": {"step": 7, "totalSteps": 7}}'
    )
    world.exit(0, 0, word=word)
    world.reconcile()
    assert world.phase == "Succeeded"
    assert world.status.progress is not None
    assert (world.status.progress.step, world.status.progress.total_steps) == (7, 7)


def test_how_far_a_job_came_is_told_by_pod_0_though_another_pods_end_was_seen_first() -> None:
    world = running()
    world.leader = None
    world.exit(1, 0, word=TerminationMessage("succeeded", epoch=1))
    world.reconcile()
    assert world.phase == "Succeeded"
    assert world.status.progress is not None
    assert world.status.progress.step != 7
    world.exit(
        0,
        0,
        word=parse_termination_message(
            '{"result": "succeeded", "epoch": 1, "generation": 2, "progress": {"step": 7, "totalSteps": 7},'
            ' "checkpoint": {"step": 6}, "generationHistory": ["1.1 Application"]}'
        ),
    )
    world.reconcile()
    assert world.status.progress is not None
    assert world.status.checkpoint is not None
    assert (world.status.progress.step, world.status.checkpoint.step) == (7, 6)
    assert [(c.id, c.cause.value) for c in world.status.restarts.charges] == [("1.1", "Application")]
    assert world.status.last_failure is not None
    assert world.status.last_failure.reason == "ApplicationError"
    world.now += 7200
    assert not world.reconcile().changed, "it is written once"


def test_a_lost_link_right_before_the_end_is_counted_too() -> None:
    world = running()
    assert world.leader is not None
    world.leader.end_generation("PodLost", world.now, index=1)
    world.leader.outcome = LeaderOutcome("succeeded")  # told before the pods have ended
    world.reconcile()
    assert world.phase == "Succeeded"
    assert [(c.id, c.cause.value) for c in world.status.restarts.charges] == [("1.1", "Infrastructure")]


def test_the_failure_that_ends_a_job_unseen_is_no_restart_either() -> None:
    world = running(application=1)
    word = parse_termination_message(
        '{"result": "failed", "epoch": 1, "generation": 2, "generationHistory": ["1.1 Application", "1.2 Application"]}'
    )
    world.exit(0, 5, word=word)
    world.leader = None
    world.reconcile()
    assert world.phase == "Failed"
    assert [c.id for c in world.status.restarts.charges] == ["1.1"]


@pytest.mark.parametrize("history", ["7", '"x"', "[1, null, {}]", '["", "1.1", "x Application", "1.-1 Application"]'])
def test_a_history_that_is_none_charges_nothing(history: str) -> None:
    word = parse_termination_message(f'{{"result": "succeeded", "generationHistory": {history}}}')
    assert word is not None
    assert word.history == ()


def test_a_leader_that_was_told_to_leave_does_not_end_the_job() -> None:
    world = running()
    assert world.leader is not None
    world.delete(0)
    world.leader.outcome = LeaderOutcome("stopped")
    world.exit(0, 143, word=TerminationMessage("stopped", 1, 1))
    world.reconcile()
    assert world.phase == "Restarting"
    world.run("Running")


def test_an_agent_0_that_cannot_start_ends_nothing() -> None:
    world = World(job().nodes(2).build()).run("Starting")
    world.exit(0, 1, word=TerminationMessage("left", message="No space left on device"))
    world.run("Running")


def test_exit_code_0_without_a_word_is_a_lost_pod() -> None:
    world = running()
    world.exit(1, 0)
    world.lead()
    world.reconcile()
    assert world.phase == "Restarting"


def test_a_late_leader_of_another_epoch_is_not_believed() -> None:
    world = running()
    assert world.leader is not None
    stale = dataclasses.replace(world.leader, outcome=LeaderOutcome("succeeded"))
    world.vanish(0)
    world.reconcile()
    world.bind()
    world.start()
    world.leader = stale
    world.reconcile()
    assert world.phase == "Restarting"


@pytest.mark.parametrize("field", ["exitCode", "rank"])
def test_what_is_no_number_in_a_last_word_is_nothing(field: str) -> None:
    """In Python, True is one."""
    word = parse_termination_message(json.dumps({"result": "failed", "epoch": 1, "generation": 1, field: True}))
    assert word is not None
    assert (word.exit_code, word.rank) == (None, None)
