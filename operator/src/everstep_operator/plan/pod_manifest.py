"""The body of one pod, from the frozen template alone: whatever was edited or upgraded since, a replacement is like the
pod that it replaces. All that it gets besides is the address of a leader that runs already, and the nodes to avoid.

Called once for each of thousands of pods, so it copies only the few objects that differ and shares the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everstep_operator.plan import plain_mode
from everstep_operator.plan.affinity import exclude_nodes, prefer_other_nodes
from everstep_operator.plan.agent_volume import find_template_config_map
from everstep_operator.plan.folder_publisher import select_folder_containers
from everstep_operator.plan.frozen_template import FrozenTemplate
from everstep_operator.plan.labels import LABEL_EPOCH, LABEL_INDEX, LABEL_JOB, LABEL_TEMPLATE
from everstep_operator.plan.observation import EPOCH_OPTION, EPOCH_VARIABLE, TRAINER_CONTAINER

LEADER_VARIABLE = "EVERSTEP_LEADER"
INDEX_VARIABLE = "EVERSTEP_INDEX"
MANAGED_BY_LABEL = {"app.kubernetes.io/managed-by": "everstep"}


def make_pod_name(job: str, index: int) -> str:
    """Return the name of a pod. The name is the lock of its index: the API server lets one object have it at a time."""
    return f"{job}-{index}"


def build_pod(
    frozen: FrozenTemplate,
    index: int,
    epoch: int,
    leader: str = "",
    avoid: Sequence[str] = (),
    shun: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the pod to POST. It shares objects with `frozen`: read it, do not change it.

    Args:
        frozen: The template of the pod.
        index: Its replica index.
        epoch: The epoch in which it is made.
        leader: ip:port of the leader to which the pod's agent shall announce itself; empty where there is none yet.
        avoid: Names of nodes on which it must not be.
        shun: Names of nodes on which it is only if nothing else is free.
    """
    about = frozen.job["job"]
    name: str = about["name"]
    pod = frozen.find_pod(index)
    metadata = pod.get("metadata") or {}
    body: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": make_pod_name(name, index),
            "namespace": about["namespace"],
            "labels": {
                **build_shared_labels(pod, name, frozen.epoch),
                LABEL_INDEX: str(index),
                LABEL_EPOCH: str(epoch),
            },
            "ownerReferences": [build_owner_reference(name, about["uid"])],
        },
        "spec": {**pod["spec"], "hostname": f"algo-{index + 1}"},
    }
    annotations = dict(metadata.get("annotations") or {})
    if frozen.job.get("plain"):
        annotations |= plain_mode.build_pod_annotations(frozen.job, index)
        mounted = find_template_config_map(pod["spec"], name)
        config_map = mounted[0] if mounted is not None else ""
        body["spec"]["containers"] = _change_trainer(
            pod,
            lambda trainer: {
                "env": plain_mode.build_environment(frozen.job, index, config_map, epoch, trainer.get("env") or [])
            },
        )
    else:
        body["spec"]["containers"] = _change_trainer(pod, lambda trainer: _tell_agent(trainer, index, epoch, leader))
    if extra := pod["spec"].get("initContainers"):
        base = int(about.get("created") or 0)  # absent in a template of before jobs told it
        body["spec"]["initContainers"] = select_folder_containers(extra, index, epoch, base)
    if avoid:
        body["spec"]["affinity"] = exclude_nodes(body["spec"].get("affinity") or {}, avoid)
    if shun:
        body["spec"]["affinity"] = prefer_other_nodes(body["spec"].get("affinity") or {}, shun)
    if annotations:
        body["metadata"]["annotations"] = annotations
    return body


def build_shared_labels(pod: Mapping[str, Any], job: str, template: int) -> dict[str, str]:
    """Return the labels that all pods of a set have.

    Args:
        pod: The frozen pod template.
        job: Name of the job.
        template: The epoch of the template.
    """
    given = (pod.get("metadata") or {}).get("labels") or {}
    return {**given, **MANAGED_BY_LABEL, LABEL_JOB: job, LABEL_TEMPLATE: str(template)}


def _tell_agent(trainer: Mapping[str, Any], index: int, epoch: int, leader: str) -> dict[str, Any]:
    """Return the fields of the trainer by which its agent knows which pod it is in: words of its command, for all words
    together are one field to the API server's bookkeeping. Nobody can change them, as nobody can change a spec."""
    env = trainer.get("env") or []
    if all(each["name"] != INDEX_VARIABLE for each in env):
        options = [f"--index={index}", f"{EPOCH_OPTION}{epoch}", *([f"--leader={leader}"] if leader else [])]
        return {"command": [*trainer["command"], *options]}
    # An older template: its agent reads variables, and it refers to labels, which anybody may change who may change
    # pods.
    values = {INDEX_VARIABLE: str(index), EPOCH_VARIABLE: str(epoch), **({LEADER_VARIABLE: leader} if leader else {})}
    return {
        "env": [*(e for e in env if e["name"] not in values), *({"name": n, "value": v} for n, v in values.items())]
    }


def _change_trainer(
    pod: Mapping[str, Any], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the containers, with other fields for the trainer."""
    containers = pod["spec"]["containers"]
    return [{**c, **change(c)} if c["name"] == TRAINER_CONTAINER else c for c in containers]


def build_owner_reference(name: str, uid: str) -> dict[str, Any]:
    return {
        "apiVersion": "everstep.dev/v1alpha1",
        "kind": "TrainingJob",
        "name": name,
        "uid": uid,
        "controller": True,
        # Background deletion is ours; "foreground" of a user's must wait for the pods, as it says.
        "blockOwnerDeletion": True,
    }
