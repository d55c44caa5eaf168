"""Topological orders whose prefixes make good cuts."""

from __future__ import annotations

from everstep.pipeline.partition.blocks import Blocks, sort_topologically


def list_orders(blocks: Blocks) -> list[list[int]]:
    """Return different orders: as given, each block as late as it may be, and the one that keeps the fewest bytes
    open."""
    count = len(blocks.blocks)
    flipped = {count - 1 - index: {count - 1 - each for each in after} for index, after in enumerate(blocks.after)}
    late = [count - 1 - index for index in reversed(sort_topologically(flipped))]
    found = [list(range(count)), late, _order_by_open_bytes(blocks)]
    return [each for index, each in enumerate(found) if each not in found[:index]]


def _order_by_open_bytes(blocks: Blocks) -> list[int]:
    """Greedily the ready block that leaves the fewest bytes open; among equals, the first."""
    before, after = blocks.before, blocks.after
    missing = [len(found) for found in before]
    waiting = [len(value.consumers) for value in blocks.values]
    gives: list[list[int]] = [[] for _ in blocks.blocks]
    takes: list[list[int]] = [[] for _ in blocks.blocks]
    for number, value in enumerate(blocks.values):
        gives[value.producer].append(number)
        for consumer in value.consumers:
            takes[consumer].append(number)
    ready = {index for index, count in enumerate(missing) if count == 0}
    order = []

    def growth(block: int) -> tuple[int, int]:
        closed = sum(blocks.values[number].size for number in takes[block] if waiting[number] == 1)
        return sum(blocks.values[number].size for number in gives[block]) - closed, block

    while ready:
        block = min(ready, key=growth)
        ready.discard(block)
        order.append(block)
        for number in takes[block]:
            waiting[number] -= 1
        for each in after[block]:
            missing[each] -= 1
            if missing[each] == 0:
                ready.add(each)
    return order
