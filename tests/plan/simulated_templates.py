"""The frozen template of a simulated job, as the operator reads it from its ConfigMap."""

from __future__ import annotations

from collections.abc import Mapping

from everstep_operator.api.job import TrainingJob
from everstep_operator.plan.agent_volume import make_template_name
from everstep_operator.plan.frozen_template import FrozenTemplate
from everstep_operator.plan.plan_settings import PlanSettings
from everstep_operator.plan.template import read_frozen_template


def find_frozen_template(
    job: TrainingJob, config_maps: Mapping[str, object], settings: PlanSettings
) -> FrozenTemplate | None:
    """Return the job's present template; None if no ConfigMap has it, or not with the operator's signature."""
    meta, template = job.metadata, job.status.template
    assert template is not None
    names = (make_template_name(meta.name, meta.uid, template.epoch), f"{meta.name}-{template.epoch}")
    found = next((config_maps[name] for name in names if name in config_maps), None)
    if found is None:
        return None
    keys, namespace = settings.operator_keys, meta.namespace or ""
    return read_frozen_template(found, namespace=namespace, uid=meta.uid, epoch=template.epoch, keys=keys)  # type: ignore[arg-type]
