"""Slots that an earlier run with more of them has left on a node: they go once nobody needs what is in them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.slots.slots import Slot, Slots, SlotState


def move_surplus_away(slots: Slots, count: int, saves: Collection[Key], newest: Key | None) -> list[Slot]:
    """Take the surplus slots away; Slots.clear_removed() gives their memory back.

    What is not in the store stays until it is, or until a newer checkpoint is there; what is read, until it is read.

    Args:
        slots: Of this node.
        count: How many of them the run fills.
        saves: The checkpoints that are being stored.
        newest: The greatest that is known to be committed, if any.

    Returns:
        The slots that were taken away.
    """
    moved = []
    for slot in slots.surplus(count):
        claim = slot.claimed()
        if claim is not None:
            is_obsolete = newest is not None and newest > claim.key
            if claim.key in saves or not (is_obsolete or slot.state is SlotState.STORED):
                continue
        with contextlib.suppress(OSError):  # it is tried again
            if slots.move_away(slot):
                moved.append(slot)
    return moved
