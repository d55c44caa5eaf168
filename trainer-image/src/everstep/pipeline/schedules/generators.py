"""Make a schedule from its row in the table of names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.schedules.actions import Action, ActionKind, Schedule
from everstep.pipeline.schedules.table import NamedSchedule, find_schedule


def make_schedule(
    name: str, stages: int, ranks: int, microbatches: int, split: Collection[int] | None = None
) -> Schedule:
    """Return the computations of a schedule; `lower_schedule` adds what is sent.

    Args:
        name: One of NAMES or ALIASES.
        stages: The number of stages.
        ranks: The number of ranks.
        microbatches: The number of micro-batches.
        split: The stages whose backward may be split, None for all; the others have full backward where the input
            gradient would be.

    Raises:
        PipelineError: The schedule is not for so many stages; the message says for which it is.
    """
    row = find_schedule(name)
    chunks = _count_chunks(row, stages, ranks, microbatches)
    may_split = frozenset(range(stages) if split is None else split)
    return Schedule(
        name=row.name,
        placement=row.placement(ranks, chunks),
        microbatches=microbatches,
        ranks=tuple(
            tuple(_join_backwards(row.generate(rank, ranks, chunks, microbatches), may_split)) for rank in range(ranks)
        ),
    )


def _count_chunks(row: NamedSchedule, stages: int, ranks: int, microbatches: int) -> int:
    """Return the number of stages on each rank."""
    if min(stages, ranks, microbatches) < 1:
        raise PipelineError(
            f"{row.name}: {stages} stages, {ranks} ranks, {microbatches} micro-batches: each must be 1 or more"
        )
    if stages % ranks:
        raise PipelineError(f"{row.name}: {stages} stages are not a multiple of {ranks} ranks")
    chunks = stages // ranks
    if row.chunks not in (None, chunks):
        each = "one stage" if row.chunks == 1 else f"{row.chunks} stages"
        needed = "one stage" if row.chunks * ranks == 1 else f"{row.chunks * ranks} stages"
        raise PipelineError(f"{row.name}: is for {each} on each rank, not {chunks}: take {needed}, or {row.instead}")
    return chunks


def _join_backwards(actions: Iterable[Action], may_split: frozenset[int]) -> Iterator[Action]:
    for action in actions:
        if action.stage in may_split or action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            yield action
        elif action.kind is ActionKind.INPUT_GRAD:
            yield Action(ActionKind.BACKWARD, action.stage, action.microbatch)
