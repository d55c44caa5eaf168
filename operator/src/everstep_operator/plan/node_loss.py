"""Tells dead nodes from silent ones. Kubernetes takes minutes for that: a node that lost its power is NotReady after
some 50 s, its pods are told to go after 300 s more, and stay for ever, since no kubelet confirms their end.

A node is lost when its agent is silent **and** its kubelet has not renewed the node's Lease for `node_silence`
seconds, both as seen by the operator (`cluster/node_leases.py`). One of them alone proves nothing: a kubelet that is
restarted or updated leaves its pods running, and an agent may be starved or cut off from its leader only.

Where more than half of the nodes of a job, a zone or a cluster of at least `MIN_BRAKED` are silent together, a network
that is cut in two is likelier than that many deaths: nothing is done, and the job says `Held`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from everstep_operator.plan.agent_config import find_termination_grace
from everstep_operator.plan.leader_view import LeaderView
from everstep_operator.plan.node_view import NodeView
from everstep_operator.plan.observation import PodView
from everstep_operator.plan.plan_context import RUN_PHASES, PlanContext

MIN_BRAKED = 3
MAX_SUSPECTS = 64  # nodes of one job whose Leases are read at a time
# An agent that has not joined by then is not merely starting.
JOIN_SECONDS = 30.0
# After the grace of a pod on a node of which Kubernetes itself knows nothing any more.
CONFIRM_SECONDS = 30.0
_UNKNOWN = "NodeStatusUnknown"


def list_suspect_nodes(s: PlanContext) -> tuple[frozenset[str], float | None]:
    """Return the nodes whose Leases are worth reading now, and when to ask again though nothing happens."""
    if s.plain:
        return frozenset(), None  # nobody would fence what may still run there
    suspects, later = set(), []
    grace = find_termination_grace(s.job, s.observed.settings)
    for pod in s.observed.ours:
        if not pod.node or pod.ended is not None:
            continue
        if _is_given_up(pod, s.observed.nodes.get(pod.node), grace, s.now):
            suspects.add(pod.node)
        elif _is_agent_silent(pod, s.observed.leader, hint=True) and pod.started_at is not None:
            if s.phase in RUN_PHASES or s.now >= pod.started_at + JOIN_SECONDS:
                suspects.add(pod.node)
            else:
                later.append(pod.started_at + JOIN_SECONDS)
        if pod.deleting_since is not None:
            later.append(pod.deleting_since + grace + CONFIRM_SECONDS)
    return frozenset(sorted(suspects)[:MAX_SUSPECTS]), min((at for at in later if at > s.now), default=None)


def declare_lost_nodes(
    nodes: Mapping[str, NodeView], pods: Iterable[PodView], leader: LeaderView | None, *, grace: float, now: float
) -> dict[str, NodeView]:
    """Return the nodes, with those marked that are dead (`dead_since`) or might be (`held`).

    Args:
        nodes: The nodes under the job's pods, by name; `silent_since` tells of their Leases.
        pods: The job's own pods.
        leader: The last answer of the leader in the job's present pod 0, or None.
        grace: Seconds that the job's pods have to end.
        now: Unix seconds.
    """
    bound = [pod for pod in pods if pod.node and pod.ended is None]
    silent: dict[str, PodView] = {}
    marked = dict(nodes)
    for pod in bound:
        node = nodes.get(pod.node or "")
        if node is None or node.silent_since is None or node.gone_since is not None:
            continue
        if _is_given_up(pod, node, grace, now) and not _is_agent_heard(pod, leader):
            # Somebody has decided already that this pod is to go, whatever happened to the others.
            marked[node.name] = replace(node, dead_since=node.silent_since, held="")
        elif _is_agent_silent(pod, leader):
            silent[node.name] = pod
    hosts = {pod.node for pod in bound}
    for name in silent:
        node = marked[name]
        if node.dead_since is not None:
            continue
        held = node.held or describe_brake(len(silent), len(hosts), "the job's nodes")
        marked[name] = replace(node, held=held) if held else replace(node, dead_since=node.silent_since)
    return marked


def describe_brake(silent: int, nodes: int, which: str) -> str:
    """Return why silent nodes are not taken for dead, or nothing: they are too many of too many."""
    if nodes < MIN_BRAKED or 2 * silent <= nodes:
        return ""
    return (
        f"{silent} of {nodes} of {which} are silent at once, which a network partition explains better than so "
        "many dead machines: their pods stay until some are heard again; delete those pods if the machines are dead"
    )


def _is_agent_silent(pod: PodView, leader: LeaderView | None, *, hint: bool = False) -> bool:
    """Tell whether the agent of a pod that has a leader is out of its reach, or with `hint`, seems to be."""
    if leader is None or leader.answered_at is None or leader.outcome is not None:
        return False
    if pod.index == 0:
        return not leader.reachable and pod.epoch == leader.epoch
    return leader.reachable and (pod.index in leader.missing or (hint and pod.index in leader.quiet))


def _is_agent_heard(pod: PodView, leader: LeaderView | None) -> bool:
    if leader is None or not leader.reachable:
        return False
    return pod.index not in leader.missing if pod.index else pod.epoch == leader.epoch


def _is_given_up(pod: PodView, node: NodeView | None, grace: float, now: float) -> bool:
    """Tell whether a pod should have ended long ago, on a node of which the control plane hears nothing."""
    if pod.deleting_since is None or node is None or node.ready or node.not_ready_because != _UNKNOWN:
        return False
    return now >= pod.deleting_since + grace + CONFIRM_SECONDS
