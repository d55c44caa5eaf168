"""ZB-V: two stages on each rank, down the ranks and up again, so that the last stage is where the first is.

The order is that of arXiv 2401.10241, section 6: with F = B = W no rank waits between its first and its last action,
and none holds more than p micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from everstep.pipeline.schedules.actions import Action, ActionKind


def generate_vshape(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[Action]:
    """Yield the computations of `rank`, with the backward split everywhere; `chunks` is 2."""
    assert chunks == 2, chunks
    # The pattern is complete from 2p - 1 micro-batches on; of fewer, it is what is left without the others.
    return (
        action
        for action in _generate_pattern(rank, ranks, max(microbatches, 2 * ranks - 1))
        if action.microbatch < microbatches
    )


def _generate_pattern(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    down, up = rank, 2 * ranks - 1 - rank
    count: Counter[tuple[ActionKind, int]] = Counter()

    def next_(stage: int, *kinds: ActionKind) -> Iterator[Action]:
        for kind in kinds:
            yield Action(kind, stage, count[kind, stage])
            count[kind, stage] += 1

    forward, input_grad, weight_grad = ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD
    for _ in range(2 * (ranks - rank) - 1):
        yield from next_(down, forward)
    for _ in range(rank):
        yield from next_(up, forward)
        yield from next_(down, forward)
    for _ in range(ranks - rank):
        yield from next_(up, forward, input_grad, weight_grad)
    while count[forward, up] < count[forward, down] or count[forward, down] < microbatches:
        if count[forward, down] < microbatches:
            yield from next_(down, forward)
        yield from next_(down, input_grad, weight_grad)
        yield from next_(up, forward, input_grad, weight_grad)
    for _ in range(rank):
        yield from next_(down, input_grad)
        yield from next_(up, input_grad)
    for _ in range(ranks - rank):
        yield from next_(down, input_grad, weight_grad)
    for stage in (up, down):
        while count[weight_grad, stage] < count[input_grad, stage]:
            yield from next_(stage, weight_grad)
