"""Warn of a run in which an option of retention keeps nothing, since what it asks for is in no checkpoint.

Retention takes those for checkpoints like others, and removes them as if nothing was to be kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from everstep.checkpoint.format.user_metadata import pack_metadata, read_metadata

_log = logging.getLogger("everstep.checkpoint")

Note = Callable[[int], Mapping[str, Any]]


def warn_of_missing_metric(note: Note, metric: str, count: int) -> Note:
    """Return a function of a step to its metadata that warns once, when `count` in a row have no number of that name.

    Args:
        note: What makes the metadata.
        metric: The name of the number by which the best checkpoints are kept.
        count: As many checkpoints stay without it; the warning comes with the next one.
    """
    missing = 0

    def watch(step: int) -> Mapping[str, Any]:
        nonlocal missing
        noted = note(step)
        if missing > count:
            return noted
        plain = read_metadata(pack_metadata(noted))
        if isinstance(value := plain.get(metric), int | float) and not isinstance(value, bool):
            missing = count + 1  # the name is right: later ones may lack it, where a run does not measure each time
        elif (missing := missing + 1) > count:
            _log.warning(
                "so far none of the %d checkpoints of this session has a number called %r in its metadata (the last "
                "one has %s): keep_best keeps none of them, and older ones are removed. If later ones will lack it, "
                "give ckpt.save(step, metadata={%r: …}) or ckpt.metadata that number, or "
                "RetentionOptions(best_metric=…) its name",
                missing,
                metric,
                ", ".join(f"{name!r}: {each!r}" for name, each in plain.items())[:200] or "none",
                metric,
            )
        return noted

    return watch


def warn_of_missed_multiple(note: Note, multiple: int) -> Note:
    """Return a function of a step to its metadata that warns once, when a multiple lies between two saves.

    Args:
        note: What makes the metadata.
        multiple: Checkpoints of such steps are kept.
    """
    last: int | None = None
    has_warned = False

    def watch(step: int) -> Mapping[str, Any]:
        nonlocal last, has_warned
        before, last = last, step
        missed = (step - 1) // multiple * multiple
        if before is not None and before < missed and not has_warned:
            has_warned = True
            _log.warning(
                "keep_every=%d keeps checkpoints of steps that are a multiple of it, and none is saved at step %d: the "
                "saves are at %d and %d, and are removed like others. Take a multiple of every_steps, and "
                'policy="wait", or call save() at these steps',
                multiple,
                missed,
                before,
                step,
            )
        return note(step)

    return watch
