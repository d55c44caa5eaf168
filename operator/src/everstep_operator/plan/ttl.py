"""Clean up after the end: stragglers are removed, logs stay, and the job goes when its time to live has passed."""

from __future__ import annotations

from everstep_operator.api.reasons import Reason
from everstep_operator.plan import pod_replacement
from everstep_operator.plan.actions import Action, DeleteJob
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
    staying = [p for p in s.observed.ours if p.occupies]
    if staying and s.now >= finished + LINGER_SECONDS:
        actions += [a for a in [pod_replacement.make_deletion(staying, Reason.STOPPING)] if a is not None]
    elif staying:
        looks.append(finished + LINGER_SECONDS)
    if s.spec.ttl_after_finished is not None:
        expires = finished + s.spec.ttl_after_finished.total_seconds()
        if s.now >= expires:
            actions.append(DeleteJob(s.job.metadata.uid))
        else:
            looks.append(expires)
    return actions, min(looks, default=None)
