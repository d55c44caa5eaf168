"""All ranks save the same step, or none does and all are told which rank is where."""

from __future__ import annotations

import json
from collections.abc import Sequence

from everstep.checkpoint.errors import CheckpointError
from everstep.coordination.group import RankGroup

_MOST_NAMED = 16


class StepsDiffer(CheckpointError):
    """Ranks have come to one save with different steps."""


def check_same_step(step: int, group: RankGroup) -> None:
    """Check that all ranks save the same step. Collective.

    Args:
        step: The one that this rank saves.
        group: All ranks.

    Raises:
        StepsDiffer: On all ranks alike, with the step of each.
        RankLost: A rank is gone.
    """
    found = group.gather_bytes(b"%d" % step)
    words = None if found is None else [json.dumps(describe_difference([int(each) for each in found])).encode()]
    why = json.loads(group.scatter_bytes(None if words is None or found is None else words * len(found)))
    if why:
        raise StepsDiffer(why)


def describe_difference(steps: Sequence[int]) -> str:
    """Return which ranks are at another step than rank 0, from the steps of all in order; empty where none is."""
    others = [f"rank {rank} is at step {step}" for rank, step in enumerate(steps) if step != steps[0]]
    if not others:
        return ""
    more = f" and {len(others) - _MOST_NAMED} more ranks are at others" if len(others) > _MOST_NAMED else ""
    return (
        f"{', '.join(others[:_MOST_NAMED])}{more}, rank 0 at step {steps[0]}: nothing is saved. Call step() and save() "
        "with the same number on all ranks, and equally often; the next save at which they agree is taken"
    )
