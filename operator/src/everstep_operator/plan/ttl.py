"""Clean up after the end: stragglers are removed, logs stay, and the job goes when its time to live has passed."""

from __future__ import annotations

from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import Phase
from everstep_operator.plan import pod_replacement
from everstep_operator.plan.actions import Action, DeleteJob
from everstep_operator.plan.agent_config import find_termination_grace
from everstep_operator.plan.observation import PodView
from everstep_operator.plan.plan_context import PlanContext

# Agents leave by themselves when their leader declares the end, and write their last word while doing so.
LINGER_SECONDS = 30.0


def plan_after_end(s: PlanContext) -> tuple[list[Action], float | None]:
    """Return what is to be done about a finished job, and when to look again. Ended pods are kept: they hold the logs.

    One in which only a sidecar goes on would hold its node and GPUs for good, so it goes too.
    """
    finished = s.open.start.timestamp() if s.open is not None else s.created
    actions: list[Action] = []
    looks = []
    staying = {pod.uid: finished + _find_linger(s, pod) for pod in s.observed.ours if pod.occupies}
    late = [pod for pod in s.observed.ours if pod.uid in staying and s.now >= staying[pod.uid]]
    actions += [a for a in [pod_replacement.make_deletion(late, Reason.STOPPING)] if a is not None]
    looks += [at for at in staying.values() if at > s.now]
    if s.spec.ttl_after_finished is not None:
        expires = finished + s.spec.ttl_after_finished.total_seconds()
        if s.now >= expires:
            actions.append(DeleteJob(s.job.metadata.uid))
        else:
            looks.append(expires)
    return actions, min(looks, default=None)


def _find_linger(s: PlanContext, pod: PodView) -> float:
    """Return for how many seconds a pod may stay after the end. In one whose ranks have succeeded, a checkpoint that
    they have saved may be on its way to its store, for as long as the pod's grace."""
    if s.phase is not Phase.SUCCEEDED or not pod.running:
        return LINGER_SECONDS
    return max(LINGER_SECONDS, find_termination_grace(s.job, s.observed.settings))
