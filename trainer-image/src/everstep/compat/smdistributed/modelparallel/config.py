"""The configuration `smdistributed.modelparallel.parameters`: keys, defaults and rules. Needs no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

VARIABLE = "SM_HP_MP_PARAMETERS"
PIPELINES = ("interleaved", "simple", "_only_forward")
STRATEGIES = {"cluster": "DPT", "spread": "TPD"}
SDP_KEYS = (
    "sdp_reduce_bucket_size",
    "sdp_param_persistence_threshold",
    "sdp_max_live_parameters",
    "sdp_hierarchical_allgather",
    "sdp_gradient_clipping",
)


class ModelParallelConfigError(ValueError):
    """A key or value that cannot be; the message names the key and says what to do."""


@dataclass(frozen=True)
class ModelParallelConfig:
    """The configuration as documented for PyTorch, with the same defaults. ModelParallelConfigError names the key that
    breaks a rule."""

    pipeline_parallel_degree: int = 1
    microbatches: int = 1
    pipeline: str = "interleaved"
    optimize: str = "memory"
    placement_strategy: str = "cluster"
    auto_partition: bool = True
    default_partition: int | None = None
    ddp: bool = False
    ddp_port: int | None = None
    ddp_dist_backend: str = "auto"
    memory_weight: float | None = None
    active_microbatches: int | None = None
    deterministic_server: bool = False
    offload_activations: bool = False
    activation_loading_horizon: int = 4
    fp16: bool = False
    fp16_params: bool = False
    bf16: bool = False
    shard_optimizer_state: bool = False
    prescaled_batch: bool = False
    skip_tracing: bool = False
    delayed_parameter_initialization: bool = False
    static_mode: bool = False  # these two are in no documentation, but in the public samples
    fast_mode: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_choices()
        self._check_together()

    @classmethod
    def read(cls, given: Mapping[str, Any] | None = None) -> ModelParallelConfig:
        """Return the configuration in `given`, else that in the JSON of the environment variable SM_HP_MP_PARAMETERS,
        else the defaults.

        `partitions`, the older name of pipeline_parallel_degree, is understood, and so is a mapping of `enabled` and
        `parameters`, as the SDK has it.
        """
        if given is None:
            try:
                given = json.loads(os.environ.get(VARIABLE, "{}"))
            except ValueError as error:
                raise ModelParallelConfigError(f"{VARIABLE} is not JSON: {error}") from error
        if not isinstance(given, Mapping):
            raise ModelParallelConfigError(f"a configuration is a mapping of keys, not {type(given).__name__}")
        values = dict(given)
        if isinstance(values.get("parameters"), Mapping) and values.keys() <= {"enabled", "parameters"}:
            values = dict(values["parameters"])
        if "partitions" in values:
            if "pipeline_parallel_degree" in values:
                raise ModelParallelConfigError(
                    "partitions is the older name of pipeline_parallel_degree: give one of them"
                )
            values["pipeline_parallel_degree"] = values.pop("partitions")
        _drop_neutral_keys(values)
        hints = get_type_hints(cls)
        return cls(**{key: _check_type(key, value, hints[key]) for key, value in values.items()})

    @property
    def weight(self) -> float:
        """Return the weight of memory in the automatic partition: 0.2 for speed and 0.8 for memory, unless it was
        given."""
        if self.memory_weight is not None:
            return self.memory_weight
        return 0.2 if self.optimize == "speed" else 0.8

    @property
    def active(self) -> int:
        """Return the most micro-batches in flight: two more than there are partitions, unless it was given."""
        if self.active_microbatches is not None:
            return self.active_microbatches
        return self.pipeline_parallel_degree + 2

    @property
    def placement(self) -> str:
        """Return the placement as letters D, P and T, of which the right-most changes between neighbouring ranks."""
        return STRATEGIES.get(self.placement_strategy, self.placement_strategy)

    @property
    def half(self) -> bool:
        return self.fp16 or self.fp16_params

    def _check_numbers(self) -> None:
        for key in ("pipeline_parallel_degree", "microbatches", "active_microbatches", "activation_loading_horizon"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ModelParallelConfigError(f"{key} is {value}: it must be 1 or more")
        if self.memory_weight is not None and not 0.0 <= self.memory_weight <= 1.0:
            raise ModelParallelConfigError(f"memory_weight is {self.memory_weight}: it must be from 0.0 to 1.0")

    def _check_choices(self) -> None:
        for key, choices in (("pipeline", PIPELINES), ("optimize", ("memory", "speed"))):
            if getattr(self, key) not in choices:
                raise ModelParallelConfigError(
                    f"{key} is {getattr(self, key)!r}: it must be one of {', '.join(choices)}"
                )
        if sorted(self.placement) != sorted("DPT"):
            raise ModelParallelConfigError(
                f"placement_strategy is {self.placement_strategy!r}: it must be cluster, spread or an order of D, P, T"
            )

    def _check_together(self) -> None:
        if not self.auto_partition and self.default_partition is None:
            raise ModelParallelConfigError("default_partition must be given when auto_partition is False")
        if self.default_partition is not None and not 0 <= self.default_partition < self.pipeline_parallel_degree:
            raise ModelParallelConfigError(
                f"default_partition is {self.default_partition}: it must be below pipeline_parallel_degree, "
                f"{self.pipeline_parallel_degree}"
            )
        if not self.ddp and (self.ddp_port is not None or self.ddp_dist_backend != "auto"):
            raise ModelParallelConfigError("ddp_port and ddp_dist_backend need ddp")
        if self.shard_optimizer_state and not self.ddp:
            raise ModelParallelConfigError("shard_optimizer_state needs ddp: it is the replicas that share the state")
        if self.offload_activations and (self.microbatches < 2 or self.active < 2):
            raise ModelParallelConfigError("offload_activations needs microbatches and active_microbatches above 1")
        if self.half and self.bf16:
            raise ModelParallelConfigError("fp16 and bf16 exclude each other")


def _drop_neutral_keys(values: dict[str, Any]) -> None:
    """Reject keys of what everstep does not do; their neutral values are dropped."""
    if values.get("horovod"):
        raise ModelParallelConfigError("horovod is for TensorFlow: for PyTorch set ddp")
    if "contiguous" in values:
        raise ModelParallelConfigError("contiguous is for TensorFlow, which is not offered: leave it out")
    values.pop("horovod", None)
    for key, neutral, reason in (
        ("tensor_parallel_degree", 1, "tensor parallelism is not offered: set it to 1 and use more partitions"),
        ("sharded_data_parallel_degree", 1, "sharded data parallelism is not offered: use FSDP, or more partitions"),
    ):
        if (value := values.pop(key, neutral)) != neutral:
            raise ModelParallelConfigError(f"{key} is {value}: {reason}")
    for key in ("load_partition", "partition_file"):
        if values.pop(key, None):
            raise ModelParallelConfigError(
                f"{key}: the form of these files is not documented: leave it out, see `everstep pipeline`"
            )
    for key in SDP_KEYS:
        if key in values:
            raise ModelParallelConfigError(f"{key}: sharded data parallelism is not offered: leave it out")
    known = {each.name for each in fields(ModelParallelConfig)}
    for key in values:
        if key not in known:
            raise ModelParallelConfigError(
                f"{key} is no key of the configuration; there are {', '.join(sorted(known))}"
            )


def _check_type(key: str, value: Any, hint: Any) -> Any:
    kinds = [each for each in getattr(hint, "__args__", (hint,)) if each is not type(None)]
    if value is None and len(kinds) < len(getattr(hint, "__args__", (hint,))):
        return None
    (kind,) = kinds
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ModelParallelConfigError(f"{key} is {value!r}: it must be of type {kind.__name__}")
    return value
