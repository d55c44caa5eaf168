"""The schedules that have names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.schedules.actions import Action, ActionKind, Schedule
from everstep.pipeline.schedules.looped import generate_looped
from everstep.pipeline.schedules.vshape import generate_vshape

ALIASES = {"gpipe": "simple"}
NAMES = ("simple", "1f1b", "interleaved", "zb-h1", "zb-interleaved", "zb-v")


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
    name = ALIASES.get(name, name)
    chunks = _count_chunks(name, stages, ranks, microbatches)
    if name == "zb-v":
        placement = (*range(ranks), *reversed(range(ranks)))
    else:
        placement = tuple(stage % ranks for stage in range(stages))
    may_split = frozenset(range(stages) if split is None else split)
    return Schedule(
        name=name,
        placement=placement,
        microbatches=microbatches,
        ranks=tuple(
            tuple(_join_backwards(_of_rank(name, rank, ranks, chunks, microbatches), may_split))
            for rank in range(ranks)
        ),
    )


def _count_chunks(name: str, stages: int, ranks: int, microbatches: int) -> int:
    if name not in NAMES:
        raise PipelineError(f"there is no schedule {name!r}; there are {', '.join((*NAMES, *ALIASES))}, and files")
    if min(stages, ranks, microbatches) < 1:
        raise PipelineError(
            f"{name}: {stages} stages, {ranks} ranks, {microbatches} micro-batches: each must be 1 or more"
        )
    if stages % ranks:
        raise PipelineError(f"{name}: {stages} stages cannot be shared alike by {ranks} ranks: take a multiple")
    chunks = stages // ranks
    if name in ("1f1b", "zb-h1") and chunks != 1:
        other = {"1f1b": "interleaved", "zb-h1": "zb-interleaved or zb-v"}[name]
        raise PipelineError(f"{name}: is for one stage on each rank, not {chunks}: take {other}")
    if name == "zb-v" and chunks != 2:
        raise PipelineError(f"{name}: is for two stages on each rank, not {chunks}: take {2 * ranks} stages, or zb-h1")
    return chunks


def _of_rank(name: str, rank: int, ranks: int, chunks: int, microbatches: int) -> Iterable[Action]:
    if name == "simple":
        return _generate_gpipe(rank, ranks, chunks, microbatches)
    if name == "zb-v":
        return generate_vshape(rank, ranks, microbatches)
    return generate_looped(rank, ranks, chunks, microbatches, zero_bubble=name.startswith("zb"))


def _generate_gpipe(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[Action]:
    """All forwards, then all backwards (GPipe, arXiv 1811.06965)."""
    for chunk in range(chunks):
        for microbatch in range(microbatches):
            yield Action(ActionKind.FORWARD, chunk * ranks + rank, microbatch)
    for chunk in reversed(range(chunks)):
        for microbatch in range(microbatches):
            yield Action(ActionKind.BACKWARD, chunk * ranks + rank, microbatch)


def _join_backwards(actions: Iterable[Action], may_split: frozenset[int]) -> Iterator[Action]:
    for action in actions:
        if action.stage in may_split or action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
            yield action
        elif action.kind is ActionKind.INPUT_GRAD:
            yield Action(ActionKind.BACKWARD, action.stage, action.microbatch)
