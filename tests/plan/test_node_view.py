"""A Node is reduced to the fields on which a plan could act: a heartbeat changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from everstep_operator.plan.node_view import NodeView, parse_node


def node(*, ready: str = "True", reason: str = "KubeletReady", **spec: Any) -> dict[str, Any]:
    condition = {"type": "Ready", "status": ready, "reason": reason, "lastHeartbeatTime": "2026-01-01T00:00:00Z"}
    return {"metadata": {"name": "n1", "labels": {"a": "b"}}, "spec": spec, "status": {"conditions": [condition]}}


def test_a_heartbeat_changes_nothing() -> None:
    later = node()
    later["metadata"]["resourceVersion"] = "9"
    later["status"]["conditions"][0]["lastHeartbeatTime"] = "2026-01-01T00:05:00Z"
    later["status"]["images"] = [{"names": ["pulled/since"]}]
    assert parse_node(later) == parse_node(node()) == NodeView("n1")


def test_a_node_that_is_not_ready_says_why() -> None:
    lost = parse_node(node(ready="Unknown", reason="NodeStatusUnknown"))
    assert (lost.ready, lost.not_ready_because) == (False, "NodeStatusUnknown")
    assert not parse_node({"metadata": {"name": "new"}}).ready, "one that has not reported yet"


def test_a_cordon_and_the_taints_of_those_who_remove_nodes() -> None:
    cordoned = parse_node(node(unschedulable=True)).signal
    assert cordoned is not None
    assert not cordoned.leaves
    taints = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}, {"key": "karpenter.sh/disrupted"}]
    leaving = parse_node(node(taints=taints)).signal
    assert leaving is not None
    assert (leaving.source, leaving.leaves) == ("taint karpenter.sh/disrupted", True)
    assert parse_node(node(taints=taints[:1])) == NodeView("n1"), "what keeps others away is no drain"


@pytest.mark.parametrize("odd", [{}, {"metadata": None, "spec": None, "status": None}, node(taints=[{}])])
def test_odd_nodes_raise_nothing(odd: Any) -> None:
    parse_node(odd)
