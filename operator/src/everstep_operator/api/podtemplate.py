"""The overlay on the job's pods: unknown fields pass through, fields that everstep owns are refused."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_snake

from everstep_operator.api.base import ApiModel
from everstep_operator.api.rules import Rule
from everstep_operator.api.scalars import (
    LABEL_KEY,
    Argument,
    DnsLabel,
    DropNulls,
    LabelValue,
    ListMap,
    Whole,
    limit_keys,
)

TRAINER_CONTAINER = "trainer"
RESERVED_VOLUME_PREFIX = "everstep-"

Annotation = Annotated[str, Field(max_length=262144)]
"""At most what Kubernetes allows all annotations together."""
_LABEL_KEYS = limit_keys(LABEL_KEY, 317, "keys must be label names, like example.com/team")


def _forbid_field(field: str, message: str) -> Rule:
    attribute = to_snake(field)
    return Rule(f"!has(self.{field})", message, lambda value: getattr(value, attribute) is None, f".{field}")


def _forbid_trainer_field(field: str, message: str) -> Rule:
    attribute = to_snake(field)
    return Rule(
        f"self.name != '{TRAINER_CONTAINER}' || !has(self.{field})",
        message,
        lambda value: value.name != TRAINER_CONTAINER or getattr(value, attribute) is None,
        f".{field}",
    )


def _is_reserved_label(label: str) -> bool:
    return label.startswith("everstep.dev/") or label == "app.kubernetes.io/managed-by"


class PodMetadata(ApiModel):
    """Labels and annotations of the job's pods."""

    labels: Annotated[dict[str, LabelValue], Field(max_length=64), _LABEL_KEYS, DropNulls] = Field(default_factory=dict)
    """Added to everstep's own."""
    annotations: Annotated[dict[str, Annotation], Field(max_length=64), _LABEL_KEYS, DropNulls] = Field(
        default_factory=dict
    )
    """Added to the pods."""

    rules: ClassVar = (
        Rule(
            "!has(self.labels) || "
            "self.labels.all(key, !key.startsWith('everstep.dev/') && key != 'app.kubernetes.io/managed-by')",
            "labels everstep.dev/* and app.kubernetes.io/managed-by are set by everstep: remove them",
            lambda value: not any(_is_reserved_label(key) for key in value.labels),
            ".labels",
        ),
    )


class ContainerOverlay(ApiModel):
    """A container: the one named `trainer` is merged into everstep's, any other one runs beside it."""

    model_config = ConfigDict(extra="allow")

    name: DnsLabel
    """`trainer`, or a sidecar's name."""
    image: str | None = Field(default=None, max_length=1024)
    """For sidecars only: the trainer's is a field of the job."""
    command: list[Argument] | None = Field(default=None, max_length=1024)
    """For sidecars only: the trainer's is a field of the job."""
    args: list[Argument] | None = Field(default=None, max_length=1024)
    """For sidecars only: the trainer's is a field of the job."""
    env: list[dict[str, Any]] | None = Field(default=None, max_length=256)
    """For sidecars only: the trainer's is a field of the job."""
    resources: dict[str, Any] | None = None
    """For sidecars only: the trainer's is a field of the job."""
    image_pull_policy: str | None = Field(default=None, max_length=32)
    """For sidecars only: the trainer's is a field of the job."""
    restart_policy: str | None = Field(default=None, max_length=32)
    """For sidecars only: the trainer's is a field of the job."""

    rules: ClassVar = (
        _forbid_trainer_field("image", "the trainer's image is spec.image: set it there"),
        _forbid_trainer_field("command", "the trainer's command is spec.command: set it there"),
        _forbid_trainer_field("args", "the trainer's arguments are spec.args: set them there"),
        _forbid_trainer_field("env", "the trainer's environment is spec.env: set it there"),
        _forbid_trainer_field("resources", "the trainer's resources are spec.resources: set them there"),
        _forbid_trainer_field("imagePullPolicy", "the trainer's pull policy is spec.imagePullPolicy: set it there"),
        _forbid_trainer_field("restartPolicy", "everstep restarts the trainer itself: remove restartPolicy"),
    )


class VolumeOverlay(ApiModel):
    """A volume of the pod."""

    model_config = ConfigDict(extra="allow")

    name: DnsLabel
    """The name that volumeMounts refer to."""

    rules: ClassVar = (
        Rule(
            f"!self.name.startsWith('{RESERVED_VOLUME_PREFIX}')",
            f"volume names that start with {RESERVED_VOLUME_PREFIX} belong to everstep: choose another name",
            lambda value: not value.name.startswith(RESERVED_VOLUME_PREFIX),
            ".name",
        ),
    )


class PodSpecOverlay(ApiModel):
    """Fields of a pod's spec. Those listed here are declared so that they can be checked; all others pass through."""

    model_config = ConfigDict(extra="allow")

    containers: Annotated[list[ContainerOverlay], Field(max_length=16), ListMap("name", lambda c: c.name)] | None = None
    """`trainer` is merged into everstep's container; others are sidecars."""
    volumes: Annotated[list[VolumeOverlay], Field(max_length=64), ListMap("name", lambda v: v.name)] | None = None
    """Added to everstep's own."""
    termination_grace_period_seconds: Annotated[int, Field(ge=15, le=86400), Whole] | None = None
    """Seconds from TERM to KILL when a pod is stopped; a stopped job writes its last checkpoint in this time."""
    service_account_name: str | None = Field(default=None, max_length=253)
    """Allowed if the operator's configuration lists it."""
    host_network: bool | None = None
    """Allowed where the operator's configuration says so. A node has one such pod: its agent's port is the node's."""
    host_pid: bool | None = Field(default=None, alias="hostPID")
    """Allowed where the operator's configuration says so."""
    host_ipc: bool | None = Field(default=None, alias="hostIPC")
    """Allowed where the operator's configuration says so."""
    automount_service_account_token: bool | None = None
    """Default false. True is allowed if the operator's configuration allows it."""
    restart_policy: str | None = Field(default=None, max_length=32)
    """Refused."""
    hostname: str | None = Field(default=None, max_length=253)
    """Refused."""
    subdomain: str | None = Field(default=None, max_length=253)
    """Refused."""
    set_hostname_as_fqdn: bool | None = Field(default=None, alias="setHostnameAsFQDN")
    """Refused."""
    node_name: str | None = Field(default=None, max_length=253)
    """Refused."""
    active_deadline_seconds: Annotated[int, Whole] | None = None
    """Refused."""
    share_process_namespace: bool | None = None
    """False only."""

    rules: ClassVar = (
        _forbid_field(
            "restartPolicy", "everstep restarts ranks and pods itself: remove restartPolicy, see spec.restart"
        ),
        _forbid_field("hostname", "the container contract names hosts algo-1, algo-2, ...: remove hostname"),
        _forbid_field("subdomain", "the job's Service is the pods' subdomain: remove subdomain"),
        _forbid_field(
            "setHostnameAsFQDN", "the container contract names hosts algo-1, algo-2, ...: remove setHostnameAsFQDN"
        ),
        _forbid_field("nodeName", "nodeName goes past the scheduler: use a TrainingPool, nodeSelector or affinity"),
        _forbid_field("activeDeadlineSeconds", "all pods of a job have one clock: use spec.timeouts.runtime"),
        Rule(
            "!has(self.shareProcessNamespace) || !self.shareProcessNamespace",
            "everstep's agent must be process 1 of its container: remove shareProcessNamespace",
            lambda value: not value.share_process_namespace,
            ".shareProcessNamespace",
        ),
    )


class PodTemplate(ApiModel):
    """The overlay on the job's pods."""

    metadata: PodMetadata = Field(default_factory=PodMetadata)
    spec: PodSpecOverlay = Field(default_factory=PodSpecOverlay)
