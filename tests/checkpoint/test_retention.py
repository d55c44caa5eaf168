"""Old checkpoints go; the newest good one never does, nor one that is being read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.catalog.candidates import list_candidates, verify_checkpoint
from everstep.checkpoint.catalog.leases import SECONDS, CheckpointLease, list_leases
from everstep.checkpoint.catalog.verification import VerifiedCheckpoints, verify_and_mark
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.publish import commit
from everstep.checkpoint.retention.retention import SWEEP_AFTER, plan_retention, prune_store, prune_verified
from everstep.checkpoint.store.base import Store
from everstep.checkpoint.store.posix import PosixStore
from tests.checkpoint.builders import Training, is_good, key, load, newer
from tests.checkpoint.test_model import Died, Mortal

training = Training(rows=2)

some_keys = st.sets(st.builds(key, st.integers(0, 12), st.integers(1, 3)))


@contextmanager
def hold_lease(store: Store, key: Key, seconds: float = SECONDS) -> Iterator[CheckpointLease]:
    """Held while the block runs. Take it before the manifest is read: one that is still there then is left alone."""
    held = CheckpointLease(store, key, seconds)
    try:
        yield held
    finally:
        held.release()


def steps(keys: list[Key]) -> list[int]:
    return [each.step for each in keys]


def test_the_last_ones_are_kept() -> None:
    keys = [key(step) for step in (10, 20, 30, 40)]
    assert steps(plan_retention(keys, (), {key(30), key(40)}, keep_last=2)) == [10, 20]


def test_multiples_are_kept() -> None:
    keys = [key(step) for step in (50, 100, 150, 200, 250)]
    assert steps(plan_retention(keys, (), {key(250)}, keep_last=1, keep_every=100)) == [50, 150]


def test_of_a_multiple_whose_later_one_is_not_verified_both_are_kept() -> None:
    keys = [key(100, 1), key(100, 2), key(150, 2)]
    assert plan_retention(keys, (), {key(100, 1), key(150, 2)}, keep_last=1, keep_every=100) == []


def test_what_is_not_verified_counts_for_nothing() -> None:
    """Three are to stay: the newest three are not all good, so an older good one stays as the third."""
    keys = [key(step) for step in (10, 20, 30, 40, 50)]
    assert steps(plan_retention(keys, (), {key(20), key(30), key(50)}, keep_last=3)) == [10]
    assert plan_retention(keys, (), {key(30), key(50)}, keep_last=3) == []


def test_of_a_multiple_that_two_attempts_saved_the_later_is_kept() -> None:
    keys = [key(100, 1), key(100, 2), key(150, 2)]
    assert plan_retention(keys, (), {key(150, 2)}, keep_last=1, keep_every=100) == [key(100, 1)]


def test_nothing_goes_before_something_newer_was_verified() -> None:
    keys = [key(step) for step in (10, 20, 30)]
    assert plan_retention(keys, (), (), keep_last=1) == []
    assert plan_retention(keys, (), {key(10)}, keep_last=1) == []
    assert steps(plan_retention(keys, (), {key(20)}, keep_last=1)) == [10]


def test_what_was_verified_and_is_gone_counts_for_nothing() -> None:
    assert plan_retention([key(10), key(20)], (), {key(30)}, keep_last=1) == []


def test_what_is_read_stays() -> None:
    assert steps(plan_retention([key(10), key(20), key(30)], {key(10)}, {key(30)}, keep_last=1)) == [20]


def test_keeping_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="keep_last"):
        plan_retention([], (), (), keep_last=0)


@given(some_keys, some_keys, some_keys, st.integers(1, 4), st.none() | st.integers(1, 5))
def test_whatever_goes_something_newer_and_verified_stays(
    keys: set[Key], leased: set[Key], verified: set[Key], keep_last: int, keep_every: int | None
) -> None:
    removed = plan_retention(keys, leased, verified, keep_last, keep_every)
    good = verified & keys
    assert set(removed) <= keys - leased
    assert all(one < other for one, other in pairwise(removed))
    assert not removed or len(good - set(removed)) >= keep_last
    newest = sorted(good)[-keep_last:]
    assert all(each < newest[0] for each in removed)


def test_pruned_checkpoints_leave_nothing(store: Store) -> None:
    for step in (10, 20, 30):
        training.save(store, key(step))
    assert prune_store(store, {key(20), key(30)}, keep_last=2).removed == (key(10),)
    assert list_candidates(store) == [key(30), key(20)]
    assert not list(store.list(key(10).data_prefix))
    assert is_good(training, load(store))


def test_what_another_version_wrote_is_not_removed(store: Store) -> None:
    for step in (10, 20, 30):
        training.save(store, key(step))
    store.replace(key(20).manifest_name, newer(store.read(key(20).manifest_name)))
    assert prune_store(store, {key(30)}, keep_last=1).removed == (key(10),)
    assert list_candidates(store) == [key(30), key(20)]
    assert len(list(store.list(key(20).data_prefix))) == 6


def test_a_prune_that_died_is_finished_by_the_next(store: Store) -> None:
    training.save(store, key(10))
    training.save(store, key(20))
    store.delete([key(10).manifest_name])
    done = prune_store(store, {key(20)}, keep_last=1, sweep_after=10, clock=lambda: time.time() + 100)
    assert done.leftovers == (key(10),)
    assert not list(store.list(key(10).data_prefix))


@pytest.mark.parametrize("calls", range(11))
def test_what_a_prune_that_died_has_left_can_be_saved_again_and_is_whole(calls: int, store: Store) -> None:
    for step in (10, 20):
        training.save(store, key(step))
        verify_and_mark(store, key(step))
    with suppress(Died):
        prune_store(Mortal(store, calls, after=True), {key(20)}, keep_last=1)
    for rank in range(training.world):
        _, manifest = training.part(key(10), rank)
        if not commit.is_node_announced(store, rank, manifest):
            store.delete([key(10).part_name(rank)])
            training.write(store, key(10), rank)
    training.commit(store, key(10))
    verify_checkpoint(store, key(10))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("calls", range(11))
def test_prunes_around_one_that_died_keep_as_many_verified_checkpoints_as_are_wanted(
    calls: int, after: bool, store: Store
) -> None:
    """The older is half removed and saved again, then a prune wants three: none of what counts may be half there."""
    for step in (10, 20, 30):
        training.save(store, key(step))
        verify_and_mark(store, key(step))
    with suppress(Died):
        prune_verified(VerifiedCheckpoints(Mortal(store, calls, after)), keep_last=2)
    for rank in range(training.world):
        _, manifest = training.part(key(10), rank)
        if not commit.is_node_announced(store, rank, manifest):
            store.delete([*(entry.name for entry in store.list(key(10).mark_prefix)), key(10).part_name(rank)])
            training.write(store, key(10), rank)
    training.commit(store, key(10))
    marked = VerifiedCheckpoints(store).marked(list_candidates(store))
    prune_verified(VerifiedCheckpoints(store), keep_last=3)
    assert len(VerifiedCheckpoints(store).marked(list_candidates(store))) >= len(marked)
    for step in (10, 20, 30):
        verify_checkpoint(store, key(step))
    assert prune_verified(VerifiedCheckpoints(store), keep_last=2).removed == (key(10),)
    assert list_candidates(store) == [key(30), key(20)]


def test_leftovers_of_dead_saves_go_when_they_are_old_and_a_greater_one_is_good(store: Store) -> None:
    training.write(store, key(10), 0)
    training.save(store, key(20))
    training.write(store, key(30), 0)
    later = time.time() + 100

    def kept() -> set[Key]:
        return {Key.of_data(entry.name) for entry in store.list("data/")}

    prune_store(store, {key(20)}, keep_last=1, sweep_after=3600, clock=lambda: later)
    assert kept() == {key(10), key(20), key(30)}
    prune_store(store, (), keep_last=1, sweep_after=10, clock=lambda: later)
    assert kept() == {key(10), key(20), key(30)}
    assert prune_store(store, {key(20)}, keep_last=1, sweep_after=10, clock=lambda: later).leftovers == (key(10),)
    assert kept() == {key(20), key(30)}


def test_temporary_files_of_dead_writers_go(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    training.save(store, key(20))
    (tmp_path / "manifests" / ".new-0123456789abcdef").touch()
    assert prune_store(store, {key(20)}, keep_last=1, sweep_after=10, clock=lambda: time.time() + 100).swept == 1
    assert is_good(training, load(store))


# Leases


def test_what_is_leased_survives_until_the_lease_expires(store: Store) -> None:
    for step in (10, 20, 30):
        training.save(store, key(step))
    now = time.time()
    with hold_lease(store, key(10), seconds=60):
        assert prune_store(store, {key(30)}, keep_last=1, clock=lambda: now + 30).removed == (key(20),)
        assert prune_store(store, {key(30)}, keep_last=1, clock=lambda: now + 90).removed == (key(10),)
    assert list_leases(store) == {}


def test_a_lease_is_renewed(store: Store) -> None:
    now = 1000.0
    held = CheckpointLease(store, key(10), seconds=60, clock=lambda: now)
    now = 1059.0
    held.renew()
    now = 1100.0
    assert not held.expired
    now = 1119.0
    assert held.expired


@pytest.mark.parametrize("hours", [-30, -1, 1, 30])
def test_a_wrong_clock_of_who_reads_or_of_who_removes_harms_nobody(
    store: Store, hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = time.time
    for step in (10, 20, 30):
        training.save(store, key(step))
    training.write(store, key(25), 0)  # somebody copies it here at this moment
    monkeypatch.setattr(time, "time", lambda: right() + 3600 * hours)
    with hold_lease(store, key(10)):
        monkeypatch.setattr(time, "time", right)
        assert prune_store(store, {key(30)}, keep_last=2).removed == ()
    with hold_lease(store, key(10)):
        monkeypatch.setattr(time, "time", lambda: right() + 3600 * hours)
        done = prune_store(store, {key(30)}, keep_last=1)
    assert (done.removed, done.leftovers, done.swept) == ((key(20),), (), 0)
    assert prune_store(store, {key(30)}, keep_last=1).removed == (key(10),)
    assert {Key.of_data(entry.name) for entry in store.list("data/")} == {key(25), key(30)}
    assert list_leases(store) == {}
    assert not list(store.list("leases/"))


def test_what_somebody_else_has_put_beside_leases_stays(store: Store) -> None:
    for name in ("leases/contract.pdf", "leases/2024/contract.json", "leases/0.json"):
        store.replace(name, b"theirs")
    training.save(store, key(10))
    training.save(store, key(20))
    later = time.time() + 10 * SWEEP_AFTER
    assert prune_store(store, {key(20)}, keep_last=1, clock=lambda: later).removed == (key(10),)
    assert {entry.name for entry in store.list("leases/")} == {
        "leases/contract.pdf",
        "leases/2024/contract.json",
        "leases/0.json",
    }


def test_a_lease_that_cannot_be_read_holds_nothing_and_goes(store: Store) -> None:
    training.save(store, key(10))
    training.save(store, key(20))
    for number, content in enumerate((b"", b"[]", b"{}", b'{"attempt": 1, "step": 2, "expires": 3}', b"\xff")):
        store.replace(f"leases/{number:016x}.json", content)
    assert list_leases(store) == {}
    assert prune_store(store, {key(20)}, keep_last=1).removed == (key(10),)
    prune_store(store, {key(20)}, keep_last=1, sweep_after=10, clock=lambda: time.time() + 100)
    assert not list(store.list("leases/"))
