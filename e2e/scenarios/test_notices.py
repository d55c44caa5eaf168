"""A node that is announced to go away is left in time: a checkpoint, then its pod goes elsewhere, and nobody pays."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from e2e.harness import Cluster, Object, condition, phase, python, training_job
from e2e.scenarios.test_lost_nodes import APART, find_victim, generation, nodes_of

SPOT = "aws-node-termination-handler/spot-itn"
needs_own_nodes = pytest.mark.skipif("KUBECONFIG" in os.environ, reason="taints nodes, which are somebody's here")

# One rank in each pod, which saves by itself once an hour only: what is in the store was asked for.
TRAINS = """
import os, time, torch, torch.distributed as dist, everstep
dist.init_process_group('gloo')
weight = torch.nn.Parameter(torch.zeros(1 << 16))
with everstep.checkpointer('/checkpoints/run', every='1h') as checkpoints:
    step = checkpoints.restore(weight=weight.data).step
    print('generation', os.environ['EVERSTEP_EPOCH'], 'begins at', step, 'with', int(weight.data[0]), flush=True)
    while True:
        step += 1
        weight.data += 1
        everstep.progress(step)
        checkpoints.step(step)
        time.sleep(0.05)
"""


@pytest.fixture
def tainted(cluster: Cluster) -> Iterator[list[str]]:
    """Names of nodes that the test has tainted: they are as before afterwards."""
    names: list[str] = []
    yield names
    for name in names:
        cluster.kubectl("taint", "node", name, f"{SPOT}-", check=False)


def trains(name: str, volume: Object) -> Object:
    return training_job(
        name,
        python(TRAINS),
        image="everstep/trainer:0.1.0",
        numNodes=2,
        restart={"infrastructure": 0},
        resources={"requests": {"cpu": "100m", "memory": "512Mi"}},
        podTemplate={"spec": {"affinity": APART, **volume}},
    )


def step_of(job: Object) -> int:
    return int((job["status"].get("progress") or {}).get("step") or 0)


@needs_own_nodes
@pytest.mark.timeout(500)
def test_a_spot_notice_moves_a_pod_and_training_goes_on_from_the_checkpoint_asked_for(
    cluster: Cluster, namespace: str, volume: Object, tainted: list[str]
) -> None:
    cluster.apply(trains("moved", volume), namespace=namespace)
    before = cluster.wait_job(namespace, "moved", lambda job: step_of(job) > 20, 180, "ranks train")
    uids = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in cluster.pods(namespace, "moved")}
    pod, node = find_victim(cluster, namespace, "moved")
    tainted.append(node)
    cluster.kubectl("taint", "node", node, f"{SPOT}=notice:NoSchedule")
    noticed = cluster.wait_job(
        namespace, "moved", lambda job: bool(job["status"].get("disruption")), 30, "the notice is on record"
    )
    record = noticed["status"]["disruption"]
    assert (record["reason"], record["nodes"]) == ("SpotInterruption", [node])
    assert condition(noticed, "NodesHealthy")["reason"] == "SpotInterruption"
    after = cluster.wait_job(
        namespace,
        "moved",
        lambda job: phase(job) == "Running" and generation(job) > generation(before),
        240,
        "ranks run again without the noticed node",
    )
    now = nodes_of(cluster, namespace, "moved")
    assert now.keys() == uids.keys()
    assert node not in now.values()
    kept = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in cluster.pods(namespace, "moved")}
    assert [name for name in uids if kept[name] != uids[name]] == [pod], "the other pod stays"
    restarts = after["status"]["restarts"]
    assert (restarts["total"], restarts["preemption"]) == (1, 1)
    assert after["status"]["lastFailure"]["reason"] == "SpotInterruption"

    def begun(_: Object) -> bool:
        return len(re.findall(r"begins at", cluster.all_logs(namespace, "moved"))) >= 3

    cluster.wait_job(namespace, "moved", begun, 120, "ranks have restored")
    begins = re.findall(r"begins at (\d+) with (\d+)", cluster.all_logs(namespace, "moved"))
    starts = {int(step) for step, weight in begins if step == weight}
    assert max(starts) > 20, "what was asked for is what they go on from"


@needs_own_nodes
@pytest.mark.timeout(300)
def test_a_notice_that_is_withdrawn_in_time_costs_nothing(
    cluster: Cluster, namespace: str, volume: Object, tainted: list[str]
) -> None:
    cluster.apply(trains("stays", volume), namespace=namespace)
    before = cluster.wait_job(namespace, "stays", lambda job: step_of(job) > 5, 180, "ranks train")
    _, node = find_victim(cluster, namespace, "stays")
    tainted.append(node)
    # A maintenance that is announced well before: the checkpoint may be committed long before the pods would leave.
    cluster.kubectl("label", "node", node, "cloud.google.com/scheduled-maintenance-time=4102444800")
    try:
        cluster.wait_job(
            namespace,
            "stays",
            lambda job: condition(job, "NodesHealthy").get("reason") == "NodeMaintenance",
            30,
            "the maintenance is told",
        )
    finally:
        cluster.kubectl("label", "node", node, "cloud.google.com/scheduled-maintenance-time-")
    after = cluster.wait_job(
        namespace, "stays", lambda job: condition(job, "NodesHealthy").get("status") == "True", 60, "it is over"
    )
    assert generation(after) == generation(before)
    assert after["status"].get("restarts", {}).get("total", 0) == 0
