"""All ranks load the same checkpoint, the newest that is good for every one of them, or none is touched.

In rounds: rank 0 proposes; each node fetches the manifest; each rank says what it needs; the ranks of a node read and
verify that once, together; each takes what it needs. A vote ends every round (vote.py), and anything that is wrong with
a checkpoint anywhere sends all ranks to the next one.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from everstep.checkpoint.candidates import read_chunk
from everstep.checkpoint.checksum import digest
from everstep.checkpoint.errors import CheckpointError, Conflict, Damaged, Incomplete, StoreError
from everstep.checkpoint.format import Chunk, Manifest, decode, encode
from everstep.checkpoint.keys import Key
from everstep.checkpoint.loading import Chunks, Loading
from everstep.checkpoint.merging import merge
from everstep.checkpoint.node_cache import NodeCache, pack, share, units, unpack
from everstep.checkpoint.proposals import MEMORY, Proposals, mine
from everstep.checkpoint.slots import Slots
from everstep.checkpoint.state.kinds import StateMismatch
from everstep.checkpoint.store.base import Store
from everstep.checkpoint.topology import Topology
from everstep.checkpoint.vote import Vote

# What is wrong with this checkpoint, as opposed to with this run: another one may be good.
_BAD = (Damaged, StoreError, Incomplete, Conflict)

_THREADS = 4  # readers of one rank

T = TypeVar("T")


class NoGoodCheckpoint(CheckpointError):
    """Checkpoints were saved and none of them can be loaded; the objects are as they were. `reasons` by key."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        listed = "; ".join(f"{key}: {why}" for key, why in reasons.items())
        super().__init__(f"no checkpoint is good, and none was loaded. {listed}")
        self.reasons = dict(reasons)


@dataclass(frozen=True)
class Restored:
    """What was loaded. `step` is 0 and `key` None for a fresh start.

    `tier`: "memory" or "store". `fell_back`: newer checkpoints that are bad, with the reason. `left`: names of objects
    that each rank has its own state of, saved by another number of ranks. `values`: plain values that were given, by
    name, as they are now. `bytes` were read and verified by this rank, in `seconds`, the whole restore's.
    """

    step: int = 0
    key: Key | None = None
    tier: str = ""
    fell_back: dict[str, str] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
    bytes: int = 0
    seconds: float = 0.0


class _Bad(Exception):
    """This checkpoint is bad on some rank."""


class Restorer:
    """One rank's side of a restore; all ranks make one and call restore() together."""

    def __init__(
        self,
        objects: Mapping[str, object],
        store: Store,
        topology: Topology,
        vote: Vote,
        memory: Path,
        *,
        allow_pickle: bool = False,
    ) -> None:
        """`memory`: the folder of this node's slots."""
        self._objects = objects
        self._store = store
        self._topology = topology
        self._vote = vote
        self._memory = memory
        self._allow_pickle = allow_pickle
        self._proposals = Proposals(store, topology)
        self._bytes = 0

    def restore(self) -> Restored:
        """Loads the newest checkpoint that is good on all ranks.

        NoGoodCheckpoint, StateMismatch, RankLost, StoreError when the store cannot even be listed; the objects are
        untouched by then. An error while they take in their state is raised on all ranks; they are undefined then.
        """
        began = time.monotonic()
        try:
            while True:
                proposal = self._vote.agree(mine(self._memory, self._topology), self._proposals.next)
                if proposal["key"] is None:
                    if proposal["rejected"]:
                        raise NoGoodCheckpoint(proposal["rejected"])
                    return Restored(seconds=time.monotonic() - began)
                try:
                    restored = self._load(Key.parse(proposal["key"]), proposal["tier"])
                except _Bad as bad:
                    self._proposals.reject(str(bad))
                    continue
                return replace(
                    restored, fell_back=proposal["rejected"], bytes=self._bytes, seconds=time.monotonic() - began
                )
        finally:
            self._proposals.close()
            self._vote.settle()

    def _load(self, key: Key, tier: str) -> Restored:
        name = self._together(lambda: secrets.token_hex(8) if self._topology.rank == 0 else None)[0]
        cache = NodeCache(self._memory, name, shared=len(self._topology.ranks) > 1)
        with contextlib.ExitStack() as stack:
            if self._leads:
                stack.callback(cache.remove)
            self._together(lambda: self._fetch(key, tier, cache) if self._leads else None)
            manifest = decode(cache.message("manifest"), key.manifest_name)
            chunks = Chunks(manifest)
            loading = self._plan(manifest, chunks, cache)
            tiers = self._together(lambda: self._read(manifest, chunks, cache, tier, stack))
            loaded = self._together(
                lambda: loading.apply(lambda part: cache.part(part, manifest), self._alive), local=True
            )
        found = MEMORY if all(each == MEMORY for each in tiers) else "store"
        return Restored(key.step, key, found, left=tuple(loading.left), values=loaded)

    @property
    def _leads(self) -> bool:
        return self._topology.local == 0

    def _alive(self) -> None:
        self._vote.alive()
        self._proposals.renew()

    def _fetch(self, key: Key, tier: str, cache: NodeCache) -> None:
        """The node's leader gets the manifest, for all of the node."""
        cache.create()
        if tier == MEMORY and self._topology.nodes == 1:
            found = [manifest for _, manifest in Slots(self._memory).whole() if manifest.key == key]
            if not found:
                raise _gone(key)
            data = encode(merge(found[:1]))
        else:
            data = self._store.read(key.manifest_name)
        if decode(data, key.manifest_name).key != key:
            raise Damaged(key.manifest_name, "is the manifest of another checkpoint")
        cache.leave("manifest", data)

    def _plan(self, manifest: Manifest, chunks: Chunks, cache: NodeCache) -> Loading:
        """What this rank needs; StateMismatch on all ranks if it does not fit the objects of any."""
        topology = self._topology

        def plan() -> Loading:
            found = Loading(
                manifest,
                self._objects,
                rank=topology.rank,
                world=topology.world,
                allow_pickle=self._allow_pickle,
            )
            needs = set() if found.problems else found.needs(manifest, chunks)
            cache.leave(f"needs.{topology.local}", pack(needs, len(chunks.all)))
            return found

        loading: Loading = self._together(plan, local=True)
        names = sorted(manifest.tensors)
        wanted = {i for i, name in enumerate(names) if name in loading.wanted}
        message = {
            "problems": [f"rank {topology.rank}: {each}" for each in loading.problems],
            "wanted": pack(wanted, len(names)).hex(),
        }

        def fits(messages: list[Any]) -> list[str]:
            problems = [each for message in messages for each in message["problems"]]
            if not problems:
                taken = {names[i] for i in unpack([bytes.fromhex(message["wanted"]) for message in messages])}
                below = tuple(f"{prefix}." for prefix in loading.exclusive())
                problems = [
                    f"{name} is in the checkpoint, and nothing here has it"
                    for name in names
                    if name.startswith(below) and name not in taken
                ]
            return problems

        problems = self._vote.agree(message, fits)
        if problems:
            raise StateMismatch(problems)
        return loading

    def _read(
        self, manifest: Manifest, chunks: Chunks, cache: NodeCache, tier: str, stack: contextlib.ExitStack
    ) -> str:
        """Brings this rank's share of what the node needs into its memory and verifies it. The tier it was in."""
        topology = self._topology
        needed = unpack([cache.message(f"needs.{local}") for local in range(len(topology.ranks))])
        held = _adopt(self._memory, manifest, cache, stack) if tier == MEMORY else set()
        every = units([chunks.all[number] for number in needed], manifest)
        if self._leads:
            cache.check_room(sum(unit.length for unit in every if unit.part not in held))
        own = share(every, topology.local, len(topology.ranks))
        cache.reserve([unit for unit in own if unit.part not in held], manifest)
        # Mapped before the threads begin, which then share the mappings.
        parts = {unit.part: cache.part(unit.part, manifest) for unit in own}

        def bring(unit: Chunk) -> None:
            into = parts[unit.part][unit.offset : unit.offset + unit.length]
            if unit.part not in held:
                read_chunk(self._store, manifest, unit, into)
            elif digest(manifest.checksum, into) != unit.sum:
                name = manifest.parts[unit.part].name
                raise Damaged(name, f"bytes {unit.offset} to {unit.offset + unit.length} are bad in this node's memory")
            self._alive()

        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="restore")
        try:
            for _ in pool.map(bring, own):
                pass
        finally:
            pool.shutdown(cancel_futures=True)
        self._bytes += sum(unit.length for unit in own)
        return MEMORY if all(unit.part in held for unit in own) else "store"

    def _together(self, work: Callable[[], T], *, local: bool = False) -> Any:
        """Every rank works; what all of them made, or with `local` what this one did.

        _Bad on all ranks when the checkpoint is bad for one of them, CheckpointError when anything else went wrong.
        """
        made: T | None = None
        failure: Exception | None = None
        message: dict[str, Any] = {}
        try:
            made = work()
            if not local:
                message["made"] = made
        except Exception as error:  # the other ranks wait: they are told whatever it is
            failure = error
            message["bad" if isinstance(error, _BAD) else "failed"] = f"rank {self._topology.rank}: {error}"
        outcome = self._vote.agree(message, _judge)
        if outcome.get("failed"):
            if failure is not None and not isinstance(failure, _BAD):
                raise failure
            raise CheckpointError(outcome["failed"])
        if outcome.get("bad"):
            raise _Bad(outcome["bad"]) from failure
        return made if local else outcome["made"]


def _judge(messages: list[dict[str, Any]]) -> dict[str, Any]:
    for kind in ("failed", "bad"):
        said = [message[kind] for message in messages if kind in message]
        if said:
            more = f" (and {len(said) - 1} more ranks)" if len(said) > 1 else ""
            return {kind: said[0] + more}
    return {"made": [message.get("made") for message in messages]}


def _adopt(memory: Path, manifest: Manifest, cache: NodeCache, stack: contextlib.ExitStack) -> set[int]:
    """The parts of this checkpoint that are in a slot of this node, used where they are; their numbers."""
    numbers = {part.name: i for i, part in enumerate(manifest.parts)}
    for slot, found in Slots(memory).whole():
        if found.key != manifest.key:
            continue
        stack.enter_context(slot.reading())
        if slot.manifest() != found:
            raise _gone(manifest.key)
        held = set()
        for local, part in enumerate(found.parts):
            if part.name in numbers and manifest.parts[numbers[part.name]] == part:
                cache.adopt(numbers[part.name], slot.part(local), part.size)
                held.add(numbers[part.name])
        return held
    raise _gone(manifest.key)


def _gone(key: Key) -> Damaged:
    return Damaged(str(key), "is not in this node's memory any more")
