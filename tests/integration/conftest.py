from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from e2e.cluster.controlplane import ControlPlane
from e2e.cluster.errors import ClusterError
from e2e.cluster.ports import free_ports
from everstep_operator.cluster import errors
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.node_leases import NODE_LEASES_NAMESPACE
from everstep_operator.cluster.rbac import USED_PERMISSIONS
from everstep_operator.cluster.resources import JOBS, NODES, ApiResource
from tests.integration.world import NAMESPACES, OWN_NAMESPACE, SERVICE_ACCOUNTS, OperatorProcess, World, until

CRDS = ApiResource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
)
ROOT = Path(__file__).parents[2]
USER = "everstep-operator-under-test"
KEY = bytes(range(32))
_numbers = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.integration)


def rbac_objects() -> list[tuple[str, dict[str, Any]]]:
    """Exactly the rights of the table, bound to a user of its own: whatever else the operator tries is refused."""
    objects = []
    namespaces = {"own": OWN_NAMESPACE, "node-leases": NODE_LEASES_NAMESPACE}
    for scope in ("jobs", "budgets", "cluster", "taints", "node-leases", "own"):
        rules = [
            {"apiGroups": [right.group], "resources": [right.resource], "verbs": [right.verb]}
            for right in sorted(USED_PERMISSIONS)
            if right.scope == scope
        ]
        namespace = namespaces.get(scope)
        meta = {"name": f"everstep-{scope}", **({"namespace": namespace} if namespace else {})}
        kind = "Role" if namespace else "ClusterRole"
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": meta["name"]}
        subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": USER}
        head = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": meta}
        objects.append((f"{kind.lower()}s", {**head, "kind": kind, "rules": rules}))
        binding = {**head, "kind": f"{kind}Binding", "roleRef": reference, "subjects": [subject]}
        objects.append((f"{kind.lower()}bindings", binding))
    return objects


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    try:
        plane = ControlPlane()
        plane.start()
    except (ClusterError, OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no API server on this machine: {error}")
    try:
        asyncio.run(install(plane))
        yield plane
    finally:
        plane.stop()


async def install(plane: ControlPlane) -> None:
    """Create the CRDs, the operator's own namespace and its rights."""
    client = await Client.connect(str(plane.kubeconfig))
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        for body in yaml.safe_load_all(path.read_text()):
            await client.create(CRDS, None, body)
    await client.create(NAMESPACES, None, make_namespace(OWN_NAMESPACE))
    for plural, body in rbac_objects():
        resource = ApiResource("rbac.authorization.k8s.io", "v1", plural, body["kind"])
        await client.create(resource, body["metadata"].get("namespace"), body)
    for plural in ("trainingjobs", "trainingpools"):

        async def served(plural: str = plural) -> bool:
            try:
                async for _ in client.list(ApiResource("everstep.dev", "v1alpha1", plural, "X"), None):
                    return True
            except errors.NotFound:
                pass
            return False

        await until(served, f"{plural} are served")
    await client.close()


def make_namespace(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


@pytest.fixture(scope="session")
def operator_process(
    control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    """Running or stopped, as the last test left it. Its key is given, so that tests can play the leader."""
    folder = tmp_path_factory.mktemp("operator")
    (folder / "key").mkdir()
    (folder / "key" / "key").write_bytes(KEY)
    process = OperatorProcess(control_plane.user_kubeconfig(USER), folder, free_ports(1)[0])
    process.start()
    process.wait_ready()
    try:
        yield process
    finally:
        if process.running():
            process.stop()


@pytest.fixture
def operator(operator_process: OperatorProcess) -> OperatorProcess:
    """Running, whatever test came before: the order of tests is not told."""
    if not operator_process.running():
        operator_process.start()
        operator_process.wait_ready()
    return operator_process


@pytest_asyncio.fixture
async def world(control_plane: ControlPlane, operator: OperatorProcess) -> AsyncIterator[World]:
    """A namespace of its own, served by the operator's process."""
    async with _world(control_plane, operator.agent_port) as made:
        yield made


@pytest_asyncio.fixture
async def still_world(control_plane: ControlPlane, operator_process: OperatorProcess) -> AsyncIterator[World]:
    """A namespace that no operator serves until the test starts one."""
    if operator_process.running():
        operator_process.stop()
    async with _world(control_plane, operator_process.agent_port) as made:
        yield made


@contextlib.asynccontextmanager
async def _world(control_plane: ControlPlane, agent_port: int) -> AsyncIterator[World]:
    number = next(_numbers)
    name = f"team-{number}"
    client = await Client.connect(str(control_plane.kubeconfig), field_manager="user")
    await client.create(NAMESPACES, None, make_namespace(name))
    # Without a controller-manager nobody else makes it, and no pod is admitted before.
    await client.create(SERVICE_ACCOUNTS, name, {"metadata": {"name": "default"}})
    world = World(client, name, agent_port, network=number)
    try:
        yield world
    finally:
        for job in await world.all(JOBS):  # else every operator of later tests looks after it too, and counts it
            await client.delete(JOBS, name, job["metadata"]["name"], uid=job["metadata"]["uid"])
        # Else a set of a later test is counted against them, and tainted or small ones have no place for it.
        async for page in client.list(NODES, None):
            for node in page.items:
                await client.delete(NODES, None, node["metadata"]["name"], uid=None)
        await client.close()
