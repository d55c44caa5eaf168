"""The containers that carry a program's own checkpoint files: one restores them before it starts, one publishes them.

The program writes into `/opt/ml/checkpoints` and knows nothing of a store. Both containers run the checkpoint library's
commands beside it, so any program and any distribution will do. Kubernetes starts a sidecar before the trainer and ends
it after the trainer has ended: what the program wrote last is still published. Pod 0 publishes, all pods restore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from everstep.agent.ranks.container_contract import name_attempt
from everstep_operator.api.checkpoint import FOLDER
from everstep_operator.api.job import TrainingJob
from everstep_operator.api.trainer import SETTABLE_VARIABLES
from everstep_operator.plan.observation import EPOCH_VARIABLE
from everstep_operator.plan.overlay import normalize_mount_path

RESTORER, PUBLISHER = "everstep-restore", "everstep-publish"
VOLUME = "everstep-checkpoints"
# What is restored is renamed into place whole, and no mount point can be renamed: the trainer's mount is a folder of
# the volume, and these two see the volume itself.
_PLACE, _SUBFOLDER = "/opt/everstep/checkpoints", "files"
_COMMAND = ("python3", "-m", "everstep.cli", "checkpoint")
# Equal requests and limits: with a sidecar of another kind the pod would lose the QoS class Guaranteed. A pod template
# may say otherwise, by the containers' names.
_AMOUNTS = {"cpu": "500m", "memory": "512Mi"}
# A store that is unavailable for a moment fails no start; what lasts longer is told in the status.
_OUTAGE_SECONDS = 120
# No pod restores another job's files: where pods share a volume, they would be there once the store is put right.
_CLAIM = "--resume"
# The first half of the fencing token is the pod's epoch. Ranks that start again in place go on in one folder.
_GENERATION = {"name": "EVERSTEP_GENERATION", "value": "0"}


def mount_program_folder(job: TrainingJob) -> dict[str, str]:
    """Return what the trainer's mount of `/opt/ml/checkpoints` has besides its path and volume.

    Args:
        job: The job.
    """
    return {"subPath": _SUBFOLDER} if _has_folder(job) else {}


def build_folder_containers(job: TrainingJob) -> list[dict[str, Any]]:
    """Return the init containers that restore and publish the folder; none where the job does not ask for them.

    Args:
        job: The job.
    """
    policy = job.spec.checkpoint
    if policy is None or policy.folder is None or policy.store is None:
        return []
    said, files = policy.folder, f"{_PLACE}/{_SUBFOLDER}"
    wait = ("--wait", str(_OUTAGE_SECONDS))
    restore = [*_COMMAND, "restore", policy.store, files, "--if-any", "--if-empty", *wait, _CLAIM]
    meta = job.metadata
    identity = {"name": "EVERSTEP_JOB", "value": f"{meta.namespace or ''}/{meta.name}/{meta.uid}"}
    publish = [*_COMMAND, "publish", files, policy.store, "--watch", "--keep-last", str(policy.keep_last)]
    quiet = f"{said.quiet.total_seconds():g}" if said.quiet is not None else None
    for option, value in (("--quiet", quiet), ("--marker", said.marker), ("--each", said.each)):
        publish += [option, value] if value is not None else []
    env = [item.manifest() for item in job.spec.env if item.name not in SETTABLE_VARIABLES]
    common: dict[str, Any] = {
        "image": said.image or job.spec.image,
        "env": [*env, _GENERATION, identity],
        "volumeMounts": [{"name": VOLUME, "mountPath": _PLACE}],
        "resources": {"requests": _AMOUNTS, "limits": _AMOUNTS},
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if policy.secret_ref is not None:
        common["envFrom"] = [{"secretRef": {"name": policy.secret_ref.name}}]
    if said.image is None and job.spec.image_pull_policy is not None:
        common["imagePullPolicy"] = job.spec.image_pull_policy
    return [
        {"name": RESTORER, "command": restore, **common},
        {"name": PUBLISHER, "command": publish, "restartPolicy": "Always", **common},
    ]


def find_hidden_folder(job: TrainingJob, trainer: Mapping[str, Any]) -> str | None:
    """Return why nothing that the program writes would be published; None if it is.

    Args:
        job: The job.
        trainer: The container of the ranks, with what the job's pod template says.
    """
    mounts = {normalize_mount_path(m.get("mountPath") or "/"): m.get("name") for m in trainer.get("volumeMounts") or ()}
    if not _has_folder(job) or mounts.get(FOLDER) == VOLUME:
        return None
    return (
        f"checkpoint.folder publishes what is written into {FOLDER}, and podTemplate mounts another volume there: "
        "remove one of them"
    )


def select_folder_containers(
    containers: Sequence[Mapping[str, Any]], index: int, epoch: int, attempt_base: int
) -> list[Mapping[str, Any]]:
    """Return the init containers of one pod: of several publishers of one store each would take the others' steps.

    Args:
        containers: Those of the template.
        index: The pod's replica index.
        epoch: The epoch in which it is made.
        attempt_base: What is added to it in the store, see `agent_config.find_attempt_base`; 0: nothing.
    """
    # Who publishes has an attempt; another pod may be of an earlier epoch, and claims the store for the job alone.
    if index != 0:
        return [each for each in containers if each.get("name") != PUBLISHER]
    token = [{"name": EPOCH_VARIABLE, "value": str(epoch)}]
    if (attempt := name_attempt(attempt_base, epoch, int(_GENERATION["value"]))) is not None:
        token.append({"name": "EVERSTEP_ATTEMPT", "value": attempt})
    ours = (RESTORER, PUBLISHER)
    return [
        {**each, "env": [*(each.get("env") or ()), *token]} if each.get("name") in ours else each for each in containers
    ]


def _has_folder(job: TrainingJob) -> bool:
    return job.spec.checkpoint is not None and job.spec.checkpoint.folder is not None
