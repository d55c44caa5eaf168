"""TrainingJob: what to run, on how many nodes, and what may break on the way."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from everstep_operator.api.base import ApiModel
from everstep_operator.api.meta import API_VERSION, ObjectMeta
from everstep_operator.api.podtemplate import PodTemplate
from everstep_operator.api.rules import Rule, TransitionRule
from everstep_operator.api.scalars import DnsName, DropNulls, Duration, Int, ListMap, Pattern, Quantity, between, keys
from everstep_operator.api.status import TrainingJobStatus

OPERATOR = "everstep.dev/operator"
NAME = "^[a-z]([-a-z0-9]{0,48}[a-z0-9])?$"
_NAME = re.compile(NAME)
_DOMAIN_PATH = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/[A-Za-z0-9/._~%!$&'()*+,;=:-]+$"

Argument = Annotated[str, Field(max_length=131072)]
"""At most what Linux takes as one argument (MAX_ARG_STRLEN)."""


class EnvVar(ApiModel):
    """An environment variable of the trainer."""

    name: Annotated[str, Pattern("^[ -<>-~]+$", 256)]
    value: Argument | None = None
    value_from: dict[str, Any] | None = None
    """A Kubernetes EnvVarSource; its content is checked when the first pod is created."""

    rules: ClassVar = (
        Rule(
            "!has(self.value) || self.value == '' || !has(self.valueFrom)",
            "set value or valueFrom, not both",
            lambda env: not env.value or env.value_from is None,
        ),
        Rule(
            "!self.name.startsWith('EVERSTEP_')",
            "names that start with EVERSTEP_ belong to everstep: choose another name",
            lambda env: not env.name.startswith("EVERSTEP_"),
            ".name",
        ),
    )


ResourceList = Annotated[
    dict[str, Quantity],
    DropNulls,
    Field(max_length=32),
    keys("^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", 317,
         "keys must be resource names, like cpu or nvidia.com/gpu"),
]  # fmt: skip


class Resources(ApiModel):
    """Resources of the trainer container of each pod."""

    requests: ResourceList = Field(default_factory=dict)
    limits: ResourceList = Field(default_factory=dict)


class Torch(ApiModel):
    """Ranks are started directly with torch.distributed's environment variables; torchrun is not needed."""


class Mpi(ApiModel):
    """Ranks are started by `mpirun`, which needs neither ssh nor root here."""

    options: list[Argument] = Field(default_factory=list, max_length=64)
    """Further arguments of mpirun."""


class Horovod(Mpi):
    """Ranks are started by `mpirun` with what Horovod expects."""


class Plain(ApiModel):
    """One process per pod, which starts its own ranks, such as torchrun."""


class Distribution(ApiModel):
    """How ranks are started: exactly one of the fields."""

    torch: Torch | None = None
    horovod: Horovod | None = None
    mpi: Mpi | None = None
    none: Plain | None = None

    rules: ClassVar = (
        Rule(
            "[has(self.torch), has(self.horovod), has(self.mpi), has(self.none)].filter(given, given).size() == 1",
            "set exactly one of torch, horovod, mpi, none; an empty one is written torch: {}",
            lambda value: len(value.model_dump(exclude_none=True)) == 1,
        ),
    )

    @property
    def kind(self) -> Literal["torch", "horovod", "mpi", "none"]:
        """The name of the field that is set."""
        if self.torch is not None:
            return "torch"
        if self.horovod is not None:
            return "horovod"
        return "mpi" if self.mpi is not None else "none"

    @property
    def options(self) -> list[str]:
        """Further arguments of mpirun; empty for torch and none."""
        chosen = self.horovod or self.mpi
        return list(chosen.options) if chosen is not None else []


class PoolChoice(ApiModel):
    """A TrainingPool to try."""

    name: DnsName
    wait: Annotated[Duration, between("0s", "28d")] = timedelta(minutes=10)
    """How long to wait for capacity here before the next pool is tried; without meaning on the last one."""


class Restart(ApiModel):
    """How often the job may be restarted. Pre-emption is never charged."""

    application: Annotated[Int, Field(ge=0, le=1000)] = 3
    """Restarts within `window` that failures of the program may cost."""
    infrastructure: Annotated[Int, Field(ge=0, le=1000)] = 20
    """Restarts within `window` that lost pods and nodes may cost."""
    window: Annotated[Duration, between("1s", "28d")] = timedelta(hours=1)
    """The time over which restarts are counted."""
    fencing: Literal["checkpoint", "strict"] = "checkpoint"
    """What ranks lose when they are cut off from the leader: the right to publish a checkpoint, or (strict) to run at all."""
    max_backoff: Annotated[Duration, between("0s", "1h")] = timedelta(minutes=1)
    """Longest pause before a restart after repeated failures of the program; `0s` switches pauses off."""


class Timeouts(ApiModel):
    """When to give up."""

    pending: Annotated[Duration, between("1s", "28d")] = timedelta(hours=6)
    """Longest time without enough capacity for all pods."""
    startup: Annotated[Duration, between("1s", "1d")] = timedelta(minutes=10)
    """Longest time from pods on nodes until all ranks are started."""
    runtime: Annotated[Duration, between("1s", "28d")] = timedelta(hours=24)
    """Longest time since the first start, less the time spent pending or suspended."""


# What the operator itself judges at any time may change at any time; what running pods were built from may not.
MUTABLE = ("suspend", "ttlAfterFinished", "timeouts", "restart")
_HOW = "set spec.suspend to true, change it, then set spec.suspend to false"


def _fixed(field: str, attribute: str) -> TransitionRule:
    return TransitionRule(
        f"self.suspend || oldSelf.suspend || self.?{field} == oldSelf.?{field}",
        f"{field} cannot change while the job is active: {_HOW}",
        lambda new, old: new.suspend or old.suspend or getattr(new, attribute) == getattr(old, attribute),
        f".{field}",
    )


class TrainingJobSpec(ApiModel):
    """What to run."""

    image: str = Field(min_length=1, max_length=1024)
    """Container image of the trainer."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """Default: Kubernetes' own, by the image's tag."""
    command: list[Argument] | None = Field(default=None, min_length=1, max_length=256)
    """The program of one rank. Absent: plain mode, the image's entrypoint with the argument `train`."""
    args: list[Argument] = Field(default_factory=list, max_length=1024)
    """Arguments of the command; without a command, of the image's entrypoint in place of `train`."""
    env: Annotated[list[EnvVar], Field(max_length=256), ListMap("name", lambda env: env.name)] = Field(
        default_factory=list
    )
    """Environment variables of the trainer."""
    hyperparameters: Annotated[
        dict[str, Annotated[str, Field(max_length=2500)]],
        DropNulls,
        Field(max_length=100),
        keys("^[^\\x00]+$", 256, "keys must have between 1 and 256 characters"),
    ] = Field(default_factory=dict)
    """Strings that the program finds in `/opt/ml/input/config/hyperparameters.json`, `SM_HPS` and `SM_HP_<name>`."""
    num_nodes: Annotated[Int, Field(ge=1, le=2000)] = 1
    """Pods of the job."""
    num_proc_per_node: Annotated[Int, Field(ge=1, le=64)] | None = None
    """Ranks in each pod. Default: its GPUs, otherwise 1."""
    resources: Resources = Resources()
    """Resources of each pod's trainer container."""
    distribution: Distribution = Distribution(torch=Torch())
    """How ranks are started."""
    pools: Annotated[list[PoolChoice], Field(max_length=8), ListMap("name", lambda pool: pool.name)] = Field(
        default_factory=list
    )
    """TrainingPools in order of preference. Empty: any node that fits."""
    restart: Restart = Restart()
    """Restart budgets and fencing."""
    timeouts: Timeouts = Timeouts()
    """When to give up."""
    security_profile: Literal["restricted", "image"] = "restricted"
    """`restricted`: Pod Security's restricted profile, user 1000. `image`: the image's own user, for images that need root."""
    suspend: bool = False
    """True stops the job with a grace period and keeps it; false starts it, or starts it again."""
    ttl_after_finished: Annotated[Duration, between("0s", "365d")] | None = None
    """Delete the job so long after its end. Absent: never. A GitOps controller creates, and so runs, a deleted job again."""
    managed_by: Annotated[str, Pattern(_DOMAIN_PATH, 63)] | None = None
    """The controller in charge. Absent or `everstep.dev/operator`: everstep; a job of any other is left alone."""
    pod_template: PodTemplate = PodTemplate()
    """Overlay on the job's pods."""

    transitions_allowed: ClassVar = (
        *(_fixed(field, attribute) for field, attribute in (
            ("image", "image"), ("imagePullPolicy", "image_pull_policy"), ("command", "command"), ("args", "args"), ("env", "env"),
            ("hyperparameters", "hyperparameters"), ("numNodes", "num_nodes"), ("numProcPerNode", "num_proc_per_node"),
            ("resources", "resources"), ("distribution", "distribution"), ("pools", "pools"),
            ("securityProfile", "security_profile"), ("podTemplate", "pod_template"),
        )),
        TransitionRule(
            "self.?managedBy == oldSelf.?managedBy",
            "managedBy cannot change: delete the job and create it again",
            lambda new, old: new.managed_by == old.managed_by,
            ".managedBy",
        ),
    )  # fmt: skip


class TrainingJob(ApiModel):
    """A distributed training run."""

    api_version: Literal["everstep.dev/v1alpha1"] = API_VERSION
    kind: Literal["TrainingJob"] = "TrainingJob"
    metadata: ObjectMeta
    spec: TrainingJobSpec
    status: TrainingJobStatus = TrainingJobStatus()

    rules: ClassVar = (
        Rule(
            f"self.metadata.name.matches('{NAME}')",
            "metadata.name must be at most 50 characters a-z, 0-9 and '-', start with a letter and end with a letter or digit: "
            "pods and the Service are named after it",
            lambda job: (
                bool(_NAME.fullmatch(job.metadata.name)) or (not job.metadata.name and bool(job.metadata.generate_name))
            ),
        ),
    )

    @property
    def managed_here(self) -> bool:
        """Whether this operator is in charge of the job."""
        return self.spec.managed_by in (None, OPERATOR)
