"""The volumes of a pod that hold checkpoints: the store's folder, and the memory for copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep_operator.api.checkpoint import FOLDER
from everstep_operator.api.job import TrainingJob
from everstep_operator.api.scalars import parse_quantity
from everstep_operator.plan.overlay import normalize_mount_path

DEFAULT_SHM_BYTES = 1 << 30


def find_volume_source(job: TrainingJob, folder: str) -> dict[str, Any]:
    """Return the source of the volume for a folder of `/opt/ml`.

    Args:
        job: The job.
        folder: Name of the folder.
    """
    policy = job.spec.checkpoint
    if folder == "checkpoints" and policy is not None and policy.volume is not None:
        return policy.volume.manifest()
    return {"emptyDir": {}}


def limit_memory_volumes(job: TrainingJob) -> tuple[str, str]:
    """Return the size limits of /dev/shm and of the volume for copies of checkpoints: half of the pod's memory each,
    or what the job says for the second, and half of the rest.

    What is in them counts against the pod's limit. Two volumes that are both full leave nothing for the ranks: the
    checkpoint library therefore checks the memory that is available before it makes slots.

    Args:
        job: The job.

    Returns:
        Both in bytes, as quantities.
    """
    memory, said = _count_pod_memory(job), job.spec.checkpoint and job.spec.checkpoint.memory
    if not said:
        half = memory // 2 if memory is not None else DEFAULT_SHM_BYTES
        return str(half), str(half)
    copies = int(parse_quantity(said))
    return str((memory - copies) // 2 if memory is not None else DEFAULT_SHM_BYTES), str(copies)


def find_memory_shortage(job: TrainingJob) -> str | None:
    """Return what is wrong with the memory for copies of checkpoints; None if it is a part of the pod's.

    Args:
        job: The job.
    """
    memory, said = _count_pod_memory(job), job.spec.checkpoint and job.spec.checkpoint.memory
    if not said or memory is None or parse_quantity(said) < memory:
        return None
    return (
        f"checkpoint.memory is {said}, and the pod has {memory} bytes of memory, of which it is a part: raise "
        "resources.limits.memory to what the program needs besides, or lower checkpoint.memory"
    )


def _count_pod_memory(job: TrainingJob) -> int | None:
    resources = job.spec.resources
    memory = resources.limits.get("memory") or resources.requests.get("memory")
    return int(parse_quantity(memory)) if memory else None


def find_missing_store(job: TrainingJob, spec: Mapping[str, Any], trainer: Mapping[str, Any]) -> str | None:
    """Return why the job's ranks have no place for checkpoints that all nodes share; None if they may have one.

    Args:
        job: The job.
        spec: The spec of its pods.
        trainer: The container of the ranks.
    """
    policy = job.spec.checkpoint
    if policy is not None and policy.folder is not None:
        return (
            f"spec.checkpoint.folder of the job {job.metadata.name} says that its program writes files of its own: "
            "remove it, or give everstep.checkpointer() another store"
        )
    if job.spec.num_nodes == 1 or (policy is not None and policy.store is not None):
        return None
    mounts = {normalize_mount_path(m.get("mountPath") or "/"): m.get("name") for m in trainer.get("volumeMounts") or ()}
    name = mounts.get(FOLDER)
    own = {"emptyDir", "ephemeral"}  # of each pod
    if not any(volume["name"] == name and own & volume.keys() for volume in spec.get("volumes") or ()):
        return None
    return (
        f"the job {job.metadata.name} has {job.spec.num_nodes} nodes and no store that they share: set "
        "spec.checkpoint.store, as s3://bucket/run, or spec.checkpoint.volume in its manifest"
    )
