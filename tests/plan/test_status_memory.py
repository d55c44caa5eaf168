"""A status that no operator has written is told from one that another operator has."""

from __future__ import annotations

from typing import Any

import pytest

from everstep_operator.api.status import Phase, TrainingJobStatus
from everstep_operator.plan.observation import MAX_EPOCHS_LOST
from everstep_operator.plan.status_memory import undo_edit
from tests.builders import job
from tests.plan.world import World


def history() -> list[TrainingJobStatus]:
    """Return a job's statuses, one write after the other."""
    world = World(job().nodes(2).build()).run("Running")
    for index in (1, 0):
        world.vanish(index)
        world.run("Restarting")
        world.run("Running")
    world.edit(suspend=True)
    world.run("Suspended")
    world.edit(suspend=False)
    world.run("Running")
    world.end()
    world.run("Succeeded")
    return world.statuses


def test_what_operators_write_is_never_undone() -> None:
    statuses = history()
    for number, known in enumerate(statuses):
        assert all(undo_edit(known, found) is None for found in statuses[number:])


@pytest.mark.parametrize(
    "edit",
    [
        {"epoch": 0},
        {"template": None},
        {"restarts": TrainingJobStatus().restarts},
        {"transitions": []},
        {"phase": Phase.FAILED},
        {"phase": None},
        {"epoch": 999_999_999},
    ],
)
def test_what_nobody_but_a_person_can_have_written_is_undone(edit: dict[str, Any]) -> None:
    known = history()[-2]
    assert undo_edit(known, known.model_copy(update=edit)) == known


def test_an_empty_status_is_undone_and_an_epoch_is_never_lowered() -> None:
    known = history()[-2]
    assert undo_edit(known, TrainingJobStatus()) == known
    raised = TrainingJobStatus(epoch=known.epoch + 5)
    right = undo_edit(known, raised)
    assert right is not None
    assert right.epoch == known.epoch + 5


def test_an_epoch_that_was_raised_within_reason_stays() -> None:
    known = history()[-2]
    assert undo_edit(known, known.model_copy(update={"epoch": known.epoch + MAX_EPOCHS_LOST})) is None
