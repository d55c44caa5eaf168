"""A checkpoint that was read back has the marks of all its nodes; only that counts where old ones are removed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.checkpoint.catalog.candidates import list_candidates, read_index, verify_checkpoint, verify_node
from everstep.checkpoint.catalog.verification import (
    VerifiedCheckpoints,
    list_unverified_nodes,
    mark_node,
    verify_and_mark,
)
from everstep.checkpoint.errors import CheckpointError, Damaged, Full
from everstep.checkpoint.format.keys import VERIFIED, Key
from everstep.checkpoint.publish import commit
from everstep.checkpoint.retention.pruning import prune_by_hand
from everstep.checkpoint.retention.retention import prune_store, prune_verified
from everstep.checkpoint.store.base import Store
from tests.checkpoint.builders import Training, is_good, key, load
from tests.checkpoint.writers import Site, until

TRAINING = Training(rows=2)


def marked(store: Store) -> list[int]:
    return [each.step for each in VerifiedCheckpoints(store).marked(list_candidates(store))]


def spoil(store: Store, name: str) -> None:
    data = bytearray(store.read(name))
    data[-70] ^= 1
    store.replace(name, bytes(data))


def test_each_node_verifies_its_own_share_and_all_marks_make_it_verified(store: Store) -> None:
    TRAINING.write(store, key(), 1)
    announced = commit.read_announcement(store, key(), 1)
    seen: list[int] = []
    verify_node(store, announced, 0, on_bytes=seen.append)
    assert sum(seen) == 4096 + 128  # nothing of node 0
    mark_node(store, announced, 0)  # before the commit, of which this node may never hear
    TRAINING.write(store, key(), 0)
    TRAINING.commit(store, key())
    assert list_unverified_nodes(store, read_index(store, key())) == [0]
    assert marked(store) == []
    mark_node(store, commit.read_announcement(store, key(), 0), 0)
    assert marked(store) == [10]


def test_a_share_that_is_bad_gets_no_mark(store: Store) -> None:
    TRAINING.save(store, key())
    spoil(store, key().part_name(1))
    with pytest.raises(Damaged):
        verify_and_mark(store, key())
    assert list_unverified_nodes(store, read_index(store, key())) == [1]


def test_a_mark_of_other_bytes_counts_for_nothing(store: Store) -> None:
    """As of a save of the same key that was begun anew."""
    TRAINING.save(store, key())
    for node in (0, 1):
        store.replace(f"{key().mark_prefix}{node:05d}-{'0' * 16}", b"")
    assert marked(store) == []


def test_what_has_no_marks_is_verified_on_demand_before_it_counts(store: Store) -> None:
    for step in (10, 20, 30, 40):
        TRAINING.save(store, key(step))
    spoil(store, key(30).part_name(0))
    found = VerifiedCheckpoints(store)
    assert prune_verified(found, keep_last=2).removed == (key(10),)
    assert set(found.bad) == {key(30)}
    assert marked(store) == [40, 20]
    assert list_candidates(store) == [key(40), key(30), key(20)]


def test_what_has_its_marks_is_not_read_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20, 30):
        TRAINING.save(store, key(step))
        verify_and_mark(store, key(step))

    def refuse(name: str, offset: int, into: memoryview) -> None:
        raise AssertionError(f"{name} is read")

    monkeypatch.setattr(store, "read_into", refuse)
    assert prune_verified(VerifiedCheckpoints(store), keep_last=2).removed == (key(10),)


def remove(store: Store, name: str) -> None:
    store.delete([name])


def cut(store: Store, name: str) -> None:
    store.replace(name, store.read(name)[:-1])


@pytest.mark.parametrize("harm", [remove, cut])
@pytest.mark.parametrize("what", ["part", "node manifest", "index"])
def test_what_lost_something_after_its_marks_does_not_count(
    store: Store, harm: Callable[[Store, str], None], what: str
) -> None:
    for step in (10, 20, 30, 40):
        TRAINING.save(store, key(step))
        verify_and_mark(store, key(step))
    names = {
        "part": key(40).part_name(1),
        "node manifest": read_index(store, key(40)).nodes[1].name,
        "index": key(40).manifest_name,
    }
    found = VerifiedCheckpoints(store)
    assert len(found.marked(list_candidates(store))) == 4  # what was read of them then is not believed for ever
    harm(store, names[what])
    assert prune_verified(found, keep_last=2).removed == (key(10),)
    assert marked(store) == [30, 20]
    assert found.newest(list_candidates(store), 2) == [key(30), key(20)]


def test_where_something_was_lost_all_that_counts_is_read_again(store: Store) -> None:
    for step in (10, 20, 30, 40):
        TRAINING.save(store, key(step))
        verify_and_mark(store, key(step))
    remove(store, key(40).part_name(1))
    spoil(store, key(20).part_name(0))  # as large as it was
    found = VerifiedCheckpoints(store)
    assert prune_verified(found, keep_last=2).removed == ()
    assert set(found.bad) == {key(40), key(20)}
    assert marked(store) == [30, 10]


def test_a_person_who_prunes_has_all_that_counts_read_again(store: Store) -> None:
    for step in (10, 20, 30, 40):
        TRAINING.save(store, key(step))
        verify_and_mark(store, key(step))
    spoil(store, key(30).part_name(0))
    found = VerifiedCheckpoints(store, believe_marks=False)
    assert prune_verified(found, keep_last=2).removed == (key(10),)
    assert set(found.bad) == {key(30)}
    assert list_candidates(store) == [key(40), key(30), key(20)]


@pytest.mark.parametrize("believe_marks", [True, False])
def test_of_a_multiple_the_one_that_stays_alone_is_good(store: Store, believe_marks: bool) -> None:
    keys = [key(100, 1), key(100, 2), key(150, 2), key(170, 2)]
    for each in keys:
        TRAINING.save(store, each)
        verify_and_mark(store, each)
    remove(store, key(100, 2).part_name(1))
    found = VerifiedCheckpoints(store, believe_marks=believe_marks)
    assert prune_verified(found, keep_last=1, keep_every=100).removed == (key(150, 2),)


def test_what_another_prune_has_removed_meanwhile_is_not_called_damaged(store: Store) -> None:
    for step in (10, 20, 30):
        TRAINING.save(store, key(step))
        verify_and_mark(store, key(step))
    keys, found = list_candidates(store), VerifiedCheckpoints(store)
    assert found.marked(keys) == keys
    prune_store(store, [key(30)], keep_last=1)
    assert found.newest(keys, 2) == [key(30)]
    assert found.bad == {}


def test_where_nothing_could_go_nothing_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20):
        TRAINING.save(store, key(step))
    monkeypatch.setattr(store, "read_into", None)
    assert prune_verified(VerifiedCheckpoints(store), keep_last=2).removed == ()


def test_marks_go_with_their_checkpoint_and_after_it(store: Store) -> None:
    for step in (10, 20):
        TRAINING.save(store, key(step))
        verify_and_mark(store, key(step))
    prune_store(store, [key(20)], keep_last=1)
    assert {Key.of_mark(entry.name) for entry in store.list(VERIFIED)} == {key(20)}
    # A prune that died between manifest and marks.
    TRAINING.save(store, key(5))
    verify_and_mark(store, key(5))
    store.delete([key(5).manifest_name, *(entry.name for entry in store.list(key(5).data_prefix))])
    assert prune_store(store, [key(20)], keep_last=1, sweep_after=-1).leftovers == (key(5),)
    assert {Key.of_mark(entry.name) for entry in store.list(VERIFIED)} == {key(20)}
    assert is_good(TRAINING, load(store))


def test_what_was_verified_once_and_is_bad_now_loses_its_marks(store: Store) -> None:
    TRAINING.save(store, key())
    verify_and_mark(store, key())
    spoil(store, key().part_name(0))
    found = VerifiedCheckpoints(store)
    assert not found.still_holds(key())
    assert found.newest([key()], 1) == []
    assert marked(store) == []


# Writers


def test_two_nodes_mark_what_they_stored_and_old_ones_go(quick_path: Path) -> None:
    site = Site(quick_path)
    try:
        nodes = [site.node(node=number, nodes=2, ranks=(number,), keep_last=1) for number in (0, 1)]
        for step in (10, 20):
            for node in nodes:
                node.save(key(step))
            nodes[0].report("saved")
        until(lambda: list_candidates(site.store) == [key(20)], "the older one is removed")
        assert marked(site.store) == [20]
        verify_checkpoint(site.store, key(20))
    finally:
        site.end()


def test_saved_means_that_all_of_it_is(quick_path: Path) -> None:
    """A writer that believes to be the only node of a run of two ranks commits nothing, and removes nothing."""
    site = Site(quick_path)
    try:
        both = site.node(keep_last=1)
        both.save(key(10))
        both.report("saved")
        both.leave()
        until(lambda: not both.runs, "the writer has ended")
        alone = site.node(nodes=1, ranks=(0,), keep_last=1, attempt="0000000000.0000000002")
        alone.save(key(20, generation=2))
        assert "is of 2 ranks, and has no part of rank 1" in alone.report("failed")["why"]
        assert list_candidates(site.store) == [key(10)]
        assert site.good(key(10))
    finally:
        site.end()


def test_a_store_where_nothing_can_be_marked_keeps_all(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20):
        TRAINING.save(store, key(step))

    def refuse(name: str, data: bytes) -> None:
        raise CheckpointError(f"no {name}")

    monkeypatch.setattr(store, "replace", refuse)
    with pytest.raises(CheckpointError, match="no verified/"):
        prune_verified(VerifiedCheckpoints(store), keep_last=1)
    assert list_candidates(store) == [key(20), key(10)]


def test_a_full_store_is_pruned_by_hand_though_it_takes_no_mark(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (10, 20, 30):
        TRAINING.save(store, key(step))

    def refuse(name: str, data: bytes) -> None:
        raise Full(store.url, f"could not write {name}: No space left on device")

    monkeypatch.setattr(store, "replace", refuse)
    pruning = prune_by_hand(VerifiedCheckpoints(store, believe_marks=False), keep_last=1)
    assert pruning.done.removed == (key(10), key(20))
    assert list_candidates(store) == [key(30)]
