"""The operator's settings: environment variables `EVERSTEP_<NAME>` (the chart's), each also a command-line flag."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from everstep_operator.plan.decision import parse_reason
from everstep_operator.plan.node_signals import Place, SignalRule
from everstep_operator.plan.plan_settings import GUARD_ANNOTATIONS

PREFIX = "EVERSTEP_"
MIN_NODE_SILENCE = 15.0


def _split_names(value: Any) -> Any:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _limit_silence(value: float) -> float:
    if value and not MIN_NODE_SILENCE <= value <= 3600:
        raise ValueError(f"must be 0, or from {MIN_NODE_SILENCE:g} to 3600 seconds: kubelets renew every 10 s")
    return value


def _decode_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"must be JSON: {error}") from error


class NodeSignalSetting(BaseModel):
    """One signal of a Node that an administrator adds, or means otherwise than the operator does."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    taint: str = ""
    """Key of the taint. Exactly one of `taint`, `label` and `condition` is given."""
    label: str = ""
    """Key of the label."""
    condition: str = ""
    """Type of the condition."""
    value: str = ""
    """Value of the label, or status of the condition; default: any, and True."""
    reason: Literal["SpotInterruption", "NodeMaintenance", "ScaleDown", "NodeUnhealthy", "GpuUnhealthy"]
    seconds: float | None = Field(None, gt=0, le=86_400)
    """Seconds from the signal until the machine may be gone; absent: it stays, and only a checkpoint is asked for."""

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if sum(map(bool, (self.taint, self.label, self.condition))) != 1:
            raise ValueError("give exactly one of taint, label and condition")
        return self

    def to_rule(self) -> SignalRule:
        """Return the rule for the table of signals."""
        place: Place = "taint" if self.taint else "label" if self.label else "condition"
        name = self.taint or self.label or self.condition
        return SignalRule(place, name, parse_reason(self.reason), self.seconds, self.value)


NameList = Annotated[tuple[str, ...], BeforeValidator(_split_names)]


class OperatorSettings(BaseModel):
    """Holds what an administrator may set. Times are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    watch_namespaces: NameList = ()
    """Namespaces whose jobs this operator runs; none: all of them."""
    kubeconfig: str | None = None
    """For an operator outside of a cluster; default: the pod's service account, else $KUBECONFIG."""
    cluster_domain: str = "cluster.local"
    agent_port: int = Field(8470, ge=1, le=65535)
    fence_timeout: float = Field(35.0, ge=5)
    """How long a leader that nobody renews may go on publishing checkpoints."""
    node_silence: Annotated[float, AfterValidator(_limit_silence)] = 20.0
    """How long the kubelet of a silent agent's node must not have renewed the node's Lease (it does every 10 s) until
    the node is taken for dead and its pods are replaced; at least three eighths of the Lease's duration. 0: only a
    removed Node object is."""

    node_failure_window: float = Field(86_400.0, ge=0, le=30 * 86_400)
    """How long a failure of a job counts against its node. Nodes with two of them, or one of a device, are avoided by
    new pods. 0: no node is ever avoided."""

    node_signals: Annotated[tuple[NodeSignalSetting, ...], BeforeValidator(_decode_json)] = ()
    """Further signals of Nodes that go away or are in trouble, as a JSON list; see `NodeSignalSetting`."""

    out_of_service_taint: bool = False
    """Whether dead nodes are marked out of service where a job waits for a volume to be detached from them."""

    allowed_service_accounts: NameList = ()
    """Service accounts that a job's pods may use besides `default`."""
    allowed_host_fields: NameList = ()
    allowed_priority_classes: NameList = ()
    copied_labels: NameList = ("kueue.x-k8s.io/queue-name",)
    """Labels of a job that its pods get too. Never all of them: a GitOps tool would take the pods for its own."""
    job_pod_annotations: Annotated[dict[str, str], BeforeValidator(_decode_json)] = dict(GUARD_ANNOTATIONS)
    """Annotations of jobs' pods, as a JSON object, unless the pod template has them otherwise."""
    disruption_budget: bool = False
    """Whether each running job gets a PodDisruptionBudget."""

    workers: int = Field(32, ge=1)
    """Jobs looked at in parallel, those aside that hang; those of one namespace get half of what others leave."""
    parallel_creates: int = Field(100, ge=1)
    """Requests that create or delete pods in parallel, over all jobs, those aside that hang; one namespace gets half of
    what others leave."""
    leader_connections: int = Field(1000, ge=1)
    resync_seconds: float = Field(300.0, gt=0)
    request_timeout: float = Field(35.0, gt=0)
    """Longer than an admission webhook may take (30): the API server then says which one did not answer."""

    lease_name: str = "everstep-operator"
    pod_namespace: str = "everstep-system"
    """Where the Lease and the operator key are."""
    pod_uid: str = ""
    """Who holds the Lease. A container that is restarted keeps its pod's UID and goes on at once."""
    key_secret: str = "everstep-operator-key"  # noqa: S105 (a name)
    """Name of the Secret of the operator key. The operator makes it if there is none; another name is another key."""
    key_folder: Path = Path("/etc/everstep/key")
    """Where that Secret is mounted."""
    previous_keys_folder: Path = Path("/etc/everstep/previous-keys")
    """One file for each key that was current before, and by which running jobs were started."""

    bind: str = ""
    """Address of the health and metrics ports. Empty: all of the pod's, since the kubelet probes from outside of it."""
    health_port: int = Field(8080, ge=0, le=65535)
    metrics_port: int = Field(9090, ge=-1, le=65535)
    """-1: no metrics."""
    stuck_seconds: float = Field(600.0, gt=0)
    """`/healthz` fails when one look at one job takes longer."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "text"] = "json"

    @classmethod
    def load(cls, environment: Mapping[str, str], flags: Mapping[str, Any] | None = None) -> Self:
        """Read the settings. Flags win over variables; an empty variable is an absent one. `POD_UID` and
        `POD_NAMESPACE` have no prefix: the chart fills them from the pod's own fields."""
        values: dict[str, Any] = {}
        for name in cls.model_fields:
            variable = name.upper() if name.startswith("pod_") else PREFIX + name.upper()
            if environment.get(variable):
                values[name] = environment[variable]
        values.update({name: value for name, value in (flags or {}).items() if value is not None})
        return cls(**values)
