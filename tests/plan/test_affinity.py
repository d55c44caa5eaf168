"""Gangs that their own rules keep from ever being placed are told from those that only wait."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep_operator.plan.affinity import is_node_allowed
from everstep_operator.plan.labels import LABEL_EPOCH, LABEL_INDEX, LABEL_JOB
from everstep_operator.plan.node_capacity import count_places, parse_node_capacity

HOST, ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"
LABELS = {"app": "train", LABEL_JOB: "digits"}
MANY = 100


def node(name: str, pods: int = 8, zone: str | None = None, **labels: str) -> dict[str, Any]:
    known = {HOST: name, **({ZONE: zone} if zone else {}), **labels}
    return {"metadata": {"name": name, "labels": known}, "status": {"allocatable": {"pods": str(pods)}}}


def count(spec: dict[str, Any], *nodes: dict[str, Any], labels: dict[str, str] = LABELS) -> int:
    rooms = [parse_node_capacity(raw) for raw in nodes]
    return count_places({"spec": spec}, rooms, enough=MANY, labels=labels, namespace="team")


# --- node affinity


def by_nodes(*terms: Any) -> dict[str, Any]:
    required = {"nodeSelectorTerms": list(terms)}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("term", "allowed"),
    [
        (expression("gpu", "In", "h100", "h200"), True),
        (expression("gpu", "In", "a100"), False),
        (expression("gpu", "In"), False),
        (expression("gpu", "NotIn", "h100"), False),
        (expression("gpu", "NotIn", "a100"), True),
        (expression("other", "NotIn", "a100"), True),
        (expression("gpu", "Exists"), True),
        (expression("other", "Exists"), False),
        (expression("gpu", "DoesNotExist"), False),
        (expression("other", "DoesNotExist"), True),
        (expression("memory", "Gt", "79"), True),
        (expression("memory", "Gt", "80"), False),
        (expression("memory", "Lt", "81"), True),
        (expression("memory", "Lt", "80"), False),
        (expression("gpu", "Gt", "1"), False),
        (expression("memory", "Gt", "many"), False),
        (expression("other", "Lt", "1"), False),
        (expression("gpu", "Resembles", "h100"), True),
        ({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}, True),
        ({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]}, False),
        ({"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n1"]}]}, False),
        ({"matchFields": [{"key": "metadata.colour", "operator": "In", "values": ["red"]}]}, True),
        ({"matchExpressions": [], "matchFields": []}, False),
        ({}, False),
    ],
)
def test_a_node_is_admitted_as_the_scheduler_does(term: Any, allowed: bool) -> None:
    here = node("n1", gpu="h100", memory="80")
    assert count(by_nodes(term), here) == (8 if allowed else 0)
    assert count(by_nodes(expression("other", "Exists"), term), here) == (8 if allowed else 0), "terms are alternatives"


def test_all_requirements_of_a_term_hold_together() -> None:
    both = {
        "matchExpressions": [
            *expression("a", "Exists")["matchExpressions"],
            *expression("b", "Exists")["matchExpressions"],
        ]
    }
    assert count(by_nodes(both), node("n1", a=""), node("n2", b=""), node("n3", a="", b="")) == 8


def test_what_is_only_preferred_forbids_nothing() -> None:
    preferred = [{"weight": 1, "preference": expression("other", "Exists")}]
    spec = {"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}}
    assert count(spec, node("n1")) == 8
    spec = {"affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
        {"weight": 1, "podAffinityTerm": {"topologyKey": HOST, "labelSelector": {"matchLabels": LABELS}}}
    ]}}}  # fmt: skip
    assert count(spec, node("n1")) == 8


# --- pods of the set that keep each other away


def apart(key: str = HOST, selector: Any = None, **term: Any) -> dict[str, Any]:
    given = {"matchLabels": {"app": "train"}} if selector is None else selector
    required = [{"topologyKey": key, "labelSelector": given, **term}]
    return {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}


NODES = [node("n1", zone="a"), node("n2", zone="a"), node("n3", zone="b")]


def test_pods_that_must_be_apart_have_one_place_in_each_domain() -> None:
    assert count(apart(HOST), *NODES) == 3
    assert count(apart(ZONE), *NODES) == 2
    assert count(apart(ZONE), *NODES, node("n4", zone="c", pods=0)) == 2, "no place is none"


def test_a_node_outside_of_all_domains_keeps_nobody_away() -> None:
    assert count(apart(ZONE), *NODES, node("n4", pods=5)) == 2 + 5


@pytest.mark.parametrize(
    ("selector", "applies"),
    [
        ({"matchLabels": {"app": "train"}}, True),
        ({"matchLabels": {"app": "train", LABEL_JOB: "digits"}}, True),
        ({}, True),
        ({"matchExpressions": [{"key": "app", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["web"]}]}, True),
        ({"matchLabels": {"app": "web"}}, False),
        ({"matchLabels": {LABEL_JOB: "letters"}}, False),
        ({"matchExpressions": [{"key": "app", "operator": "Resembles", "values": ["train"]}]}, False),
        ({"matchLabels": {LABEL_INDEX: "0"}}, False),
        ({"matchExpressions": [{"key": LABEL_EPOCH, "operator": "Exists"}]}, False),
    ],
)
def test_only_rules_that_mean_the_pods_themselves_count(selector: Any, applies: bool) -> None:
    assert count(apart(HOST, selector), *NODES) == (3 if applies else 24)


def test_a_rule_without_a_selector_means_no_pods() -> None:
    assert count(apart(HOST, labelSelector=None), *NODES) == 24


@pytest.mark.parametrize(
    ("term", "applies"),
    [
        ({"namespaces": ["team"]}, True),
        ({"namespaces": ["other"]}, False),
        ({"namespaceSelector": {}}, True),
        ({"namespaceSelector": {"matchLabels": {"tier": "gold"}}}, False),
        ({"namespaces": ["team"], "namespaceSelector": {"matchLabels": {"tier": "gold"}}}, True),
        ({"matchLabelKeys": ["app", "absent"]}, True),
        ({"matchLabelKeys": [LABEL_INDEX]}, False),
        ({"mismatchLabelKeys": [LABEL_JOB]}, False),
        ({"mismatchLabelKeys": ["absent"]}, True),
    ],
)
def test_only_rules_that_certainly_mean_this_namespace_and_these_pods_count(term: Any, applies: bool) -> None:
    assert count(apart(HOST, **term), *NODES) == (3 if applies else 24)


# --- pods of the set that want to be together


def together(key: str = ZONE, selector: Any = None, **term: Any) -> dict[str, Any]:
    given = {"matchLabels": {LABEL_JOB: "digits"}} if selector is None else selector
    required = [{"topologyKey": key, "labelSelector": given, **term}]
    return {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}


def test_pods_that_must_be_together_have_the_places_of_the_largest_domain() -> None:
    assert count(together(ZONE), *NODES) == 16
    assert count(together(HOST), *NODES) == 8
    assert count(together("rack"), *NODES) == 0


@pytest.mark.parametrize(
    "term",
    [
        {"selector": {"matchLabels": {"app": "train"}}},  # pods of others may be in each domain
        {"selector": {"matchLabels": {LABEL_JOB: "letters"}}},
        {"namespaces": ["team", "other"]},  # where a job may have the same name
        {"namespaceSelector": {}},
        {"matchLabelKeys": [LABEL_INDEX]},
    ],
)
def test_pods_that_must_be_with_others_need_a_domain_and_no_more_is_known(term: dict[str, Any]) -> None:
    assert count(together(ZONE, **term), *NODES, node("n4")) == 24


def test_rules_are_not_judged_on_more_nodes_than_it_takes() -> None:
    seen = 0

    def rooms() -> Any:
        nonlocal seen
        for number in range(1000):
            seen += 1
            yield parse_node_capacity(node(f"n{number}", zone="a"))

    for spec in (apart(HOST), together(ZONE), {}):
        seen = 0
        assert count_places({"spec": spec}, rooms(), enough=20, labels=LABELS, namespace="team") == 20
        assert seen <= 64


# --- topology spread

OWN = {"matchLabels": {LABEL_JOB: "digits"}}


def spread(key: str = ZONE, skew: int = 1, selector: Any = OWN, **more: Any) -> dict[str, Any]:
    constraint = {
        "topologyKey": key, "maxSkew": skew, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": selector, **more
    }  # fmt: skip
    return {"topologySpreadConstraints": [constraint]}


def zones(*pods: int) -> list[dict[str, Any]]:
    return [node(f"n{number}", zone=f"z{number}", pods=count) for number, count in enumerate(pods)]


@pytest.mark.parametrize(
    ("pods", "skew", "places"),
    [((4, 4), 1, 8), ((4, 1), 1, 3), ((4, 0), 1, 1), ((4, 0), 3, 3), ((8, 2, 5), 2, 4 + 2 + 4), ((), 1, 0)],
)
def test_no_domain_is_ahead_of_the_emptiest_by_more_than_the_skew(
    pods: tuple[int, ...], skew: int, places: int
) -> None:
    assert count(spread(skew=skew), *zones(*pods)) == places


def test_too_few_domains_hold_no_more_than_the_skew_each() -> None:
    assert count(spread(minDomains=3), *zones(4, 4)) == 2
    assert count(spread(minDomains=2), *zones(4, 4)) == 8
    assert count(spread(minDomains=3, selector={"matchLabels": {"app": "train"}}), *zones(4, 4)) == 2


def test_a_node_without_the_key_takes_no_pods_and_is_no_domain() -> None:
    assert count(spread(), *zones(4, 4), node("n9")) == 8
    both = spread()["topologySpreadConstraints"] + spread("rack")["topologySpreadConstraints"]
    assert count({"topologySpreadConstraints": both}, *zones(4, 4)) == 0


def test_nodes_that_are_not_selected_are_domains_only_if_the_rule_says_so() -> None:
    nodes = [*zones(4, 4), node("cpu", zone="z9", kind="cpu")]
    nodes = [
        {**raw, "metadata": {**raw["metadata"], "labels": {"kind": "gpu", **raw["metadata"]["labels"]}}}
        for raw in nodes
    ]
    for selection in ({"nodeSelector": {"kind": "gpu"}}, by_nodes(expression("kind", "In", "gpu"))):
        assert count({**spread(), **selection}, *nodes) == 8
        assert count({**spread(nodeAffinityPolicy="Ignore"), **selection}, *nodes) == 2


def test_nodes_with_taints_are_domains_unless_the_rule_says_otherwise() -> None:
    tainted = node("n9", zone="z9")
    tainted["spec"] = {"taints": [{"key": "control-plane", "effect": "NoSchedule"}]}
    assert count(spread(), *zones(4, 4), tainted) == 2
    assert count(spread(nodeTaintsPolicy="Honor"), *zones(4, 4), tainted) == 8


@pytest.mark.parametrize(
    "constraint",
    [
        spread(whenUnsatisfiable="ScheduleAnyway"),
        spread(selector={"matchLabels": {"app": "train"}}),  # pods of others may fill the emptiest domain
        spread(selector={"matchLabels": {"app": "web"}}),
        spread(selector=None),
        spread(matchLabelKeys=[LABEL_INDEX]),
        {"topologySpreadConstraints": None},
    ],
)
def test_what_cannot_be_judged_counts_as_possible(constraint: dict[str, Any]) -> None:
    assert count(constraint, *zones(4, 0)) == 4


def test_a_rule_by_the_job_s_own_label_can_be_judged() -> None:
    assert count(spread(selector={"matchLabels": {"app": "train"}}, matchLabelKeys=[LABEL_JOB]), *zones(4, 0)) == 1


def test_rules_hold_together() -> None:
    assert count({**apart(HOST), **spread(skew=5)}, *zones(4, 4)) == 2


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["In", "Gt", "", HOST, "train"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(
        st.sampled_from([
            "matchLabels", "matchExpressions", "key", "operator", "values", "topologyKey", "labelSelector", "maxSkew",
            "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms", "namespaces", "matchLabelKeys",
        ]),
        inner, max_size=3,
    ),
    max_leaves=6,
)  # fmt: skip


@given(ODD, ODD, ODD)
def test_odd_rules_raise_nothing(nodes: Any, pods: Any, constraints: Any) -> None:
    affinity = {"nodeAffinity": nodes, "podAntiAffinity": pods, "podAffinity": pods}
    spec = {"affinity": affinity, "topologySpreadConstraints": constraints}
    assert 0 <= count(spec, *NODES) <= MANY
    is_node_allowed(spec, "", {})
