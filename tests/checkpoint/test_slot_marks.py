"""While ranks are away the writer verifies what lies in memory; a mark says so of these files, and of no others."""

from __future__ import annotations

import os
import shutil

import pytest

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.manifest import HEADER
from everstep.checkpoint.slots import slot_marks
from everstep.checkpoint.slots.slots import Claim, Slot, SlotState
from tests.checkpoint.builders import key
from tests.checkpoint.writers import Node, Site, until


def is_marked(slot: Slot) -> bool:
    manifest = slot.manifest()
    return manifest is not None and slot_marks.is_marked(slot, manifest)


def crashed(site: Site) -> tuple[Node, Slot]:
    """A node whose ranks died after a save, and the slot that holds it, verified."""
    node = site.node()
    slot = node.slots[node.save(key(10))]
    node.report("saved")
    assert not is_marked(slot), "ranks that are there may write"
    node.die()
    until(lambda: is_marked(slot), "the writer has verified the slot")
    return node, slot


def test_a_slot_is_verified_when_its_ranks_have_gone_and_no_more_once_it_is_claimed(site: Site) -> None:
    _, slot = crashed(site)
    back = site.node(attempt="0000000000.0000000002")
    again = back.slots[back.save(key(20, 2))]
    back.report("saved")
    third = back.slots[back.save(key(30, 2))]
    back.report("saved")
    assert {again.number, third.number} == {0, 1}
    assert not is_marked(slot)
    assert not (slot.path / "verified").exists()


def test_a_slot_that_is_not_good_gets_no_mark(site: Site) -> None:
    node = site.node()
    bad = node.slots[node.save(key(10))]
    node.report("saved")
    good = node.slots[node.save(key(20))]
    node.report("saved")
    with bad.part(1).open("r+b") as file:  # as by a rank that writes anywhere before it dies
        file.seek(HEADER + 9)
        byte = file.read(1)
        file.seek(HEADER + 9)
        file.write(bytes([byte[0] ^ 1]))
    node.die()
    until(lambda: is_marked(good), "the good slot is verified")
    assert not is_marked(bad)


def test_a_mark_is_believed_of_the_very_files_in_a_directory_of_our_own(site: Site) -> None:
    _, slot = crashed(site)
    copy = slot.path.with_name("7")
    shutil.copytree(slot.path, copy)
    assert not is_marked(Slot(copy)), "other files with the same bytes"
    slot.path.chmod(0o770)
    assert not is_marked(slot), "others may enter"
    slot.path.chmod(0o700)
    assert is_marked(slot)
    os.utime(slot.part(0))
    with slot.part(0).open("ab") as file:
        file.write(b"x")
    assert not is_marked(slot), "another size"


def test_a_slot_that_is_read_cannot_be_claimed(site: Site) -> None:
    """A reader that holds a slot and has seen that it is whole may read it twice."""
    _, slot = crashed(site)
    with slot.reading():
        with pytest.raises(CheckpointError, match="is being read"):
            slot.claim(Claim(key(20), 2, 0, 1))
        assert is_marked(slot)
    slot.claim(Claim(key(20), 2, 0, 1))
    assert slot.state is SlotState.FILLING


def test_a_verification_ends_when_somebody_comes(site: Site) -> None:
    _, slot = crashed(site)
    manifest = slot.manifest()
    assert manifest is not None

    def came() -> None:
        raise slot_marks.Interrupted

    with pytest.raises(slot_marks.Interrupted):
        slot_marks.verify_slot(slot, manifest, came)
