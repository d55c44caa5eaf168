"""Drop what earlier ranks of the same attempt have left of steps that a run reaches again: its saves of them have the
same names, and a checkpoint of some nodes' old shares and others' new ones would be whole to all who look."""

from __future__ import annotations

from everstep.checkpoint.format.keys import Attempt, Key
from everstep.checkpoint.writer.save_ends import SaveEnds
from everstep.checkpoint.writer.slot_memory import SlotMemory
from everstep.checkpoint.writer.storing import Storing


async def drop_steps_ahead(
    storing: Storing, memory: SlotMemory, ends: SaveEnds, attempt: str, restored: str | None
) -> None:
    """Drop, on this node, what the attempt has saved after the checkpoint that its training goes on from.

    Args:
        storing: What is on its way into the store ends first.
        memory: The slots and copies are free after that.
        ends: How such saves have ended is forgotten.
        attempt: That of the run.
        restored: The checkpoint that training goes on from; None where it begins.
    """
    own, start = Attempt.parse(attempt), None if restored is None else Key.parse(restored)

    def is_ahead(key: Key) -> bool:
        return key.attempt == own and (start is None or key > start)

    await storing.drop(is_ahead)
    for slot in memory.find_slots(is_ahead):
        slot.release()
    ends.clear()
