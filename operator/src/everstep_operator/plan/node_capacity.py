"""Counts how many pods of a set today's nodes could hold if they held nothing else.

An upper bound: other pods are not looked at, and a cordon, a taint that passes (taints.py) or a kubelet that has not
reported its resources yet may be over in a minute. So a gang that is larger than this cannot be placed unless nodes are
added or changed; one that is not larger may still lack room. Rules between the pods of the set are in `affinity.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from everstep_operator.plan.affinity import CandidateNode, is_node_allowed, list_placement_rules
from everstep_operator.plan.taints import is_temporary

_QUANTITY_UNITS = {
    unit: Decimal(1000) ** power for power, unit in enumerate(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"), -3)
}
_QUANTITY_UNITS |= {unit: Decimal(1024) ** power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)}
_LEAST, _MOST = Decimal("1e-9"), Decimal("1e30")  # no quantity is finer; none that is larger means anything

Taints = tuple[tuple[str, str, str], ...]  # key, value, effect of each


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """The part of a Node that decides whether pods of a set can ever be bound to it."""

    name: str
    labels: Mapping[str, str]
    taints: Taints  # only those that keep pods away for good
    allocatable: Mapping[str, Decimal]  # empty: not reported yet


def parse_node_capacity(raw: Mapping[str, Any]) -> NodeCapacity:
    """Sort out what one Node can hold. Never raises on odd values."""
    meta = raw.get("metadata") or {}
    labels = meta.get("labels") or {}
    taints = (raw.get("spec") or {}).get("taints") or ()
    return NodeCapacity(
        name=str(meta.get("name") or ""),
        labels={str(key): str(value) for key, value in labels.items()},
        taints=tuple(
            (str(t.get("key") or ""), str(t.get("value") or ""), str(t.get("effect") or ""))
            for t in taints
            if t.get("effect") in ("NoSchedule", "NoExecute") and not is_temporary(str(t.get("key") or ""))
        ),
        allocatable=_parse_amounts((raw.get("status") or {}).get("allocatable")),
    )


def count_places(
    pod: Mapping[str, Any],
    capacities: Iterable[NodeCapacity],
    *,
    enough: int,
    labels: Mapping[str, str] | None = None,
    namespace: str = "",
) -> int:
    """Count the pods that nodes could hold.

    Args:
        pod: The set's frozen pod template.
        capacities: All nodes of the cluster.
        enough: Where to stop counting.
        labels: Labels that all pods of the set have; None: those of the template.
        namespace: Namespace of the pods.

    Returns:
        How many such pods the nodes could hold at once, at most `enough`.
    """
    spec: Mapping[str, Any] = pod.get("spec") or {}
    if labels is None:
        labels = (pod.get("metadata") or {}).get("labels") or {}
    rules = list_placement_rules(spec, labels, namespace)
    wanted = _sum_requests(spec)
    tolerated: dict[Taints, bool] = {}  # nodes have few different ones
    may_stop = all(rule.only_grows for rule in rules)
    nodes: list[CandidateNode] = []
    places, stop_at = 0, 1
    for capacity in capacities:
        if capacity.taints not in tolerated:
            tolerated[capacity.taints] = _tolerates_all(spec.get("tolerations") or (), capacity.taints)
        node = _make_candidate(spec, capacity, wanted, enough, tolerated[capacity.taints])
        places += node.places
        nodes.append(node)
        # Rules are asked at each doubling: all of that together costs as much as to ask them once, of all nodes.
        if may_stop and places >= enough and len(nodes) >= (stop_at if rules else 0):
            stop_at = 2 * len(nodes)
            if all(rule.count(nodes) >= enough for rule in rules):
                return enough
    return min([places, enough, *(rule.count(nodes) for rule in rules)])


def _make_candidate(
    spec: Mapping[str, Any], capacity: NodeCapacity, wanted: Mapping[str, Decimal], enough: int, tolerated: bool
) -> CandidateNode:
    selector = spec.get("nodeSelector") or {}
    selected = all(capacity.labels.get(key) == value for key, value in selector.items())
    selected = selected and is_node_allowed(spec, capacity.name, capacity.labels)
    places = _count_node_places(wanted, capacity.allocatable, enough) if selected and tolerated else 0
    if _claims_host_port(spec):
        places = min(places, 1)
    return CandidateNode(capacity.labels, selected, places)


def _count_node_places(wanted: Mapping[str, Decimal], allocatable: Mapping[str, Decimal], enough: int) -> int:
    if not allocatable:
        return enough
    return min((int(allocatable.get(name, Decimal(0)) / amount) for name, amount in wanted.items()), default=enough)


def _claims_host_port(spec: Mapping[str, Any]) -> bool:
    """Tell whether a pod wants a port of its node, which a second one of its set could not have."""
    ports = [port for each in spec.get("containers") or () for port in each.get("ports") or ()]
    return any(port.get("hostPort") or (spec.get("hostNetwork") and port.get("containerPort")) for port in ports)


def _sum_requests(spec: Mapping[str, Any]) -> dict[str, Decimal]:
    """Return what the scheduler reserves for a pod (k8s.io/component-helpers/resource, PodRequests).

    Containers run together, with the init containers that go on beside them (sidecars); other init containers run
    before, one after the other, beside the sidecars that were started by then.
    """
    together: dict[str, Decimal] = {}
    sidecars: dict[str, Decimal] = {}
    before: dict[str, Decimal] = {}
    for container in spec.get("initContainers") or ():
        requests = _read_requests(container.get("resources"))
        if container.get("restartPolicy") == "Always":
            sidecars = _add_amounts(sidecars, requests)
            requests = sidecars
        else:
            requests = _add_amounts(sidecars, requests)
        before = {name: max(before.get(name, Decimal(0)), amount) for name, amount in (before | requests).items()}
    for container in spec.get("containers") or ():
        together = _add_amounts(together, _read_requests(container.get("resources")))
    together = _add_amounts(together, sidecars)
    total = {name: max(before.get(name, Decimal(0)), amount) for name, amount in (before | together).items()}
    total |= _read_requests(spec.get("resources"))  # of the pod as a whole, where it says so
    total = {**_add_amounts(total, _parse_amounts(spec.get("overhead"))), "pods": Decimal(1)}
    return {name: amount for name, amount in total.items() if amount > 0}


def _read_requests(resources: Any) -> dict[str, Decimal]:
    """Return what is requested. The API server takes a limit for the request where only the limit is given."""
    given = resources or {}
    return _parse_amounts({**(given.get("limits") or {}), **(given.get("requests") or {})})


def _add_amounts(left: Mapping[str, Decimal], right: Mapping[str, Decimal]) -> dict[str, Decimal]:
    return {name: left.get(name, Decimal(0)) + right.get(name, Decimal(0)) for name in left.keys() | right.keys()}


def _tolerates_all(tolerations: Iterable[Mapping[str, Any]], taints: Taints) -> bool:
    return all(any(_tolerates_taint(toleration, taint) for toleration in tolerations) for taint in taints)


def _tolerates_taint(toleration: Mapping[str, Any], taint: tuple[str, str, str]) -> bool:
    key, value, effect = taint
    if toleration.get("effect") not in (None, "", effect) or toleration.get("key") not in (None, "", key):
        return False
    return toleration.get("operator") == "Exists" or (toleration.get("value") or "") == value


def _parse_amounts(given: Any) -> dict[str, Decimal]:
    found = {str(name): read_quantity(value) for name, value in (given or {}).items()}
    return {name: amount for name, amount in found.items() if amount is not None}


def read_quantity(quantity: Any) -> Decimal | None:
    """Return a Kubernetes quantity as a number; None if it is none."""
    text = str(quantity)
    unit = text.lstrip("+-.0123456789")
    try:
        number = (
            Decimal(text[: len(text) - len(unit)]) * _QUANTITY_UNITS[unit] if unit in _QUANTITY_UNITS else Decimal(text)
        )
    except ArithmeticError:
        return None
    if number.is_nan() or number <= 0:
        return None if number.is_nan() else Decimal(0)
    return max(_LEAST, min(_MOST, number))
