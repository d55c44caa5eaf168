"""Reading back and retention, which follow a commit, delay no save, however long they take."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint.catalog.candidates import list_candidates, verify_checkpoint
from everstep.checkpoint.errors import CheckpointError, Full
from everstep.checkpoint.slots.slots import Claim, Slots
from everstep.checkpoint.store.posix import PosixStore
from everstep.checkpoint.writer import keeper, storing
from everstep.checkpoint.writer.control import WriterConfig
from everstep.checkpoint.writer.keeper import Keeper, Save
from everstep.checkpoint.writer.storing import Storing
from tests.checkpoint.builders import key
from tests.checkpoint.slot_builders import fill
from tests.checkpoint.writers import until

PATIENCE = 20.0
SIZE = 20 << 20  # bytes of a save that is read back in four pieces, two at a time
READS = 2  # of a small one: its header, and all else


class Slow(PosixStore):
    """Whoever reads a chunk waits for `goes_on`, or for `pause` seconds."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.goes_on = threading.Event()
        self.pause: float | None = 0.0
        self.reads = 0
        self.is_read = threading.Event()

    def read_into(self, name: str, offset: int, into: memoryview) -> None:
        self.reads += 1
        self.is_read.set()
        self.goes_on.wait(self.pause)
        super().read_into(name, offset, into)


class Node:
    """A keeper with one slot, and a store that keeps one checkpoint."""

    def __init__(self, folder: Path, store: Slow) -> None:
        self.slots = Slots.create(folder / "memory", 1)
        self.store = store
        self.keeper = Keeper(self.slots, lambda slot, claim, manifest: None)

    async def save(self, step: int, size: int = 10_000, **config: Any) -> Save:
        self.slots.reserve([size], 1)
        claim = Claim(key(step), 1, 0, 1)
        self.slots[0].claim(claim)
        fill(self.slots, 0, claim.key, 0, size, world=1)
        save = Save(
            self.slots[0],
            claim,
            WriterConfig(self.store.url, {}, str(claim.key.attempt), 0, 1, 1, (0,), keep_last=1, **config),
            left_behind=False,
        )
        await self.keeper.keep(save)
        return save

    @property
    def steps(self) -> list[int]:
        return [each.step for each in list_candidates(self.store)]


@pytest.fixture
def node(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    store = Slow(str(quick_path / "store"))
    monkeypatch.setattr(keeper, "open_store", lambda url, **options: store)
    yield Node(quick_path, store)
    store.goes_on.set()


def within_patience(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE))


def test_saves_go_on_while_a_store_hangs_where_one_is_read_back(node: Node) -> None:
    async def run() -> None:
        node.store.pause = None
        await node.save(0)
        for step in range(1, 7):
            with pytest.raises(CheckpointError, match=r"nothing was read back|still hangs"):
                await node.keeper.tidy(await node.save(step, commit_timeout=0.05))
        assert node.steps == [6, 5, 4, 3, 2, 1, 0]
        assert node.store.reads <= 2, "only one checkpoint is read back, by two threads"

    within_patience(run())


def test_reading_back_may_take_longer_than_a_save(node: Node) -> None:
    async def run() -> None:
        await node.save(1)
        newest = await node.save(2, SIZE, commit_timeout=0.5)
        node.store.pause = 0.3
        await node.keeper.tidy(newest)
        assert node.steps == [2]

    within_patience(run())


def test_of_those_that_wait_only_the_newest_is_read_back(node: Node) -> None:
    async def run() -> None:
        node.store.pause = None
        await node.save(0)
        tidies = []
        for step in range(1, 5):
            tidies.append(asyncio.create_task(node.keeper.tidy(await node.save(step, commit_timeout=PATIENCE))))
            await asyncio.to_thread(node.store.is_read.wait, PATIENCE)
        node.store.goes_on.set()
        await asyncio.gather(*tidies)
        assert node.steps == [4]
        assert node.store.reads == 2 * READS

    within_patience(run())


def test_a_full_disk_that_takes_no_mark_gets_rid_of_what_is_not_to_be_kept(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no later save would find room."""

    def refuse(name: str, data: bytes) -> None:
        raise Full(node.store.url, f"could not write {name}: No space left on device")

    async def save_two() -> None:
        await node.save(10)
        save = await node.save(20)
        monkeypatch.setattr(node.store, "replace", refuse)
        await node.keeper.tidy(save)

    monkeypatch.setattr(keeper, "_MARKS_PATIENCE", 0.0)
    asyncio.run(save_two())
    assert node.steps == [20]


class Stuck(PosixStore):
    """The first part that is put stands still in the middle until `goes_on`, and no more is done to it once it
    `has_ended`."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.goes_on, self.has_ended, self.is_stuck = threading.Event(), threading.Event(), threading.Event()

    def put(self, name: str, data: Iterable[bytes | memoryview], size: int) -> None:
        if self.is_stuck.is_set():
            super().put(name, data, size)
            return
        try:
            super().put(name, self._stand_still(data), size)
        finally:
            self.has_ended.set()

    def _stand_still(self, data: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for piece in data:
            self.is_stuck.set()
            self.goes_on.wait(PATIENCE)
            yield piece


def test_what_was_given_up_and_still_hangs_removes_nothing_of_what_is_stored_in_its_place(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Stuck(str(quick_path / "store"))
    monkeypatch.setattr(keeper, "open_store", lambda url, **options: store)
    monkeypatch.setattr(storing, "_FIRST_PAUSE", 0.0)
    slots, told = Slots.create(quick_path / "memory", 1), list[str]()
    slots.reserve([SIZE], 1)
    claim = Claim(key(1), 1, 0, 1)
    slots[0].claim(claim)
    fill(slots, 0, claim.key, 0, SIZE, world=1)
    config = WriterConfig(store.url, {}, str(claim.key.attempt), 0, 1, 1, (0,), commit_timeout=PATIENCE)

    async def run() -> None:
        made = Storing(
            slots,
            Keeper(slots, lambda slot, claim, manifest: None),
            lambda report: told.append(report["event"]),
            lambda: None,
        )
        made.start(slots[0], claim, replace(config, commit_timeout=1.0))
        await asyncio.to_thread(store.is_stuck.wait, PATIENCE)
        await asyncio.to_thread(until, lambda: "failed" in told, "the save is given up")
        made.try_again(config)
        await asyncio.to_thread(until, lambda: not made.saves, "it was tried again")
        store.goes_on.set()
        await asyncio.to_thread(store.has_ended.wait, PATIENCE)
        while "saved" not in told:
            monkeypatch.setattr(made, "_next_try", 0.0)
            made.try_again(config)
            await asyncio.sleep(0.01)
        verify_checkpoint(store, claim.key)

    within_patience(run())
