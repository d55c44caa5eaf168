"""One set of pods in two pools: the first `minOnDemand` pods in one of on-demand capacity, the others in another.

The leader is pod 0, so no provider takes it away. The set has one `job.json`: programs are told the machine type of the
pool of the others.
"""

from __future__ import annotations

from dataclasses import replace

from everstep_operator.api.job import TrainingJob
from everstep_operator.api.pool import TrainingPool
from everstep_operator.api.reasons import Reason
from everstep_operator.plan.frozen_template import FrozenTemplate
from everstep_operator.plan.plan_settings import PlanSettings
from everstep_operator.plan.template import RejectedTemplate, resolve_template


def resolve_for_pools(
    job: TrainingJob,
    *,
    epoch: int,
    pool: TrainingPool | None,
    on_demand: TrainingPool | None,
    plain: bool,
    settings: PlanSettings,
) -> FrozenTemplate | RejectedTemplate:
    """Return the template of a set, as `resolve_template` does.

    Args:
        job: The job.
        epoch: The template epoch.
        pool: The pool of the set; None: the job names none.
        on_demand: The pool of the first pods, where it is another one.
        plain: Whether the image runs without the agent.
        settings: The operator's configuration.
    """
    made = resolve_template(job, epoch=epoch, pool=pool, plain=plain, settings=settings)
    if on_demand is None or isinstance(made, RejectedTemplate):
        return made
    first = resolve_template(job, epoch=epoch, pool=on_demand, plain=plain, settings=settings)
    if isinstance(first, RejectedTemplate):
        return first
    here, there = made.job["numProcPerNode"], first.job["numProcPerNode"]
    if here != there:
        names = [each.metadata.name if each is not None else "" for each in (pool, on_demand)]
        return RejectedTemplate(
            Reason.INVALID_TEMPLATE,
            f"numProcPerNode is by default the number of GPUs of a pod: {here} in TrainingPool {names[0]!r}, {there} "
            f"in {names[1]!r}; set numProcPerNode, or the same number of both GPU resources",
        )
    return replace(made, on_demand=first.pod, num_on_demand=job.spec.min_on_demand)
