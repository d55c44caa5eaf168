"""The operator key is rotated while a job runs, by a real process and a real API server."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.agent.wire.auth import job_token
from everstep_operator.cluster.resources import CONFIG_MAPS, SECRETS
from everstep_operator.plan.agent_volume import find_token_secret, make_template_name
from tests.integration.conftest import KEY
from tests.integration.inprocess import Simulation
from tests.integration.world import OperatorProcess, World, until

NEW_KEY = bytes(reversed(range(32)))


@pytest.fixture
def rotated(operator: OperatorProcess, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The flags of an operator after the rotation. The process of the other tests is back when the test ends."""
    flags = {"key-folder": str(tmp_path / "key"), "previous-keys-folder": str(tmp_path / "previous")}
    for file, key in (("key/key", NEW_KEY), ("previous/everstep-operator-key", KEY)):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_bytes(key)
    before = dict(operator.flags)
    yield flags
    operator.stop()
    operator.flags = before
    operator.start()
    operator.wait_ready()


async def tokens(world: World, job: str) -> dict[str, Any]:
    """The tokens of a job by the name of their Secret, which its pods have to mount."""
    mounted = {find_token_secret(pod["spec"]) for pod in await world.pods(job)}
    there = {secret["metadata"]["name"]: secret for secret in await world.all(SECRETS)}
    return {name: base64.b64decode(there[name]["data"]["token"]) for name in mounted}


async def test_a_running_job_keeps_its_pods_its_token_and_its_template_over_a_rotation(
    operator: OperatorProcess, world: World, rotated: dict[str, str]
) -> None:
    job = await world.submit("digits", numNodes=2)
    uid = job["metadata"]["uid"]
    async with Simulation(world, "digits") as simulation:  # its leader has the token of the first key
        await world.until_phase("digits", "Running", seconds=120)
        before = await world.pods("digits")
        name = make_template_name("digits", uid, 1)
        template = await world.client.get(CONFIG_MAPS, world.namespace, name)
        token = await tokens(world, "digits")
        assert [*token.values()] == [job_token(KEY, uid, 1)]
        assert await asyncio.to_thread(operator.stop) == 0
        operator.flags |= rotated
        operator.start()
        await asyncio.to_thread(operator.wait_ready)

        lost = before[1]
        await world.remove(lost)

        async def replaced() -> bool:
            pods = await world.pods("digits")
            return len(pods) == 2 and pods[1]["metadata"]["uid"] != lost["metadata"]["uid"]

        await until(replaced, "the lost pod is replaced", 120)
        assert (await world.pods("digits"))[0]["metadata"]["uid"] == before[0]["metadata"]["uid"]
        assert await tokens(world, "digits") == token
        assert await world.client.get(CONFIG_MAPS, world.namespace, name) == template

        other = await world.submit("new", numNodes=1)
        await world.until_pods("new", 1, seconds=120)
        assert [*(await tokens(world, "new")).values()] == [job_token(NEW_KEY, other["metadata"]["uid"], 1)]

        async def one_is_counted() -> bool:  # figures are taken every few seconds
            metrics = await asyncio.to_thread(operator.fetch, "/metrics", operator.metrics_port)
            return "everstep_jobs_of_previous_keys 1.0" in metrics

        await until(one_is_counted, "the job of the previous key is counted", 60)

        simulation.finish.set()  # only a leader that is authenticated can tell of it: the pods go on running
        status = await world.until_phase("digits", "Succeeded", seconds=120)
    assert status["epoch"] == 1, "its leader is the one that it had"
