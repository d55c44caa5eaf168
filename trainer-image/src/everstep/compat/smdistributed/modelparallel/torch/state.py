"""The state that `smp.init` sets up, and the ranks of each group: one for each process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from everstep.compat.smdistributed.modelparallel.config import ModelParallelConfig, ModelParallelConfigError
from everstep.pipeline.transport.grid import Grid, make_grid

if TYPE_CHECKING:
    from everstep.compat.smdistributed.modelparallel.torch.model import DistributedModel


# As torchrun and everstep set them, and what mpirun of Open MPI, MPICH or Intel MPI sets where nobody else does.
RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


class NotInitialized(RuntimeError):
    """An error of a call before smp.init()."""


@dataclass
class SmpState:
    """The state of one process. `groups`: its process group in each dimension, `members` the ranks in it, in order."""

    config: ModelParallelConfig
    grid: Grid
    rank: int
    size: int
    groups: dict[str, Any]
    members: dict[str, list[int]]
    model: DistributedModel | None = None
    optimizers: list[Any] = field(default_factory=list)
    tracing: bool = False

    @property
    def replica(self) -> int:
        return self.grid.find(self.rank)[0]

    @property
    def stage_rank(self) -> int:
        return self.grid.find(self.rank)[1]


_state: SmpState | None = None
_retired: list[Any] = []  # groups of former states


def current_state() -> SmpState:
    """Return the state of this process. Raises NotInitialized before smp.init()."""
    if _state is None:
        raise NotInitialized("call smp.init() first")
    return _state


def is_initialized() -> bool:
    """Return whether smp.init() was called."""
    return _state is not None


def init(config: Any = None) -> None:
    """Begin. `config` is a mapping of the documented keys; None reads SM_HP_MP_PARAMETERS.

    Joins the process group of torch.distributed, if the script has not (from RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT, or what mpirun says). ModelParallelConfigError names the key that cannot be, also against the number of
    processes.
    """
    import torch.distributed as dist

    global _state
    read = ModelParallelConfig.read(config)
    if not dist.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "7777")
        dist.init_process_group(
            _choose_backend(read),
            rank=read_first_variable(RANK, 0),
            world_size=read_first_variable(SIZE, 1),
        )
    size, stages = dist.get_world_size(), read.pipeline_parallel_degree
    if size % stages:
        raise ModelParallelConfigError(f"pipeline_parallel_degree is {stages}: it does not divide the {size} processes")
    if size > stages and not read.ddp:
        raise ModelParallelConfigError(f"ddp must be True for {size} processes and pipeline_parallel_degree {stages}")
    shutdown()
    _state = _arrange_groups(read, dist.get_rank(), size)
    _end_retired()


def read_first_variable(names: Sequence[str], default: int) -> int:
    """Return the number in the first of these variables that is set."""
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()), default)


def is_tracing() -> bool:
    """Return whether the model is being traced, which the first step begins with."""
    return _state is not None and _state.tracing


def shutdown() -> None:
    """Forget everything; smp.init() may be called again. The process group stays.

    Groups that smp.init() made end with the next smp.init(): until then others may still read what was sent in them.
    """
    global _state
    if _state is not None:
        _retired.extend({id(group): group for name, group in _state.groups.items() if name != "WORLD"}.values())
    _state = None


def _end_retired() -> None:
    import torch.distributed as dist

    while _retired:
        # It may be gone already, with the group of all.
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            dist.destroy_process_group(_retired.pop())


def _choose_backend(config: ModelParallelConfig) -> str:
    import torch

    if config.ddp_dist_backend != "auto":
        return config.ddp_dist_backend
    return "nccl" if torch.cuda.is_available() else "gloo"


def _arrange_groups(config: ModelParallelConfig, rank: int, size: int) -> SmpState:
    import torch.distributed as dist

    arranged = make_grid(size, config.pipeline_parallel_degree, config.placement)
    every = {
        "PP": [list(ranks) for ranks in arranged.processes],
        "RDP": [list(each) for each in zip(*arranged.processes, strict=True)],
        "TP": [[each] for each in range(size)],
    }
    groups: dict[str, Any] = {"WORLD": dist.group.WORLD}
    members: dict[str, list[int]] = {"WORLD": list(range(size))}
    for name, all_members in every.items():
        for ranks in all_members:  # every process makes every group
            group = dist.new_group(ranks)
            if rank in ranks:
                groups[name], members[name] = group, ranks
    # Without tensor parallelism a model's processes are those of its pipeline, and its replicas those of its stages.
    for name, same in (("MP", "PP"), ("DP", "RDP")):
        groups[name], members[name] = groups[same], members[same]
    return SmpState(config, arranged, rank, size, groups, members)
