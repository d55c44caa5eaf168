"""Finds trouble with the nodes under a job's pods, and with pods whose node is gone.

Of a NotReady node the job only tells: it may come back. Of a GPU in trouble it only tells, too: its ranks find out by
themselves whether they can go on. What follows from an announced end of a node is in `node_notices`. A node that was
removed from the cluster does not come back, nor does one that `node_loss` has declared dead: nobody will ever report
the end of its pods. They are lost, and their objects are deleted by force so that replacements can be made.
"""

from __future__ import annotations

from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import Disruption, Restarts
from everstep_operator.plan import node_notices, volume_claims
from everstep_operator.plan.actions import DeletePods, MarkOutOfService, PodRef
from everstep_operator.plan.agent_config import RESTART_GRACE, find_fence_timeout
from everstep_operator.plan.node_failures import NodeFailure
from everstep_operator.plan.node_view import NodeView
from everstep_operator.plan.observation import PodView
from everstep_operator.plan.plan_context import PlanContext, to_utc

# After an agent has fenced itself: its ranks have `RESTART_GRACE` to end, and the agent some seconds to kill the rest.
_DYING = RESTART_GRACE + 5.0
# Losses that speak against the machine. An eviction, a preemption or a deletion is somebody's decision.
NODE_REASONS = frozenset(
    {Reason.POD_LOST, Reason.NODE_LOST, Reason.CONTAINER_KILLED, Reason.UNCLEAN_NODE, Reason.FENCED}
)


def find_node_trouble(s: PlanContext, disruption: Disruption | None = None) -> tuple[Reason, str] | None:
    """Return (reason, message) of the worst that is wrong with a node under a pod that may still run, or None.

    Args:
        s: The job.
        disruption: What is on record of nodes that go away.
    """
    found = []
    for pod in s.current.values():
        node = s.observed.nodes.get(pod.node) if pod.node and pod.ended is None else None
        if node is not None and (wrong := _judge_node(node, disruption)) is not None:
            found.append((*wrong, pod.index, f"{pod.name} is on {node.name}"))
    sick = {gpu.index: gpu for gpu in reversed(s.leader.sick_gpus)} if s.leader is not None else {}
    for pod in s.current.values():
        if (gpu := sick.get(pod.index)) is not None and pod.ended is None:
            what = f"which has a GPU with a problem ({gpu.name}: {gpu.problem})"
            found.append((5, Reason.GPU_UNHEALTHY, what, pod.index, f"{pod.name} is on {pod.node}"))
    if not found:
        return None
    worst, reason, what, _, where = min(found)
    others = sum(1 for other in found if other[0] == worst) - 1
    more = f", and {others} more pods are on such nodes" if others else ""
    return reason, f"{where}, {what}{more}"


def force_delete_lost_pods(s: PlanContext) -> tuple[DeletePods | None, float | None]:
    """Return the pods to force-delete now, and when to look again at those that may not go yet.

    With `fencing: strict` no rank of a lost pod may run beside its replacement: its machine may be up, only cut off,
    and its agent takes one fence timeout to stop them. Otherwise the fencing token keeps such ranks from publishing.
    """
    wait = _compute_force_delay(s)
    due = [
        (pod.gone_since + wait, pod)
        for pod in s.observed.ours
        if pod.gone_since is not None and (pod.ended is None or pod.deleting)
    ]
    now_ = tuple(PodRef(pod.name, pod.uid, 0) for at, pod in due if at <= s.now)
    later = min((at for at, _ in due if at > s.now), default=None)
    return (DeletePods(now_, Reason.NODE_LOST.value) if now_ else None), later


def list_nodes_to_mark(s: PlanContext) -> list[MarkOutOfService]:
    """Return the dead nodes whose pods are force-deleted now, and whose volumes nobody else can mount before they are
    detached; none unless an administrator allows it."""
    if not s.observed.settings.out_of_service_taint or not volume_claims.list_unshared_claims(s):
        return []
    deleted, _ = force_delete_lost_pods(s)
    names = {ref.name for ref in deleted.pods} if deleted is not None else set()
    nodes = (s.observed.nodes.get(pod.node) for pod in s.observed.ours if pod.name in names and pod.node)
    dead = {node.name for node in nodes if node is not None and node.gone_since is None}
    return [MarkOutOfService(name) for name in sorted(dead)]


def may_come_back(s: PlanContext, pod: PodView) -> bool:
    """Return whether nothing is known of a pod but that its Node is gone, and the pod is not to be replaced yet.

    A kubelet that registers its Node anew shows that the ranks have gone on all the while: no generation has ended.
    """
    waits = pod.gone_since is not None and s.now < pod.gone_since + _compute_force_delay(s)
    return waits and pod.ended is None and not pod.deleting


def _compute_force_delay(s: PlanContext) -> float:
    strict = s.spec.restart.fencing == "strict" and not s.plain
    return find_fence_timeout(s.job, s.observed.frozen, s.observed.settings) + _DYING if strict else 0.0


def _judge_node(node: NodeView, disruption: Disruption | None) -> tuple[int, Reason, str] | None:
    if node.gone_since is not None:
        return 0, Reason.NODE_LOST, "which is no longer in the cluster"
    if node.dead_since is not None:
        return 0, Reason.NODE_LOST, "whose kubelet and agent are both silent"
    if node.held:
        return 1, Reason.HELD, f"which is silent: {node.held}"
    if not node.ready:
        return 2, Reason.NODE_NOT_READY, f"which is not Ready ({node.not_ready_because})"
    signal = node.signal
    if signal is not None and signal.leaves:
        deadline = disruption.deadline if disruption is not None and node.name in disruption.nodes else None
        if deadline is None and signal.deadline is not None:
            deadline = to_utc(signal.deadline)
        when = f" by {node_notices.format_time(deadline)}" if deadline is not None else ""
        return 3, signal.reason, f"which goes away{when} ({signal.source})"
    if node.deleting or (signal is not None and signal.reason is Reason.NODE_DRAINING):
        source = signal.source if signal is not None else "its Node object is being deleted"
        return 4, Reason.NODE_DRAINING, f"which is being drained ({source})"
    return (5, signal.reason, f"which is in trouble ({signal.source})") if signal is not None else None


def find_node_failures(s: PlanContext, restarts: Restarts) -> dict[str, NodeFailure]:
    """Return the failures that this plan learns of, by node.

    Args:
        s: The job.
        restarts: Those on record with what this plan charges.
    """
    found: dict[str, NodeFailure] = {}
    meta, now = s.job.metadata, s.now
    known = s.status.restarts.last.token if s.status.restarts.last is not None else (0, 0)
    for charge in restarts.charges:
        if charge.token > known and charge.node and charge.reason in NODE_REASONS:
            found[charge.node] = NodeFailure(
                f"{meta.uid}/{charge.id}", meta.namespace or "", meta.name, charge.reason, now
            )
    sick = {gpu.index for gpu in s.leader.sick_gpus} if s.leader is not None else set()
    seen = {
        name
        for name, node in s.observed.nodes.items()
        if node.signal is not None and node.signal.reason is Reason.GPU_UNHEALTHY
    }
    for pod in s.current.values() if sick or seen else ():
        witnessed = pod.node in seen
        if pod.node and pod.ended is None and (witnessed or pod.index in sick):
            name, said = f"{pod.uid}/gpu{'-node' if witnessed else ''}", Reason.GPU_UNHEALTHY.value
            found[pod.node] = NodeFailure(name, meta.namespace or "", meta.name, said, now, True, witnessed)
    return found
