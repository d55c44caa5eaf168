"""One cluster for the whole run, a namespace of its own for every test."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e import deploy
from e2e.cluster import backend
from e2e.cluster.local import LocalCluster
from e2e.harness import PATIENCE, Cluster, Object, python, training_job
from e2e.lives import two_by_operator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        # The hook is given the items of all folders.
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            own = item.get_closest_marker("timeout")
            item.add_marker(pytest.mark.timeout(PATIENCE * (own.args[0] if own else 120)), append=False)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Provide the cluster with images, chart and pools; taken down afterwards only if this run brought it up."""
    with deploy.cluster() as running:
        yield running


def gpu_job(name: str, nodes: int) -> Object:
    resources = {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"nvidia.com/gpu": "1"}}
    command = python("import time; time.sleep(3)")
    return training_job(name, command, numNodes=nodes, numProcPerNode=1, resources=resources)


@pytest.fixture(scope="session", autouse=True)
def early(request: pytest.FixtureRequest) -> None:
    """Begin, before the first scenario, what takes long by itself and disturbs nobody, if any asks for it."""
    if any("gangs" in item.fixturenames for item in request.session.items if isinstance(item, pytest.Function)):
        request.getfixturevalue("gangs")


@pytest.fixture(scope="session")
def gangs(cluster: Cluster) -> Iterator[str]:
    """Provide the namespace of two jobs, `first` and `second`, that each want two thirds of all GPUs.

    That one gives way and tries again takes the operator 90 s. No other scenario needs a GPU.
    """
    capacity = sum(
        int(node["status"]["allocatable"].get("nvidia.com/gpu", 0))
        for node in cluster.items("/api/v1/nodes")
        if not node["spec"].get("taints")
    )
    size = capacity * 2 // 3
    assert 2 * size > capacity
    with cluster.namespace() as name:
        cluster.apply(gpu_job("first", size), gpu_job("second", size), namespace=name)
        yield name


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    with cluster.namespace() as name:
        yield name
        _assert_no_index_had_two_pods(name)
    # What one scenario has done to pods shall not keep the next one's from a third of the cluster.
    cluster.kubectl("delete", "configmap", "-n", deploy.SYSTEM, "everstep-node-failures", "--ignore-not-found")


def _assert_no_index_had_two_pods(namespace: str) -> None:
    """Assert of each scenario, whatever it broke, what the API server's audit log tells of the operator's deeds."""
    cluster = backend.choose()
    if not isinstance(cluster, LocalCluster):
        return  # another kind keeps no such log
    log, operator = cluster.control.read_audit_log(), f"system:serviceaccount:{deploy.SYSTEM}:everstep"
    assert not two_by_operator(log, namespace, operator, cluster.broken)


@pytest.fixture
def volume(cluster: Cluster, namespace: str) -> Iterator[Object]:
    """Return what a pod template needs for a folder that all nodes share, at /checkpoints."""
    folder = Path(tempfile.mkdtemp(prefix="everstep-checkpoints-"))
    folder.chmod(0o777)
    shape = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": namespace},
            "spec": {**shape, "capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder)}},
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "checkpoints"},
            "spec": {**shape, "volumeName": namespace, "resources": {"requests": {"storage": "1Gi"}}},
        },
        namespace=namespace,
    )
    try:
        yield {
            "containers": [{"name": "trainer", "volumeMounts": [{"name": "kept", "mountPath": "/checkpoints"}]}],
            "volumes": [{"name": "kept", "persistentVolumeClaim": {"claimName": "checkpoints"}}],
        }
    finally:
        cluster.kubectl("delete", "persistentvolume", namespace, "--wait=false", check=False)
        shutil.rmtree(folder, ignore_errors=True)
