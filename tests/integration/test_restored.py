"""A cluster whose etcd is restored from a backup while the operator runs."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from e2e.cluster.controlplane import ControlPlane
from everstep_operator.cluster.client import Client
from tests.integration.conftest import install, make_namespace
from tests.integration.inprocess import Simulation, operator
from tests.integration.world import NAMESPACES, SERVICE_ACCOUNTS, World, until

WRITES = 500  # more than a test makes


@pytest.fixture
def own_control_plane(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """One more, for this test alone; skipped where the session's cannot run."""
    with ControlPlane() as plane:
        asyncio.run(install(plane))
        yield plane


def _write_to_etcd(plane: ControlPlane) -> bool:
    key, value = (base64.b64encode(word).decode() for word in (b"/elsewhere", b"1"))
    url = f"http://127.0.0.1:{plane.settings.etcd_port}/v3/kv/put"
    try:
        with urlopen(Request(url, json.dumps({"key": key, "value": value}).encode()), timeout=5):
            return True
    except URLError:
        return False


def _back_up(plane: ControlPlane, backup: Path) -> None:
    plane.stop_apiserver()
    plane.stop_etcd()
    shutil.copytree(plane.folder / "etcd", backup)
    plane.start_etcd()
    plane.start_apiserver()


async def _restore(plane: ControlPlane, backup: Path, *, writes: int) -> None:
    """Restore, with the revision raised by as many writes: `etcdutl snapshot restore --bump-revision` does the same."""
    plane.stop_apiserver()
    plane.stop_etcd()
    shutil.rmtree(plane.folder / "etcd")
    shutil.copytree(backup, plane.folder / "etcd")
    plane.start_etcd()

    async def answers() -> bool:
        return await asyncio.to_thread(_write_to_etcd, plane)

    await until(answers, "etcd answers")
    await asyncio.to_thread(lambda: [_write_to_etcd(plane) for _ in range(writes)])
    await asyncio.to_thread(plane.start_apiserver)


@pytest.mark.parametrize("writes", [0, WRITES], ids=["versions go back", "versions go far ahead"])
async def test_jobs_go_on_after_etcd_was_restored_under_the_operator(
    own_control_plane: ControlPlane, tmp_path: Path, writes: int
) -> None:
    plane, backup = own_control_plane, tmp_path / "backup"
    client = await Client.connect(str(plane.kubeconfig), field_manager="user")
    await client.create(NAMESPACES, None, make_namespace("team"))
    await client.create(SERVICE_ACCOUNTS, "team", {"metadata": {"name": "default"}})
    world = World(client, "team", 8470, network=77)
    async with operator(plane.kubeconfig, world), Simulation(world, "digits", ("n1", "n2")) as simulation:
        await world.submit("digits", numNodes=2)
        await world.until_phase("digits", "Running")
        await asyncio.to_thread(_back_up, plane, backup)
        first = await world.pods("digits")
        await world.remove(first[0])

        async def replaced() -> bool:
            status = (await world.job("digits"))["status"]
            return (status["epoch"], status["phase"]) == (2, "Running")

        await until(replaced, "another leader")
        await _restore(plane, backup, writes=writes)

        async def remembered() -> bool:
            return bool((await world.job("digits"))["status"]["epoch"] == 2)

        await until(remembered, "the epoch that was given out since is on record again", 60)
        simulation.finish.set()
        await world.until_phase("digits", "Succeeded", seconds=60)
        assert [pod["metadata"]["uid"] for pod in await world.pods("digits")] == [
            pod["metadata"]["uid"] for pod in first
        ]
    await client.close()
