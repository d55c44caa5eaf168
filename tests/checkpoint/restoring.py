"""Checkpoints to restore: two of one small model, in a store that tells what is read of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from everstep.checkpoint.catalog.manifests import read_manifest
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.state.kinds import PerRank
from everstep.checkpoint.state.rng import Rng
from everstep.checkpoint.store.base import ObjectReader
from everstep.checkpoint.store.posix import PosixStore
from tests.checkpoint import ranks

OLD, NEW = ranks.key(10), ranks.key(20)


class Watched(PosixStore):
    """A folder that counts the bytes that are read of parts and tells `on_read(name, offset)` before each read.

    With `far` it is on another machine, as far as the restore knows.
    """

    is_local = True

    def __init__(
        self, folder: Path, on_read: Callable[[str, int], None] = lambda name, offset: None, *, far: bool = False
    ) -> None:
        super().__init__(folder)
        self.is_local = not far
        self.bytes = 0
        self.manifests = 0
        self._on_read = on_read
        self._lock = threading.Lock()

    def read(self, name: str) -> bytes:
        self.manifests += name.startswith("manifests/")
        return super().read(name)

    @contextmanager
    def open_object(self, name: str) -> Iterator[ObjectReader]:
        self._on_read(name, 0)
        with super().open_object(name) as opened:
            yield _WatchedObject(self, name, opened)

    def was_read(self, name: str, offset: int, into: memoryview) -> None:
        """May change what came."""
        self._on_read(name, offset)
        with self._lock:
            self.bytes += len(into)


class _WatchedObject:
    def __init__(self, store: Watched, name: str, opened: ObjectReader) -> None:
        self._store, self._name, self._opened = store, name, opened

    def read_into(self, offset: int, into: memoryview) -> None:
        self._opened.read_into(offset, into)
        self._store.was_read(self._name, offset, into)

    def expect(self, offset: int, length: int) -> None:
        self._opened.expect(offset, length)


def model(fill: float, size: int = 40) -> nn.Module:
    made = nn.Linear(size, size)
    for param in made.parameters():
        nn.init.constant_(param, fill)
    return made


def filled(made: nn.Module) -> float:
    values: set[float] = {value.item() for param in made.parameters() for value in torch.aminmax(param)}
    assert len(values) == 1, "a mixture of two checkpoints"
    return values.pop()


def save_both(store: Path, size: int = 40) -> None:
    for key in (OLD, NEW):
        ranks.save(PosixStore(store), key, {"model": model(key.step, size), "rng": PerRank(Rng())})


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def weight_at(store: Path, key: Key) -> int:
    """Return where the model's weight begins in the part of rank 0; the generators' bytes are in that part too."""
    [shard] = read_manifest(PosixStore(store), key).tensors["model.weight"].shards
    return shard.chunks[0].offset


def touched(store: PosixStore, tmp_path: Path) -> tuple[Any, float]:
    """Return what a restore by one rank says, and what the model holds then."""
    made = model(-1)
    return ranks.restore(store, tmp_path / "memory", {"model": made}), filled(made)
