"""Ranks, sizes and process groups in each dimension; tensor parallelism has size 1."""

from __future__ import annotations

from typing import Any

from everstep.compat.smdistributed.modelparallel.torch.state import LOCAL_RANK, LOCAL_SIZE, found, state


def rank() -> int:
    """Return the rank of this process among all."""
    return state().rank


def size() -> int:
    """Return the number of all processes."""
    return state().size


def local_rank() -> int:
    """Return the rank of this process among those of its node (LOCAL_RANK)."""
    return found(LOCAL_RANK, rank())


def local_size() -> int:
    """Return the number of processes of this node (LOCAL_WORLD_SIZE)."""
    return found(LOCAL_SIZE, size())


def _rank(dimension: str) -> int:
    return state().members[dimension].index(state().rank)


def _size(dimension: str) -> int:
    return len(state().members[dimension])


def mp_rank() -> int:
    """Return the rank among the processes that hold this model replica."""
    return _rank("MP")


def mp_size() -> int:
    return _size("MP")


def dp_rank() -> int:
    """Return the rank among the replicas: what a script shards its data by."""
    return _rank("DP")


def dp_size() -> int:
    return _size("DP")


def pp_rank() -> int:
    """Return the rank among the stages of this pipeline."""
    return _rank("PP")


def pp_size() -> int:
    return _size("PP")


def tp_rank() -> int:
    return _rank("TP")


def tp_size() -> int:
    """Return 1, always."""
    return _size("TP")


def rdp_rank() -> int:
    return _rank("RDP")


def rdp_size() -> int:
    return _size("RDP")


def get_mp_group() -> list[int]:
    """Return the ranks over which this model replica is partitioned."""
    return list(state().members["MP"])


def get_dp_group() -> list[int]:
    """Return the ranks that hold other replicas of this partition."""
    return list(state().members["DP"])


def get_pp_group() -> list[int]:
    """Return the ranks of this pipeline."""
    return list(state().members["PP"])


def get_tp_group() -> list[int]:
    """Return this rank alone."""
    return list(state().members["TP"])


def get_rdp_group() -> list[int]:
    """Return the same as `get_dp_group`."""
    return list(state().members["RDP"])


def get_world_process_group() -> Any:
    return state().groups["WORLD"]


def get_mp_process_group() -> Any:
    return state().groups["MP"]


def get_dp_process_group() -> Any:
    return state().groups["DP"]


def get_pp_process_group() -> Any:
    return state().groups["PP"]


def get_tp_process_group() -> Any:
    return state().groups["TP"]


def get_rdp_process_group() -> Any:
    return state().groups["RDP"]
