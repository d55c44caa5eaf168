"""A node on which pods die is left alone by the third placement; who binds whom, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from e2e import deploy
from e2e.harness import Cluster, Object, phase, python, training_job, wait

HOLD = "import time\ntime.sleep(900)"
needs_own_nodes = pytest.mark.skipif("KUBECONFIG" in os.environ, reason="looks for processes of pods on this machine")


def drawn_to(node: str, name: str) -> Object:
    """Return a job of one pod that the scheduler puts on this node wherever it may."""
    chosen = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    wish = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": chosen}]}
    template = {"spec": {"affinity": {"nodeAffinity": wish}}}
    return training_job(name, python(HOLD), restart={"infrastructure": 9}, podTemplate=template)


def wait_running(cluster: Cluster, namespace: str, name: str, restarts: int = 0) -> str:
    """Wait until the job runs after so many restarts, and return its node."""

    def runs(job: Object) -> bool:
        total = ((job.get("status") or {}).get("restarts") or {}).get("total", 0)
        return phase(job) == "Running" and total == restarts

    cluster.wait_job(namespace, name, runs, 90, f"{name} runs after {restarts} restarts")
    return str(cluster.pods(namespace, name)[0]["spec"]["nodeName"])


def everstep_nodes(cluster: Cluster, *options: str) -> str:
    command = [sys.executable, "-m", "everstep.cli", "nodes", *options]
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "COLUMNS": "200"}
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60).stdout


@needs_own_nodes
@pytest.mark.timeout(400)
def test_a_node_on_which_pods_die_is_left_alone_until_somebody_clears_it(cluster: Cluster, namespace: str) -> None:
    (node, *_) = (item["metadata"]["name"] for item in cluster.items("/api/v1/nodes") if not item["spec"].get("taints"))
    cluster.apply(drawn_to(node, "first"), namespace=namespace)
    for restarts in range(2):
        assert wait_running(cluster, namespace, "first", restarts) == node
        deploy.kill_container(cluster, namespace, "first", 0)
    assert wait_running(cluster, namespace, "first", 2) != node, "the third placement"
    events = cluster.items(f"/api/v1/namespaces/{namespace}/events", fieldSelector="reason=NodeAvoided")
    assert any(node in event["message"] for event in events)
    assert node in everstep_nodes(cluster)

    with cluster.namespace() as other, cluster.namespace() as third:
        cluster.apply(drawn_to(node, "second"), namespace=other)
        assert wait_running(cluster, other, "second") == node, "one namespace alone binds no other"
        deploy.kill_container(cluster, other, "second", 0)
        wait_running(cluster, other, "second", 1)
        cluster.apply(drawn_to(node, "third"), namespace=third)
        assert wait_running(cluster, third, "third") != node, "two namespaces bind everybody"
        assert node in everstep_nodes(cluster, "--clear", node)

        def used_again() -> bool:
            cluster.kubectl("delete", "tj", "-n", third, "third", "--ignore-not-found")
            cluster.apply(drawn_to(node, "third"), namespace=third)
            return bool(wait_running(cluster, third, "third") == node)

        wait(used_again, 60, f"{node} is used again")
