"""Our resources in a real API server, beyond validation: columns, selectors, the status subresource."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from datetime import timedelta

import pytest

from everstep_operator.api.resources import TRAINING_JOBS
from everstep_operator.api.status import Cause, Charge, Restarts, TrainingJobStatus
from tests.api.conftest import ApiServer, collection
from tests.api.tables import manifest
from tests.builders import CREATED

pytestmark = pytest.mark.integration

JOB = manifest({"metadata": {"name": "served"}, "spec": {"numNodes": 2}})
PATH = f"{collection(JOB)}/served"
STATUS = TrainingJobStatus.parse(
    {
        "phase": "Running",
        "observedGeneration": 1,
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "Running",
                "message": "All ranks run.",
                "lastTransitionTime": "2026-01-01T12:00:00Z",
                "observedGeneration": 1,
            }
        ],
        "epoch": 2,
        "generation": 3,
        "template": {"epoch": 1, "pool": "spot", "plain": False},
        "nodes": 2,
        "readyNodes": 2,
        "progress": {"step": 1200, "totalSteps": 5000, "stepsPerSecond": 14.25},
        "lastFailure": {
            "cause": "Preemption",
            "reason": "SpotInterruption",
            "node": "n7",
            "rank": 3,
            "exitCode": 143,
            "message": "gone",
            "logTail": ["a", "b"],
        },
        "transitions": [{"phase": "Running", "reason": "Running", "start": "2026-01-01T12:00:00.250000Z"}],
        "timings": {"pending": 3, "running": 880.5, "goodput": 0.97},
    }
).model_copy(
    update={
        "restarts": Restarts()
        .charge(Charge(id="1.1", cause=Cause.PREEMPTION, time=CREATED))
        .charge(Charge(id="1.2", cause=Cause.APPLICATION, time=CREATED + timedelta(seconds=5)))
    }
)


@pytest.fixture
def stored(api_server: ApiServer) -> Iterator[None]:
    code, answer = api_server.request("POST", collection(JOB), JOB)
    assert code == http.client.CREATED, answer
    written = {**answer, "status": STATUS.manifest()}
    code, answer = api_server.request("PUT", f"{PATH}/status?fieldValidation=Strict", written)
    assert code == http.client.OK, answer
    yield
    api_server.request("DELETE", PATH)


@pytest.mark.usefixtures("stored")
def test_status_is_stored_as_it_was_written(api_server: ApiServer) -> None:
    _, answer = api_server.request("GET", PATH)
    assert answer["status"] == STATUS.manifest()


@pytest.mark.usefixtures("stored")
def test_a_user_cannot_write_status(api_server: ApiServer) -> None:
    _, before = api_server.request("GET", PATH)
    code, after = api_server.request("PUT", PATH, {**before, "status": {"phase": "Succeeded"}})
    assert (code, after["status"]["phase"]) == (http.client.OK, "Running")


@pytest.mark.usefixtures("stored")
def test_kubectl_get_shows_the_columns(api_server: ApiServer) -> None:
    _, table = api_server.request("GET", collection(JOB), accept="application/json;as=Table;v=v1;g=meta.k8s.io")
    (row,) = table["rows"]
    cells = dict(zip([column["name"] for column in table["columnDefinitions"]], row["cells"], strict=True))
    shown = {name: cells[name] for name in ("Phase", "Ready", "Nodes", "Step", "Restarts", "Pool", "Last-failure")}
    assert shown == {
        "Phase": "Running",
        "Ready": 2,
        "Nodes": 2,
        "Step": 1200,
        "Restarts": 2,
        "Pool": "spot",
        "Last-failure": "SpotInterruption",
    }


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize(("selector", "found"), [("status.phase=Running", 1), ("spec.suspend=true", 0)])
def test_jobs_can_be_selected(api_server: ApiServer, selector: str, found: int) -> None:
    code, answer = api_server.request("GET", f"{collection(JOB)}?fieldSelector={selector}")
    assert (code, len(answer["items"])) == (http.client.OK, found)


def test_names_for_kubectl(api_server: ApiServer) -> None:
    _, answer = api_server.request("GET", "/apis/everstep.dev/v1alpha1")
    served = {resource["name"]: resource for resource in answer["resources"]}
    assert served[TRAINING_JOBS.plural]["shortNames"] == ["tj"]
    assert served["trainingpools"]["shortNames"] == ["tpool"]
    assert served["trainingpools"]["namespaced"] is False
    assert all("everstep" in served[name]["categories"] for name in ("trainingjobs", "trainingpools"))
