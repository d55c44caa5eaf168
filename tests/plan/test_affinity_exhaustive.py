"""The count of places is compared with all that a scheduler could do on small clusters: it is never below that."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from everstep_operator.plan.labels import LABEL_JOB
from everstep_operator.plan.node_capacity import count_places, parse_node_capacity

HOST, ZONE, RACK = "kubernetes.io/hostname", "topology.kubernetes.io/zone", "rack"
OWN = {"app": "train", LABEL_JOB: "digits"}
OTHER = {"app": "train", LABEL_JOB: "letters"}  # pods of another job, which are there and stay
SELECTORS = ({"app": "train"}, {LABEL_JOB: "digits"}, {"app": "train", LABEL_JOB: "digits"}, {LABEL_JOB: "letters"})
MANY = 50


@dataclass(frozen=True)
class SmallNode:
    labels: dict[str, str]
    pods: int
    others: int  # pods of the other job on it; they take none of the places

    def raw(self) -> dict[str, Any]:
        return {
            "metadata": {"name": self.labels[HOST], "labels": self.labels},
            "status": {"allocatable": {"pods": str(self.pods)}},
        }


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


class Scheduler:
    """Binds one pod after the other wherever the rules of kube-scheduler allow it, in every order."""

    def __init__(self, nodes: list[SmallNode], spec: dict[str, Any]) -> None:
        self.nodes = nodes
        self.anti = self._terms(spec, "podAntiAffinity")
        self.affinity = self._terms(spec, "podAffinity")
        self.spread = spec.get("topologySpreadConstraints", [])

    @staticmethod
    def _terms(spec: dict[str, Any], kind: str) -> list[dict[str, Any]]:
        rules = spec.get("affinity", {}).get(kind, {})
        found: list[dict[str, Any]] = rules.get("requiredDuringSchedulingIgnoredDuringExecution", [])
        return found

    def most(self) -> int:
        """Return the largest number of pods that any order of bindings reaches."""
        start = (0,) * len(self.nodes)
        known, open_ = {start}, [start]
        while open_:
            bound = open_.pop()
            for index in range(len(self.nodes)):
                if self._allowed(bound, index):
                    after = (*bound[:index], bound[index] + 1, *bound[index + 1 :])
                    if after not in known:
                        known.add(after)
                        open_.append(after)
        return max(map(sum, known))

    def _allowed(self, bound: tuple[int, ...], index: int) -> bool:
        if bound[index] >= self.nodes[index].pods:
            return False
        return self._apart(bound, index) and self._together(bound, index) and self._even(bound, index)

    def _in_domains(self, selectors: list[dict[str, str]], key: str, bound: tuple[int, ...]) -> Counter[str]:
        """Count the pods that all of the selectors match, by domain."""
        found: Counter[str] = Counter()
        for node, ours in zip(self.nodes, bound, strict=True):
            if key in node.labels:
                for labels, count in ((OWN, ours), (OTHER, node.others)):
                    if all(matches(selector, labels) for selector in selectors):
                        found[node.labels[key]] += count
        return found

    def _apart(self, bound: tuple[int, ...], index: int) -> bool:
        labels = self.nodes[index].labels
        for term in self.anti:
            key, selector = term["topologyKey"], term["labelSelector"]["matchLabels"]
            if key in labels and self._in_domains([selector], key, bound)[labels[key]]:
                return False
        return True

    def _together(self, bound: tuple[int, ...], index: int) -> bool:
        if not self.affinity:
            return True
        labels = self.nodes[index].labels
        selectors = [term["labelSelector"]["matchLabels"] for term in self.affinity]
        counts = {
            term["topologyKey"]: self._in_domains(selectors, term["topologyKey"], bound) for term in self.affinity
        }
        if any(key not in labels for key in counts):
            return False
        if all(count[labels[key]] for key, count in counts.items()):
            return True
        # The first of a set that means itself may go anywhere.
        return not any(map(sum, (c.values() for c in counts.values()))) and all(matches(s, OWN) for s in selectors)

    def _even(self, bound: tuple[int, ...], index: int) -> bool:
        keys = {constraint["topologyKey"] for constraint in self.spread}
        if not keys <= self.nodes[index].labels.keys():
            return False
        for constraint in self.spread:
            key, selector = constraint["topologyKey"], constraint["labelSelector"]["matchLabels"]
            counts: defaultdict[str, int] = defaultdict(int)
            for node, ours in zip(self.nodes, bound, strict=True):
                if keys <= node.labels.keys():
                    counts[node.labels[key]] += ours * matches(selector, OWN) + node.others * matches(selector, OTHER)
            least = min(counts.values()) if len(counts) >= constraint.get("minDomains", 1) else 0
            after = counts[self.nodes[index].labels[key]] + matches(selector, OWN)
            if after - least > constraint["maxSkew"]:
                return False
        return True


def _node(number: int, drawn: tuple[str | None, str | None, int, int]) -> SmallNode:
    zone, rack, pods, others = drawn
    keys = {HOST: f"n{number}", ZONE: zone, RACK: rack}
    return SmallNode({key: value for key, value in keys.items() if value is not None}, pods, others)


NODES = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", None]), st.sampled_from(["r", "s", None]), st.integers(0, 3), st.integers(0, 1)
    ),
    min_size=1, max_size=4,
).map(lambda drawn: [_node(number, each) for number, each in enumerate(drawn)])  # fmt: skip
KEYS = st.sampled_from([HOST, ZONE, RACK])
SELECTOR = st.sampled_from(SELECTORS).map(lambda labels: {"matchLabels": labels})
TERMS = st.lists(st.fixed_dictionaries({"topologyKey": KEYS, "labelSelector": SELECTOR}), max_size=2)
SPREAD = st.lists(
    st.fixed_dictionaries(
        {"topologyKey": KEYS, "labelSelector": SELECTOR, "maxSkew": st.integers(1, 2),
         "whenUnsatisfiable": st.just("DoNotSchedule")},
        optional={"minDomains": st.integers(1, 3)},
    ),
    max_size=2, unique_by=lambda constraint: constraint["topologyKey"],
)  # fmt: skip


def spec_of(anti: list[Any], affinity: list[Any], spread: list[Any]) -> dict[str, Any]:
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = {"podAntiAffinity": {required: anti}, "podAffinity": {required: affinity}}
    return {"affinity": terms, "topologySpreadConstraints": spread}


def count(spec: dict[str, Any], nodes: list[SmallNode], enough: int = MANY) -> int:
    rooms = [parse_node_capacity(node.raw()) for node in nodes]
    return count_places({"spec": spec}, rooms, enough=enough, labels=OWN, namespace="team")


@given(NODES, TERMS, TERMS, SPREAD, st.integers(1, 6))
@settings(max_examples=400, deadline=None)
def test_no_set_that_a_scheduler_could_place_counts_as_impossible(
    nodes: list[SmallNode], anti: list[Any], affinity: list[Any], spread: list[Any], wanted: int
) -> None:
    spec = spec_of(anti, affinity, spread)
    possible = Scheduler(nodes, spec).most()
    assert count(spec, nodes) >= possible
    assert count(spec, nodes, wanted) >= min(possible, wanted), "also where counting stops early"


@given(NODES, KEYS)
@settings(deadline=None)
def test_pods_that_must_be_together_have_the_places_of_one_domain(nodes: list[SmallNode], key: str) -> None:
    """As many as the scheduler finds, no more: the rule names the job, so nobody else's pods matter."""
    own = [{"topologyKey": key, "labelSelector": {"matchLabels": {LABEL_JOB: "digits"}}}]
    spec = spec_of([], own, [])
    assert count(spec, nodes) == Scheduler(nodes, spec).most()
