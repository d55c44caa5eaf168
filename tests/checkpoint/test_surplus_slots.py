"""A run with fewer slots than the one before gives memory back, and a run that finds no room leaves nothing behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from everstep.checkpoint.catalog.candidates import list_candidates
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.keys import Attempt, Key
from everstep.checkpoint.peers import replica_slots
from everstep.checkpoint.slots.slots import Claim, Slots, SlotState
from everstep.checkpoint.writer import control
from tests.checkpoint.builders import key
from tests.checkpoint.slot_builders import fill
from tests.checkpoint.writers import SIZES, Node, Site, until

LATER = [Attempt(0, generation) for generation in (2, 3)]


def numbers(slots: Slots) -> list[int]:
    return [slot.number for slot in slots]


def save(node: Node, key: Key) -> int:
    number = node.save(key)
    assert node.report("saved")["key"] == str(key)
    return number


def test_fewer_slots_give_memory_back_when_nobody_reads_them_and_may_be_more_again(site: Site) -> None:
    node = site.node()
    assert {save(node, key(10)), save(node, key(20))} == {0, 1}
    node.die()
    with node.slots[1].reading():
        fewer = site.node(slots=1, attempt=str(LATER[0]))
        assert save(fewer, Key(LATER[0], 30)) == 0
        assert node.slots[1].state is SlotState.STORED
    until(lambda: numbers(fewer.slots) == [0], "the other slot is removed")
    fewer.die()
    more = site.node(attempt=str(LATER[1]))
    assert {save(more, Key(LATER[1], step)) for step in (40, 50)} == {0, 1}
    assert all(site.good(Key(LATER[1], step)) for step in (40, 50)), "not what was in a slot of that name before"


def parts_in(slots: Slots) -> list[str]:
    return sorted(path.name for slot in slots for path in slot.path.glob("*.part"))


def test_a_run_with_fewer_ranks_on_a_node_gives_back_the_memory_of_the_others(site: Site) -> None:
    two = site.node()
    assert {save(two, key(10)), save(two, key(20))} == {0, 1}
    two.die()
    one = site.node(attempt=str(LATER[0]), world=1, ranks=(0,))
    assert {save(one, Key(LATER[0], step)) for step in (30, 40)} == {0, 1}
    assert parts_in(one.slots) == ["0.part", "0.part"]
    held = Path(f"/proc/{one.pid}/maps").read_text()
    assert "1.part" not in held, "nor is the memory kept by who has mapped it"
    one.die()
    again = site.node(attempt=str(LATER[1]))
    assert {save(again, Key(LATER[1], step)) for step in (50, 60)} == {0, 1}
    assert all(site.good(Key(LATER[1], step)) for step in (50, 60))


def test_what_is_not_in_the_store_yet_is_stored_before_its_slot_goes(site: Site) -> None:
    slots = Slots.create(site.folder / "memory-0", 3)
    slots.reserve(SIZES, 3)
    slots[2].claim(Claim(key(10), 2, 0, 1))
    for local, size in enumerate(SIZES):
        fill(slots, 2, key(10), local, size)
    slots[1].claim(Claim(key(20), 2, 0, 1))  # its ranks died while they filled it
    site.node(slots=1, attempt=str(LATER[0]))
    until(lambda: numbers(slots) == [0], "the other slots are removed")
    assert list_candidates(site.store) == [key(10)]
    assert site.good(key(10))


def test_a_run_that_finds_no_room_leaves_no_slot_and_no_writer_behind(site: Site) -> None:
    directory, config = site.folder / "memory-0", site.config()
    links = [control.join_writer(directory, config, local, 600.0) for local in (0, 1)]
    site.pids.append(links[0].pid)
    for link in links:
        with pytest.raises(
            CheckpointError, match=r"2 slots for checkpoints need .* are missing; .* or use MemoryOptions\(slots=1\)"
        ):
            link.call("reserve", sizes=[1 << 50, 0], kept=[])
    assert numbers(Slots(directory)) == []
    assert links[0].call("reserve", sizes=SIZES, kept=[]) is None
    assert links[0].call("begin", key=str(key(10))) == 0, "who finds room after that is not told of it"
    links[0].call("void", key=str(key(10)), why="the test has seen enough")
    for link in links:
        link.close()
    crowded = replace(config, node=1)
    link = control.join_writer(site.folder / "memory-1", crowded, 0, 600.0)
    with pytest.raises(CheckpointError, match="are missing"):
        link.call("reserve", sizes=[1 << 50, 0], kept=[])
    link.close()
    until(lambda: not (site.folder / "memory-1").exists(), "the writer ends, and nothing stays")


def test_fewer_copies_of_another_node_are_kept_when_a_newer_one_has_come(site: Site) -> None:
    first, second = site.pair()
    for step in (10, 20):
        first.save(key(step))
        first.report("copied")
    for node in (first, second):
        node.die()
    first, second = site.pair(slots=1, attempt=str(LATER[0]))
    assert second.copies()[0] == key(20), "the newest stays, wherever it is"
    newer = Key(LATER[0], 30)
    first.save(newer)
    first.report("copied")
    assert second.copies() == [newer]
    assert numbers(replica_slots.open_peer_copies(second.directory)) == [0]
