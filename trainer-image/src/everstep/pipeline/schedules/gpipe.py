"""GPipe (arXiv 1811.06965): all forwards, then all backwards, with stages that go round the ranks."""

from __future__ import annotations

from collections.abc import Iterator

from everstep.pipeline.schedules.actions import Action, ActionKind


def generate_gpipe(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[Action]:
    """Yield the computations of `rank`."""
    for chunk in range(chunks):
        for microbatch in range(microbatches):
            yield Action(ActionKind.FORWARD, chunk * ranks + rank, microbatch)
    for chunk in reversed(range(chunks)):
        for microbatch in range(microbatches):
            yield Action(ActionKind.BACKWARD, chunk * ranks + rank, microbatch)
