"""A machine that dies costs its pod and half a minute, though its Node object stays."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from e2e.cluster import backend
from e2e.harness import Cluster, Object, phase, python, training_job

HOLD = "import os, time\nprint('generation', os.environ['EVERSTEP_GENERATION'], flush=True)\ntime.sleep(900)"
APART = {
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {
                "topologyKey": "kubernetes.io/hostname",
                "labelSelector": {"matchExpressions": [{"key": "everstep.dev/job", "operator": "Exists"}]},
            }
        ]
    }
}
needs_own_nodes = pytest.mark.skipif("KUBECONFIG" in os.environ, reason="breaks nodes, which are somebody's here")


@pytest.fixture
def broken() -> Iterator[list[str]]:
    """Names of nodes that the test has broken: they are whole again afterwards."""
    names: list[str] = []
    yield names
    for name in names:
        backend.faulty().restart_node(name)


def apart(name: str) -> Object:
    return training_job(name, python(HOLD), numNodes=2, podTemplate={"spec": {"affinity": APART}})


def nodes_of(cluster: Cluster, namespace: str, job: str) -> dict[str, str]:
    """Return the node of each pod, by the pod's name."""
    return {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in cluster.pods(namespace, job)}


def find_victim(cluster: Cluster, namespace: str, job: str) -> tuple[str, str]:
    """Return a pod of the job, and its node, on which the operator does not run."""
    pods = cluster.items("/api/v1/namespaces/everstep-system/pods")
    taken = {pod["spec"].get("nodeName") for pod in pods}
    return next((pod, node) for pod, node in nodes_of(cluster, namespace, job).items() if node not in taken)


def generation(job: Object) -> tuple[int, int]:
    return job["status"]["epoch"], job["status"]["generation"]


@needs_own_nodes
@pytest.mark.timeout(400)
def test_a_node_that_loses_its_power_costs_its_pod_and_no_more(
    cluster: Cluster, namespace: str, broken: list[str]
) -> None:
    cluster.apply(apart("struck"), namespace=namespace)
    before = cluster.wait_phase(namespace, "struck", "Running")
    uids = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in cluster.pods(namespace, "struck")}
    pod, node = find_victim(cluster, namespace, "struck")
    broken.append(node)
    backend.faulty().kill_node(node)
    after = cluster.wait_job(
        namespace,
        "struck",
        lambda job: phase(job) == "Running" and generation(job) > generation(before),
        120,
        "ranks run again without the dead node",
    )
    now = nodes_of(cluster, namespace, "struck")
    assert now.keys() == uids.keys()
    assert node not in now.values()
    kept = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in cluster.pods(namespace, "struck")}
    assert [name for name in uids if kept[name] != uids[name]] == [pod], "the other pod stays"
    assert after["status"]["restarts"]["infrastructure"] == 1
    assert after["status"]["lastFailure"]["reason"] == "NodeLost"
