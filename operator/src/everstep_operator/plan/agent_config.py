"""job.json (001): what every agent of a job is told, whether its pods are on a cluster or processes on a laptop."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from everstep_operator.api.job import TrainingJob
from everstep_operator.api.pool import TrainingPool
from everstep_operator.api.scalars import parse_quantity
from everstep_operator.plan.frozen_template import FrozenTemplate
from everstep_operator.plan.observation import TRAINER_CONTAINER
from everstep_operator.plan.plan_settings import PlanSettings

PROTOCOL = 1
RESTART_GRACE = 5.0
LEAVE_SECONDS = 10  # seconds an agent keeps for its own last word after the ranks' grace
CHECKPOINT_VARIABLE = "EVERSTEP_CHECKPOINT"  # JSON
LOCAL_INSTANCE_TYPE = "local"  # what SageMaker's toolkits call a machine that is no instance type
DEFAULT_GPU_RESOURCE = "nvidia.com/gpu"


def build_job_config(
    job: TrainingJob, *, template_epoch: int, pool: TrainingPool | None, settings: PlanSettings, plain: bool = False
) -> dict[str, Any]:
    """Return the content of job.json. `plain`, `agentDigest` and the counts of CPUs and GPUs are the operator's own;
    agents ignore them."""
    spec = job.spec
    gpus = gpu_count(job, pool)
    grace = find_termination_grace(job, settings)
    return {
        "protocol": PROTOCOL,
        "job": {
            "namespace": job.metadata.namespace or "default",
            "name": job.metadata.name,
            "uid": job.metadata.uid,
            "created": find_attempt_base(job),
        },
        "templateEpoch": template_epoch,
        "numNodes": spec.num_nodes,
        "numProcPerNode": spec.num_proc_per_node or max(1, gpus),
        "command": [*(spec.command or []), *spec.args],
        "distribution": {"kind": spec.distribution.kind, "options": spec.distribution.options},
        "variables": {**spec.distribution.variables, **build_checkpoint_variables(job)},
        "hyperparameters": dict(spec.hyperparameters),
        "restart": {
            "application": spec.restart.application,
            "maxBackoffSeconds": int(spec.restart.max_backoff.total_seconds()),
            "onExitCodes": [{"codes": rule.codes, "action": rule.action.value} for rule in spec.restart.on_exit_codes],
        },
        "fencing": spec.restart.fencing,
        "hangTimeoutSeconds": spec.timeouts.hang.total_seconds() if spec.timeouts.hang is not None else 0,
        "fenceTimeoutSeconds": compute_fence_timeout(spec.num_nodes, settings),
        "stopGraceSeconds": max(5, grace - _read_stop_delay(job) - LEAVE_SECONDS),
        "restartGraceSeconds": RESTART_GRACE,
        "instanceType": pool.instance_type if pool is not None else LOCAL_INSTANCE_TYPE,
        "service": service_name(job) if spec.num_nodes > 1 else "",
        "port": settings.agent_port,
        "plain": plain,
        "agentDigest": "" if plain else settings.agent_digest,
        "cpus": _count_cpus({**spec.resources.requests, **spec.resources.limits}),
        "gpus": gpus,
    }


def find_attempt_base(job: TrainingJob) -> int:
    """Return what is added to epochs where attempts of several jobs are compared: the time of the job's creation."""
    created = job.metadata.creation_timestamp
    return 0 if created is None else max(0, int(created.timestamp()))


def build_checkpoint_variables(job: TrainingJob) -> dict[str, str]:
    """Return what the checkpoint library in the ranks is told of `spec.checkpoint`; nothing where that is absent."""
    policy = job.spec.checkpoint
    return {} if policy is None else {CHECKPOINT_VARIABLE: json.dumps(policy.describe_for_library(), sort_keys=True)}


def find_termination_grace(job: TrainingJob, settings: PlanSettings) -> int:
    """Return the seconds that a job's pods have to end: those of its template, or the operator's."""
    return job.spec.pod_template.spec.termination_grace_period_seconds or settings.termination_grace


def compute_fence_timeout(num_nodes: int, settings: PlanSettings) -> float:
    """Return the fence timeout of a job, in seconds: the configured one, or longer where the job is large.

    Nodes hear of their leader's lease by its heartbeats, at most 200 a second for all of them. Four intervals have to
    fit, so a job of more than 50 nodes per configured second has 1 s per 50 nodes.
    """
    return max(settings.fence_timeout, num_nodes / 50)


def find_fence_timeout(job: TrainingJob, frozen: FrozenTemplate | None, settings: PlanSettings) -> float:
    """Return the fence timeout of a job's agents, in seconds: as frozen in their template, for the operator's setting
    may have been lowered since."""
    told = frozen.job.get("fenceTimeoutSeconds") if frozen is not None else None
    at_least = compute_fence_timeout(job.spec.num_nodes, settings)
    return max(at_least, float(told)) if isinstance(told, (int, float)) else at_least


def find_agent_port(frozen: FrozenTemplate | None, settings: PlanSettings) -> int:
    """Return the port of a job's agents: as frozen in their template, for the operator's setting may have changed
    since."""
    told = frozen.job.get("port") if frozen is not None else None
    return told if type(told) is int else settings.agent_port


def service_name(job: TrainingJob) -> str:
    return f"{job.metadata.name}.{job.metadata.namespace or 'default'}.svc"


def _read_stop_delay(job: TrainingJob) -> int:
    """Return how many seconds of the grace the trainer's preStop hook sleeps before the agent gets its signal.

    How long a hook of another kind takes, nobody knows beforehand.
    """
    trainer = next((c for c in job.spec.pod_template.spec.containers or () if c.name == TRAINER_CONTAINER), None)
    found: Any = trainer.manifest() if trainer is not None else None
    for name in ("lifecycle", "preStop", "sleep", "seconds"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if type(found) is int and found > 0 else 0


def gpu_resource(pool: TrainingPool | None) -> str:
    return pool.spec.gpu_resource if pool is not None else DEFAULT_GPU_RESOURCE


def gpu_count(job: TrainingJob, pool: TrainingPool | None) -> int:
    """Return the GPUs of one pod, asked for by the pool's resource name or by the usual one."""
    limits = job.spec.resources.limits
    amount = limits.get(gpu_resource(pool)) or limits.get(DEFAULT_GPU_RESOURCE)
    return int(parse_quantity(amount)) if amount else 0


def _count_cpus(resources: Mapping[str, str]) -> int:
    return max(1, math.ceil(parse_quantity(resources.get("cpu", "1"))))
