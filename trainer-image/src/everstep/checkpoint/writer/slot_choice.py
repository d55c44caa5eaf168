"""Choose which of a node's slots the next save takes, and how long it waits for one.

With two slots the newest whole copy is kept until the one after it is whole. So a save that is due early waits: for a
sum, for other ranks' GPUs, or for processes that restore.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import TypeVar

from everstep.checkpoint.errors import NoSlot
from everstep.checkpoint.slots.slots import READ_TIMEOUT, Slot, Slots
from everstep.checkpoint.writer.filling_saves import Filling
from everstep.checkpoint.writer.keeper import Save

# Seconds that a save waits for a slot which GPUs still copy an earlier one into: they give up sooner than this.
FILL_TIMEOUT = 330.0

C = TypeVar("C", bound=Hashable)


def choose_slot(slots: Slots, count: int, saves: Collection[Save], filling: Filling[C]) -> Slot:
    """Return the slot whose loss costs least; never the newest whole one where there is another.

    Args:
        slots: Of this node.
        count: How many of them this run fills.
        saves: Those that are being stored.
        filling: Those that ranks are about.

    Raises:
        NoSlot: Every slot is in use.
    """
    every = slots.first(count)
    newest = slots.newest()
    keep = {newest.number} if newest and len(every) > 1 else set()
    keep |= {save.slot.number for save in saves if save.needs_slot}
    free = []
    for slot in every:
        claim = slot.claimed()
        if slot.number in keep or (claim is not None and claim.key in filling) or slot.is_read:
            continue
        free.append((claim is not None, claim.key if claim else None, slot))
    if not free:
        uses = [f"slot {slot.number} is {slot.state.value}{' and being read' * slot.is_read}" for slot in every]
        raise NoSlot("every slot is in use: " + ", ".join(uses))
    return min(free, key=lambda each: (each[0], str(each[1])))[2]


def will_be_free(
    slots: Slots, saves: Collection[Save], filling: Filling[C], *, local: int, waited_seconds: float
) -> bool:
    """Tell whether a slot is going to be given back to a save of this local rank that has waited for one so long.

    A slot that the rank has not filled itself it will never fill: it is at a newer save.

    Args:
        slots: The node's slots.
        saves: The saves that are being stored.
        filling: The saves that ranks are filling.
        local: The local rank.
        waited_seconds: How long its save has waited.
    """
    if any(save.needs_slot for save in saves):  # at most for commit_timeout
        return True
    if filling.waits_for_others(local):
        return waited_seconds < FILL_TIMEOUT
    return waited_seconds < READ_TIMEOUT and any(slot.is_read for slot in slots)
