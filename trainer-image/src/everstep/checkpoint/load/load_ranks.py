"""The ranks that load a sharded object together: which these are, and how all of them take the same checkpoint.

Each holds a piece of one tensor, so a rank that fell back by itself would make a model of two steps. They agree through
the store of the process group, without a collective: no group is opened, and whoever does not come is named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.ranks.host_group import ERRORS
from everstep.checkpoint.restore.options import RestoreOptions, find_difference
from everstep.checkpoint.restore.steps import run_restore_step
from everstep.checkpoint.state.aliases import list_objects
from everstep.checkpoint.state.flat import bind_kinds
from everstep.checkpoint.state.kinds import ObjectKind, PerRank
from everstep.checkpoint.state.loaded import is_dtensor
from everstep.checkpoint.state.modules import Modules
from everstep.checkpoint.state.optimizers import OptimizerObject
from everstep.checkpoint.state.plain import StatefulObject, StateValue
from everstep.coordination.arrivals import open_meeting
from everstep.coordination.consensus import PATIENCE, Consensus
from everstep.coordination.kv_store import STORE_PATIENCE, KVStore, LocalKVStore

T = TypeVar("T")

PATIENCE_SECONDS = PATIENCE  # without a sign of life of a rank


def find_ranks(objects: Mapping[str, object]) -> tuple[int, ...]:
    """Return the ranks that hold pieces of these objects, in order: those of the meshes of their DTensors.

    A mesh that is cut out of another stands for that one, so that all stages of a pipeline are among them.

    Args:
        objects: By name; what is wrapped as PerRank does not count.

    Returns:
        The ranks; none where nothing is sharded, or this rank holds nothing of it.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return ()
    rank = dist.get_rank()
    kinds = bind_kinds({name: each for name, each in objects.items() if not isinstance(each, PerRank)}, rank=rank)
    # A state_dict() may be dear, as a loader's, which starts its workers: only where nothing else tells.
    plain = [each for each in kinds if not isinstance(each, StatefulObject)]
    ranks = _ranks_of(plain) or _ranks_of(each for each in kinds if isinstance(each, StatefulObject))
    return tuple(sorted(ranks)) if rank in ranks and len(ranks) > 1 else ()


class LoadingRanks:
    """One rank's side of a load; all `ranks` make one, equally often. None: this process loads by itself."""

    def __init__(self, ranks: Sequence[int] = ()) -> None:
        self._ranks = tuple(ranks) or (0,)
        self._rank = dist.get_rank() if ranks else 0
        kv_store: KVStore = LocalKVStore()
        if ranks:
            digest = hashlib.sha256(str(self._ranks).encode()).hexdigest()[:16]
            store = dist.distributed_c10d._get_default_store()
            kv_store = open_meeting(store, f"load_into()/{digest}", self._ranks, STORE_PATIENCE, ERRORS)
        number = self._ranks.index(self._rank)
        self._consensus = Consensus(
            kv_store, number, len(self._ranks), PATIENCE_SECONDS, self._ranks, purpose="during the restore"
        )

    @property
    def are_several(self) -> bool:
        """Tell whether there are others that load with this one."""
        return len(self._ranks) > 1

    def check_options(self, options: RestoreOptions) -> None:
        """See that all ranks were given the same.

        Raises:
            CheckpointError: On all ranks, with two of them and what they were given.
        """
        described = run_restore_step(self._consensus, self._rank, options.describe, is_local=False)
        if why := find_difference(described, "load_into()", self._ranks):
            raise CheckpointError(why)

    def ask_first(self, work: Callable[[], T]) -> T:
        """Return what the first rank finds, which JSON must be able to write. Its error is one of all ranks."""
        leads = self._rank == self._ranks[0]
        first: T = run_restore_step(self._consensus, self._rank, lambda: work() if leads else None, is_local=False)[0]
        return first

    def run(self, work: Callable[[], T]) -> T:
        """Do this rank's share, and fail where another one does: see run_restore_step()."""
        done: T = run_restore_step(self._consensus, self._rank, work, is_local=True)
        return done

    def give_sign(self) -> None:
        """Show the others that this rank still works; call it often, from any thread."""
        self._consensus.alive()

    def close(self) -> None:
        """Wait a few seconds until the others have heard how it ended; afterwards this process may exit."""
        self._consensus.settle()


def _ranks_of(kinds: Iterable[ObjectKind]) -> set[int]:
    meshes = {
        id(each.device_mesh): each.device_mesh for kind in kinds for each in _tensors_of(kind) if is_dtensor(each)
    }
    return {int(rank) for mesh in meshes.values() for rank in _find_root_mesh(mesh).mesh.flatten().tolist()}


def _tensors_of(kind: ObjectKind) -> Iterable[Any]:
    if isinstance(kind, Modules):
        return [leaf for _, leaf in kind.leaves()]
    if isinstance(kind, OptimizerObject):
        return kind.params
    if isinstance(kind, StateValue):
        return list_objects(kind.value)
    return list_objects(kind.inner.state_dict()) if isinstance(kind, StatefulObject) else []


def _find_root_mesh(mesh: Any) -> Any:
    """Return the mesh that this one was cut out of, where torch tells."""
    find = getattr(mesh, "_get_root_mesh", None)
    return mesh if find is None else find()
