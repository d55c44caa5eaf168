"""The number of pods of a set that nodes can hold is never less than the scheduler could bind."""

from __future__ import annotations

from typing import Any

import pytest

from everstep_operator.plan.node_capacity import count_places, parse_node_capacity

GPU = "nvidia.com/gpu"


def node(*, labels: Any = None, taints: Any = (), **allocatable: Any) -> dict[str, Any]:
    return {"metadata": {"labels": labels}, "spec": {"taints": list(taints)}, "status": {"allocatable": allocatable}}


def pod(*containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"resources": given} for given in containers], **spec}}


def count(template: dict[str, Any], *nodes: dict[str, Any], enough: int = 100) -> int:
    return count_places(template, [parse_node_capacity(raw) for raw in nodes], enough=enough)


def test_the_scarcest_resource_counts() -> None:
    eight = node(cpu="3920m", memory="30Gi", pods="110", **{GPU: "8"})
    assert count(pod({"limits": {GPU: 2}}), eight) == 4
    assert count(pod({"requests": {"cpu": "0.98"}}), eight) == 4
    assert count(pod({"requests": {"memory": "16G"}}), eight) == 2
    assert count(pod({"limits": {"memory": "16G"}}, {"requests": {"memory": "15Gi"}}), eight, eight) == 2
    assert count(pod({}), node(pods="3"), node(pods="2")) == 5
    assert count(pod({}), node(pods="3"), node(pods="2"), enough=4) == 4
    assert count(pod({"limits": {GPU: 1}}), node(pods="110", cpu="4")) == 0, "no GPU there"


def test_what_a_pod_reserves_is_what_the_scheduler_counts() -> None:
    """Init containers run before the others, sidecars beside all of them, and a runtime has an overhead."""
    four = node(cpu="4", memory="16Gi", pods="110")

    def init(cpu: int, **fields: Any) -> dict[str, Any]:
        return {"resources": {"requests": {"cpu": cpu}}, **fields}

    one = {"requests": {"cpu": "1"}}
    sidecar = init(1, restartPolicy="Always")
    assert count(pod(one, initContainers=[init(1)]), four) == 4
    assert count(pod(one, initContainers=[init(2), init(1)]), four) == 2
    assert count(pod(one, initContainers=[init(5)]), four) == 0
    assert count(pod(one, initContainers=[sidecar]), four) == 2
    assert count(pod(one, initContainers=[sidecar, init(3)]), four) == 1, "beside the sidecar"
    assert count(pod(one, initContainers=[init(3), sidecar]), four) == 1, "before it"
    assert count(pod(one, initContainers=[init(2), sidecar]), four) == 2
    assert count(pod(one, overhead={"cpu": "1"}), four) == 2
    assert count(pod(one, one, resources={"requests": {"cpu": "1"}}), four) == 4, "of the pod as a whole"
    assert count(pod(one, resources={"limits": {"memory": "8Gi"}}), four) == 2


def test_a_node_has_one_pod_of_a_set_that_wants_a_port_of_its_node() -> None:
    nodes = [node(pods="110"), node(pods="110")]

    def listening(**port: int) -> dict[str, Any]:
        return {"containers": [{"ports": [port]}]}

    assert count({"spec": listening(containerPort=6006)}, *nodes) == 100
    assert count({"spec": listening(containerPort=6006, hostPort=80)}, *nodes) == 2
    assert count({"spec": {**listening(containerPort=8470), "hostNetwork": True}}, *nodes) == 2


def test_only_nodes_that_are_selected_and_whose_taints_are_tolerated_count() -> None:
    pools = [node(labels={"pool": name}, pods="1") for name in ("a", "a", "b")]
    assert count(pod({}, nodeSelector={"pool": "a"}), *pools) == 2
    taint = {"key": GPU, "value": "yes", "effect": "NoSchedule"}
    for toleration, places in (
        ({"key": GPU, "operator": "Exists"}, 1),
        ({"operator": "Exists"}, 1),
        ({"key": GPU, "value": "yes", "effect": "NoSchedule"}, 1),
        ({"key": GPU, "value": "no"}, 0),
        ({"key": GPU, "operator": "Exists", "effect": "NoExecute"}, 0),
        ({"key": "other", "operator": "Exists"}, 0),
    ):
        assert count(pod({}, tolerations=[toleration]), node(pods="1", taints=[taint])) == places, toleration
    assert count(pod({}), node(pods="1", taints=[{**taint, "effect": "PreferNoSchedule"}])) == 1


def test_what_may_be_over_in_a_minute_does_not_count_against_a_node() -> None:
    taints = [{"key": f"node.kubernetes.io/{what}", "effect": "NoSchedule"} for what in ("not-ready", "unschedulable")]
    assert count(pod({}), node(pods="1", taints=taints)) == 1
    assert count(pod({"limits": {GPU: 8}}), node(), enough=7) == 7, "its kubelet has not reported yet"


@pytest.mark.parametrize(
    "key",
    [
        "node.cloudprovider.kubernetes.io/uninitialized",
        "node.cloudprovider.kubernetes.io/shutdown",
        "node.cilium.io/agent-not-ready",
        "ebs.csi.aws.com/agent-not-ready",
        "cni.istio.io/not-ready",
        "karpenter.sh/unregistered",
        "karpenter.sh/disruption",
        "readiness.k8s.io/network",
        "example.com/gpu-driver.startup",
        "example.com/startup",
        "startup-taint.cluster-autoscaler.kubernetes.io/driver",
        "ignore-taint.cluster-autoscaler.kubernetes.io/driver",
        "cloud.google.com/impending-node-termination",
        "remediator.kubernetes.azure.com/unschedulable",
        "aws-node-termination-handler/spot-itn",
        "ToBeDeletedByClusterAutoscaler",
    ],
)
def test_taints_of_nodes_that_start_or_are_serviced_do_not_count_against_them(key: str) -> None:
    """A node on which such a taint stays is removed, and another one takes its place."""
    taint = {"key": key, "value": "true", "effect": "NoSchedule"}
    assert count(pod({}), node(pods="1", taints=[taint])) == 1
    lasting = {"key": GPU, "effect": "NoSchedule"}
    assert count(pod({}), node(pods="1", taints=[taint, lasting])) == 0


@pytest.mark.parametrize(
    "key",
    [
        "kubernetes.azure.com/scalesetpriority",
        "cloud.google.com/gke-spot",
        "node-role.kubernetes.io/control-plane",
        "karpenter.sh/nodepool",
        "startup.example.com/gpu",
    ],
)
def test_taints_that_keep_pods_away_for_good_do(key: str) -> None:
    assert count(pod({}), node(pods="1", taints=[{"key": key, "effect": "NoSchedule"}])) == 0


@pytest.mark.parametrize("odd", ["many", "1Q", "", "NaN", "Infinity", "1e999999999", [], {}, None, True])
def test_odd_quantities_raise_nothing(odd: Any) -> None:
    assert count(pod({"limits": {"cpu": odd}}), node(pods="1", cpu=odd)) in (0, 1)
    assert count(pod({"limits": {"cpu": "1"}}), node(pods="1", cpu=odd)) in (0, 1)


@pytest.mark.parametrize("odd", [{}, {"metadata": None, "spec": None, "status": None}, {"spec": {"taints": [{}]}}])
def test_odd_nodes_raise_nothing(odd: dict[str, Any]) -> None:
    parse_node_capacity(odd)
