"""The status: restarts are charged once and never forgotten inside their window."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep_operator.api.status import MAX_CHARGES, Cause, Charge, ConditionType, Phase, Restarts, TrainingJobStatus
from tests.builders import CREATED, job


def charge(generation: int, cause: Cause = Cause.APPLICATION, minute: int = 0, epoch: int = 1) -> Charge:
    return Charge(id=f"{epoch}.{generation}", cause=cause, time=CREATED + timedelta(minutes=minute))


def test_a_charge_counts_for_its_cause_and_in_all() -> None:
    made = Restarts().charge(charge(1)).charge(charge(2, Cause.PREEMPTION)).charge(charge(3))
    assert (made.total, made.application, made.infrastructure, made.preemption) == (3, 2, 0, 1)
    assert [entry.id for entry in made.charges] == ["1.1", "1.2", "1.3"]


@pytest.mark.parametrize("again", [charge(2), charge(1), charge(9, epoch=0)])
def test_a_generation_is_charged_once(again: Charge) -> None:
    made = Restarts().charge(charge(1)).charge(charge(2))
    assert made.charge(again) == made


def test_ten_comes_after_nine_and_epochs_before_generations() -> None:
    made = Restarts().charge(charge(9)).charge(charge(10)).charge(charge(1, epoch=2))
    assert made.last == charge(1, epoch=2)
    assert made.total == 3


def test_only_the_window_counts() -> None:
    made = Restarts().charge(charge(1, minute=0)).charge(charge(2, minute=30)).charge(charge(3, minute=61))
    assert made.within(Cause.APPLICATION, CREATED + timedelta(minutes=1)) == 2
    assert made.within(Cause.INFRASTRUCTURE, CREATED) == 0


@given(st.lists(st.sampled_from(Cause), max_size=300), st.integers(0, 300))
def test_a_full_list_forgets_no_restart_of_a_budget(causes: list[Cause], minute: int) -> None:
    made = Restarts()
    for number, cause in enumerate(causes, 1):
        made = made.charge(charge(number, cause, minute=number))
    since = CREATED + timedelta(minutes=minute)
    assert len(made.charges) <= MAX_CHARGES
    assert made.total == len(causes) == sum(entry.count for entry in made.charges)
    for cause in (Cause.APPLICATION, Cause.INFRASTRUCTURE):
        recent = sum(1 for number, each in enumerate(causes, 1) if each == cause and number > minute)
        assert made.within(cause, since) >= recent


def test_reads_what_it_wrote() -> None:
    status = TrainingJobStatus(phase=Phase.RUNNING, epoch=2, restarts=Restarts().charge(charge(1)))
    assert job().status(status).build().status == status


def test_fields_of_a_newer_operator_are_ignored() -> None:
    read = TrainingJobStatus.parse({"phase": "Running", "shinyNewField": 1, "restarts": {"other": 2}})
    assert read.phase is Phase.RUNNING


def test_a_condition_is_found_by_type() -> None:
    made = TrainingJobStatus.parse(
        {
            "conditions": [
                {"type": "Ready", "status": "True", "reason": "Running", "lastTransitionTime": "2026-01-01T00:00:00Z"}
            ]
        }
    )
    assert made.is_true(ConditionType.READY)
    assert not made.is_true(ConditionType.COMPLETE)
    assert made.condition(ConditionType.FAILED) is None


def test_finished_phases() -> None:
    assert [phase for phase in Phase if phase.finished] == [Phase.SUCCEEDED, Phase.FAILED]
