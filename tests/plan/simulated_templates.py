"""The frozen template of a simulated job, as the operator reads it from its ConfigMap."""

from __future__ import annotations

from everstep_operator.api.job import TrainingJob
from everstep_operator.plan.frozen_template import FrozenTemplate
from everstep_operator.plan.plan_settings import PlanSettings
from everstep_operator.plan.template import read_frozen_template


def find_frozen_template(job: TrainingJob, found: object, epoch: int, settings: PlanSettings) -> FrozenTemplate | None:
    """Return the job's template of this epoch in a ConfigMap; None if it is not the operator's."""
    keys, namespace = settings.operator_keys, job.metadata.namespace or ""
    return read_frozen_template(found, namespace=namespace, uid=job.metadata.uid, epoch=epoch, keys=keys)  # type: ignore[arg-type]
