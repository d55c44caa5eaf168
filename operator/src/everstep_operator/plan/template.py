"""The resolved pod template: job + pool + the operator's settings, made once per template epoch and then frozen.

The order of authority: what the agent needs, over the user's overlay, over the pool, over our defaults. What the
overlay may not touch is refused by the API's schema; what only an administrator may grant is checked here.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from everstep_operator.api.job import TrainingJob
from everstep_operator.api.pool import TrainingPool
from everstep_operator.api.reasons import Reason
from everstep_operator.plan import agent_volume, plain_mode
from everstep_operator.plan.agent_config import (
    CHECKPOINT_VARIABLE,
    DEFAULT_GPU_RESOURCE,
    build_job_config,
    gpu_resource,
)
from everstep_operator.plan.checkpoint_volumes import (
    find_memory_shortage,
    find_missing_store,
    find_volume_source,
    limit_memory_volumes,
)
from everstep_operator.plan.folder_publisher import build_folder_containers, find_hidden_folder, mount_program_folder
from everstep_operator.plan.frozen_template import FrozenTemplate
from everstep_operator.plan.labels import LABEL_CAPACITY, LABEL_JOB, LABEL_TEMPLATE
from everstep_operator.plan.observation import TRAINER_CONTAINER
from everstep_operator.plan.operator_keys import make_secret_name
from everstep_operator.plan.overlay import merge_overlay, normalize_mount_path
from everstep_operator.plan.plan_settings import PlanSettings
from everstep_operator.plan.pod_manifest import MANAGED_BY_LABEL, build_owner_reference
from everstep_operator.plan.pod_security import Profile, confine_containers, list_violations
from everstep_operator.plan.template_field_types import find_misshapen_field

AGENT_COMMAND = ["python3", "-I", "-S", "-B", f"{agent_volume.FOLDER}/agent.pyz", "run"]
DEFAULT_USER_ID = 1000
# Where the checkpoint library keeps its slots. Not in /dev/shm, which the agent empties between two generations: ranks
# that are started again in place restore from here, without the store.
_CHECKPOINT_MEMORY = "/opt/everstep/memory"  # the agent names it to the ranks, in EVERSTEP_CHECKPOINT_MEMORY

_FIELD_REF = "fieldPath"
_REFERENCES = {
    "EVERSTEP_POD_IP": "status.podIP",
    "EVERSTEP_NODE_NAME": "spec.nodeName",  # for the ranks: copies of a checkpoint lie on another machine
}
_SHM = "/dev/shm"  # noqa: S108
_AUTOMOUNT = "automountServiceAccountToken"
_ON_DEMAND = "on-demand.json"
_SIGNATURE = "signature"  # in the data, which nobody can change once it is there
_TOO_MANY_PLAIN = (
    f"numNodes is {{nodes}}, and without the agent a job has at most {plain_mode.MAX_NODES} nodes, since each pod "
    "holds the names of all: set spec.command and use an image with Python 3.9 or later, or take fewer nodes"
)
_FOLDERS = ("input", "model", "output", "checkpoints")  # the last one may be published


@dataclass(frozen=True, slots=True)
class RejectedTemplate:
    """A rejection: no pod can come of this template, because the operator's configuration does not allow it or it is no
    pod's."""

    reason: Reason
    message: str


def resolve_template(
    job: TrainingJob, *, epoch: int, pool: TrainingPool | None, plain: bool, settings: PlanSettings
) -> FrozenTemplate | RejectedTemplate:
    """Return the template of this epoch, or why there is none.

    Args:
        job: The job.
        epoch: The template epoch.
        pool: The pool to run in; None: the job names none.
        plain: Whether the image runs without the agent.
        settings: The operator's configuration.
    """
    over = job.spec.pod_template.spec.manifest()
    if (message := find_misshapen_field(over)) is not None:
        return RejectedTemplate(Reason.INVALID_TEMPLATE, message)
    if (message := _find_forbidden_field(over, settings)) is not None:
        return RejectedTemplate(Reason.NOT_PERMITTED, message)
    if plain and job.spec.num_nodes > plain_mode.MAX_NODES:
        return RejectedTemplate(Reason.INVALID_TEMPLATE, _TOO_MANY_PLAIN.format(nodes=job.spec.num_nodes))
    if (message := find_memory_shortage(job)) is not None:
        return RejectedTemplate(Reason.INVALID_TEMPLATE, message)
    config = build_job_config(job, template_epoch=epoch, pool=pool, settings=settings, plain=plain)
    spec = merge_overlay(_build_base_pod(job, epoch, pool, plain, settings), over)
    profile = job.spec.security_profile
    if profile == "restricted":
        confine_containers(spec)
    if (message := _find_violation(spec, job.spec.pod_template.metadata.annotations, profile, settings)) is not None:
        return RejectedTemplate(Reason.NOT_PERMITTED, message)
    trainer = next(c for c in spec["containers"] if c["name"] == TRAINER_CONTAINER)
    if (message := find_hidden_folder(job, trainer)) is not None:
        return RejectedTemplate(Reason.INVALID_TEMPLATE, message)
    if not plain:  # the agent writes its last message where it is by default, and nowhere else is it looked for
        for name in ("terminationMessagePath", "terminationMessagePolicy"):
            trainer.pop(name, None)
    if spec.get("hostNetwork"):
        _share_host_network(spec, trainer, plain_mode.MASTER_PORT if plain else settings.agent_port)
    # A read-only root without a writable /tmp breaks nearly every trainer.
    if (trainer.get("securityContext") or {}).get("readOnlyRootFilesystem") and not _has_mount(trainer, "/tmp"):  # noqa: S108
        trainer["volumeMounts"] = [*trainer["volumeMounts"], _build_mount("everstep-tmp", "/tmp")]  # noqa: S108
        spec["volumes"] = [*spec["volumes"], {"name": "everstep-tmp", "emptyDir": {}}]
    if (why := find_missing_store(job, spec, trainer)) is not None:
        policy = job.spec.checkpoint
        said = policy.describe_for_library() if policy is not None else {}  # a script may name a store itself
        said = {**{name: value for name, value in said.items() if name != "store"}, "missing": why}
        config["variables"] = {**config["variables"], CHECKPOINT_VARIABLE: _encode_json(said)}
    config |= {"ownsSharedMemory": _owns_folder(spec, trainer, _SHM), "ownsIpc": not spec.get("hostIPC")}
    config["ownsInput"] = _owns_folder(spec, trainer, plain_mode.CONFIG_FOLDER)
    # A user's volume on one of our mount points leaves our volume without a use.
    used = [m.get("name") for c in _list_containers(spec) for m in c.get("volumeMounts") or ()]
    spec["volumes"] = [v for v in spec["volumes"] if not v["name"].startswith("everstep-") or v["name"] in used]
    copied = {k: v for k, v in job.metadata.labels.items() if k in settings.copied_labels}
    meta = job.spec.pod_template.metadata
    labels = {**copied, **meta.labels}
    if pool is not None:
        labels[LABEL_CAPACITY] = pool.spec.capacity_type
    annotations = {**settings.pod_annotations, **meta.annotations}
    pod = {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}
    return FrozenTemplate(epoch=epoch, pod=pod, job=config)


def build_config_map(job: TrainingJob, frozen: FrozenTemplate, key: bytes) -> dict[str, Any]:
    """Return the immutable ConfigMap of a template, signed.

    Args:
        job: The job that owns it.
        frozen: Its template.
        key: The operator key.
    """
    data = {"job.json": _encode_json(frozen.job), "template.json": _encode_json(frozen.pod)}
    if frozen.on_demand is not None:
        data[_ON_DEMAND] = _encode_json({"count": frozen.num_on_demand, "template": frozen.on_demand})
    if frozen.job.get("plain"):
        data |= plain_mode.build_plain_files(frozen.job)
    data[_SIGNATURE] = _sign_template(data, job.metadata.namespace or "", job.metadata.uid, frozen.epoch, key)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": build_metadata(job, config_map_name_of(frozen), frozen.epoch),
        "immutable": True,
        "data": data,
    }


def build_secret(job: TrainingJob, epoch: int, name: str) -> dict[str, Any]:
    """Return the immutable Secret `name`, still without its token."""
    meta = build_metadata(job, name, epoch)
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "immutable": True, "type": "Opaque"}


def secret_name_of(frozen: FrozenTemplate) -> str:
    """Return the name of the Secret that the template's pods mount, or nothing where they mount none."""
    return agent_volume.find_token_secret(frozen.pod["spec"])


def config_map_name_of(frozen: FrozenTemplate) -> str:
    """Return the name of the ConfigMap that keeps the template, which its pods mount."""
    about = frozen.job["job"]
    mounted = agent_volume.find_template_config_map(frozen.pod["spec"], about["name"])
    return (
        mounted[0]
        if mounted is not None
        else agent_volume.make_template_name(about["name"], about["uid"], frozen.epoch)
    )


def read_frozen_template(
    raw: Mapping[str, Any], *, namespace: str, uid: str, epoch: int, keys: Sequence[bytes]
) -> FrozenTemplate | None:
    """Read the ConfigMap of a template epoch back, if the operator's signature on it holds.

    Pods are made from it with the operator's rights, and others may write ConfigMaps where the job is. What is in its
    metadata is not believed: labels and owner references of an immutable ConfigMap can still be changed.

    Args:
        raw: The ConfigMap as the API server gives it.
        namespace: Namespace of the job that asks.
        uid: UID of the job that asks.
        epoch: The template epoch that it asks for.
        keys: The operator keys, by any of which it may be signed.

    Returns:
        The template; None if it is damaged, forged, of another job or epoch, or signed by nobody or by another key: the
        job is then resolved again, as when its ConfigMap was deleted.
    """
    data = raw.get("data")
    if not isinstance(data, dict) or raw.get("binaryData"):
        return None
    content = {name: value for name, value in data.items() if name != _SIGNATURE}
    given = str(data.get(_SIGNATURE) or "").encode(errors="replace")
    if not any(
        hmac.compare_digest(_sign_template(content, namespace, uid, epoch, key).encode(), given) for key in keys
    ):
        return None
    try:
        pod, config = json.loads(content["template.json"]), json.loads(content["job.json"])
        first = json.loads(content.get(_ON_DEMAND, "{}"))
        return FrozenTemplate(epoch, {**pod}, {**config}, first.get("template"), first.get("count", 0))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _sign_template(data: Mapping[str, str], namespace: str, uid: str, epoch: int, key: bytes) -> str:
    """Sign all that the ConfigMap holds, for one job and one epoch. JSON tells where each part ends, and its first
    letter tells this from whatever else the key is used for: no UID begins with a bracket."""
    text = json.dumps(["frozen-template", namespace, uid, epoch, data], sort_keys=True)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def build_metadata(job: TrainingJob, name: str, epoch: int | None = None) -> dict[str, Any]:
    """Return the metadata of an object that belongs to a job, and to a template epoch of it if one is given."""
    labels = {**MANAGED_BY_LABEL, LABEL_JOB: job.metadata.name}
    if epoch is not None:
        labels[LABEL_TEMPLATE] = str(epoch)
    return {
        "name": name,
        "namespace": job.metadata.namespace,
        "labels": labels,
        "ownerReferences": [build_owner_reference(job.metadata.name, job.metadata.uid)],
    }


def _build_base_pod(
    job: TrainingJob, epoch: int, pool: TrainingPool | None, plain: bool, settings: PlanSettings
) -> dict[str, Any]:
    restricted = job.spec.security_profile == "restricted"
    security: dict[str, Any] = {"fsGroup": DEFAULT_USER_ID, "fsGroupChangePolicy": "OnRootMismatch"}
    if restricted:
        security |= {"runAsNonRoot": True, "runAsUser": DEFAULT_USER_ID, "seccompProfile": {"type": "RuntimeDefault"}}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": settings.termination_grace,
        "securityContext": security,
        "containers": [_build_trainer(job, pool, plain)],
        "volumes": _build_volumes(job, epoch, plain, settings),
        "tolerations": _build_tolerations(pool, settings),
    }
    if containers := build_folder_containers(job):
        spec["initContainers"] = containers
    if pool is not None and pool.spec.node_selector:
        spec["nodeSelector"] = dict(pool.spec.node_selector)
    if job.spec.num_nodes > 1:
        name, namespace = job.metadata.name, job.metadata.namespace or "default"
        spec["subdomain"] = name
        spec["dnsConfig"] = {"searches": [f"{name}.{namespace}.svc.{settings.cluster_domain}"]}
    return spec


def _build_trainer(job: TrainingJob, pool: TrainingPool | None, plain: bool) -> dict[str, Any]:
    spec = job.spec
    mounts = [_build_mount("everstep-shm", _SHM)]
    mounts += [_build_mount(f"everstep-{folder}", f"/opt/ml/{folder}") for folder in _FOLDERS]
    mounts[-1] |= mount_program_folder(job)
    env = [item.manifest() for item in spec.env]
    container: dict[str, Any] = {"name": TRAINER_CONTAINER, "image": spec.image, "env": env, "volumeMounts": mounts}
    if plain:
        if spec.command:
            container["command"] = [*spec.command]
        container["args"] = [*spec.args] or ([] if spec.command else ["train"])
        mounts.append(_build_mount("everstep-config", plain_mode.CONFIG_FOLDER, readOnly=True))
        container["terminationMessagePolicy"] = "FallbackToLogsOnError"
    else:
        container["command"] = AGENT_COMMAND
        env += [{"name": n, "valueFrom": {"fieldRef": {_FIELD_REF: path}}} for n, path in _REFERENCES.items()]
        # No `readOnly`: whatever a pod says, kubelets mount volumes of this kind so.
        mounts.append(_build_mount(agent_volume.VOLUME, agent_volume.FOLDER))
        mounts += [_build_mount("everstep-run", "/run/everstep"), _build_mount("everstep-memory", _CHECKPOINT_MEMORY)]
    said = spec.resources
    amounts = {"requests": _with_gpu_name(said.requests, pool), "limits": _with_gpu_name(said.limits, pool)}
    resources = {**amounts, "claims": [each.manifest() for each in said.claims]}
    if resources := {kind: given for kind, given in resources.items() if given}:
        container["resources"] = resources
    if spec.checkpoint is not None and spec.checkpoint.secret_ref is not None:
        container["envFrom"] = [{"secretRef": {"name": spec.checkpoint.secret_ref.name}}]
    if spec.image_pull_policy is not None:
        container["imagePullPolicy"] = spec.image_pull_policy
    return container


def _with_gpu_name(amounts: Mapping[str, str], pool: TrainingPool | None) -> dict[str, str]:
    """Return amounts under the pool's name for GPUs, which the usual name in a job means."""
    name = gpu_resource(pool)
    if name == DEFAULT_GPU_RESOURCE or DEFAULT_GPU_RESOURCE not in amounts or name in amounts:
        return dict(amounts)
    return {(name if key == DEFAULT_GPU_RESOURCE else key): amount for key, amount in amounts.items()}


def _build_volumes(job: TrainingJob, epoch: int, plain: bool, settings: PlanSettings) -> list[dict[str, Any]]:
    name = agent_volume.make_template_name(job.metadata.name, job.metadata.uid, epoch)
    shared_memory, checkpoint_memory = limit_memory_volumes(job)
    volumes: list[dict[str, Any]] = [
        {"name": "everstep-shm", "emptyDir": {"medium": "Memory", "sizeLimit": shared_memory}},
        *({"name": f"everstep-{folder}", **find_volume_source(job, folder)} for folder in _FOLDERS),
    ]
    if plain:
        config = {
            "name": name,
            "items": [{"key": k, "path": k} for k in ("hyperparameters.json", "inputdataconfig.json")],
        }
        annotation = {"fieldRef": {_FIELD_REF: f"metadata.annotations['{plain_mode.RESOURCE_CONFIG_ANNOTATION}']"}}
        per_pod = {"items": [{"path": "resourceconfig.json", **annotation}]}
        sources = [{"configMap": config}, {"downwardAPI": per_pod}]
        return [*volumes, {"name": "everstep-config", "projected": {"sources": sources}}]
    token = make_secret_name(job.metadata.name, job.metadata.uid, epoch, settings.operator_key)
    return [
        *volumes,
        agent_volume.build_agent_volume(agent=settings.agent_config_map, template=name, token=token),
        {"name": "everstep-run", "emptyDir": {}},
        {"name": "everstep-memory", "emptyDir": {"medium": "Memory", "sizeLimit": checkpoint_memory}},
    ]


def _build_tolerations(pool: TrainingPool | None, settings: PlanSettings) -> list[dict[str, Any]]:
    # Said here, so that the job behaves alike on a cluster that adds other ones by default, or none.
    patient = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": settings.node_lost_toleration}
    ours = [{"key": f"node.kubernetes.io/{taint}", **patient} for taint in ("not-ready", "unreachable")]
    return [*ours, *(t.manifest() for t in pool.spec.tolerations)] if pool is not None else ours


def _share_host_network(spec: dict[str, Any], trainer: dict[str, Any], port: int) -> None:
    """Tell the scheduler which port of its node a pod needs: no two have one, of this job or another. And names of the
    job are those of the cluster, also where pods have the name servers of their nodes by default."""
    spec.setdefault("dnsPolicy", "ClusterFirstWithHostNet")
    ports = trainer.get("ports") or []
    if all(each.get("containerPort") != port for each in ports):
        trainer["ports"] = [*ports, {"containerPort": port}]


def _find_forbidden_field(over: Mapping[str, Any], settings: PlanSettings) -> str | None:
    account = over.get("serviceAccountName") or over.get("serviceAccount")
    if account and not _is_allowed(account, settings.service_accounts):
        return _denial_message(f"serviceAccountName {account!r}", "service accounts")
    priority = over.get("priorityClassName")
    if priority and not _is_allowed(priority, settings.priority_classes):
        return _denial_message(f"priorityClassName {priority!r}", "priority classes")
    if over.get(_AUTOMOUNT) and not _is_allowed(_AUTOMOUNT, settings.host_fields):
        return _denial_message(_AUTOMOUNT, "host fields")
    # The same token, mounted by hand.
    projected = {
        v["name"]
        for v in over.get("volumes") or ()
        if any("serviceAccountToken" in s for s in _list_projected_sources(v))
    }
    if projected and not _is_allowed(_AUTOMOUNT, settings.host_fields):
        return _denial_message(
            f"{_AUTOMOUNT}, for the serviceAccountToken in volumes {sorted(projected)},", "host fields"
        )
    return None


def _find_violation(
    spec: Mapping[str, Any], annotations: Mapping[str, str], profile: Profile, settings: PlanSettings
) -> str | None:
    """Return what the job's security profile forbids and no administrator has granted, None if nothing."""
    found = [
        each
        for each in list_violations(spec, annotations, profile)
        if not _is_allowed(each.grant, settings.host_fields)
    ]
    if not found:
        return None
    grants = ", ".join(sorted({each.grant for each in found}))
    standard = "restricted" if profile == "restricted" else "baseline"
    remedy = "remove it"
    if profile == "restricted" and not list_violations(spec, annotations, "image"):
        remedy += ", say securityProfile: image"
    return (
        f"{found[0]}: securityProfile {profile} is the {standard} Pod Security Standard; {remedy}, or ask whoever runs "
        f"the operator to allow {grants} among its host fields"
    )


def _owns_folder(spec: Mapping[str, Any], trainer: Mapping[str, Any], folder: str) -> bool:
    """Tell whether nobody but this pod sees what is in a folder: its agent may empty its /dev/shm then, and other pods
    write none of the contract's files there."""
    mounts = {normalize_mount_path(m.get("mountPath") or "/"): m.get("name") for m in trainer.get("volumeMounts") or ()}
    around = [folder, *map(str, PurePosixPath(folder).parents)]
    name = next((mounts[path] for path in around if path in mounts), None)
    return any(volume["name"] == name and "emptyDir" in volume for volume in spec.get("volumes") or ())


def _list_projected_sources(volume: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    return (volume.get("projected") or {}).get("sources") or ()


def _denial_message(what: str, which: str) -> str:
    return (
        f"podTemplate.spec: {what} is not in the operator's list of allowed {which}: remove it, or ask whoever runs "
        "the operator to allow it"
    )


def _is_allowed(name: str, names: frozenset[str]) -> bool:
    return "*" in names or name in names


def _list_containers(spec: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    return [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]


def _has_mount(container: Mapping[str, Any], path: str) -> bool:
    return any(normalize_mount_path(m.get("mountPath") or "") == path for m in container["volumeMounts"])


def _build_mount(name: str, path: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "mountPath": path, **more}


def _encode_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
