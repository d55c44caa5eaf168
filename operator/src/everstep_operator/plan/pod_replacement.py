"""The replacement of pods: which ones are deleted, and which are created again.

Survivors are kept. A pod that ended although the job has not, or that its leader calls unclean, is deleted; only when
its object is gone is the index made again, because the name is the lock: two live pods of one index cannot exist, not
even by two operators at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import Phase
from everstep_operator.plan import start_failures
from everstep_operator.plan.actions import DeletePods, PodRef
from everstep_operator.plan.affinity import list_excluded_nodes
from everstep_operator.plan.observation import PodView
from everstep_operator.plan.plan_context import PlanContext
from everstep_operator.plan.pod_manifest import make_pod_name

# A pod that the kubelet refuses ends at once; made again at once it would do so thousands of times an hour.
REFUSED_RETRY_SECONDS = 10.0
# A leader learns of a lost pod by its closed connections. So long the pod stays, as evidence of why it was lost.
EVIDENCE_SECONDS = 5.0
# After so long the scheduler knows of a dead node itself. An operator that has just started knows of none.
DEATH_KNOWN_SECONDS = 60.0
# How often it is asked whether a node is back that pods without a node were kept from.
BACK_SECONDS = 10.0
# A node's clock may be so far behind the API server's that a program seems to have ended before it was told to.
NODE_CLOCK_ERROR_SECONDS = 60.0
CHOOSY_SECONDS = 120.0  # of waiting for other nodes than those on which jobs have failed
_WAITING_PHASES = frozenset({Phase.PENDING, Phase.SCHEDULING, Phase.STARTING, Phase.RESTARTING})


def list_missing_indices(s: PlanContext) -> tuple[int, ...]:
    """Return the indices without any object. A deleting pod is not missing: its processes may still run."""
    taken = {p.index for p in s.stale} | s.current.keys()
    return tuple(i for i in range(s.wanted) if i not in taken)


def list_lost_pods(s: PlanContext) -> list[PodView]:
    """Return the pods of the set in which nothing will ever run again (agent mode; the job has no outcome)."""
    unclean = _list_unclean_uids(s)
    return [p for p in s.current.values() if not p.live or p.uid in unclean]


def list_deletable_pods(s: PlanContext) -> tuple[list[PodView], float | None]:
    """Return the lost pods whose objects are to go now, and when to look again at those that may stay for a moment."""
    now_, later = [], []
    attempt = start_failures.compute_next_attempt(start_failures.count_start_failures(s).record)
    for pod in list_lost_pods(s):
        if pod.deleting or (pod.ended is None and pod.gone_since is not None):
            # A pod on a dead node stays like this until something proves that the node is dead: see
            # node_trouble.force_delete_lost_pods.
            continue
        at = attempt if start_failures.has_failed_at_start(s, pod) else _deletable_at(s, pod)
        if at <= s.now:
            now_.append(pod)
        else:
            later.append(at)
    return now_, min(later, default=None)


def _deletable_at(s: PlanContext, pod: PodView) -> float:
    if pod.ended is None:
        return s.now
    at = s.now
    if pod.started_at is None or s.status.generation == 0:
        # Before a generation has run nothing is charged, so nothing but time bounds a pod that fails at every start.
        at = max(at, pod.created + REFUSED_RETRY_SECONDS)
    if is_out_of_memory(pod) and pod.index != 0 and s.leader is not None and s.phase in _RUNNING_PHASES:
        until = (pod.ended.finished_at or 0.0) + EVIDENCE_SECONDS
        # One that is to end in a while is of a node whose clock is ahead: nobody would wait for hours.
        if until <= s.now + 2 * EVIDENCE_SECONDS and not _is_in_history(s, pod):
            at = max(at, until)
    return at


def _is_in_history(s: PlanContext, pod: PodView) -> bool:
    """Return whether the leader has told of this pod's end, and the entry is on record."""
    last = s.status.restarts.last
    if s.leader is None or last is None:
        return False
    return any(e.index == pod.index and e.order <= last.token for e in s.leader.history[-8:])


def list_pods_to_place_anew(s: PlanContext) -> tuple[list[PodView], float | None]:
    """Return the pods that wait for a node while they are kept from one that was silent when they were made, and is
    back; and when to look again at those whose nodes are not. A pod's affinity cannot be changed: it is made again."""
    frozen = s.observed.frozen
    given = list_excluded_nodes(frozen.pod["spec"]) if frozen is not None else frozenset()
    waiting = [pod for pod in s.current.values() if pod.live and not pod.scheduled and pod.avoids - given]
    old = [pod for pod in waiting if s.now >= pod.created + DEATH_KNOWN_SECONDS]
    back = [pod for pod in old if any(_is_back(s, name) for name in pod.avoids - given)]
    return back, s.now + BACK_SECONDS if len(back) < len(waiting) else None


def is_choosy(s: PlanContext) -> bool:
    """Return whether pods rather wait than run where jobs have failed before. For long, a bad node is better."""
    return s.now < s.since(_WAITING_PHASES) + CHOOSY_SECONDS


def _is_back(s: PlanContext, name: str) -> bool:
    node = s.observed.nodes.get(name)
    if node is None or not node.ready or node.gone_since is not None or name in s.observed.silent_nodes:
        return False
    if name in s.observed.avoided_nodes and is_choosy(s):
        return False
    return node.signal is None or not node.signal.leaves


def is_out_of_memory(pod: PodView) -> bool:
    """Return whether a pod has ended because its container was killed for memory.

    Container runtimes give this reason to whatever ends a container of which any process was ever killed for memory: a
    rank that was started again in place days ago is enough, and a drain looks like it.
    """
    end = pod.ended
    if end is None or end.reason != "OOMKilled":
        return False
    if end.word is not None:  # the agent has ended by itself, and knows the exit code of the rank
        return end.word.result == "failed" and end.word.exit_code == _KILLED
    told = pod.deleting_since is not None and end.finished_at is not None and end.finished_at > pod.deleting_since
    return not told and pod.ended_by not in _KUBELET_ENDS and end.exit_code not in (0, _TERMINATED)


def has_succeeded(pod: PodView) -> bool:
    """Return whether a plain pod has come to its end by itself. A program that handles TERM exits with 0 as well, when
    it is told to stop in the middle of its work."""
    return pod.ended is not None and pod.ended.exit_code == 0 and not was_told_to_stop(pod)


def was_told_to_stop(pod: PodView) -> bool:
    """Return whether a container that has ended was told to before: its exit code proves nothing then."""
    if pod.ended is None:
        return False
    if pod.ended_by or pod.ended.reason in _KUBELET_ENDS:
        return True
    if pod.deleting_since is None:
        return False
    # The API server gives no time to end to a pod that has ended, as far as it knows. The end's time is of the node.
    error = NODE_CLOCK_ERROR_SECONDS if pod.deletion_grace > 0 else 0.0
    return pod.ended.finished_at is None or pod.ended.finished_at >= pod.deleting_since - error


def _find_end_reason(pod: PodView) -> str:
    """Return why a pod has ended: the kubelet's reason for all of it comes before its container's, which tells no more
    than an exit code."""
    return pod.ended_by or (pod.ended.reason if pod.ended is not None else "")


def explain_loss(pod: PodView | None) -> Reason:
    """Return the best reason that a pod's last state gives."""
    if pod is None:
        return Reason.POD_DELETED
    if is_out_of_memory(pod):
        return Reason.OUT_OF_MEMORY
    if pod.disruption != "PreemptionByScheduler" and (announced := _explain_by_notice(pod)) is not None:
        return announced
    if pod.disruption is not None and pod.disruption.startswith(_EVICTED_BY_KUEUE):
        return Reason.PREEMPTED
    if pod.disruption is not None:
        return _DISRUPTIONS.get(pod.disruption, Reason.EVICTED)
    if _find_end_reason(pod) in _KUBELET_ENDS:
        return Reason.EVICTED
    if pod.ended is None and pod.gone_since is not None:
        return Reason.NODE_LOST
    if pod.ended is not None and pod.ended.word is not None and (said := _REASONS_BY_RESULT.get(pod.ended.word.result)):
        return said
    if pod.deleting:
        return Reason.POD_DELETED
    if pod.ended is not None and pod.ended.signal == 9:
        return Reason.CONTAINER_KILLED
    return Reason.POD_LOST


def explain_pod_loss(s: PlanContext, pod: PodView | None) -> Reason:
    """Return the reason of a loss as `explain_loss`, and what the nodes add to it.

    Of a pod whose object is gone, that is the end of its node that was announced, if one was. A pod that was evicted
    for a NoExecute taint has lost its node only where the node is in trouble itself: else somebody has set the taint.
    """
    record = s.status.disruption
    if pod is None and record is not None and record.deadline is not None:
        nodes = {p.node for p in s.current.values()}
        if record.leaving is not None or not nodes.issuperset(record.nodes):
            return NOTICE_REASONS.get(record.reason, Reason.POD_DELETED)
    found = explain_loss(pod)
    if (
        found is Reason.NODE_LOST
        and pod is not None
        and pod.disruption == _EVICTED_FOR_TAINT
        and pod.gone_since is None
    ):
        node = s.observed.nodes.get(pod.node) if pod.node else None
        if node is not None and node.ready and node.lost_since is None and node.silent_since is None:
            return Reason.EVICTED
    return found


def _explain_by_notice(pod: PodView) -> Reason | None:
    """Return the announced end of a pod's node as the reason of its loss, where nothing else explains it better.

    A kubelet that shuts down with its machine says so, where nobody has announced it: on a spot node that is the
    provider's notice, and the only one that some of them give.
    """
    ended = pod.ended
    reason = _find_end_reason(pod)
    if reason in _SHUTDOWNS and pod.on_spot:
        return Reason.SPOT_INTERRUPTION
    taken = pod.deleting or pod.gone_since is not None or pod.disruption is not None
    ended_by_kubelet = ended is not None and (reason in _KUBELET_ENDS or ended.signal in _STOP_SIGNALS)
    return NOTICE_REASONS.get(pod.notice) if taken or ended_by_kubelet else None


def describe_kept_pod(s: PlanContext) -> tuple[PodView, str] | None:
    """Return a pod that finalizers keep after its end, and a message about it: no other pod can have its name.

    Whoever put them there acts within a moment, or needs to be told. It may be a pod of a former job of this name.
    """
    finalized = [p for p in s.observed.pods if p.finalizers and (p.ended is not None or not p.scheduled)]
    name, uid = s.job.metadata.name, s.job.metadata.uid
    kept = next(
        (p for p in finalized if p.owner == uid or any(p.name == make_pod_name(name, i) for i in range(s.wanted))), None
    )
    if kept is None:
        return None
    return kept, f"pod {kept.name} has ended and cannot be replaced before its finalizers are gone: {kept.finalizers}"


def make_deletion(pods: Iterable[PodView], why: Reason) -> DeletePods | None:
    """Delete those pods that nobody has asked to go yet. A pod on a removed node does not hear it: see
    `node_trouble.force_delete_lost_pods`."""
    found = tuple(PodRef(p.name, p.uid) for p in pods if p.live or (p.ended is not None and not p.deleting))
    return DeletePods(found, why.value) if found else None


def _list_unclean_uids(s: PlanContext) -> set[str]:
    if s.leader is None or not s.leader.unclean:
        return set()
    # The complaint may be about the pod's predecessor.
    uids = {item.uid for item in s.leader.unclean}
    return {pod.uid for pod in s.current.values() if pod.uid in uids}


_RUNNING_PHASES = frozenset({"Starting", "Running", "Restarting"})
_SHUTDOWNS = frozenset({"Terminated", "NodeShutdown"})  # of a pod, by a kubelet whose machine shuts down
_KUBELET_ENDS = frozenset({"Evicted", "Preempting", *_SHUTDOWNS})
_STOP_SIGNALS = (9, 15)
_KILLED, _TERMINATED = (128 + number for number in _STOP_SIGNALS)
# Why a node goes away, by the name of the reason; the restart that follows is free of charge.
NOTICE_REASONS = {
    reason.value: reason for reason in (Reason.SPOT_INTERRUPTION, Reason.NODE_MAINTENANCE, Reason.SCALE_DOWN)
}
_EVICTED_FOR_TAINT = "DeletionByTaintManager"
# Of its TerminationTarget; newer versions of Kueue add "DueToPreempted" and the like.
_EVICTED_BY_KUEUE = "WorkloadEvicted"
_DISRUPTIONS = {
    "PreemptionByScheduler": Reason.PREEMPTED,
    "EvictionByEvictionAPI": Reason.EVICTED,
    "TerminationByKubelet": Reason.EVICTED,
    _EVICTED_FOR_TAINT: Reason.NODE_LOST,
    "DeletionByPodGC": Reason.NODE_LOST,
}
_REASONS_BY_RESULT = {"fenced": Reason.FENCED, "unclean": Reason.UNCLEAN_NODE, "stopped": Reason.POD_DELETED}
LOSS_REASONS = frozenset(
    {
        *_DISRUPTIONS.values(),
        *_REASONS_BY_RESULT.values(),
        *NOTICE_REASONS.values(),
        Reason.OUT_OF_MEMORY,
        Reason.CONTAINER_KILLED,
    }
)  # what `explain_loss` may find, but for the vague POD_LOST
