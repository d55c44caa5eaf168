"""job.json: what is wrong with it is said by the field's name."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.agent import config
from everstep_operator.plan.agent_config import build_job_config
from everstep_operator.plan.plan_settings import PlanSettings
from tests.builders import job

from .bench import JOB, configuration

ENVIRONMENT = {"EVERSTEP_INDEX": "0", "EVERSTEP_EPOCH": "1", "EVERSTEP_POD_IP": "10.0.0.1"}
ENVIRON = {"EVERSTEP_INDEX": "1", "EVERSTEP_EPOCH": "3", "EVERSTEP_POD_IP": "10.0.0.1"}


def test_reads_the_job_and_the_pod() -> None:
    parsed = config.parse_config({**JOB, "someday": {}}, ENVIRON)
    assert (parsed.name, parsed.index, parsed.epoch, parsed.leads) == ("digits", 1, 3, False)
    assert (parsed.command, parsed.distribution, parsed.world_size) == (("python", "train.py"), "torch", 4)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("protocol", 2, "protocol 2 is not 1"),
        ("numNodes", 0, "numNodes must be at least 1"),
        ("numNodes", True, "numNodes must be int"),
        ("numNodes", 1, "EVERSTEP_INDEX: 1 is not below numNodes = 1"),
        ("command", "train.py", "command must be list"),
        ("distribution", {"kind": "smoke"}, "kind must be one of torch, mpi, horovod, none"),
        ("fenceTimeoutSeconds", -1, "fenceTimeoutSeconds must be a number of seconds of at least 1, not -1"),
        ("fenceTimeoutSeconds", 0, "fenceTimeoutSeconds must be a number of seconds of at least 1, not 0"),
        ("restartGraceSeconds", -1, "restartGraceSeconds must be a number of seconds, not -1"),
        ("hyperparameters", {"lr": 1}, "hyperparameters must map strings to strings"),
        ("job", None, "job: must be an object"),
    ],
)
def test_names_the_field(field: str, value: Any, message: str) -> None:
    with pytest.raises(config.AgentConfigError, match=message):
        config.parse_config({**JOB, field: value}, ENVIRON)


def test_a_thousand_agents_send_at_most_200_heartbeats_a_second() -> None:
    assert config.parse_config({**JOB, "numNodes": 1200}, ENVIRON).heartbeat == 6.0
    assert config.parse_config(JOB, ENVIRON).heartbeat == 1.0


@pytest.mark.parametrize("fence_timeout", [5.0, 40.0, 300.0])
@pytest.mark.parametrize("nodes", [1, 2, 200, 1200, 2000])
def test_a_lease_outlives_four_heartbeats_at_every_size(nodes: int, fence_timeout: float) -> None:
    """The operator tells a job of this size a pair that fits; an agent that was told another one keeps it right."""
    settings = PlanSettings(fence_timeout=fence_timeout)
    told = build_job_config(job().nodes(nodes).build(), template_epoch=1, pool=None, settings=settings)
    parsed = config.parse_config(
        {**JOB, "numNodes": nodes, "fenceTimeoutSeconds": told["fenceTimeoutSeconds"]}, ENVIRONMENT
    )
    assert parsed.fence_timeout >= fence_timeout
    assert 4 * parsed.heartbeat <= parsed.fence_timeout
    assert nodes / parsed.heartbeat <= 200
    small = config.parse_config({**JOB, "numNodes": nodes, "fenceTimeoutSeconds": 5}, ENVIRONMENT)
    assert 4 * small.heartbeat <= small.fence_timeout


@pytest.mark.parametrize(
    ("fields", "address"),
    [
        ({"leader": "10.0.0.9:8470"}, "10.0.0.9:8470"),
        ({}, "algo-1.train:8470"),
        ({"service": ""}, ""),
    ],
)
def test_knows_where_its_leader_may_be_found(fields: dict[str, Any], address: str) -> None:
    assert configuration(2, 1, 1, 1, **{"service": "train", "port": 8470, **fields}).leader_address == address
