"""One forward, one backward, with stages that go round the ranks: 1F1B and ZB-H1, plain and interleaved.

Stage s is on rank s mod p. A rank takes its chunks in rounds of micro-batches: chunk 0 of the round, chunk 1, and so
on; backward likewise, the last chunk first. After a warm-up of forwards it alternates (PipeDream-flush; Megatron,
arXiv 2104.04473). Zero bubble (arXiv 2401.10241, H1): rank r leaves r weight gradients for later, which fill the
bubble at the end while no rank holds more than p micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from everstep.pipeline.schedules.actions import Action, ActionKind


def generate_looped(rank: int, ranks: int, chunks: int, microbatches: int, *, zero_bubble: bool) -> Iterator[Action]:
    """Yield the computations of `rank`; the backward is split everywhere if `zero_bubble`, else nowhere."""
    rounds = _list_rounds(microbatches, ranks)
    forwards = [
        Action(ActionKind.FORWARD, chunk * ranks + rank, microbatch)
        for round_ in rounds
        for chunk in range(chunks)
        for microbatch in round_
    ]
    backwards = [
        (chunk * ranks + rank, microbatch)
        for round_ in rounds
        for chunk in reversed(range(chunks))
        for microbatch in round_
    ]
    # Interleaved 1F1B needs twice the distance to the last rank: a gradient comes back only after a full backward.
    distance = (1 if zero_bubble or chunks == 1 else 2) * (ranks - 1 - rank)
    warm = min((chunks - 1) * len(rounds[0]) + distance, len(forwards))
    left_over = rank if zero_bubble else 0
    yield from forwards[:warm]
    for count, (stage, microbatch) in enumerate(backwards):
        if warm + count < len(forwards):
            yield forwards[warm + count]
        if not zero_bubble:
            yield Action(ActionKind.BACKWARD, stage, microbatch)
            continue
        yield Action(ActionKind.INPUT_GRAD, stage, microbatch)
        if count >= left_over:
            yield Action(ActionKind.WEIGHT_GRAD, *backwards[count - left_over])
    if zero_bubble:
        for stage, microbatch in backwards[max(len(backwards) - left_over, 0) :]:
            yield Action(ActionKind.WEIGHT_GRAD, stage, microbatch)


def _list_rounds(microbatches: int, ranks: int) -> list[range]:
    """Rounds of p micro-batches, or of a few more each where m is no multiple of p: a round of fewer would let the
    ranks wait between its chunks, and can even bring them to a stand. The largest come first, for the warm-up."""
    number = max(1, microbatches // ranks)
    size, more = divmod(microbatches, number)
    starts = [index * size + min(index, more) for index in range(number + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
