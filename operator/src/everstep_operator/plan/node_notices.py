"""Leaves nodes that are announced to go away: a checkpoint first, then the pods on them go, and are made elsewhere.

`node_signals` reads from a Node what is announced. The first sight of it is on record in `status.disruption`, with the
deadline, before anything follows. The leader is asked for a checkpoint (`RequestCheckpoint`); once it is committed, or
shortly before the deadline, or at once where no ranks run, the pods on these nodes are deleted: directly, since whoever
drains the node may respect an annotation or a PodDisruptionBudget that keeps pods until the machine is gone. A signal
that is gone before is a notice that was withdrawn, and the ranks go on. Where the node stays (a cordon, a fault), a
checkpoint is all that is asked for.

The restart is free of charge (`pod_replacement.NOTICE_REASONS`). Replacements exclude the nodes by name, since a job
may tolerate their taints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime

from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import MAX_DISRUPTED_NODES, Disruption, Phase
from everstep_operator.plan import pod_replacement
from everstep_operator.plan.actions import RequestCheckpoint
from everstep_operator.plan.decision import Decision
from everstep_operator.plan.node_signals import NodeSignal
from everstep_operator.plan.node_view import NodeView
from everstep_operator.plan.observation import Observation, PodView
from everstep_operator.plan.plan_context import PlanContext, to_utc

# So long before the deadline the pods go, checkpoint or not, or a quarter of a shorter notice: their ranks may save by
# themselves when they are told to stop, and the kubelet has to confirm their end.
LEAVE_SECONDS = 30.0
LEAVE_SHARE = 0.25
# A deadline that is further away (maintenance is announced days before) is reported, and acted upon when it is near.
AHEAD_SECONDS = 600.0
# A machine that is up so long after the time that was announced is not the one that goes: labels stay, and what they
# tell is when a window of maintenance begins.
OVERDUE_SECONDS = 600.0
# Nodes that stay may be cordoned for weeks, and more of them one by one: what was saved so long ago says nothing of one
# that is new. Nodes that are cordoned in a volley share a checkpoint.
SAVE_AGAIN_SECONDS = 60.0
_IDLE_PHASES = frozenset({Phase.SUSPENDED, Phase.STOPPING, Phase.SUCCEEDED, Phase.FAILED})


def drop_overdue_signals(observed: Observation, now: float) -> Observation:
    """Return the observation without announcements of a time that has passed long ago, of nodes that are Ready.

    Such nodes would be left at once, and excluded for as long as the announcement stays: where all nodes have one, no
    pod could ever be placed.

    Args:
        observed: The observation.
        now: Unix seconds.
    """
    overdue = {
        name: replace(node, signal=None)
        for name, node in observed.nodes.items()
        if node.ready
        and node.signal is not None
        and node.signal.deadline is not None
        and now > node.signal.deadline + OVERDUE_SECONDS
    }
    return replace(observed, nodes={**observed.nodes, **overdue}) if overdue else observed


def leave_noticed_nodes(s: PlanContext, decision: Decision) -> Decision:
    """Return the decision with what is to be done about announced ends of nodes, and with the record of it."""
    if decision.phase in _IDLE_PHASES or decision.template is not None:
        return decision  # all pods go anyway
    signals = _list_signals(s)
    later = [
        deadline - AHEAD_SECONDS
        for signal in signals.values()
        if (deadline := signal.deadline) is not None and deadline > s.now + AHEAD_SECONDS
    ]
    record = _update_record(s, {name: each for name, each in signals.items() if not is_far(each, s.now)})
    if record is None:
        return decision.requeue_at(min(later, default=None))
    decision = decision.with_fields(disruption=record).requeue_at(min(later, default=None))
    if s.status.disruption is None or s.status.disruption.noticed != record.noticed:
        # Nothing follows before it is on record: CRDs that are older than the operator cannot hold it, and each look
        # would be the first.
        return decision
    record = _note_checkpoint(s, record)
    if record.leaving is None and record.deadline is not None:
        leave_at = _compute_leave_time(record)
        if record.saved_step is not None or s.now >= leave_at or not may_ranks_run(s):
            record = record.model_copy(update={"leaving": to_utc(s.now)})
        else:
            decision = decision.requeue_at(leave_at)
    decision = decision.with_fields(disruption=record)
    if record.leaving is not None:
        doomed = [pod for pod in s.live if pod.node and (each := signals.get(pod.node)) is not None and each.leaves]
        why = pod_replacement.NOTICE_REASONS.get(record.reason, Reason.NODE_DRAINING)
        return decision.with_actions(pod_replacement.make_deletion(doomed, why))
    return decision.with_actions(_make_request(s, record))


def explain_leave(s: PlanContext, lost: PodView | None) -> tuple[Reason, str] | None:
    """Return the reason and the message of a restart that an announced end of nodes has caused, or None.

    Args:
        s: The job.
        lost: A pod that is lost; None where its object is gone.
    """
    record = s.status.disruption
    if record is None or record.deadline is None or (lost is not None and not lost.notice):
        return None
    reason = pod_replacement.explain_pod_loss(s, lost)
    return (reason, describe_disruption(record)) if reason.value in pod_replacement.NOTICE_REASONS else None


def describe_disruption(record: Disruption) -> str:
    """Return a sentence about nodes that go away, by when, and which checkpoint was committed before."""
    if record.saved_step is not None:
        saved = f"the checkpoint of step {record.saved_step} is committed"
    elif record.leaving is not None:
        saved = "no checkpoint was committed in time, so that ranks go on from the last one that there is"
    else:
        saved = "a checkpoint is asked for"
    if record.deadline is None:
        return f"{_name_nodes(record.nodes)} may fail or be drained ({record.source}): {saved}"
    goes = "goes" if len(record.nodes) == 1 else "go"
    when = f"{goes} away by {format_time(record.deadline)}"
    leaves = "; pods leave" if record.leaving is not None else ""
    return f"{_name_nodes(record.nodes)} {when} ({record.source}): {saved}{leaves}"


def list_left_nodes(s: PlanContext) -> list[str]:
    """Return the names of nodes that the job leaves, where no pod of it shall be created."""
    record = s.status.disruption
    if record is None or record.deadline is None:
        return []
    known = s.observed.nodes
    stays = (name for name, node in known.items() if node.lost_since is None and not _goes_away(node))
    return sorted(set(record.nodes) - set(stays))


def make_request_id(record: Disruption) -> str:
    """Return the id of the request for a checkpoint: the same for one notice, whoever asks and how often."""
    return str(round(record.noticed.timestamp() * 1000))


def format_time(at: datetime) -> str:
    """Return a time as Kubernetes writes it."""
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def _goes_away(node: NodeView) -> bool:
    return node.signal is not None and node.signal.leaves


def is_far(signal: NodeSignal, now: float) -> bool:
    """Return whether a node goes so much later that nothing is done about it yet."""
    return signal.deadline is not None and signal.deadline > now + AHEAD_SECONDS


def _list_signals(s: PlanContext) -> dict[str, NodeSignal]:
    """Return the signals of the nodes under live pods, by the node's name. A plain pod saves nothing by itself."""
    found: dict[str, NodeSignal] = {}
    if not any(node.signal is not None for node in s.observed.nodes.values()):
        return found
    for pod in s.live:
        node = s.observed.nodes.get(pod.node) if pod.node else None
        if node is not None and node.signal is not None and (node.signal.leaves or not s.plain):
            found[node.name] = node.signal
    return found


def _update_record(s: PlanContext, signals: Mapping[str, NodeSignal]) -> Disruption | None:
    """Return the record that follows from the last one and from what is announced now."""
    old = s.status.disruption
    leaving = {name: each for name, each in signals.items() if each.leaves}
    complete = len(s.live) == s.wanted
    if old is not None and old.deadline is not None:
        if old.leaving is not None and not (complete and s.phase is Phase.RUNNING and not _is_on(s, old, leaving)):
            return _extend(s, old, [*old.nodes, *leaving], leaving)  # until ranks run elsewhere
        if old.leaving is None and not leaving and not complete:
            # Somebody else was faster, or the machine was: its pods are gone, or going.
            return old.model_copy(update={"leaving": to_utc(s.now)})
    chosen = leaving or signals
    if not chosen:
        return None
    same = old is not None and old.leaving is None and (old.deadline is not None) == bool(leaving)
    if old is not None and same and not (not leaving and _is_outdated(s, old, chosen)):
        return _extend(s, old, chosen, leaving)
    deadlines = {name: each.compute_deadline(s.now) for name, each in chosen.items()}
    first = min(chosen, key=lambda name: (deadlines[name] or 0.0, name))
    at = deadlines[first]
    return Disruption(
        reason=chosen[first].reason.value,
        source=chosen[first].source,
        nodes=sorted(chosen)[:MAX_DISRUPTED_NODES],
        noticed=to_utc(s.now),
        deadline=None if at is None else to_utc(at),
    )


def _is_outdated(s: PlanContext, record: Disruption, names: Iterable[str]) -> bool:
    """Return whether the checkpoint of a record was saved long before another node joined those that stay."""
    if record.saved_step is None or len(record.nodes) >= MAX_DISRUPTED_NODES:  # a full record does not name all
        return False
    return s.now >= record.noticed.timestamp() + SAVE_AGAIN_SECONDS and not set(names) <= set(record.nodes)


def _extend(s: PlanContext, old: Disruption, names: Iterable[str], leaving: Mapping[str, NodeSignal]) -> Disruption:
    """Return the record with these nodes, and the deadline of those that are new if that is earlier."""
    added = [leaving[name].compute_deadline(s.now) for name in leaving if name not in old.nodes]
    times = [at for at in (old.deadline.timestamp() if old.deadline is not None else None, *added) if at is not None]
    nodes = sorted(set(names))[:MAX_DISRUPTED_NODES]
    return old.model_copy(update={"nodes": nodes, "deadline": to_utc(min(times)) if times else None})


def _is_on(s: PlanContext, record: Disruption, leaving: Mapping[str, NodeSignal]) -> bool:
    """Return whether a live pod is on one of the nodes that still go away."""
    return any(pod.node in record.nodes and pod.node in leaving for pod in s.live)


def _note_checkpoint(s: PlanContext, record: Disruption) -> Disruption:
    """Return the record with the step of the checkpoint that was asked for, once the leader tells that it is
    committed."""
    told = s.leader.checkpoint_request if s.leader is not None else None
    if told is None or told.id != make_request_id(record) or record.leaving is not None:
        return record
    return record if told.saved_step is None else record.model_copy(update={"saved_step": told.saved_step})


def may_ranks_run(s: PlanContext) -> bool:
    """Return whether ranks may run that could save something. A leader that is not heard may still train."""
    if s.leader is not None:
        return s.leader.phase == "running"
    return s.head is not None and s.head.running


def _compute_leave_time(record: Disruption) -> float:
    """Return when the pods go at the latest (Unix seconds)."""
    assert record.deadline is not None
    end, notice = record.deadline.timestamp(), (record.deadline - record.noticed).total_seconds()
    return end - min(LEAVE_SECONDS, LEAVE_SHARE * max(0.0, notice))


def _make_request(s: PlanContext, record: Disruption) -> RequestCheckpoint | None:
    name = make_request_id(record)
    leader = s.leader
    if leader is None or not leader.reachable or leader.phase != "running":
        return None
    if leader.checkpoint_request is not None and leader.checkpoint_request.id == name:
        return None
    return RequestCheckpoint(name, record.deadline.timestamp() if record.deadline is not None else None)


def _name_nodes(names: list[str]) -> str:
    if len(names) == 1:
        return f"node {names[0]}"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"nodes {', '.join(names[:3])}{more}"
