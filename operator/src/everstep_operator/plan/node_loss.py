"""Tells dead nodes from silent ones. Kubernetes takes minutes for that: a node that lost its power is NotReady after
some 50 s, its pods are told to go after 300 s more, and stay for ever, since no kubelet confirms their end.

A node is lost when its agent is silent **and** its kubelet has not renewed the node's Lease for `node_silence`
seconds, both as seen by the operator (`cluster/node_leases.py`). One of them alone proves nothing: a kubelet that is
restarted or updated leaves its pods running, and an agent may be starved or cut off from its leader only.

The leader's agent is one that the operator cannot reach, for a fence timeout: a machine that stands still for less goes
on as if nothing had been. Nor does that prove anything where the kubelet was heard later: machines that die fall silent
as a whole, and whatever else keeps the operator from the leader (a NetworkPolicy, its own network) may last for weeks,
in which kubelets are restarted. An operator that has just started takes a leader for one that it can reach if the job's
status says that the operator before it could.

Where more than half of the nodes of a job, a zone, a pool or a cluster of at least `MIN_BRAKED` are silent together, a
network that is cut in two is likelier than that many deaths: nothing is done, and the job says `Held`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from everstep_operator.api.job import TrainingJob
from everstep_operator.api.status import ConditionType, TrainingJobStatus
from everstep_operator.plan.agent_config import find_fence_timeout, find_termination_grace
from everstep_operator.plan.frozen_template import FrozenTemplate
from everstep_operator.plan.leader_view import LeaderView
from everstep_operator.plan.node_view import NodeView
from everstep_operator.plan.observation import PodView
from everstep_operator.plan.plan_context import RUN_PHASES, PlanContext
from everstep_operator.plan.plan_settings import PlanSettings

MIN_BRAKED = 3
MAX_SUSPECTS = 64  # nodes of one job whose Leases are read at a time
# An agent that has not joined by then is not merely starting.
JOIN_SECONDS = 30.0
# After the grace of a pod on a node of which Kubernetes itself knows nothing any more.
CONFIRM_SECONDS = 30.0
HELD_SECONDS = 5.0  # until a node that is held is judged anew
_UNKNOWN = "NodeStatusUnknown"


def list_suspect_nodes(s: PlanContext) -> tuple[frozenset[str], float | None]:
    """Return the nodes whose Leases are worth reading now, and when to ask again though nothing happens."""
    if s.plain:
        return frozenset(), None  # nobody would fence what may still run there
    suspects, later = set(), []
    grace = find_termination_grace(s.job, s.observed.settings)
    fence_timeout = find_fence_timeout(s.job, s.observed.frozen, s.observed.settings)
    leader = _recall_leader(s.status, s.observed.leader)
    bound = [pod for pod in s.observed.ours if pod.node and pod.ended is None]
    for pod in bound:
        node = s.observed.nodes.get(pod.node or "")
        if _is_given_up(pod, node, grace, s.now):
            suspects.add(pod.node or "")
        elif leader is not None and leader.answered_at is not None and pod.index == 0 and _seems_silent(pod, leader):
            later.append(leader.answered_at + fence_timeout)
            # With it those whose silence would tell that the network is cut in two.
            alone = _has_outlived(node, leader.answered_at + fence_timeout)
            suspects.update({pod.node or ""} if alone else _list_silent_nodes(bound, leader))
        elif pod.index > 0 and leader is not None and leader.reachable and _seems_silent(pod, leader):
            if s.phase in RUN_PHASES or (pod.started_at is not None and s.now >= pod.started_at + JOIN_SECONDS):
                suspects.add(pod.node or "")
            elif pod.started_at is not None:
                later.append(pod.started_at + JOIN_SECONDS)
        if node is not None and node.held:
            later.append(s.now + HELD_SECONDS)  # nobody tells when one of the others is heard again
        if pod.deleting_since is not None:
            later.append(pod.deleting_since + grace + CONFIRM_SECONDS)
    chosen = frozenset(sorted(suspects)[:MAX_SUSPECTS]) if len(suspects) > MAX_SUSPECTS else frozenset(suspects)
    return chosen, min((at for at in later if at > s.now), default=None)


def declare_lost_nodes(
    job: TrainingJob,
    nodes: Mapping[str, NodeView],
    pods: Iterable[PodView],
    leader: LeaderView | None,
    *,
    frozen: FrozenTemplate | None,
    settings: PlanSettings,
    now: float,
) -> dict[str, NodeView]:
    """Return the nodes, with those marked that are dead (`dead_since`) or might be (`held`).

    Args:
        job: The job, whose pods are looked at.
        nodes: The nodes under the pods, by name; `silent_since` tells of their Leases.
        pods: All pods with the job's label.
        leader: The last answer of the leader in the job's present pod 0, or None.
        frozen: The job's template, as far as it is known.
        settings: The operator's.
        now: Unix seconds.
    """
    if job.status.template is not None and job.status.template.plain:
        return dict(nodes)  # another job may have asked for their Leases; but nobody would fence what may run there
    grace, fence_timeout = find_termination_grace(job, settings), find_fence_timeout(job, frozen, settings)
    bound = [pod for pod in pods if pod.owner == job.metadata.uid and pod.node and pod.ended is None]
    dead, marked, leader = set(), dict(nodes), _recall_leader(job.status, leader)
    for pod in bound:
        node = nodes.get(pod.node or "")
        if node is None or node.silent_since is None or node.gone_since is not None:
            continue
        if _is_given_up(pod, node, grace, now) and not _is_agent_heard(pod, leader):
            # Somebody has decided already that this pod is to go, whatever happened to the others.
            marked[node.name] = replace(node, dead_since=node.silent_since, held="")
        elif _is_agent_silent(pod, node, leader, fence_timeout, now):
            dead.add(node.name)
    brake = _find_brake(nodes, bound, leader) if dead else ""
    for name in dead:
        node = marked[name]
        if node.dead_since is not None:
            continue
        held = node.held or brake
        marked[name] = replace(node, held=held) if held else replace(node, dead_since=node.silent_since)
    return marked


def _recall_leader(status: TrainingJobStatus, leader: LeaderView | None) -> LeaderView | None:
    """Return a leader that has not answered this operator as if it had when it was first asked, if one before has
    reached it: the status names a generation of its epoch, and no loss of connection that is older."""
    if leader is None or leader.answered_at is not None or not status.generation:
        return leader
    degraded = status.condition(ConditionType.DEGRADED)
    if degraded is not None and degraded.status == "True":
        since = degraded.last_transition_time.timestamp()
        if since < math.floor(leader.asked_since):  # the API has whole seconds
            return leader
    return replace(leader, answered_at=leader.asked_since, epoch=status.epoch, generation=status.generation)


def _find_brake(nodes: Mapping[str, NodeView], bound: Sequence[PodView], leader: LeaderView | None) -> str:
    """Return why no node of this job is to be taken for dead now, or nothing."""
    hosts = {pod.node for pod in bound}
    silent = _list_silent_nodes(bound, leader)
    if leader is not None and not leader.reachable:
        # Agents of which the leader alone could tell: those whose Leases are read stand for all of them.
        hosts &= set(silent)
    elif len(silent) > MAX_SUSPECTS:
        return describe_brake(len(silent), len(hosts), "the job's nodes")  # not all Leases are read
    unrenewed = [name for name in silent if name in nodes and (nodes[name].unrenewed or nodes[name].silent_since)]
    return describe_brake(len(unrenewed), len(hosts), "the job's nodes")


def _list_silent_nodes(bound: Iterable[PodView], leader: LeaderView | None) -> list[str]:
    """Return the nodes of which nobody hears an agent; of a leader that is silent itself as many as may be asked for,
    the leader's first."""
    silent = {pod.node or "": pod.index for pod in bound if _seems_silent(pod, leader)}
    ordered = sorted(silent, key=lambda name: (silent[name] != 0, name))
    return ordered if leader is not None and leader.reachable else ordered[:MAX_SUSPECTS]


def _has_outlived(node: NodeView | None, until: float) -> bool:
    """Tell whether a kubelet was heard after `until`: whatever silenced the leader was not the death of its machine."""
    return node is not None and node.renewed_at is not None and node.renewed_at > until


def describe_brake(silent: int, nodes: int, which: str) -> str:
    """Return why silent nodes are not taken for dead, or nothing: they are too many of too many."""
    if nodes < MIN_BRAKED or 2 * silent <= nodes:
        return ""
    return (
        f"{silent} of {nodes} of {which} are silent at once, which a network partition explains better than so "
        "many dead machines: their pods stay until some are heard again; delete those pods if the machines are dead"
    )


def _seems_silent(pod: PodView, leader: LeaderView | None) -> bool:
    """Tell whether nobody hears the agent of a pod now. While nobody hears the leader, nobody hears of any."""
    if leader is None or leader.answered_at is None or leader.outcome is not None:
        return False
    if pod.index == 0 or not leader.reachable:
        return not leader.reachable and (pod.index > 0 or pod.epoch == leader.epoch)
    return pod.index in leader.missing or pod.index in leader.quiet


def _is_agent_silent(pod: PodView, node: NodeView, leader: LeaderView | None, fence_timeout: float, now: float) -> bool:
    """Tell whether an agent was silent for long enough to be one of the two witnesses."""
    if leader is None or leader.answered_at is None or not _seems_silent(pod, leader):
        return False
    if pod.index > 0:
        return leader.reachable and pod.index in leader.missing
    until = leader.answered_at + fence_timeout
    return now >= until and not _has_outlived(node, until)


def _is_agent_heard(pod: PodView, leader: LeaderView | None) -> bool:
    if leader is None or not leader.reachable:
        return False
    return pod.index not in leader.missing if pod.index else pod.epoch == leader.epoch


def _is_given_up(pod: PodView, node: NodeView | None, grace: float, now: float) -> bool:
    """Tell whether a pod should have ended long ago, on a node of which the control plane hears nothing."""
    if pod.deleting_since is None or node is None or node.ready or node.not_ready_because != _UNKNOWN:
        return False
    return now >= pod.deleting_since + grace + CONFIRM_SECONDS
