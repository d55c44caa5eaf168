"""Tells on which nodes pods of a set may be, and how many of them the rules between them allow at once.

Only what the scheduler requires: node affinity, pod affinity and anti-affinity among pods of the set
(`requiredDuringScheduling…`), and topology spread (`DoNotSchedule`). All answers are upper bounds: what cannot be
judged from the template and the nodes alone, such as rules about other pods, forbids nothing.

References: "Assigning Pods to Nodes" and "Pod Topology Spread Constraints" in the documentation of Kubernetes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep_operator.plan.labels import LABEL_EPOCH, LABEL_INDEX, LABEL_JOB

# Pods of a set differ in these, so a selector with one of them may match some of them only.
_DISTINCT_LABELS = frozenset({LABEL_INDEX, LABEL_EPOCH, "apps.kubernetes.io/pod-index"})


@dataclass(frozen=True, slots=True)
class CandidateNode:
    """A node of the cluster, and how many pods of the set it could hold by itself."""

    labels: Mapping[str, str]
    selected: bool  # by the node selector and the node affinity of the pods
    places: int  # 0 where the pods may not be, for whatever reason


@dataclass(frozen=True, slots=True)
class PlacementRule:
    """A rule with a `count` function that returns how many pods of the set the given nodes could hold under it."""

    count: Callable[[Sequence[CandidateNode]], int]
    only_grows: bool = True  # more nodes are never fewer places


def is_node_allowed(spec: Mapping[str, Any], name: str, labels: Mapping[str, str]) -> bool:
    """Tell whether the required node affinity of a pod admits a node.

    Args:
        spec: Spec of the pod.
        name: Name of the node; empty if it is unknown.
        labels: Labels of the node.
    """
    required = _as_mapping(
        _as_mapping(_get_affinity(spec).get("nodeAffinity")).get("requiredDuringSchedulingIgnoredDuringExecution")
    )
    terms = _as_mappings(required.get("nodeSelectorTerms"))
    return not terms or any(_term_matches(term, name, labels) for term in terms)


def exclude_nodes(affinity: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return a pod's affinity with nodes excluded by their names, whatever else it requires.

    Args:
        affinity: The `affinity` of the pod; empty if it has none.
        names: Names of the nodes.
    """
    node = _as_mapping(affinity.get("nodeAffinity"))
    required = _as_mapping(node.get("requiredDuringSchedulingIgnoredDuringExecution"))
    own = _as_mappings(required.get("nodeSelectorTerms"))
    # Terms are alternatives, so each has to exclude them (an empty one matches no node, and shall not match any).
    excluded = _exclude_by_name(names)
    terms = [
        {**term, "matchFields": [*(term.get("matchFields") or ()), *excluded]}
        for term in own
        if term.get("matchExpressions") or term.get("matchFields")
    ]
    if not own:
        terms = [{"matchFields": excluded}]
    elif not terms:
        terms = [{}]
    required = {**required, "nodeSelectorTerms": terms}
    return {**affinity, "nodeAffinity": {**node, "requiredDuringSchedulingIgnoredDuringExecution": required}}


def prefer_other_nodes(affinity: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return a pod's affinity with a preference for other nodes than these, whatever else it prefers.

    Args:
        affinity: The `affinity` of the pod; empty if it has none.
        names: Names of the nodes.
    """
    node = _as_mapping(affinity.get("nodeAffinity"))
    own = _as_mappings(node.get("preferredDuringSchedulingIgnoredDuringExecution"))
    preferred = [*own, {"weight": 100, "preference": {"matchFields": _exclude_by_name(names)}}]
    return {**affinity, "nodeAffinity": {**node, "preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _exclude_by_name(names: Sequence[str]) -> list[dict[str, Any]]:
    # A requirement on a field takes one value.
    return [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in names]


def list_excluded_nodes(spec: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of nodes that every alternative of a pod's required node affinity excludes.

    Args:
        spec: Spec of the pod.
    """
    required = _as_mapping(_get_affinity(spec).get("nodeAffinity")).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    found = [
        {
            name
            for each in _as_mappings(term.get("matchFields"))
            if each.get("key") == "metadata.name" and each.get("operator") == "NotIn"
            for name in _as_strings(each.get("values"))
        }
        for term in _as_mappings(_as_mapping(required).get("nodeSelectorTerms"))
        if term.get("matchExpressions") or term.get("matchFields")
    ]
    return frozenset(set.intersection(*found)) if found else frozenset()


def count_rule_terms(spec: Mapping[str, Any]) -> int:
    """Return the number of values in all that tells on which nodes a pod may be: each of them is looked at for each
    node. Of a list of values, as names of hosts, sixteen cost as much as one elsewhere.

    Args:
        spec: Spec of the pod.
    """
    waiting = [spec.get(name) for name in ("affinity", "nodeSelector", "tolerations", "topologySpreadConstraints")]
    terms = 0
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list) and not any(isinstance(item, (Mapping, list)) for item in value):
            terms += 1 + len(value) // 16
        elif isinstance(value, list):
            waiting += value
        else:
            terms += value is not None
    return terms


def list_placement_rules(spec: Mapping[str, Any], labels: Mapping[str, str], namespace: str) -> list[PlacementRule]:
    """Return the rules by which pods of a set keep each other away from nodes, or want to be together.

    Args:
        spec: Spec of the pods.
        labels: Labels that all pods of the set have.
        namespace: Namespace of the pods.

    Returns:
        Each tells of all nodes of the cluster how many pods of the set they could hold.
    """
    rules: list[PlacementRule] = []
    for term in _list_required_terms(spec, "podAntiAffinity"):
        if _is_of_namespace(term, namespace) and _selects_own_pods(term, labels):
            rules.append(_make_exclusion_rule(str(term.get("topologyKey"))))
    rules += [_in_one(term, labels, namespace) for term in _list_required_terms(spec, "podAffinity")]
    constraints = _as_mappings(spec.get("topologySpreadConstraints"))
    hard = [each for each in constraints if each.get("whenUnsatisfiable") in (None, "DoNotSchedule")]
    keys = frozenset(str(each.get("topologyKey")) for each in hard)
    rules += [_make_spread_rule(each, keys, labels) for each in hard]
    return rules


# --- pods that keep each other away


def _make_exclusion_rule(key: str) -> PlacementRule:
    def count(nodes: Sequence[CandidateNode]) -> int:
        taken: set[str] = set()
        places = 0
        for node in nodes:
            value = node.labels.get(key)
            if value is None:  # a node without the label is in no domain, and keeps nobody away
                places += node.places
            elif node.places and value not in taken:
                taken.add(value)
                places += 1
        return places

    return PlacementRule(count)


# --- pods that want to be together


def _in_one(term: Mapping[str, Any], labels: Mapping[str, str], namespace: str) -> PlacementRule:
    key = str(term.get("topologyKey"))
    # Else pods of others, in any domain, may be those that are wanted nearby. A name is used again elsewhere.
    alone = _is_of_namespace(term, namespace) and set(_as_strings(term.get("namespaces"))) <= {namespace}
    alone = (
        alone
        and term.get("namespaceSelector") is None
        and _selects_own_pods(term, labels)
        and _is_of_one_job(term, labels)
    )

    def count(nodes: Sequence[CandidateNode]) -> int:
        domains: defaultdict[str, int] = defaultdict(int)
        for node in nodes:
            if key in node.labels:  # a node without the label takes no pods, whoever is wanted
                domains[node.labels[key]] += node.places
        return max(domains.values(), default=0) if alone else sum(domains.values())

    return PlacementRule(count)


# --- pods that are spread


def _make_spread_rule(constraint: Mapping[str, Any], keys: frozenset[str], labels: Mapping[str, str]) -> PlacementRule:
    key, skew = str(constraint.get("topologyKey")), _as_positive(constraint.get("maxSkew"))
    least_domains = _as_positive(constraint.get("minDomains"))
    by_affinity = constraint.get("nodeAffinityPolicy") != "Ignore"
    judged = skew is not None and bool(_selects_own_pods(constraint, labels))
    # Pods of others may raise the smallest count, unless they cannot be meant. And with this policy nodes come and go.
    alone = _is_of_one_job(constraint, labels) and constraint.get("nodeTaintsPolicy") != "Honor"

    def count(nodes: Sequence[CandidateNode]) -> int:
        domains: defaultdict[str, int] = defaultdict(int)
        for node in nodes:
            # One that lacks a key of any constraint takes no pods, and does not count as a domain.
            if all(each in node.labels for each in keys) and (node.selected or not by_affinity):
                domains[node.labels[key]] += node.places
        total = sum(domains.values())
        if not judged or skew is None:
            return total
        if least_domains is not None and len(domains) < least_domains:
            return sum(min(places, skew) for places in domains.values())
        if not alone:
            return total
        most = min(domains.values(), default=0) + skew
        return sum(min(places, most) for places in domains.values())

    return PlacementRule(count, only_grows=False)  # a new domain is the emptiest


def _is_of_namespace(term: Mapping[str, Any], namespace: str) -> bool:
    """Tell whether a term certainly looks at the pods' own namespace."""
    names, selector = _as_strings(term.get("namespaces")), term.get("namespaceSelector")
    return namespace in names or (selector is None and not names) or selector == {}


def _selects_own_pods(rule: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Tell whether the selector of a rule certainly matches all pods of the set."""
    selector = rule.get("labelSelector")
    if not isinstance(selector, Mapping):
        return False
    expressions = _expressions_of(selector)
    same = [key for key in _as_strings(rule.get("matchLabelKeys")) if key in labels or key in _DISTINCT_LABELS]
    others = [key for key in _as_strings(rule.get("mismatchLabelKeys")) if key in labels or key in _DISTINCT_LABELS]
    if (
        others
        or any(str(each.get("key")) in _DISTINCT_LABELS for each in expressions)
        or _DISTINCT_LABELS.intersection(same)
    ):
        return False
    return all(_expression_matches(each, labels, unknown=False) for each in expressions)


def _is_of_one_job(rule: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Tell whether the selector of a rule matches pods of this job only."""
    if LABEL_JOB not in labels:
        return False
    own = {"key": LABEL_JOB, "operator": "In", "values": [labels[LABEL_JOB]]}
    expressions = _expressions_of(_as_mapping(rule.get("labelSelector")))
    return own in expressions or LABEL_JOB in _as_strings(rule.get("matchLabelKeys"))


def _expressions_of(selector: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the requirements of a label selector, all of one form."""
    equal = [
        {"key": key, "operator": "In", "values": [value]}
        for key, value in _as_mapping(selector.get("matchLabels")).items()
    ]
    return [*equal, *_as_mappings(selector.get("matchExpressions"))]


# --- nodes


def _term_matches(term: Mapping[str, Any], name: str, labels: Mapping[str, str]) -> bool:
    expressions, fields = _as_mappings(term.get("matchExpressions")), _as_mappings(term.get("matchFields"))
    if not expressions and not fields:
        return False  # an empty term matches no node
    own = {"metadata.name": name} if name else {}
    return all(_expression_matches(each, labels, unknown=True) for each in expressions) and all(
        each.get("key") not in own or _expression_matches(each, own, unknown=True) for each in fields
    )


def _expression_matches(requirement: Mapping[str, Any], labels: Mapping[str, str], *, unknown: bool) -> bool:
    """Evaluate one requirement of a selector. `unknown` is the answer for an operator that nobody knows here."""
    value = labels.get(str(requirement.get("key")))
    values = _as_strings(requirement.get("values"))
    match requirement.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            here, limit = _parse_label_integer(value), _parse_label_integer(values[0] if len(values) == 1 else None)
            if here is None or limit is None:
                return False
            return here > limit if operator == "Gt" else here < limit
    return unknown


# --- what users write is looked at with suspicion: the API server has checked it, but of another version maybe


def _get_affinity(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    return _as_mapping(spec.get("affinity"))


def _list_required_terms(spec: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    return _as_mappings(
        _as_mapping(_get_affinity(spec).get(kind)).get("requiredDuringSchedulingIgnoredDuringExecution")
    )


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _as_mappings(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in _as_list(value) if isinstance(each, Mapping)]


def _as_strings(value: Any) -> list[str]:
    return [str(each) for each in _as_list(value)]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _as_positive(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _parse_label_integer(text: str | None) -> int | None:
    """Return a label's value as an integer of 64 bits, as the scheduler reads it."""
    digits = (text or "").lstrip("+-")
    if text is None or len(text) - len(digits) > 1 or not (digits.isascii() and digits.isdecimal()) or len(digits) > 19:
        return None
    return int(text)
