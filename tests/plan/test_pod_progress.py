"""Only what no plan is in a hurry for waits: a step of one pod among many that have yet to follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from everstep_operator.plan.observation import ContainerEnd, PodView
from everstep_operator.plan.pod_progress import is_one_step

NEW = PodView(index=3, name="digits-3", uid="u", epoch=1, template=1, created=1.0)
BOUND = replace(NEW, node="n1", scheduled_at=2.0)
RUNNING = replace(BOUND, phase="Running", ip="10.0.0.3", started_at=3.0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (None, NEW),
        (NEW, BOUND),
        (replace(NEW, unschedulable="0/3 nodes", avoids=frozenset({"n2"})), BOUND),
        (BOUND, replace(BOUND, waiting_reason="ContainerCreating")),
        (replace(BOUND, waiting_reason="ContainerCreating"), RUNNING),
    ],
)
def test_a_step_waits_while_others_have_yet_to_follow(old: PodView | None, new: PodView) -> None:
    assert is_one_step(old, new, unbound=2, unstarted=2)
    assert not is_one_step(old, new, unbound=0, unstarted=0), "all have"
    first = replace(old, index=0) if old is not None else None
    assert not is_one_step(first, replace(new, index=0), unbound=2, unstarted=2), "pod 0 leads"


def test_the_last_pod_that_gets_its_node_does_not_wait_though_none_is_started() -> None:
    assert not is_one_step(NEW, BOUND, unbound=0, unstarted=4)


@pytest.mark.parametrize(
    "trouble",
    [
        {"unschedulable": "0/3 nodes"},
        {"container_wait": "ImagePullBackOff"},
        {"deleting_since": 5.0},
        {"disruption": "PreemptionByScheduler"},
        {"ended": ContainerEnd(1, None, "Error", "", 4.0)},
        {"phase": "Failed", "ended_by": "Evicted"},
        {"uid": "another"},
        {"epoch": 2},
        {"owner": "another"},
        {"token_secret": "another"},
        {"listed": False},
        {"finalizers": "team.example/keep"},
        {"node": "n2"},
    ],
)
@pytest.mark.parametrize("old", [NEW, BOUND, RUNNING])
def test_everything_else_is_looked_at_at_once(old: PodView, trouble: dict[str, Any]) -> None:
    changed = replace(old, **trouble)
    if changed.node == "n2" and old is NEW:
        return  # a pod that gets its node
    assert not is_one_step(old, changed, unbound=2, unstarted=2)
    assert not is_one_step(old, None, unbound=2, unstarted=2)


@pytest.mark.parametrize("later", [BOUND, RUNNING, replace(NEW, deleting_since=1.0), replace(NEW, phase="Failed")])
def test_a_pod_that_appears_in_the_middle_of_its_life_is_looked_at_at_once(later: PodView) -> None:
    assert not is_one_step(None, later, unbound=2, unstarted=2)


def test_a_pod_that_loses_its_node_or_start_is_looked_at_at_once() -> None:
    assert not is_one_step(RUNNING, BOUND, unbound=2, unstarted=2)
    assert not is_one_step(BOUND, NEW, unbound=2, unstarted=2)
