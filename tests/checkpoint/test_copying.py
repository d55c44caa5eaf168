"""A copy is the same checkpoint, or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.checkpoint.candidates import candidates, verify
from everstep.checkpoint.copying import copy
from everstep.checkpoint.errors import Conflict, Damaged
from everstep.checkpoint.keys import HINT
from everstep.checkpoint.store.base import Store, open_store
from tests.checkpoint.builders import Training, is_good, key, load

TRAINING = Training()


def test_a_copy_is_the_same_checkpoint(store: Store, tmp_path: Path) -> None:
    source = open_store(tmp_path / "source")
    TRAINING.save(source, key(5))
    seen: list[int] = []
    assert copy(source, store, key(5), on_bytes=seen.append)
    assert verify(store, key(5)) == verify(source, key(5))
    assert is_good(TRAINING, load(store))
    for rank in range(2):
        assert store.read(key(5).part_name(rank)) == source.read(key(5).part_name(rank))
    assert sum(seen) > 0
    assert not copy(source, store, key(5))


def test_a_damaged_checkpoint_is_not_copied(store: Store, tmp_path: Path) -> None:
    source = open_store(tmp_path / "source")
    TRAINING.save(source, key(5))
    part = tmp_path / "source" / key(5).part_name(1)
    data = bytearray(part.read_bytes())
    data[-100] ^= 1
    part.write_bytes(data)
    with pytest.raises(Damaged):
        copy(source, store, key(5))
    assert candidates(store) == []
    part.write_bytes(bytes(data[:-100]) + bytes([data[-100] ^ 1]) + bytes(data[-99:]))
    assert copy(source, store, key(5))
    assert is_good(TRAINING, load(store))


def test_another_checkpoint_of_the_same_name_is_left_alone(store: Store, tmp_path: Path) -> None:
    source = open_store(tmp_path / "source")
    TRAINING.save(source, key(5))
    Training(rows=8).save(store, key(5))
    with pytest.raises(Conflict):
        copy(source, store, key(5))
    assert is_good(Training(rows=8), load(store))


def test_the_hint_only_moves_forward(store: Store, tmp_path: Path) -> None:
    source = open_store(tmp_path / "source")
    for step in (5, 6):
        TRAINING.save(source, key(step))
    for step in (6, 5):
        copy(source, store, key(step))
    assert store.read(HINT).decode() == key(6).manifest_name
