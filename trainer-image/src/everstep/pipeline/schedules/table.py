"""The schedules that have names, one row for each: `make_schedule`, the advisor, the API of jobs and the docs read it.

A new schedule is a file with its generator, and a row here; `make generate` then writes it into the CRDs and into
`docs/reference/schedules.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.schedules.actions import Action
from everstep.pipeline.schedules.gpipe import generate_gpipe
from everstep.pipeline.schedules.looped import generate_looped
from everstep.pipeline.schedules.vshape import generate_vshape

Generate = Callable[[int, int, int, int], Iterable[Action]]  # of (rank, ranks, chunks, microbatches)


def place_round(ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the rank of each stage where stages go round the ranks."""
    return tuple(range(ranks)) * chunks


def place_down_and_up(ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the rank of each stage where the last is on the rank of the first."""
    down = tuple(range(ranks))
    return tuple(rank for chunk in range(chunks) for rank in (down[::-1] if chunk % 2 else down))


@dataclass(frozen=True)
class NamedSchedule:
    """A schedule by its name.

    The formulas are for p ranks, v stages on each, m micro-batches, and F, B, W the times of a rank for one micro-batch
    (B for the inputs, W for the weights), with equal stages, free links, and m a multiple of p that is large enough.

    Attributes:
        name: The name in plans, jobs and calls.
        about: What it does, in sentences for its page.
        example: Stages, ranks and micro-batches of the timeline on its page.
        chunks: The number of stages on each rank that it is for; None for any.
        placement: A function of (ranks, chunks) that returns the rank of each stage.
        generate: A function of (rank, ranks, chunks, microbatches) that returns the computations of a rank.
        bubble: The time of a step beyond m (F + B + W).
        held: The most activations that a rank holds, in micro-batches of a rank.
        instead: The schedules to take for another number of stages on each rank.
        plain: The schedule that it is with one stage on each rank, by another name; "" if there is none.
        alias: Another name; "" for none.
    """

    name: str
    about: str
    example: tuple[int, int, int]
    chunks: int | None
    placement: Callable[[int, int], tuple[int, ...]]
    generate: Generate
    bubble: str
    held: str
    instead: str = ""
    plain: str = ""
    alias: str = ""

    def is_worth_trying(self, chunks: int) -> bool:
        """Tell whether it exists for so many stages on each rank, and no other name is for the same."""
        return self.chunks in (None, chunks) and not (self.plain and chunks == 1)


_ONE_F_ONE_B: Generate = partial(generate_looped, zero_bubble=False)
_ZERO_BUBBLE: Generate = partial(generate_looped, zero_bubble=True)

SCHEDULES = (
    NamedSchedule(
        "simple",
        "All forwards run first, then all backwards. Each rank holds every micro-batch until its backward.",
        example=(4, 4, 6),
        chunks=None,
        placement=place_round,
        generate=generate_gpipe,
        bubble="(p − 1) (F + B + W) / v",
        held="m",
        alias="gpipe",
    ),
    NamedSchedule(
        "1f1b",
        "After a warm-up, forwards and backwards alternate. The bubble is that of `simple`, but rank r holds at most "
        "p − r micro-batches, however many there are.",
        example=(4, 4, 6),
        chunks=1,
        placement=place_round,
        generate=_ONE_F_ONE_B,
        bubble="(p − 1) (F + B + W)",
        held="min(p, m)",
        instead="interleaved",
    ),
    NamedSchedule(
        "interleaved",
        "1F1B with v stages on each rank: a v-th of the bubble, v times the messages and somewhat more memory.",
        example=(8, 4, 4),
        chunks=None,
        placement=place_round,
        generate=_ONE_F_ONE_B,
        bubble="(p − 1) (F + B + W) / v",
        held="p + (p − 1) / v",
        plain="1f1b",
    ),
    NamedSchedule(
        "zb-h1",
        "Each backward is split. Weight gradients, for which no other rank waits, fill the bubble at the end.",
        example=(4, 4, 6),
        chunks=1,
        placement=place_round,
        generate=_ZERO_BUBBLE,
        bubble="(p − 1) (F + B − W)",
        held="p",
        instead="zb-interleaved or zb-v",
    ),
    NamedSchedule(
        "zb-interleaved",
        "`zb-h1` with v stages on each rank.",
        example=(8, 4, 4),
        chunks=None,
        placement=place_round,
        generate=_ZERO_BUBBLE,
        bubble="(p − 1) (F + B − W) / v",
        held="p",
        plain="zb-h1",
    ),
    NamedSchedule(
        "zb-v",
        "Two stages on each rank: the first half of the stages goes down the ranks and the second half up again, so "
        "that the loss is computed on the rank that reads the input. With F = B = W and at least 2p − 1 micro-batches, "
        "a rank is idle only before its first action and after its last.",
        example=(6, 3, 6),
        chunks=2,
        placement=place_down_and_up,
        generate=generate_vshape,
        bubble="(p − 1) F / 2 if F = B = W",
        held="p",
        instead="zb-h1",
    ),
)
NAMES = tuple(each.name for each in SCHEDULES)
ALIASES = {each.alias: each.name for each in SCHEDULES if each.alias}


def find_schedule(name: str) -> NamedSchedule:
    """Return the row of a name or an alias.

    Raises:
        PipelineError: There is none.
    """
    for each in SCHEDULES:
        if name in (each.name, each.alias or None):
            return each
    raise PipelineError(f"there is no schedule {name!r}; choose one of {', '.join((*NAMES, *ALIASES))}, or a file")
