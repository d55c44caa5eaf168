"""The writer's work on a filled slot: sum, store, commit on node 0; verify what this node stored, and on node 0
remove what is not to be kept."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from everstep.checkpoint.catalog.best import KeepBest
from everstep.checkpoint.catalog.candidates import list_candidates, verify_node
from everstep.checkpoint.catalog.manifests import read_index
from everstep.checkpoint.catalog.verification import VerifiedCheckpoints, list_unverified_nodes, mark_node
from everstep.checkpoint.errors import CheckpointError, Missing, StoreError
from everstep.checkpoint.format.keys import Attempt, Key
from everstep.checkpoint.format.manifest import Manifest
from everstep.checkpoint.publish import attempts, commit, fence
from everstep.checkpoint.retention import retention
from everstep.checkpoint.slots.slots import Claim, Slot, Slots, SlotState
from everstep.checkpoint.store.base import Store, open_store
from everstep.checkpoint.writer.control import WriterConfig
from everstep.checkpoint.writer.persist import Mappings, SaveProgress, store_again, store_slot, sum_slot

_FIRST_POLL, _SLOWEST_POLL = 0.02, 2.0  # seconds
_MARKS_PATIENCE = 30.0  # seconds

T = TypeVar("T")


class Committed(CheckpointError):
    """Nothing is left to do for what was found in a slot. `size`: its bytes; None where only a newer one is there."""

    def __init__(self, key: Key, size: int | None) -> None:
        super().__init__(f"{key} is in the store" if size is not None else f"a newer one than {key} is in the store")
        self.size = size


class Save:
    """One filled slot on its way. `left_behind`: another writer, or this one, may have begun to store it before.

    `again`: it has failed before, and all have been told. `doing` is for messages; `told`: when somebody was told that
    it stalls.
    """

    def __init__(
        self, slot: Slot, claim: Claim, config: WriterConfig, *, left_behind: bool, again: bool = False
    ) -> None:
        self.slot = slot
        self.claim = claim
        self.config = config
        self.left_behind = left_behind
        self.again = again
        self.progress = SaveProgress()
        self.doing = "waiting for its turn"
        self.needs_slot = True
        self.stored: Manifest | None = None  # this node's share, once it is durable
        self.committed = False
        self.is_dropped = False  # nobody is told how it ends
        self.is_under_way = True  # it may write to the store at this moment
        self.told = 0.0


class Keeper:
    """Stores slots, one after the other; waits for commits beside that."""

    def __init__(self, slots: Slots, on_whole: Callable[[Slot, Claim, Manifest], None]) -> None:
        """`on_whole` is called, in a thread, as soon as a slot may be restored from."""
        self._slots = slots
        self._on_whole = on_whole
        self._stores: dict[str, Store] = {}
        self._shared: set[tuple[str, str]] = set()  # stores in which this node has seen what node 0 has written
        self._verified: dict[str, VerifiedCheckpoints] = {}
        self._keeps_best: dict[tuple[str, int, str, str], KeepBest] = {}
        self._mappings = Mappings()
        # Two pools: work of the first waits for work of the second.
        self._saves = ThreadPoolExecutor(4, "save")
        self._pieces = ThreadPoolExecutor(4, "piece")
        # Reading back takes as long as writing, or for ever: no save waits for it.
        self._reader = ThreadPoolExecutor(1, "tidy")
        self._turn = asyncio.Lock()
        self._running: dict[Key, Future[Any]] = {}  # a try that was given up may hang in the store for longer
        self._tidying = asyncio.Lock()
        self._to_tidy: Save | None = None
        self._pruning: asyncio.Future[None] | None = None

    @property
    def is_tidying(self) -> bool:
        """Tell whether something that is in the store is being read back, or older checkpoints removed."""
        return self._tidying.locked()

    def forget(self, slots: Iterable[Slot]) -> None:
        """Let go of the parts of slots that are removed: their memory is not free before that."""
        for slot in slots:
            self._mappings.forget(slot)

    def open_anew(self, config: WriterConfig) -> None:
        """Open the store of a run anew when it is needed next: what it was opened with may be set right by then."""
        self._stores.pop(config.url, None)

    def take_over(self, environment: Mapping[str, str]) -> None:
        """Go on for another run: open its store as its own processes do, with credentials that may have been renewed.

        Args:
            environment: That of a rank of the run; empty where it is not known.
        """
        if environment:
            os.environ.update(environment)
            for name in os.environ.keys() - environment.keys():
                del os.environ[name]
        self._stores, self._verified = {}, {}
        self.forget(self._slots)  # parts that the run does without are kept mapped by nobody

    async def keep(self, save: Save) -> dict[str, Any]:
        """Return the figures of the save once it is durable: `bytes` (on node 0 of all nodes), `seconds`, `at`."""
        began = time.monotonic()
        if save.stored is None:
            async with self._turn:
                save.stored = await self._run_alone(save, self._store)
            save.needs_slot = False
        size = sum(part.size for part in save.stored.parts)
        if save.claim.node == 0:
            save.doing = "waiting for the other nodes"
            size = await self._run_alone(save, self._commit)
            save.committed = True
        return {
            "bytes": size,
            "seconds": time.monotonic() - began,
            "at": time.time(),
        }

    async def _run_alone(self, save: Save, work: Callable[[Save], T]) -> T:
        """Do a part of the work on a save in a thread, unless an earlier try of the same save is still in one.

        What that one removes or announces when it goes on would be this one's, which has the same names.

        Raises:
            StoreError: It is.
        """
        key = save.claim.key
        if (earlier := self._running.get(key)) is not None and not earlier.done():
            raise StoreError(f"an earlier try to store {key} still hangs", save.config.url, may_pass=True)
        running = self._running[key] = self._saves.submit(work, save)
        try:
            return await asyncio.wrap_future(running)
        finally:
            if running.done() and self._running.get(key) is running:
                del self._running[key]

    async def tidy(self, save: Save) -> None:
        """Read back what this node has stored and mark it as verified; on node 0, which has committed, wait for the
        marks of the others and prune.

        It may take any time, but CheckpointError once nothing was read for `commit_timeout`. Of those that wait for an
        earlier one only the newest is done: it removes what the others would have.
        """
        self._to_tidy = save
        async with self._tidying:
            if save is not self._to_tidy:
                return
            if self._pruning is not None and not self._pruning.done():
                raise CheckpointError("the store still hangs where an earlier checkpoint was read back from it")
            began = time.monotonic()
            await self._read_back(save, self._verify)
            if save.claim.node == 0:
                # The others have begun to verify before the commit, and have about as much to read.
                patience = _MARKS_PATIENCE + 3 * (time.monotonic() - began)
                await self._read_back(save, partial(self._wait_for_marks, patience=patience))
                await self._read_back(save, self._prune)

    async def _read_back(self, save: Save, work: Callable[[Save, SaveProgress], None]) -> None:
        progress = SaveProgress()
        self._pruning = asyncio.get_running_loop().run_in_executor(self._reader, partial(work, save, progress))
        await _while_it_goes_on(self._pruning, progress, save.config.commit_timeout)

    def _wait_for_marks(self, save: Save, progress: SaveProgress, *, patience: float) -> None:
        """Wait until all nodes have verified what they stored, a newer save is there, or a node seems to have died."""
        store = self._at(save.config)
        index = read_index(store, save.claim.key)
        deadline, poll = time.monotonic() + patience, _FIRST_POLL
        while list_unverified_nodes(store, index) and save is self._to_tidy and time.monotonic() < deadline:
            time.sleep(poll)
            poll = min(poll * 1.5, _SLOWEST_POLL)
            progress.step()

    def _store(self, save: Save) -> Manifest:
        slot, config = save.slot, save.config
        if slot.state is SlotState.STORED and self._is_over(save.claim.key, config):
            key, there = save.claim.key, self._at(config)
            raise Committed(key, read_index(there, key).bytes if any(there.list(key.manifest_name)) else None)
        save.doing = "summing"
        manifest = slot.manifest() or sum_slot(self._slots, slot, self._mappings, self._pieces, save.progress)
        self._on_whole(slot, save.claim, manifest)
        save.doing = "writing to the store"
        self._check_store(config)
        store = store_again if save.left_behind else store_slot
        store(self._at(config), slot, save.claim.node, manifest, self._mappings, self._pieces, save.progress)
        slot.store(save.claim.key)
        return manifest

    def _check_store(self, config: WriterConfig) -> None:
        """See that the store is the run's, before anything is written into it.

        Raises:
            NotShared: It is another one than that of node 0, and has been from the beginning.
            Fenced: It was deleted, and is another's.
            StoreError: It is not there now.
        """
        place = (config.url, config.run)
        if config.node != 0 and place not in self._shared:
            here = f"node {config.node} ({socket.gethostname()})"
            attempts.check_is_shared(self._at(config), config.run, here, f"node 0 ({config.first_host})")
        self._shared.add(place)
        if (why := attempts.explain_replaced_store(self._at(config), config.run)) is not None:
            raise commit.Fenced(why)

    def _is_over(self, key: Key, config: WriterConfig) -> bool:
        """Tell whether it was committed; or so was a greater one of its attempt, and retention may have removed it."""
        return any(other >= key for other in list_candidates(self._at(config)) if other.attempt <= key.attempt)

    def _commit(self, save: Save) -> int:
        """Commit the save, and return the bytes of all nodes."""
        path, key, store = save.config.fence, save.claim.key, self._at(save.config)

        def fenced() -> str | None:
            # The run whose writer this is: it stores what an earlier attempt left behind, beside saves of its own.
            ours = Attempt.parse(save.config.attempt)
            why = attempts.explain_replaced_store(store, save.config.run) or attempts.find_successor(store, ours)
            return why or (None if path is None else fence.explain_fence(key.attempt, Path(path)))

        index = commit.commit_checkpoint(
            store,
            key,
            save.claim.nodes,
            fenced=fenced,
            timeout=save.config.commit_timeout,
            on_wait=save.progress.check,
        )
        return index.bytes

    def _verify(self, save: Save, progress: SaveProgress) -> None:
        store, key = self._at(save.config), save.claim.key
        try:
            announced = commit.read_announcement(store, key, save.claim.node)
            verify_node(store, announced, 0, threads=2, on_bytes=lambda count: progress.step())
        except Missing:
            if save.committed or any(store.list(key.manifest_name)):
                raise
            return  # removed since, for a newer one
        mark_node(store, announced, 0)

    def _prune(self, save: Save, progress: SaveProgress) -> None:
        config = save.config
        if any(key.attempt > save.claim.key.attempt for key in list_candidates(self._at(config))):
            return  # what stays is for that one to say: this writer was frozen, perhaps
        found = self._verified.setdefault(config.url, VerifiedCheckpoints(self._at(config)))
        retention.prune_verified(
            found,
            keep_last=config.keep_last,
            keep_every=config.keep_every,
            keep_best=self._best(config),
            on_bytes=lambda count: progress.step(),
        )

    def _best(self, config: WriterConfig) -> KeepBest | None:
        if config.keep_best is None:
            return None
        # Kept, since it remembers what it has read.
        made = KeepBest(config.keep_best, config.best_metric, config.best_mode)
        return self._keeps_best.setdefault((config.url, made.count, made.metric, made.mode), made)

    def _at(self, config: WriterConfig) -> Store:
        found = self._stores.get(config.url)
        if found is None:
            found = self._stores[config.url] = open_store(config.url, **config.options)
        return found


async def _while_it_goes_on(work: asyncio.Future[None], progress: SaveProgress, limit: float) -> None:
    """Until it is done; CheckpointError when it stood still for `limit` seconds, and it ends as soon as it goes on."""
    while not work.done():
        left = progress.at + limit - time.monotonic()
        if left <= 0:
            progress.given_up = f"nothing was read back from the store for {limit:g} s"
            work.add_done_callback(lambda ended: ended.exception())  # whatever it ends with, nobody waits for it
            raise CheckpointError(progress.given_up)
        await asyncio.wait([work], timeout=left)
    work.result()
