"""The newest verified checkpoint is chosen; names, dates and hints prove nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from everstep.checkpoint.catalog.candidates import list_candidates, read_manifest, verify_checkpoint
from everstep.checkpoint.errors import Damaged, Missing, UnknownFormat
from everstep.checkpoint.format.index import describe_node_manifest, encode_announcement
from everstep.checkpoint.format.keys import HINT, Key
from everstep.checkpoint.format.manifest import encode_manifest
from everstep.checkpoint.publish import commit
from everstep.checkpoint.store.base import Store, StoredObject
from everstep.checkpoint.store.posix import PosixStore
from tests.checkpoint.builders import Training, key, load, newer

training = Training()


def test_a_later_attempt_wins_whatever_the_steps_are(store: Store) -> None:
    order = [key(5, generation=1, epoch=1), key(10, generation=3), key(11, generation=2), key(9, generation=2)]
    for each in sorted(order, key=lambda key: key.step):
        training.save(store, each)
    assert list_candidates(store) == order


HINTS = [b"", b"\xff", b"manifests/../../etc/passwd", *(key(step).manifest_name.encode() for step in (99, 10))]


@pytest.mark.parametrize("hint", HINTS)
def test_no_hint_changes_what_is_chosen(store: Store, hint: bytes) -> None:
    training.save(store, key(10))
    training.save(store, key(20))
    store.replace(HINT, hint)
    assert list_candidates(store) == [key(20), key(10)]


def test_a_hint_shows_what_a_stale_listing_does_not(tmp_path: Path) -> None:
    class Stale(PosixStore):
        def list(self, prefix: str):  # type: ignore[no-untyped-def]
            return (entry for entry in super().list(prefix) if key(20).manifest_name != entry.name)

    store = Stale(tmp_path)
    training.save(store, key(10))
    training.save(store, key(20))
    assert list_candidates(store) == [key(20), key(10)]


def test_strangers_files_are_passed_over(store: Store) -> None:
    training.save(store, key())
    for name in ("manifests/README", "manifests/a/b.json", "data/notes.txt", "leases/x"):
        store.replace(name, b"?")
    assert list_candidates(store) == [key()]


def test_an_empty_store_has_no_candidates(store: Store) -> None:
    assert list_candidates(store) == []
    assert load(store).key is None


def test_what_is_good_verifies_and_every_byte_is_counted(store: Store) -> None:
    manifest = training.save(store, key())
    counts: list[int] = []
    assert verify_checkpoint(store, key(), on_bytes=counts.append) == manifest
    assert sum(counts) == 2 * 4096 + len(training.state(key())["shared"]) + 1000


def test_a_manifest_that_does_not_cover_its_world_is_never_chosen(store: Store) -> None:
    """As a library without this check could commit it: all that its tensors need is there, half of the world is not."""
    training.save(store, key(10))
    data, manifest = training.part(key(20), 0)
    store.put(key(20).part_name(0), [data], len(data))
    alone = replace(manifest, tensors={"own": manifest.tensors["own"]})
    commit.announce_node(store, 0, alone)
    store.replace(key(20).manifest_name, encode_announcement(describe_node_manifest(alone, encode_manifest(alone), 0)))
    with pytest.raises(Damaged, match=r"is not whole: .* is of 2 ranks, and has no part of rank 1"):
        verify_checkpoint(store, key(20))
    assert load(store).key == key(10)


def test_what_a_later_version_wrote_is_no_damage(store: Store) -> None:
    training.save(store, key(10))
    training.save(store, key(20))
    store.replace(key(20).manifest_name, newer(store.read(key(20).manifest_name)))
    assert list_candidates(store) == [key(20), key(10)]
    with pytest.raises(UnknownFormat, match="has format 77"):
        verify_checkpoint(store, key(20))


def test_a_manifest_under_another_s_name_is_damaged(store: Store) -> None:
    training.save(store, key(10))
    store.replace(key(20).manifest_name, store.read(key(10).manifest_name))
    with pytest.raises(Damaged, match="is the manifest of"):
        read_manifest(store, key(20))
    assert load(store).key == key(10)


def test_a_checkpoint_without_a_part_does_not_verify(store: Store) -> None:
    training.save(store, key())
    store.delete([key().part_name(1)])
    with pytest.raises(Missing, match=r"00001\.part"):
        verify_checkpoint(store, key())


def test_a_part_that_has_grown_does_not_verify(store: Store) -> None:
    training.save(store, key())
    store.replace(key().part_name(1), store.read(key().part_name(1)) + b"x")
    with pytest.raises(Damaged, match="has 6657 bytes, 6656 were written"):
        verify_checkpoint(store, key())


def test_a_key_that_was_never_committed_is_missing(store: Store) -> None:
    with pytest.raises(Missing):
        verify_checkpoint(store, key())


def test_names_and_sizes_are_listed(store: Store) -> None:
    training.save(store, key())

    def size(entry: StoredObject) -> int:
        return entry.size

    sizes = {entry.name: size(entry) for entry in store.list(key().data_prefix)}
    assert sizes[key().part_name(0)] == len(training.part(key(), 0)[0])
    assert {Key.of_data(name) for name in sizes} == {key()}
