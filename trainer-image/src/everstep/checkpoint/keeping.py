"""What the writer does with a filled slot: sum, store, commit on node 0, and remove what is not to be kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from everstep.checkpoint import attempts, commit, fence, retention
from everstep.checkpoint.candidates import candidates, verify
from everstep.checkpoint.control import Config
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format import Manifest
from everstep.checkpoint.keys import Attempt, Key
from everstep.checkpoint.persist import Mappings, Progress, store_again, store_slot, sum_slot
from everstep.checkpoint.slots import Claim, Slot, Slots, State
from everstep.checkpoint.store.base import Store, open_store


class Committed(CheckpointError):
    """Nothing is left to do for what was found in a slot."""

    def __init__(self, key: Key) -> None:
        super().__init__(f"{key} is in the store")


class Save:
    """One filled slot on its way. `left_behind`: another writer, or this one, may have begun to store it before.

    `again`: it has failed before, and all have been told. `doing` is for messages; `told`: when somebody was told that
    it stalls.
    """

    def __init__(self, slot: Slot, claim: Claim, config: Config, *, left_behind: bool, again: bool = False) -> None:
        self.slot = slot
        self.claim = claim
        self.config = config
        self.left_behind = left_behind
        self.again = again
        self.progress = Progress()
        self.doing = "waiting for its turn"
        self.needs_slot = True
        self.stored: Manifest | None = None  # this node's share, once it is durable
        self.committed = False
        self.told = 0.0


class Keeper:
    """Stores slots, one after the other; waits for commits beside that."""

    def __init__(self, slots: Slots, on_whole: Callable[[Slot, Claim, Manifest], None]) -> None:
        """`on_whole` is called, in a thread, as soon as a slot may be restored from."""
        self._slots = slots
        self._on_whole = on_whole
        self._stores: dict[str, Store] = {}
        self._mappings = Mappings()
        # Two pools: work of the first waits for work of the second.
        self._saves = ThreadPoolExecutor(4, "save")
        self._pieces = ThreadPoolExecutor(4, "piece")
        # Reading back takes as long as writing, or for ever: no save waits for it.
        self._reader = ThreadPoolExecutor(1, "tidy")
        self._turn = asyncio.Lock()
        self._tidying = asyncio.Lock()
        self._to_tidy: Save | None = None
        self._pruning: asyncio.Future[None] | None = None

    async def keep(self, save: Save) -> dict[str, Any]:
        """Figures of the save once it is durable: `bytes` (on node 0 of all nodes), `seconds`, `at`."""
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        if save.stored is None:
            async with self._turn:
                save.stored = await loop.run_in_executor(self._saves, partial(self._store, save))
            save.needs_slot = False
        manifest = save.stored
        if save.claim.node == 0:
            save.doing = "waiting for the other nodes"
            manifest = await loop.run_in_executor(self._saves, partial(self._commit, save))
            save.committed = True
        return {
            "bytes": sum(part.size for part in manifest.parts),
            "seconds": time.monotonic() - began,
            "at": time.time(),
        }

    async def tidy(self, save: Save) -> None:
        """Retention after a commit: nothing goes before the new one was read back and found good.

        It may take any time, but CheckpointError once nothing was read for `commit_timeout`. Of those that wait for an
        earlier one only the newest is done: it removes what the others would have.
        """
        self._to_tidy = save
        async with self._tidying:
            if save is not self._to_tidy:
                return
            if self._pruning is not None and not self._pruning.done():
                raise CheckpointError("the store still hangs where an earlier checkpoint was read back from it")
            progress = Progress()
            prune = partial(self._prune, save, progress)
            self._pruning = asyncio.get_running_loop().run_in_executor(self._reader, prune)
            await _while_it_goes_on(self._pruning, progress, save.config.commit_timeout)

    def _store(self, save: Save) -> Manifest:
        slot, config = save.slot, save.config
        if slot.state is State.STORED and self._is_over(save.claim.key, config):
            raise Committed(save.claim.key)
        save.doing = "summing"
        manifest = slot.manifest() or sum_slot(self._slots, slot, self._mappings, self._pieces, save.progress)
        self._on_whole(slot, save.claim, manifest)
        save.doing = "writing to the store"
        store = store_again if save.left_behind else store_slot
        store(self._at(config), slot, save.claim.node, manifest, self._mappings, self._pieces, save.progress)
        slot.store(save.claim.key)
        return manifest

    def _is_over(self, key: Key, config: Config) -> bool:
        """Whether it was committed; or so was a greater one of its attempt, and retention may have removed it."""
        return any(other >= key for other in candidates(self._at(config)) if other.attempt <= key.attempt)

    def _commit(self, save: Save) -> Manifest:
        path, key, store = save.config.fence, save.claim.key, self._at(save.config)

        def fenced() -> str | None:
            # The run whose writer this is: it stores what an earlier attempt left behind, beside saves of its own.
            ours = Attempt.parse(save.config.attempt)
            why = attempts.replaced(store, save.config.run) or attempts.find_successor(store, ours)
            return why or (None if path is None else fence.fenced(key.attempt, Path(path)))

        return commit.commit(
            store,
            key,
            save.claim.nodes,
            fenced=fenced,
            timeout=save.config.commit_timeout,
            on_wait=save.progress.check,
        )

    def _prune(self, save: Save, progress: Progress) -> None:
        config, store, key = save.config, self._at(save.config), save.claim.key
        if not retention.plan(candidates(store), (), [key], config.keep_last, config.keep_every):
            return  # then it need not be read back either
        verify(store, key, threads=2, on_bytes=lambda count: progress.step())
        retention.prune(store, [key], keep_last=config.keep_last, keep_every=config.keep_every)

    def _at(self, config: Config) -> Store:
        if config.url not in self._stores:
            self._stores[config.url] = open_store(config.url, **config.options)
        return self._stores[config.url]


async def _while_it_goes_on(work: asyncio.Future[None], progress: Progress, limit: float) -> None:
    """Until it is done; CheckpointError when it stood still for `limit` seconds, and it ends as soon as it goes on."""
    while not work.done():
        left = progress.at + limit - time.monotonic()
        if left <= 0:
            progress.given_up = f"nothing was read back from the store for {limit:g} s"
            work.add_done_callback(lambda ended: ended.exception())  # whatever it ends with, nobody waits for it
            raise CheckpointError(progress.given_up)
        await asyncio.wait([work], timeout=left)
    work.result()
