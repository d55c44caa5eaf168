"""Every signal by which clouds and tools announce the end of a node, read from the Node as they leave it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from everstep_operator.api.reasons import Reason
from everstep_operator.plan.node_signals import RULES, NodeSignal, SignalRule, index_rules, is_spot, read_signal
from everstep_operator.plan.node_view import parse_node
from everstep_operator.plan.taints import is_temporary
from everstep_operator.settings import OperatorSettings

SPOT, MAINTENANCE, SCALE_DOWN = Reason.SPOT_INTERRUPTION, Reason.NODE_MAINTENANCE, Reason.SCALE_DOWN
NTH = "aws-node-termination-handler/"
GKE_TAINT = "cloud.google.com/impending-node-termination"
GKE_TIME = "cloud.google.com/scheduled-maintenance-time"
AKS = "remediator.kubernetes.azure.com/unschedulable"
CA = "ToBeDeletedByClusterAutoscaler"
NOTICED = 1_760_000_000.0
PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "spot.md").read_text()


def node(
    taint: str = "",
    value: str = "",
    *,
    labels: dict[str, str] | None = None,
    condition: tuple[str, str] | None = None,
    gpus: tuple[int, int] | None = None,
    cordoned: bool = False,
) -> dict[str, Any]:
    """A Node as the API server gives it; `gpus`: of so many so many allocatable."""
    conditions = [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]
    if condition is not None:
        conditions.append({"type": condition[0], "status": condition[1], "reason": "Said"})
    status: dict[str, Any] = {"conditions": conditions}
    if gpus is not None:
        status["capacity"] = {"cpu": "96", "nvidia.com/gpu": str(gpus[0])}
        status["allocatable"] = {"cpu": "95", "nvidia.com/gpu": str(gpus[1])}
    taints = [{"key": taint, "value": value, "effect": "NoSchedule"}] if taint else []
    spec = {"taints": taints, **({"unschedulable": True} if cordoned else {})}
    return {"metadata": {"name": "n1", "labels": labels or {}}, "spec": spec, "status": status}


# A row: who announces it, the Node, the reason, and after how many seconds the machine may be gone (None: it stays).
ANNOUNCED = [
    ("any drainer: cordon", node(cordoned=True), Reason.NODE_DRAINING, None),
    ("Karpenter, spot", node("karpenter.sh/disrupted", labels={"karpenter.sh/capacity-type": "spot"}), SPOT, 120),
    ("Karpenter", node("karpenter.sh/disrupted", labels={"karpenter.sh/capacity-type": "on-demand"}), SCALE_DOWN, 120),
    ("NTH, interruption", node(f"{NTH}spot-itn", "c3a1"), SPOT, 120),
    ("NTH, maintenance", node(f"{NTH}scheduled-maintenance", "ev"), MAINTENANCE, 120),
    ("NTH, scale-in", node(f"{NTH}asg-lifecycle-termination", "ev"), SCALE_DOWN, 120),
    (
        "NTH, EKS spot",
        node(f"{NTH}asg-lifecycle-termination", labels={"eks.amazonaws.com/capacityType": "SPOT"}),
        SPOT,
        120,
    ),
    ("NTH, rebalance", node(f"{NTH}rebalance-recommendation", "ev"), Reason.NODE_DRAINING, None),
    ("GKE, spot", node(GKE_TAINT, labels={"cloud.google.com/gke-spot": "true"}), SPOT, 30),
    ("GKE, host maintenance", node(GKE_TAINT), MAINTENANCE, 30),
    ("GKE, under way", node(labels={"cloud.google.com/active-node-maintenance": "ONGOING"}), MAINTENANCE, 60),
    ("GKE, scheduled", node(labels={GKE_TIME: f"{NOTICED + 7200:.0f}"}), MAINTENANCE, 7200),
    ("AKS, spot", node(AKS, labels={"kubernetes.azure.com/scalesetpriority": "spot"}), SPOT, 30),
    ("AKS, redeploy", node(AKS), MAINTENANCE, 30),
    ("AKS, before 2024", node("remediator.aks.microsoft.com/unschedulable"), MAINTENANCE, 30),
    ("Cluster Autoscaler", node(CA, f"{NOTICED - 100:.0f}"), SCALE_DOWN, 500),
    ("Cluster Autoscaler, no time", node(CA, "soon"), SCALE_DOWN, 600),
    *(
        (f"node-problem-detector, {name}", node(condition=(name, "True")), Reason.NODE_UNHEALTHY, None)
        for name in ("KernelDeadlock", "ReadonlyFilesystem", "XfsShutdown", "CperHardwareErrorFatal")
    ),
    ("node-problem-detector", node(condition=("FrequentKubeletRestart", "True")), Reason.NODE_UNHEALTHY, None),
    ("EKS monitoring, GPU", node(condition=("AcceleratedHardwareReady", "False")), Reason.GPU_UNHEALTHY, None),
    ("EKS monitoring", node(condition=("StorageReady", "False")), Reason.NODE_UNHEALTHY, None),
    ("NVIDIA device plugin", node(gpus=(8, 7)), Reason.GPU_UNHEALTHY, None),
]
SILENT = [
    ("nothing", node()),
    ("Cluster Autoscaler, a candidate", node("DeletionCandidateOfClusterAutoscaler")),
    (
        "GKE spot, its own taint",
        node("cloud.google.com/gke-spot", "true", labels={"cloud.google.com/gke-spot": "true"}),
    ),
    ("AKS spot, its own taint", node("kubernetes.azure.com/scalesetpriority", "spot")),
    ("what a node is for", node("nvidia.com/gpu")),
    ("out of service: pods are gone by then", node("node.kubernetes.io/out-of-service", "nodeshutdown")),
    ("shut down: after the fact", node("node.cloudprovider.kubernetes.io/shutdown")),
    ("node-problem-detector, well", node(condition=("KernelDeadlock", "False"))),
    ("EKS monitoring, well", node(condition=("AcceleratedHardwareReady", "True"))),
    ("EKS monitoring, unknown", node(condition=("AcceleratedHardwareReady", "Unknown"))),
    ("all devices there", node(gpus=(8, 8))),
    ("a device plugin that restarts", node(gpus=(8, 0))),
    ("GKE, no time", node(labels={GKE_TIME: "tomorrow"})),
    ("GKE, over", node(labels={"cloud.google.com/active-node-maintenance": "DONE"})),
]


@pytest.mark.parametrize(("who", "raw", "reason", "seconds"), ANNOUNCED, ids=[row[0] for row in ANNOUNCED])
def test_a_signal_becomes_a_reason_and_a_deadline(
    who: str, raw: dict[str, Any], reason: Reason, seconds: float | None
) -> None:
    signal = read_signal(raw)
    assert signal is not None
    assert signal.reason is reason
    assert signal.leaves is (seconds is not None)
    deadline = signal.compute_deadline(NOTICED)
    assert deadline == (None if seconds is None else NOTICED + seconds)
    assert parse_node(raw).signal == signal


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.place} {rule.name}")
def test_every_rule_of_the_table_is_read_and_is_on_the_page(rule: SignalRule) -> None:
    value = f"{NOTICED + 60:.0f}" if rule.time else rule.value or "True"
    raw = {
        "taint": lambda: node(rule.name, value),
        "label": lambda: node(labels={rule.name: value}),
        "condition": lambda: node(condition=(rule.name, value)),
    }[rule.place]()
    signal = read_signal(raw)
    assert signal is not None
    assert (signal.reason, signal.source) == (rule.reason, f"{rule.place} {rule.name}")
    assert re.search(rf"`{re.escape(rule.name)}\b", PAGE)


@pytest.mark.parametrize(("who", "raw"), SILENT, ids=[row[0] for row in SILENT])
def test_what_announces_nothing_is_no_signal(who: str, raw: dict[str, Any]) -> None:
    assert read_signal(raw) is None


def test_of_several_signals_the_most_urgent_counts() -> None:
    raw = node(f"{NTH}spot-itn", cordoned=True, gpus=(8, 7), condition=("KernelDeadlock", "True"))
    signal = read_signal(raw)
    assert signal is not None
    assert (signal.reason, signal.source) == (SPOT, f"taint {NTH}spot-itn")
    del raw["spec"]["taints"]
    assert read_signal(raw) != NodeSignal(Reason.NODE_DRAINING, "cordoned"), "a fault tells more than a cordon"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("karpenter.sh/capacity-type", "spot"),
        ("eks.amazonaws.com/capacityType", "SPOT"),
        ("cloud.google.com/gke-spot", "true"),
        ("kubernetes.azure.com/scalesetpriority", "spot"),
    ],
)
def test_a_machine_that_may_be_reclaimed_says_so_by_a_label(key: str, value: str) -> None:
    assert is_spot({key: value})
    assert not is_spot({key: "on-demand"})
    assert parse_node(node(labels={key: value})).spot


def test_taints_that_announce_an_end_say_nothing_of_what_a_node_is_for() -> None:
    assert all(is_temporary(str(t["key"])) for _, raw, _, _ in ANNOUNCED for t in raw["spec"]["taints"])


def test_an_administrator_adds_signals_and_replaces_what_one_means() -> None:
    given = [
        {"taint": "corp.example/reclaim", "reason": "SpotInterruption", "seconds": 45},
        {"label": "corp.example/state", "value": "dying", "reason": "NodeMaintenance", "seconds": 600},
        {"condition": "KernelDeadlock", "reason": "NodeMaintenance", "seconds": 30},
    ]
    settings = OperatorSettings.load({"EVERSTEP_NODE_SIGNALS": json.dumps(given)})
    rules = index_rules(each.to_rule() for each in settings.node_signals)
    reclaimed = read_signal(node("corp.example/reclaim"), rules)
    assert reclaimed == NodeSignal(SPOT, "taint corp.example/reclaim", 45)
    assert read_signal(node(labels={"corp.example/state": "well"}), rules) is None
    assert read_signal(node(labels={"corp.example/state": "dying"}), rules) is not None
    replaced = read_signal(node(condition=("KernelDeadlock", "True")), rules)
    assert replaced == NodeSignal(MAINTENANCE, "condition KernelDeadlock", 30)
    assert read_signal(node(f"{NTH}spot-itn"), rules) is not None, "the others stay"


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ("reclaim", "JSON"),
        ('[{"reason": "ScaleDown"}]', "exactly one"),
        ('[{"taint": "a", "label": "b", "reason": "ScaleDown"}]', "exactly one"),
        ('[{"taint": "a", "reason": "Weather"}]', "SpotInterruption"),
        ('[{"taint": "a", "reason": "ScaleDown", "seconds": 0}]', "greater than 0"),
    ],
)
def test_a_signal_that_cannot_be_read_is_rejected_with_the_reason(given: str, word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        OperatorSettings.load({"EVERSTEP_NODE_SIGNALS": given})


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"metadata": None, "spec": None, "status": None},
        {
            "spec": {"taints": [{}]},
            "status": {"conditions": [{}], "capacity": {"nvidia.com/gpu": 8}, "allocatable": {}},
        },
        {"spec": {"taints": [{"key": CA, "value": "9" * 400}]}},
    ],
)
def test_odd_nodes_raise_nothing(odd: Any) -> None:
    read_signal(odd)
