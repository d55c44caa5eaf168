"""A checkpoint is committed whole or not at all, once, and only by who still may."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from everstep.checkpoint.catalog.candidates import list_candidates, verify_checkpoint
from everstep.checkpoint.errors import Incomplete, MissingRanks, StoreError, UnknownFormat, WriterConflict
from everstep.checkpoint.format.keys import HINT, Attempt
from everstep.checkpoint.publish import attempts, commit
from everstep.checkpoint.store.base import Store
from tests.checkpoint.builders import Training, is_good, key, load, newer

training = Training()


def test_a_committed_checkpoint_is_loaded_bit_for_bit(store: Store) -> None:
    training.save(store, key(10))
    training.save(store, key(20))
    loaded = load(store)
    assert loaded.key == key(20)
    assert is_good(training, loaded)
    assert store.read(HINT) == key(20).manifest_name.encode()


def test_nothing_is_committed_before_all_nodes_have_written(store: Store) -> None:
    training.write(store, key(), 0)
    with pytest.raises(commit.Abandoned, match="1 of 2 nodes are not done"):
        training.commit(store, key())
    assert list_candidates(store) == []


def test_the_committer_waits_for_the_others(store: Store) -> None:
    training.write(store, key(), 0)
    waiting = threading.Event()

    def write_late() -> None:
        assert waiting.wait(10)
        training.write(store, key(), 1)

    thread = threading.Thread(target=write_late)
    thread.start()
    commit.commit_checkpoint(store, key(), 2, fenced=lambda: None, timeout=10, on_wait=waiting.set)
    thread.join()
    assert is_good(training, load(store))


def test_who_is_waiting_can_be_told_to_give_up(store: Store) -> None:
    def give_up() -> None:
        raise StoreError("enough", "here")

    with pytest.raises(StoreError, match="enough"):
        commit.commit_checkpoint(store, key(), 2, fenced=lambda: None, timeout=60, on_wait=give_up)


def test_a_node_manifest_that_is_half_there_is_waited_for(store: Store) -> None:
    training.write(store, key(), 0)
    training.write(store, key(), 1)
    whole = store.read(key().node_name(1))
    store.replace(key().node_name(1), whole[:50])
    commit.commit_checkpoint(
        store, key(), 2, fenced=lambda: None, timeout=10, on_wait=lambda: store.replace(key().node_name(1), whole)
    )
    assert is_good(training, load(store))


def test_a_node_that_speaks_of_another_checkpoint_is_not_believed(store: Store) -> None:
    training.write(store, key(), 0)
    training.write(store, key(11), 1)
    store.replace(key().node_name(1), store.read(key(11).node_name(1)))
    with pytest.raises(commit.Abandoned, match=r"speaks of .*-000000000011"):
        training.commit(store, key())


def test_an_attempt_that_is_fenced_commits_nothing(store: Store) -> None:
    training.write(store, key(), 0)
    training.write(store, key(), 1)
    with pytest.raises(commit.Fenced, match="the leader is gone"):
        training.commit(store, key(), fenced=lambda: "the leader is gone")
    assert list_candidates(store) == []


def test_nodes_that_make_no_whole_are_not_committed(store: Store) -> None:
    training.write(store, key(), 0)
    _, manifest = training.part(key(), 1)
    commit.announce_node(store, 1, replace(manifest, tensors={}))
    with pytest.raises(Incomplete, match=r"shared\[40:80, 0:64\]"):
        training.commit(store, key())
    assert list_candidates(store) == []


def test_a_checkpoint_that_does_not_cover_its_world_is_not_committed(store: Store) -> None:
    """One node alone believes that it is all: its tensors are whole, what the other rank has is missing."""
    data, manifest = training.part(key(), 0)
    store.put(key().part_name(0), [data], len(data))
    commit.announce_node(store, 0, replace(manifest, tensors={"own": manifest.tensors["own"]}))
    with pytest.raises(MissingRanks, match="is of 2 ranks, and has no part of rank 1"):
        commit.commit_checkpoint(store, key(), 1, fenced=lambda: None, timeout=0)
    assert list_candidates(store) == []


def test_a_node_of_another_version_is_not_waited_for(store: Store) -> None:
    training.write(store, key(), 0)
    store.replace(key().node_name(1), newer(store.read(key().node_name(0))))
    with pytest.raises(UnknownFormat, match=r"00001\.json has format 77"):
        commit.commit_checkpoint(store, key(), 2, fenced=lambda: None, timeout=60)
    assert list_candidates(store) == []


def test_committing_twice_is_committing_once(store: Store) -> None:
    manifest = training.save(store, key())
    assert training.commit(store, key()) == manifest
    assert list_candidates(store) == [key()]


def test_two_writers_with_the_same_attempt_are_told_apart(store: Store) -> None:
    training.save(store, key())
    before = store.read(key().manifest_name)
    _, manifest = training.part(key(), 0)
    commit.announce_node(store, 0, replace(manifest, values={"step": -1}))
    _, manifest = training.part(key(), 1)
    commit.announce_node(store, 1, replace(manifest, values={"step": -1}))
    with pytest.raises(WriterConflict, match="already committed"):
        training.commit(store, key())
    assert store.read(key().manifest_name) == before


def test_a_hint_that_cannot_be_written_does_not_undo_a_commit(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_ = store.replace

    def refuse(name: str, data: bytes) -> None:
        if name == HINT:
            raise StoreError("no", name)
        replace_(name, data)

    monkeypatch.setattr(store, "replace", refuse)
    training.save(store, key())
    assert verify_checkpoint(store, key()).key == key()


# Attempts


def test_each_run_without_an_operator_gets_an_attempt_of_its_own(store: Store) -> None:
    claimed: list[Attempt] = []
    threads = [threading.Thread(target=lambda: claimed.append(attempts.claim_next_attempt(store))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == [Attempt(0, 1), Attempt(0, 2), Attempt(0, 3), Attempt(0, 4)]


def test_a_counted_attempt_is_greater_than_all_that_was_saved(store: Store) -> None:
    training.save(store, key(generation=7, epoch=3))
    training.write(store, key(generation=9, epoch=3), 0)
    assert attempts.claim_next_attempt(store) == Attempt(3, 10)


def test_a_run_in_the_folder_of_a_later_one_is_refused(store: Store) -> None:
    training.save(store, key(generation=2, epoch=3))
    attempts.check_not_superseded(store, Attempt(3, 2))
    with pytest.raises(attempts.Superseded, match=r"belongs to attempt 0000000003\.0000000002"):
        attempts.check_not_superseded(store, Attempt(1, 5))


def test_an_attempt_that_was_given_is_one_runs(store: Store) -> None:
    """A launcher may start ranks again on the machines that are left, and a pod may be placed on another one."""
    token = Attempt(1, 1)
    attempts.claim_given_attempt(store, token, attempts.RunIdentity("", ("a", "b")))
    attempts.claim_given_attempt(store, token, attempts.RunIdentity("", ("b", "c")))
    with pytest.raises(attempts.AttemptTaken, match=r"on 1 machine.s. c, was given the same one"):
        attempts.claim_given_attempt(store, token, attempts.RunIdentity("", ("c",)))
    later = Attempt(1, 2)
    attempts.claim_given_attempt(store, later, attempts.RunIdentity("job", ("a",)))
    attempts.claim_given_attempt(store, later, attempts.RunIdentity("job", ("z",)))
    with pytest.raises(attempts.AttemptTaken, match="is that of a run job job on"):
        attempts.claim_given_attempt(store, later, attempts.RunIdentity("other", ("a",)))
    assert attempts.claim_next_attempt(store) == Attempt(1, 3)
