"""All ranks load the same checkpoint, the newest that is good for every one of them, or none is touched.

In rounds: rank 0 proposes; each node fetches the manifest; each rank says what it needs; the ranks of a node read and
verify that once, together; each takes what it needs. A vote ends every round (vote.py), and anything that is wrong with
a checkpoint anywhere sends all ranks to the next one.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from everstep.checkpoint.candidates import Readable, parse_manifest, read_run
from everstep.checkpoint.checksum import digest
from everstep.checkpoint.errors import CheckpointError, Damaged, is_damage
from everstep.checkpoint.format import Chunk, Manifest, decode, encode
from everstep.checkpoint.keys import Attempt, Key
from everstep.checkpoint.loading import Chunks, Loading
from everstep.checkpoint.merging import merge
from everstep.checkpoint.node_cache import NodeCache, pack, runs, share, units, unpack
from everstep.checkpoint.peer_link import Address
from everstep.checkpoint.peer_parts import PeerParts
from everstep.checkpoint.peer_server import held
from everstep.checkpoint.peers import Peers
from everstep.checkpoint.proposals import MEMORY, PEER, STORE, Proposal, Proposals, mine
from everstep.checkpoint.slots import Claim
from everstep.checkpoint.state.kinds import StateMismatch
from everstep.checkpoint.store.base import Store
from everstep.checkpoint.store.retry import Retry
from everstep.checkpoint.topology import Topology
from everstep.checkpoint.vote import Vote

_THREADS = 4  # readers of one rank
_FARTHER = (MEMORY, PEER, STORE)

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

    `tier`: "memory", "peer" (other nodes' memory) or "store", the farthest that bytes came from. `fell_back`: newer
    checkpoints that are bad, with the reason. `left`: names of objects that each rank has its own state of, saved by
    another number of ranks. `values`: plain values that were given, by name, as they are now. `bytes` were read and
    verified by this rank, in `seconds`, the whole restore's. With strict=False `missing` are names that are here and
    not in the checkpoint, and `unexpected` those that are only there. `metadata`: as it was given to save().
    """

    step: int = 0
    key: Key | None = None
    tier: str = ""
    fell_back: dict[str, str] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
    bytes: int = 0
    seconds: float = 0.0
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)


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
        peers: Peers | None = None,
        attempt: Attempt | None = None,
        claimed: Attempt | None = None,
        run: str | None = None,
        allow_pickle: bool = False,
    ) -> None:
        """`memory`: the folder of this node's slots. `peers`: where those of other nodes are. `attempt`: this run's, as
        far as it is known; `claimed`: the one whose slots are this session's own. `run`: what the store is called, on
        the first rank of each node (see peer_server.held)."""
        self._objects = objects
        self._store = store
        self._topology = topology
        self._vote = vote
        self._memory = memory
        self._allow_pickle = allow_pickle
        self._attempt, self._claimed, self._run = attempt, claimed, run
        self._peers = peers
        self._proposals = Proposals(store, topology, reach=peers is not None, attempt=attempt)
        self._bytes = 0
        # Beyond what a store repeats by itself, a folder for one: what passes within seconds ends no restore.
        self._retry = Retry(tries=5, first=0.5, longest=5.0, sleep=self._wait)
        self._manifest: Manifest | None = None  # of this try, on a node's leader

    def restore(self) -> Restored:
        """Loads the newest checkpoint that is good on all ranks.

        NoGoodCheckpoint, StateMismatch, RankLost, StoreError when the store cannot even be listed; the objects are
        untouched by then. An error while they take in their state is raised on all ranks; they are undefined then.
        """
        began = time.monotonic()
        try:
            while True:
                offer = mine(self._memory, self._topology, run=self._run, given=self._attempt, claimed=self._claimed)
                proposal = Proposal.of(self._vote.agree(offer, self._proposals.next))
                if proposal.key is None:
                    if proposal.rejected:
                        raise NoGoodCheckpoint(proposal.rejected)
                    return Restored(seconds=time.monotonic() - began)
                try:
                    restored = self._load(Key.parse(proposal.key), proposal)
                except _Bad as bad:
                    self._proposals.reject(str(bad))
                    continue
                return replace(
                    restored, fell_back=proposal.rejected, bytes=self._bytes, seconds=time.monotonic() - began
                )
        finally:
            self._proposals.close()
            self._vote.settle()

    def _load(self, key: Key, proposal: Proposal) -> Restored:
        with contextlib.ExitStack() as stack:
            peers = stack.enter_context(contextlib.closing(self._reached(key, proposal)))
            name = self._together(lambda: self._name(key, proposal, peers))[0]
            cache = NodeCache(self._memory, name, shared=len(self._topology.ranks) > 1)
            if self._leads:
                stack.callback(cache.remove)
            self._together(lambda: self._fetch(key, proposal, name, cache) if self._leads else None)
            if self._topology.rank == 0:
                self._vote.remove(name)  # as large as the manifest, and every node has it
            manifest = self._manifest if self._leads else decode(cache.message("manifest"), key.manifest_name)
            assert manifest is not None
            chunks = Chunks(manifest)
            loading = self._plan(manifest, chunks, cache)
            tiers = self._together(lambda: self._read(manifest, chunks, cache, proposal, peers, stack))
            loaded = self._together(
                lambda: loading.apply(lambda part: cache.part(part, manifest), self._alive, cache.gives), local=True
            )
            cache.keep(loading.kept)
        found = max(tiers, key=_FARTHER.index)
        return Restored(key.step, key, found, left=tuple(loading.left), values=loaded)

    def _reached(self, key: Key, proposal: Proposal) -> PeerParts:
        """The shares of the checkpoint that other nodes hold."""
        if self._peers is None:
            return PeerParts(key, [], {}, "")
        places: list[list[Address]] = []
        names: dict[str, int] = {}
        for number, (ranks, nodes) in enumerate(proposal.shares):
            # Another first one for each of us, where there are several.
            others = [node for node in nodes if node != self._topology.node]
            turn = self._topology.node % max(1, len(others))
            places.append([self._peers.addresses[node] for node in others[turn:] + others[:turn]])
            names.update((key.part_name(rank), number) for rank in ranks if others)
        return PeerParts(key, places, names, self._peers.secret)

    def _name(self, key: Key, proposal: Proposal, peers: PeerParts) -> str | None:
        """Rank 0 names this try, and posts the manifest where it can be had without the store."""
        if self._topology.rank != 0:
            return None
        name = secrets.token_hex(8)
        if proposal.complete:
            own = {claim.node: m for claim, m in _own(self._memory, key, self._run)} if self._offers(proposal) else {}
            every = range(len(proposal.shares))
            self._manifest = merge([own[number] if number in own else peers.manifest(number) for number in every])
            if self._topology.world > 1:
                self._vote.post(name, encode(self._manifest).decode())
        return name

    def _offers(self, proposal: Proposal) -> bool:
        """Whether this node's own memory is used: what a live run has there is not even locked."""
        return any(self._topology.node in nodes for _, nodes in proposal.shares)

    @property
    def _leads(self) -> bool:
        return self._topology.local == 0

    def _alive(self) -> None:
        self._vote.alive()
        self._proposals.renew()

    def _wait(self, seconds: float) -> None:
        """Before a store is asked again."""
        self._alive()
        time.sleep(seconds)

    def _fetch(self, key: Key, proposal: Proposal, name: str, cache: NodeCache) -> None:
        """The node's leader gets the manifest, for all of the node."""
        cache.create()
        if not proposal.complete or self._topology.world > 1:  # else this rank has just made it
            data = (
                self._vote.read(name).encode()
                if proposal.complete
                else self._retry(lambda: self._store.read(key.manifest_name))
            )
            self._manifest = parse_manifest(key, data)
            cache.leave("manifest", data)
        elif self._manifest is None or self._manifest.key != key:
            raise Damaged(key.manifest_name, "is the manifest of another checkpoint")

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
        self,
        manifest: Manifest,
        chunks: Chunks,
        cache: NodeCache,
        proposal: Proposal,
        peers: PeerParts,
        stack: contextlib.ExitStack,
    ) -> str:
        """Brings this rank's share of what the node needs into its memory and verifies it. The tier it was in."""
        topology = self._topology
        needed = unpack([cache.message(f"needs.{local}") for local in range(len(topology.ranks))])
        here = _adopt(self._memory, manifest, cache, stack) if self._offers(proposal) else set()
        every = units([chunks.all[number] for number in needed], manifest)
        if self._leads:
            cache.check_room(sum(unit.length for unit in every if unit.part not in here))
        own = share(every, topology.local, len(topology.ranks))
        cache.reserve([unit for unit in own if unit.part not in here], manifest)
        # Mapped before the threads begin, which then share the mappings.
        parts = {unit.part: cache.part(unit.part, manifest) for unit in own}

        def bring(run: Sequence[Chunk]) -> str:
            name = manifest.parts[run[0].part].name
            self._alive()
            if run[0].part in here:
                cache.show(run)
            source: Readable = peers if name in peers else self._store
            part = parts[run[0].part]
            if run[0].part not in here:
                into = part[run[0].offset : run[-1].offset + run[-1].length]
                self._retry(lambda: read_run(source, manifest, run, into))
                return PEER if name in peers else STORE
            for unit in run:
                if digest(manifest.checksum, part[unit.offset : unit.offset + unit.length]) != unit.sum:
                    where = f"bytes {unit.offset} to {unit.offset + unit.length}"
                    raise Damaged(name, f"{where} are bad in this node's memory")
            return MEMORY

        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="restore")
        try:
            tiers = set(pool.map(bring, runs(own)))
        finally:
            pool.shutdown(cancel_futures=True)
        self._bytes += sum(unit.length for unit in own)
        return max(tiers, key=_FARTHER.index, default=MEMORY)

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
            message["bad" if is_damage(error) else "failed"] = f"rank {self._topology.rank}: {error}"
        outcome = self._vote.agree(message, _judge)
        if outcome.get("failed"):
            if failure is not None and not is_damage(failure):
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


def _own(memory: Path, key: Key, run: str | None) -> Iterator[tuple[Claim, Manifest]]:
    """What this node's memory holds of a checkpoint."""
    for slot, manifest in held(memory, run):
        claim = slot.claimed()
        if claim is not None and claim.key == manifest.key == key:
            yield claim, manifest


def _adopt(memory: Path, manifest: Manifest, cache: NodeCache, stack: contextlib.ExitStack) -> set[int]:
    """The parts of this checkpoint that are in this node's memory, used where they are; their numbers."""
    numbers = {part.name: i for i, part in enumerate(manifest.parts)}
    found: set[int] = set()
    for slot, own in held(memory):
        if own.key != manifest.key:
            continue
        stack.enter_context(slot.reading())
        if slot.manifest() != own:
            continue  # filled anew since
        for local, part in enumerate(own.parts):
            number = numbers.get(part.name)
            if number is not None and number not in found and manifest.parts[number] == part:
                cache.adopt(number, slot.part(local), part.size)
                found.add(number)
    return found
