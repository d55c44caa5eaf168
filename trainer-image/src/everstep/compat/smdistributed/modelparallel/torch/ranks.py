"""Ranks, sizes and process groups in each dimension; tensor parallelism has size 1."""

from __future__ import annotations

from typing import Any

from everstep.compat.smdistributed.modelparallel.torch.state import (
    LOCAL_RANK,
    LOCAL_SIZE,
    current_state,
    read_first_variable,
)


def rank() -> int:
    """Return the rank of this process among all."""
    return current_state().rank


def size() -> int:
    """Return the number of all processes."""
    return current_state().size


def local_rank() -> int:
    """Return the rank of this process among those of its node (LOCAL_RANK)."""
    return read_first_variable(LOCAL_RANK, rank())


def local_size() -> int:
    """Return the number of processes of this node (LOCAL_WORLD_SIZE)."""
    return read_first_variable(LOCAL_SIZE, size())


def _rank_in_dimension(dimension: str) -> int:
    return current_state().members[dimension].index(current_state().rank)


def _size_of_dimension(dimension: str) -> int:
    return len(current_state().members[dimension])


def mp_rank() -> int:
    """Return the rank among the processes that hold this model replica."""
    return _rank_in_dimension("MP")


def mp_size() -> int:
    return _size_of_dimension("MP")


def dp_rank() -> int:
    """Return the rank among the replicas: what a script shards its data by."""
    return _rank_in_dimension("DP")


def dp_size() -> int:
    return _size_of_dimension("DP")


def pp_rank() -> int:
    """Return the rank among the stages of this pipeline."""
    return _rank_in_dimension("PP")


def pp_size() -> int:
    return _size_of_dimension("PP")


def tp_rank() -> int:
    return _rank_in_dimension("TP")


def tp_size() -> int:
    """Return 1, always."""
    return _size_of_dimension("TP")


def rdp_rank() -> int:
    return _rank_in_dimension("RDP")


def rdp_size() -> int:
    return _size_of_dimension("RDP")


def get_mp_group() -> list[int]:
    """Return the ranks over which this model replica is partitioned."""
    return list(current_state().members["MP"])


def get_dp_group() -> list[int]:
    """Return the ranks that hold other replicas of this partition."""
    return list(current_state().members["DP"])


def get_pp_group() -> list[int]:
    """Return the ranks of this pipeline."""
    return list(current_state().members["PP"])


def get_tp_group() -> list[int]:
    """Return this rank alone."""
    return list(current_state().members["TP"])


def get_rdp_group() -> list[int]:
    """Return the same as `get_dp_group`."""
    return list(current_state().members["RDP"])


def get_world_process_group() -> Any:
    return current_state().groups["WORLD"]


def get_mp_process_group() -> Any:
    return current_state().groups["MP"]


def get_dp_process_group() -> Any:
    return current_state().groups["DP"]


def get_pp_process_group() -> Any:
    return current_state().groups["PP"]


def get_tp_process_group() -> Any:
    return current_state().groups["TP"]


def get_rdp_process_group() -> Any:
    return current_state().groups["RDP"]
