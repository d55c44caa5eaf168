"""Reads from a Node that its machine is about to go, or is in trouble: one table for all who announce it.

Each provider and each tool has signals of its own: taints, labels, conditions, a cordon, devices that a plugin has
withdrawn. A rule of the table says where a signal stands, what it means (`reason`) and, where the machine goes away,
after how many seconds. Administrators add rules, or replace those of the same place, by the setting `node_signals`.

Sources: the documentation of aws-node-termination-handler, Karpenter ("Disruption"), Cluster Autoscaler ("FAQ"), GKE
("Host maintenance events"), AKS ("Node auto-drain"), node-problem-detector, EKS ("Node auto repair") and the NVIDIA
device plugin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from everstep_operator.api.reasons import Reason

Place = Literal["taint", "label", "condition"]

GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
_MAX_SOURCE_CHARS = 253
_MAX_TIME_DIGITS = 11  # of a time in Unix seconds
# Labels by which providers mark a machine that they may reclaim at any time, and their values.
_SPOT_LABELS = {
    "karpenter.sh/capacity-type": "spot",
    "eks.amazonaws.com/capacityType": "SPOT",
    "cloud.google.com/gke-spot": "true",
    "cloud.google.com/gke-preemptible": "true",
    "kubernetes.azure.com/scalesetpriority": "spot",
}


@dataclass(frozen=True, slots=True)
class SignalRule:
    """One signal: where it stands, and what it means.

    Attributes:
        place: A taint or a label by its key, or a condition by its type.
        name: The key or the type.
        reason: The reason that the job reports.
        seconds: Seconds from the signal until the machine may be gone; None: the node stays, and a checkpoint is all
            that is asked for.
        value: The value that a label or a condition has to have; empty: any, and "True" for a condition.
        on_spot: The reason instead on a machine that its provider may reclaim at any time.
        time: What the value tells as Unix seconds: nothing, when the `seconds` began, or when the machine goes.
    """

    place: Place
    name: str
    reason: Reason
    seconds: float | None = None
    value: str = ""
    on_spot: Reason | None = None
    time: Literal["", "begin", "end"] = ""


@dataclass(frozen=True, slots=True)
class NodeSignal:
    """An announcement about one node.

    Attributes:
        reason: Why it goes, or what is wrong with it.
        source: Where that was read, as "taint karpenter.sh/disrupted".
        seconds: Seconds from when the signal is first seen until the machine may be gone; None: see `deadline`.
        deadline: When that is (Unix seconds), where the signal tells; None: see `seconds`.
    """

    reason: Reason
    source: str
    seconds: float | None = None
    deadline: float | None = None

    @property
    def leaves(self) -> bool:
        """Return whether the machine goes away, so that pods have to leave it."""
        return self.seconds is not None or self.deadline is not None

    def compute_deadline(self, noticed_at: float) -> float | None:
        """Return when the machine may be gone, given when the signal was first seen; None if it stays."""
        if self.deadline is not None:
            return self.deadline
        return None if self.seconds is None else noticed_at + self.seconds


_SPOT, _MAINTENANCE, _SCALE_DOWN = Reason.SPOT_INTERRUPTION, Reason.NODE_MAINTENANCE, Reason.SCALE_DOWN
_NTH = "aws-node-termination-handler/"
RULES: tuple[SignalRule, ...] = (
    # aws-node-termination-handler, where it taints nodes (taintNode=true). A recommendation takes no machine away.
    SignalRule("taint", f"{_NTH}spot-itn", _SPOT, 120),
    SignalRule("taint", f"{_NTH}scheduled-maintenance", _MAINTENANCE, 120),
    SignalRule("taint", f"{_NTH}asg-lifecycle-termination", _SCALE_DOWN, 120, on_spot=_SPOT),
    SignalRule("taint", f"{_NTH}rebalance-recommendation", Reason.NODE_DRAINING),
    # Karpenter drains a node for an interruption as it does to consolidate; how long that takes, pods decide.
    SignalRule("taint", "karpenter.sh/disrupted", _SCALE_DOWN, 120, on_spot=_SPOT),
    # Cluster Autoscaler gives pods at most ten minutes; the value is when it began.
    SignalRule("taint", "ToBeDeletedByClusterAutoscaler", _SCALE_DOWN, 600, time="begin"),
    # GKE: 30 s from the notice for machines that may be reclaimed, an hour at most for others.
    SignalRule("taint", "cloud.google.com/impending-node-termination", _MAINTENANCE, 30, on_spot=_SPOT),
    SignalRule("label", "cloud.google.com/active-node-maintenance", _MAINTENANCE, 60, value="ONGOING"),
    SignalRule("label", "cloud.google.com/scheduled-maintenance-time", _MAINTENANCE, time="end"),
    # AKS drains a node before Preempt and Redeploy, 30 s before at the least.
    SignalRule("taint", "remediator.kubernetes.azure.com/unschedulable", _MAINTENANCE, 30, on_spot=_SPOT),
    SignalRule("taint", "remediator.aks.microsoft.com/unschedulable", _MAINTENANCE, 30, on_spot=_SPOT),
    # EKS node monitoring, and node-problem-detector: a machine that may fail, or be repaired by force, in minutes.
    SignalRule("condition", "AcceleratedHardwareReady", Reason.GPU_UNHEALTHY, value="False"),
    *(
        SignalRule("condition", name, Reason.NODE_UNHEALTHY, value="False")
        for name in ("StorageReady", "NetworkingReady", "KernelReady", "ContainerRuntimeReady")
    ),
    *(
        SignalRule("condition", name, Reason.NODE_UNHEALTHY)
        for name in (
            "KernelDeadlock",
            "ReadonlyFilesystem",
            "XfsShutdown",
            "CperHardwareErrorFatal",
            "FrequentKubeletRestart",
            "FrequentContainerdRestart",
        )
    ),
)
Rules = Mapping[tuple[Place, str], SignalRule]


def index_rules(added: Iterable[SignalRule] = ()) -> Rules:
    """Return all rules by their place and name, for `read_signal`.

    Args:
        added: Rules of the administrator, which replace those of the same place and name.
    """
    return {(rule.place, rule.name): rule for rule in (*RULES, *added)}


DEFAULT_RULES = index_rules()
# Taints that come before the end of a node, or of its work: none of them says what a node is for.
SIGNAL_TAINTS = frozenset(rule.name for rule in RULES if rule.place == "taint")


def is_spot(labels: Mapping[str, Any]) -> bool:
    """Return whether the provider may reclaim a machine with these labels of its Node at any time."""
    return any(labels.get(key) == value for key, value in _SPOT_LABELS.items())


def read_signal(raw: Mapping[str, Any], rules: Rules = DEFAULT_RULES) -> NodeSignal | None:
    """Return what a Node, as the API server gives it, announces: of several signals the most urgent one.

    Never raises on odd values.

    Args:
        raw: The Node.
        rules: See `index_rules`.
    """
    meta: Mapping[str, Any] = raw.get("metadata") or {}
    spec: Mapping[str, Any] = raw.get("spec") or {}
    status: Mapping[str, Any] = raw.get("status") or {}
    labels: Mapping[str, Any] = meta.get("labels") or {}
    found = [
        *(_apply_rule(rules, "taint", each.get("key"), each.get("value"), labels) for each in spec.get("taints") or ()),
        *(_apply_rule(rules, "label", key, value, labels) for key, value in labels.items()),
        *(
            _apply_rule(rules, "condition", each.get("type"), each.get("status"), labels)
            for each in status.get("conditions") or ()
        ),
    ]
    signals = [signal for signal in found if signal is not None]
    if spec.get("unschedulable"):
        signals.append(NodeSignal(Reason.NODE_DRAINING, "cordoned"))
    if (lacking := _find_withdrawn_gpus(status)) is not None:
        signals.append(NodeSignal(Reason.GPU_UNHEALTHY, lacking))
    return min(signals, key=_rank_signal, default=None)


def _apply_rule(rules: Rules, place: Place, name: Any, value: Any, labels: Mapping[str, Any]) -> NodeSignal | None:
    rule = rules.get((place, str(name or "")))
    if rule is None:
        return None
    wanted = rule.value or ("True" if place == "condition" else "")
    if wanted and str(value or "") != wanted:
        return None
    reason = rule.on_spot if rule.on_spot is not None and is_spot(labels) else rule.reason
    source = f"{place} {rule.name}"[:_MAX_SOURCE_CHARS]
    told = _parse_time(value) if rule.time else None
    if rule.time == "end":
        return NodeSignal(reason, source, deadline=told) if told is not None else None
    if told is not None and rule.seconds is not None:
        return NodeSignal(reason, source, deadline=told + rule.seconds)
    return NodeSignal(reason, source, rule.seconds)


def _rank_signal(signal: NodeSignal) -> tuple[bool, bool, float, str]:
    """Order signals: a machine that goes before one in trouble, a fault before a mere cordon, the shortest first."""
    left = signal.seconds if signal.seconds is not None else float("inf")
    return not signal.leaves, signal.reason is Reason.NODE_DRAINING, left, signal.source


def _parse_time(value: Any) -> float | None:
    text = str(value or "")
    return float(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_TIME_DIGITS else None


def _find_withdrawn_gpus(status: Mapping[str, Any]) -> str | None:
    """Return which GPUs a device plugin has withdrawn since the kubelet registered them, or None."""
    capacity, allocatable = status.get("capacity") or {}, status.get("allocatable") or {}
    for name in GPU_RESOURCES:
        has, gives = str(capacity.get(name, "")), str(allocatable.get(name, ""))
        # None at all is a plugin that is restarted: kubelets withdraw all devices meanwhile.
        if has.isdecimal() and gives.isdecimal() and 0 < int(gives) < int(has):
            return f"{gives} of {has} {name} are allocatable"
    return None
