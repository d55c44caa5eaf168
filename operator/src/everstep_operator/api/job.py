"""TrainingJob: what to run, on how many nodes, and what may break on the way."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from datetime import timedelta
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field
from pydantic.alias_generators import to_snake

from everstep.pipeline.schedules import NAMES as SCHEDULE_NAMES
from everstep_operator.api.base import ApiModel
from everstep_operator.api.checkpoint import CheckpointPolicy
from everstep_operator.api.meta import ObjectMeta
from everstep_operator.api.newer import StoredResource
from everstep_operator.api.podtemplate import PodTemplate
from everstep_operator.api.restart import RestartPolicy
from everstep_operator.api.rules import Rule, UpdateRule
from everstep_operator.api.scalars import (
    Argument,
    Atomic,
    DnsName,
    DropNulls,
    Duration,
    ListMap,
    Pattern,
    Whole,
    format_duration,
    limit_duration,
)
from everstep_operator.api.status import TrainingJobStatus
from everstep_operator.api.trainer import EnvVar, TrainerResources

OPERATOR_NAME = "everstep.dev/operator"
JOB_NAME_PATTERN = "^[a-z]([-a-z0-9]{0,48}[a-z0-9])?$"
if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[("auto", *SCHEDULE_NAMES)]  # as the pipeline library's table has them
_NAME = re.compile(JOB_NAME_PATTERN)
_DOMAIN_PATH = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/[A-Za-z0-9/._~%!$&'()*+,;=:-]+$"


class TorchDistribution(ApiModel):
    """The agent starts ranks directly with torch.distributed's environment variables; torchrun is not needed."""


class MpiDistribution(ApiModel):
    """`mpirun` starts the ranks, without ssh and without root."""

    options: list[Argument] = Field(default_factory=list, max_length=64)
    """Further arguments of mpirun."""


class HorovodDistribution(MpiDistribution):
    """`mpirun` starts the ranks with the environment that Horovod expects."""


class PipelineDistribution(ApiModel):
    """Ranks start as with `torch`; in the program, `everstep.pipeline` cuts the model into stages by these fields."""

    stages: Annotated[int, Field(ge=1, le=4096), Whole]
    """Stages of the model: a divisor of the job's ranks, which then hold replicas, or a multiple of them."""
    microbatches: Annotated[int, Field(ge=1, le=65536), Whole] | None = None
    """Pieces of a replica's batch. Absent: the number with the shortest step."""
    schedule: ScheduleName = "auto"
    """The order of forward and backward passes; `auto`: the one with the shortest step within the memory."""
    optimize: Literal["speed", "memory"] = "speed"
    """Objective of the partition: short steps, or the fullest rank's memory too."""
    plan_from: Literal["profile", "file"] = "profile"
    """`profile`: the first generation measures and writes its plan to `planFile`; later ones use it, and solve it again
    when stages or ranks have changed. `file`: the plan must exist, or the job fails."""
    plan_file: Annotated[str, Pattern("^/[ -~]*[^/]$", 1024)] = "/opt/ml/checkpoints/pipeline-plan.json"
    """Path of the plan, in a volume that outlives the pods."""


class PlainDistribution(ApiModel):
    """The agent starts one process in each pod, such as torchrun, which starts its own ranks."""


class Distribution(ApiModel):
    """Selects how ranks are started: exactly one of the fields."""

    torch: TorchDistribution | None = None
    horovod: HorovodDistribution | None = None
    mpi: MpiDistribution | None = None
    pipeline: PipelineDistribution | None = None
    none: PlainDistribution | None = None

    rules: ClassVar = (
        Rule(
            "[has(self.torch), has(self.horovod), has(self.mpi), has(self.pipeline), has(self.none)]"
            ".filter(given, given).size() == 1",
            "set exactly one of torch, horovod, mpi, pipeline, none; an empty one is written torch: {}",
            lambda value: len(value.model_dump(exclude_none=True)) == 1,
        ),
    )

    @property
    def kind(self) -> Literal["torch", "horovod", "mpi", "none"]:
        """Return how the agent starts ranks: those of a pipeline are torch's."""
        if self.torch is not None or self.pipeline is not None:
            return "torch"
        if self.horovod is not None:
            return "horovod"
        return "mpi" if self.mpi is not None else "none"

    @property
    def options(self) -> list[str]:
        """Return further arguments of mpirun; an empty list where there are none."""
        chosen = self.horovod or self.mpi
        return list(chosen.options) if chosen is not None else []

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables by which the library in the ranks is configured."""
        if self.pipeline is None:
            return {}
        return {"EVERSTEP_PIPELINE": self.pipeline.model_dump_json(by_alias=True, exclude_none=True)}


_DEFAULT_WAIT = timedelta(minutes=10)


class PoolChoice(ApiModel):
    """A TrainingPool to try."""

    name: DnsName
    """Name of the TrainingPool."""
    wait: Annotated[Duration, limit_duration("0s", "28d")] = _DEFAULT_WAIT
    """How long to wait for capacity in this pool before the next one is tried. Ignored for the last pool, until the job
    has run: a job whose checkpoints are in a store or a lasting volume then goes on with the first one again."""


class Timeouts(ApiModel):
    """Sets the times after which the operator fails the job."""

    pending: Annotated[Duration, limit_duration("1s", "28d")] = timedelta(hours=6)
    """Longest time without enough capacity for all pods. It begins anew when a queue, as Kueue, has let them go."""
    startup: Annotated[Duration, limit_duration("1s", "1d")] = timedelta(minutes=10)
    """Longest time from pods on nodes until all ranks are started. In a job that has run, from when all containers are
    started: for images, Secrets and volumes it waits as long as for capacity, and `startup` besides."""
    runtime: Annotated[Duration, limit_duration("1s", "28d")] = timedelta(hours=24)
    """Longest time since the first start, less the time spent pending or suspended."""
    hang: Annotated[Duration, limit_duration("1s", "28d")] | None = None
    """Longest time in which no rank that reports steps makes one, unless one reports another phase than `train`. The
    stacks of all ranks are written to the log then, and all ranks start again. Absent: no limit."""


_FIXED_FIELDS = (
    "image", "imagePullPolicy", "command", "args", "env", "hyperparameters", "numNodes", "numProcPerNode", "resources",
    "distribution", "pools", "minOnDemand", "checkpoint", "restart.fencing", "restart.maxBackoff",
    "restart.onExitCodes", "timeouts.hang", "securityProfile", "podTemplate",
)  # fmt: skip
"""What the pods are built from. The rest is judged by the operator at every moment and may change at any."""
_IN_ANY_ORDER = ("podTemplate.spec.containers", "podTemplate.spec.volumes", "resources.claims")
_PASSED_THROUGH = frozenset({"env", "checkpoint", "podTemplate"})  # with fields of pods that the schema may not declare
_ALWAYS_THERE = (
    "image",
    "numNodes",
    "distribution",
    "minOnDemand",
    "restart.fencing",
    "restart.maxBackoff",
    "securityProfile",
)


def _unchanged_cel(field: str) -> str:
    # Optional field selection (`self.?x == oldSelf.?x`) would be shorter, but its cost is estimated as unlimited.
    equal = f"self.{field} == oldSelf.{field}"
    if field in _PASSED_THROUGH:
        # What the left side has and the schema does not declare may be anything, see `pod_fields`.
        equal += f" && oldSelf.{field} == self.{field}"
    if field == "env":
        # Lists with named items are equal in any order, but a variable may refer to those before it.
        equal += " && self.env.map(item, item.name) == oldSelf.env.map(item, item.name)"
    if field == "pools":
        # No default stands in an item (see `crdgen`), and to write it out is no change.
        choices = f"{{}}.pools.map(item, [item.name, has(item.wait) ? item.wait : '{format_duration(_DEFAULT_WAIT)}'])"
        equal = f"{choices.format('self')} == {choices.format('oldSelf')}"
    if field in _ALWAYS_THERE:
        return equal
    return f"(has(self.{field}) ? has(oldSelf.{field}) && {equal} : !has(oldSelf.{field}))"


FIXED_MESSAGE = "cannot change while the job is active"


def _make_fixed_rule(field: str) -> UpdateRule:
    value_of = attrgetter(".".join(to_snake(part) for part in field.split(".")))
    return UpdateRule(
        f"self.suspend || oldSelf.suspend || {_unchanged_cel(field)}",
        f"{field} {FIXED_MESSAGE}: set spec.suspend to true, change it, then set suspend to false; "
        "delete a job that has ended, and apply it anew",
        lambda new, old: new.suspend or old.suspend or value_of(new) == value_of(old),
        f".{field}",
    )


def _stages_fit_ranks(pipeline: PipelineDistribution | None, nodes: int, procs: int | None) -> bool:
    """Return whether the stages are divided evenly among the ranks. GPUs of a node are not known here."""
    if pipeline is None or procs is None:
        return True
    return (nodes * procs) % pipeline.stages == 0 or pipeline.stages % (nodes * procs) == 0


def _is_folder_shared(policy: CheckpointPolicy | None) -> bool:
    """Return whether all nodes see the files that a program writes, where such files are published."""
    if policy is None or policy.folder is None:
        return True
    return policy.volume is not None and policy.volume.ephemeral is None


class TrainingJobSpec(ApiModel):
    """Describes what to run."""

    image: str = Field(min_length=1, max_length=1024)
    """Container image of the trainer."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """Default: Kubernetes' own, by the image's tag."""
    command: list[Argument] | None = Field(default=None, min_length=1, max_length=256)
    """The program of one rank. Absent: plain mode, the image's entrypoint with the argument `train`, on 500 nodes at
    most."""
    args: list[Argument] = Field(default_factory=list, max_length=1024)
    """Arguments of the command; without a command, of the image's entrypoint in place of `train`. In both, `$(NAME)` is
    replaced by a variable of the container, and `$$` is one `$`, as in any pod."""
    env: Annotated[list[EnvVar], Field(max_length=256), ListMap("name", lambda env: env.name)] = Field(
        default_factory=list
    )
    """Environment variables of the trainer."""
    hyperparameters: Annotated[
        dict[str, Annotated[str, Field(max_length=2500)]],
        Field(max_length=100),
        Rule(
            "self.all(key, size(key) >= 1 && size(key) <= 256)",
            "keys must have between 1 and 256 characters",
            lambda value: all(1 <= len(key) <= 256 for key in value),
        ),
        DropNulls,
    ] = Field(default_factory=dict)
    """Strings that the program reads from `/opt/ml/input/config/hyperparameters.json`, `SM_HPS` or `SM_HP_<name>`."""
    num_nodes: Annotated[int, Field(ge=1, le=2000), Whole] = 1
    """Pods of the job."""
    num_proc_per_node: Annotated[int, Field(ge=1, le=64), Whole] | None = None
    """Ranks in each pod. Default: its GPUs (`nvidia.com/gpu`, or the pool's `gpuResource`), otherwise 1."""
    resources: TrainerResources = Field(default_factory=TrainerResources)
    """Resources of each pod's trainer container."""
    distribution: Distribution = Distribution(torch=TorchDistribution())
    """How ranks are started."""
    pools: Annotated[
        list[PoolChoice],
        Field(max_length=8),
        # No map list: CEL compares those without regard to order, and here the order is what is said.
        Rule(
            "self.all(one, self.exists_one(other, other.name == one.name))",
            "a pool may be named only once",
            lambda pools: len({pool.name for pool in pools}) == len(pools),
        ),
        Atomic(),
    ] = Field(default_factory=list)
    """TrainingPools in order of preference. Empty: any node that fits."""
    min_on_demand: Annotated[int, Field(ge=0, le=2000), Whole] = 0
    """Nodes that are in a pool of capacity type `on-demand` in any case, beginning with pod 0, which leads. The others
    are in the pool that `pools` prefers."""
    checkpoint: CheckpointPolicy | None = None
    """Where checkpoints are kept and how often they are saved."""
    restart: RestartPolicy = RestartPolicy()
    """Restart budgets and fencing."""
    timeouts: Timeouts = Timeouts()
    """When the job fails for lack of progress."""
    security_profile: Literal["restricted", "image"] = "restricted"
    """`restricted`: Pod Security's restricted profile, user 1000. `image`: the image's own user, root too, within Pod
    Security's baseline."""
    suspend: bool = False
    """True stops the pods with their grace period and keeps the job; false starts it, or starts it again."""
    ttl_after_finished: Annotated[Duration, limit_duration("0s", "365d")] | None = None
    """Time from the job's end to its deletion. Absent: never; a GitOps controller would create and run it again."""
    managed_by: Annotated[str, Pattern(_DOMAIN_PATH, 63)] | None = None
    """The responsible controller. Absent or `everstep.dev/operator`: everstep; it ignores jobs of any other."""
    pod_template: PodTemplate = Field(default_factory=PodTemplate)
    """Overlay on the job's pods."""

    rules: ClassVar = (
        Rule(
            "self.minOnDemand == 0 || self.minOnDemand <= self.numNodes",
            "minOnDemand counts some of the job's nodes: it must be at most numNodes",
            lambda spec: spec.min_on_demand <= spec.num_nodes,
            ".minOnDemand",
        ),
        Rule(
            "self.minOnDemand == 0 || has(self.pools) && self.pools.size() > 0",
            "minOnDemand needs pools: name at least one TrainingPool of capacityType on-demand, or remove minOnDemand",
            lambda spec: spec.min_on_demand == 0 or bool(spec.pools),
            ".minOnDemand",
        ),
        Rule(
            "!has(self.distribution.pipeline) || !has(self.numProcPerNode) || "
            "(self.numNodes * self.numProcPerNode) % self.distribution.pipeline.stages == 0 || "
            "self.distribution.pipeline.stages % (self.numNodes * self.numProcPerNode) == 0",
            "distribution.pipeline.stages must divide the number of ranks, numNodes times numProcPerNode, or be a "
            "multiple of it",
            lambda spec: _stages_fit_ranks(spec.distribution.pipeline, spec.num_nodes, spec.num_proc_per_node),
        ),
        # Ranks that are started again in place find what their own pod has: those of pod 0 would go on from the newest
        # files, and others from older ones, or from none.
        Rule(
            "!has(self.checkpoint) || !has(self.checkpoint.folder) || self.numNodes == 1 || "
            "has(self.checkpoint.volume) && !has(self.checkpoint.volume.ephemeral)",
            "checkpoint.folder of a job with several nodes needs checkpoint.volume, which they share: set a "
            "persistentVolumeClaim that is ReadWriteMany, or set numNodes to 1",
            lambda spec: spec.num_nodes == 1 or _is_folder_shared(spec.checkpoint),
        ),
    )
    update_rules: ClassVar = (
        *(_make_fixed_rule(field) for field in _FIXED_FIELDS),
        UpdateRule(
            _unchanged_cel("managedBy"),
            "managedBy cannot change: delete the job and create it again",
            lambda new, old: new.managed_by == old.managed_by,
            ".managedBy",
        ),
    )

    def pods_hash(self) -> str:
        """Return 16 hexadecimal digits of the SHA-256 of what the pods are built from: plenty to see a change.

        A default counts as absent, so that fields of a later version change no job that does not use them.
        """
        return self._pods_hash

    @cached_property
    def _pods_hash(self) -> str:  # a spec never changes, and each look at its job asks for this
        said = self._explicit_fields()
        # The API server takes these lists for the same in any order, and so is nobody told of another one.
        for path in _IN_ANY_ORDER:
            *groups, kind = path.split(".")
            fields = said
            for group in groups:
                fields = fields.get(group, {})
            if isinstance(fields.get(kind), list):
                fields[kind] = sorted(fields[kind], key=lambda item: str(item.get("name")))
        return self._hash_fields(said)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy, which has another hash if it has other fields."""
        made = super().model_copy(update=update, deep=deep)
        made.__dict__.pop("_pods_hash", None)
        return made

    def legacy_pods_hash(self) -> str:
        """Return the hash of versions that took another order of containers or volumes for a change."""
        return self._hash_fields(self._explicit_fields())

    def _explicit_fields(self) -> dict[str, Any]:
        said = self.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_defaults=True)
        for group in ("restart", "timeouts"):
            fields = said.get(group, {})
            said[group] = {name: value for name, value in fields.items() if f"{group}.{name}" in _FIXED_FIELDS}
        return said

    @staticmethod
    def _hash_fields(said: Mapping[str, Any]) -> str:
        built_from = {
            name: said[name] for name in {field.partition(".")[0] for field in _FIXED_FIELDS} if said.get(name)
        }
        return hashlib.sha256(json.dumps(built_from, sort_keys=True).encode()).hexdigest()[:16]


class TrainingJob(StoredResource):
    """A distributed training run."""

    api_version: Literal["everstep.dev/v1alpha1"] = "everstep.dev/v1alpha1"
    kind: Literal["TrainingJob"] = "TrainingJob"
    metadata: ObjectMeta
    spec: TrainingJobSpec
    status: TrainingJobStatus = TrainingJobStatus()

    rules: ClassVar = (
        Rule(
            f"self.metadata.name.matches('{JOB_NAME_PATTERN}')",
            "metadata.name must be at most 50 characters a-z, 0-9 and '-', start with a letter and end with a "
            "letter or digit: pods and the Service are named after it",
            lambda job: (
                bool(_NAME.fullmatch(job.metadata.name)) or (not job.metadata.name and bool(job.metadata.generate_name))
            ),
        ),
    )

    @property
    def managed_here(self) -> bool:
        """Return whether this operator is in charge of the job."""
        return self.spec.managed_by in (None, OPERATOR_NAME)
