"""An older operator reads a stored job to which newer CRDs have added something."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from everstep_operator.api.job import TrainingJob
from tests.builders import job


def stored(**spec: Any) -> dict[str, Any]:
    manifest = job().nodes(2).restart(application=7).manifest()
    manifest["spec"].update(spec)
    return manifest


def test_fields_that_only_a_newer_version_knows_are_left_out_and_named() -> None:
    manifest = stored(later=1, anything={"goes": [1, 2]})
    manifest["spec"]["restart"]["later"] = "1h"
    manifest["spec"]["env"] = [{"name": "A", "value": "1", "later": True}, {"name": "B", "later": 0}]
    manifest["metadata"]["later"] = "of the API server, and none of our business"
    read = TrainingJob.parse_stored(manifest)
    assert set(read.unknown_fields) == {
        "spec.later", "spec.anything", "spec.restart.later", "spec.env.0.later", "spec.env.1.later",
    }  # fmt: skip
    assert (read.spec.num_nodes, read.spec.restart.application) == (2, 7)
    assert [variable.name for variable in read.spec.env] == ["A", "B"]
    assert manifest["spec"]["later"] == 1, "what is stored stays as it is"
    kept = read.model_copy(update={"spec": read.spec})
    assert kept.unknown_fields == read.unknown_fields


def test_conditions_of_types_that_only_a_newer_version_knows_are_left_out() -> None:
    manifest = stored()
    time = "2026-01-01T12:00:00Z"
    types = ("Later", "Ready", "Latest", "Stalled", "Lasts")
    conditions = [{"type": t, "status": "True", "reason": "R", "lastTransitionTime": time} for t in types]
    manifest["status"] = {"phase": "Running", "conditions": conditions, "later": 1}
    read = TrainingJob.parse_stored(manifest)
    assert [condition.type for condition in read.status.conditions] == ["Ready", "Stalled"]
    assert read.unknown_fields == ()


def test_what_breaks_a_rule_is_still_rejected_whatever_is_unknown() -> None:
    for manifest in (stored(numNodes="many"), stored(later=1, numNodes=0), stored(distribution={"later": {}})):
        with pytest.raises(ValidationError):
            TrainingJob.parse_stored(manifest)


def test_a_job_of_this_version_has_no_unknown_fields() -> None:
    assert TrainingJob.parse_stored(stored()).unknown_fields == ()
    assert TrainingJob.parse_stored(stored()) == TrainingJob.parse(stored())


def test_a_manifest_that_a_user_writes_may_have_none() -> None:
    with pytest.raises(ValidationError):
        TrainingJob.parse(stored(later=1))


def test_a_cause_that_only_a_newer_version_knows_stays_a_restart_that_is_counted() -> None:
    """A newer operator has run and is rolled back: the jobs that it restarted meanwhile are still looked after."""
    manifest = job().build().manifest()
    time = "2026-01-01T12:00:00Z"
    charges = [{"id": "1.1", "cause": "Application", "time": time}, {"id": "1.2", "cause": "Later", "time": time}]
    manifest["status"] = {
        "phase": "Running",
        "restarts": {"total": 2, "application": 1, "charges": charges},
        "lastFailure": {"cause": "Later", "reason": "Later"},
        "checkpoint": {"restored": {"id": "1.3", "step": 5, "tier": "moon"}},
    }
    status = TrainingJob.parse_stored(manifest).status
    assert status.restarts.last is not None
    assert (status.restarts.last.id, status.restarts.last.cause) == ("1.2", "Ignored")
    assert status.last_failure is not None
    assert status.last_failure.reason == "Later"
    assert status.checkpoint is not None
    assert status.checkpoint.restored is not None
    assert status.checkpoint.restored.tier is None
