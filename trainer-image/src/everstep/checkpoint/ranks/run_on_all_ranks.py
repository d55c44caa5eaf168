"""Run something on every rank, so that it succeeds or fails on all of them alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.ranks.collectives import gather_objects

T = TypeVar("T")


def run_on_all_ranks(work: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Run `work` on this rank and return its result, if it succeeds on all ranks.

    Collective over `group`: without it, a rank that fails at its start leaves the others to wait for it in their first
    collective.

    Args:
        work: Called once on each rank.
        group: A gloo group; None for one process.

    Raises:
        Exception: The error of `work`, where it failed here.
        CheckpointError: With the words of the other ranks' errors, where it did not fail here.
    """
    if group is None:
        return work()
    failure: BaseException | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    failures = gather_objects(None if failure is None else f"rank {dist.get_rank()}: {failure}", group)
    if failure is not None:
        raise failure
    if any(failures):
        raise CheckpointError("; ".join(each for each in failures if each))
    return result  # type: ignore[return-value]
