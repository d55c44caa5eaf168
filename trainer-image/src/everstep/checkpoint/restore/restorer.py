"""All ranks load the same checkpoint, the newest that is good for every one of them, or none is touched.

In rounds: rank 0 proposes; each node fetches the manifest; each rank says what it needs; the ranks of a node read and
verify that once, together; each takes what it needs. Consensus ends every round, and anything that is wrong with a
checkpoint anywhere sends all ranks to the next one.

What is verified in files of this machine is read again right into the objects, and summed again: it takes no memory of
its own. Should a sum not hold then, the objects are undefined, and all ranks say so.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from everstep.checkpoint.catalog.candidates import Readable, read_run
from everstep.checkpoint.catalog.chunk_reads import THREADS, ChunkRead, ChunkReader
from everstep.checkpoint.catalog.manifests import parse_manifest
from everstep.checkpoint.catalog.selection import NoSuchStep, rename_manifest
from everstep.checkpoint.errors import CheckpointError, Damaged, StoreError
from everstep.checkpoint.format.keys import Attempt, Key
from everstep.checkpoint.format.manifest import Chunk, Manifest, decode_manifest, encode_manifest
from everstep.checkpoint.format.merging import merge_node_manifests
from everstep.checkpoint.format.user_metadata import read_metadata
from everstep.checkpoint.host.thread_pool import ThreadPool
from everstep.checkpoint.peers.discovery import Peers
from everstep.checkpoint.peers.peer_link import Address
from everstep.checkpoint.peers.peer_parts import PeerParts
from everstep.checkpoint.peers.peer_server import iterate_held_slots
from everstep.checkpoint.ranks.topology import Topology
from everstep.checkpoint.restore.chunk_numbers import Chunks
from everstep.checkpoint.restore.divided import find_elsewhere
from everstep.checkpoint.restore.loading import Loading
from everstep.checkpoint.restore.node_cache import (
    NodeCache,
    iterate_runs,
    list_read_units,
    pack_numbers,
    take_share,
    unpack_numbers,
)
from everstep.checkpoint.restore.node_manifests import NodeManifests
from everstep.checkpoint.restore.options import RestoreOptions, find_difference
from everstep.checkpoint.restore.part_files import PartFiles, hold_slots
from everstep.checkpoint.restore.proposals import MEMORY, PEER, STORE, Proposal, Proposals, make_proposal
from everstep.checkpoint.restore.steps import BadCheckpoint, UndefinedObjects, run_restore_step
from everstep.checkpoint.slots.slots import Claim
from everstep.checkpoint.state.kinds import StateMismatch
from everstep.checkpoint.store.base import Store
from everstep.checkpoint.store.retry import Retry
from everstep.coordination.consensus import Consensus

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
    """The result of a restore.

    Attributes:
        step: The step that was restored; 0 for a fresh start.
        key: Its checkpoint; None for a fresh start.
        tier: "memory", "peer" (other nodes' memory) or "store", the farthest that bytes came from.
        fell_back: Newer checkpoints that are bad, with the reason.
        not_restored: Names of objects that each rank has its own state of, saved by another number of ranks.
        kept: Keys of dictionaries that the checkpoint does not have, which keep the values that they had; and gradient
            scalers that were disabled when it was saved, and are not now.
        values: Plain values that were given, by name, as they are now.
        bytes: How many bytes this rank read and verified.
        seconds: How long the whole restore took.
        missing: With strict=False, names that are here and not in the checkpoint.
        unexpected: With strict=False, names that are only in the checkpoint.
        metadata: As it was given to save().
    """

    step: int = 0
    key: Key | None = None
    tier: str = ""
    fell_back: dict[str, str] = field(default_factory=dict)
    not_restored: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
    bytes: int = 0
    seconds: float = 0.0
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)


class Restorer:
    """One rank's side of a restore; all ranks make one and call restore() together."""

    def __init__(
        self,
        objects: Mapping[str, object],
        store: Store,
        topology: Topology,
        consensus: Consensus,
        memory: Path,
        *,
        peers: Peers | None = None,
        attempt: Attempt | None = None,
        claimed: Attempt | None = None,
        run: str | None = None,
        options: RestoreOptions = RestoreOptions(),  # noqa: B008 - frozen
    ) -> None:
        """`memory`: the folder of this node's slots. `peers`: where those of other nodes are. `attempt`: this run's, as
        far as it is known; `claimed`: the one whose slots are this session's own. `run`: what the store is called, on
        the first rank of each node (see peer_server.iterate_held_slots)."""
        self._objects = objects
        self._store, self._topology = store, topology
        self._consensus = consensus
        self._memory = memory
        self._options = options
        self._attempt, self._claimed, self._run = attempt, claimed, run
        self._peers = peers
        self._proposals = Proposals(
            store, topology, reach=peers is not None, attempt=attempt, means=options.means, wait=self._wait
        )
        self._bytes = 0
        # Beyond what a store repeats by itself, a folder for one: what passes within seconds ends no restore.
        self._retry = Retry(tries=5, first=0.5, longest=5.0, sleep=self._wait)
        self._manifest: Manifest | None = None  # of this try, on a node's leader
        self.newest_seen: Key | None = None  # see Proposal.newest
        self.taken: dict[str, Any] = {}  # see Loading

    def restore(self) -> Restored:
        """Load the newest checkpoint that is good on all ranks, of those that the options mean.

        NoSuchStep, NoGoodCheckpoint, StateMismatch, RankLost, StoreError when the store cannot even be listed; the
        objects are untouched by then. An error while they take in their state is raised on all ranks; they are
        undefined then, as RestoreFailed says where the bytes were no longer those that had been verified.
        """
        began = time.monotonic()
        try:
            self._options = replace(self._options, elsewhere=find_elsewhere(self._consensus, self._objects))
            while True:
                proposal = self._agree_on_proposal(self._offer())
                self.newest_seen = None if proposal.newest is None else Key.parse(proposal.newest)
                if proposal.key is None:
                    if proposal.rejected:
                        raise NoGoodCheckpoint(proposal.rejected)
                    if (step := self._options.step) is not None:
                        raise NoSuchStep(self._store.url, step.step if isinstance(step, Key) else step, proposal.steps)
                    return Restored(seconds=time.monotonic() - began)
                try:
                    restored = self._load(Key.parse(proposal.key), proposal)
                except BadCheckpoint as bad:
                    self._proposals.reject(str(bad))
                    continue
                return replace(
                    restored, fell_back=proposal.rejected, bytes=self._bytes, seconds=time.monotonic() - began
                )
        finally:
            self._proposals.close()
            self._consensus.settle()

    def _offer(self) -> dict[str, Any]:
        """This rank's part of the message from which rank 0 makes a proposal."""
        try:
            offer = make_proposal(
                self._memory,
                self._topology,
                run=self._run,
                given=self._attempt,
                claimed=self._claimed,
                while_waiting=self._alive,
            )
        except (FileNotFoundError, NotADirectoryError):  # a writer that ends has removed them meanwhile
            return {"offer": None, "failure": None}
        except Exception as error:  # the others wait for our message
            return {"offer": None, "failure": f"rank {self._topology.rank}: slots in {self._memory}: {error!r}"}
        return {"offer": offer, "failure": None}

    def _agree_on_proposal(self, offer: dict[str, Any]) -> Proposal:
        """Agree with all ranks on what is tried next.

        Raises:
            CheckpointError: On all ranks, where they were given different options, or one cannot read its slots.
        """

        def propose(messages: list[Any]) -> dict[str, Any]:
            why = find_difference([message["options"] for message in messages])
            why = why or "; ".join(message["failure"] for message in messages if message["failure"])
            if why:
                return {"refused": why}
            return {"proposal": self._proposals.next([message["offer"] for message in messages])}

        agreed = self._consensus.agree({"options": self._options.describe(), **offer}, propose)
        if "refused" in agreed:
            raise CheckpointError(agreed["refused"])
        return Proposal.of(agreed["proposal"])

    def _load(self, key: Key, proposal: Proposal) -> Restored:
        with contextlib.ExitStack() as stack:
            peers = stack.enter_context(contextlib.closing(self._reached(key, proposal)))
            name = self._together(lambda: self._name(key, proposal, peers))[0]
            cache = NodeCache(self._memory, name, shared=len(self._topology.ranks) > 1)
            if self._leads:
                stack.callback(cache.remove)
            manifest = self._manifest_of(key, proposal, name, cache, stack)
            files = PartFiles(manifest, self._store)
            if self._options.rename is not None:
                saved = manifest
                manifest = self._together(lambda: rename_manifest(saved, self._options.rename), local=True)
            files.leave_out({part.name for part in manifest.parts if part.name in peers})
            chunks = Chunks(manifest)
            loading = self._plan(manifest, chunks, files, cache, stack)
            reader = ChunkReader(files.open, files.name, manifest.checksum, self._alive, self._retry)
            tiers = self._together(lambda: self._read(manifest, chunks, loading, files, reader, cache, peers))
            loaded = self._together(lambda: self._apply(manifest, loading, files, reader, cache), local=True)
            self.taken = loading.taken
        return Restored(
            key.step,
            key,
            max(tiers, key=_FARTHER.index),
            not_restored=tuple(loading.not_restored),
            kept=tuple(loading.defaults),
            values=loaded,
            missing=tuple(loading.missing),
            unexpected=tuple(loading.unexpected),
            metadata=read_metadata(manifest.values),
        )

    def _reached(self, key: Key, proposal: Proposal) -> PeerParts:
        """Return the shares of the checkpoint that other nodes hold."""
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
            slots = _iterate_own_slots(self._memory, key, self._run) if self._offers(proposal) else ()
            own = {claim.node: manifest for claim, manifest in slots}
            every = range(len(proposal.shares))
            self._manifest = merge_node_manifests(
                [own[number] if number in own else peers.manifest(number) for number in every]
            )
            if self._topology.world > 1:
                self._consensus.post(name, encode_manifest(self._manifest).decode())
        return name

    def _offers(self, proposal: Proposal) -> bool:
        """Tell whether this node's own memory is used: what a live run has there is not even locked."""
        return any(self._topology.node in nodes for _, nodes in proposal.shares)

    @property
    def _leads(self) -> bool:
        return self._topology.local == 0

    def _alive(self) -> None:
        self._consensus.alive()
        self._proposals.renew()

    def _wait(self, seconds: float) -> None:
        """Wait before a store is asked again."""
        self._alive()
        time.sleep(seconds)

    def _manifest_of(
        self, key: Key, proposal: Proposal, name: str, cache: NodeCache, stack: contextlib.ExitStack
    ) -> Manifest:
        """Return the manifest of the checkpoint: all of it where the nodes hold it, else what this node needs of it."""
        nodes = NodeManifests(key, cache, self._topology, lambda each: self._retry(lambda: self._store.read(each)))

        def fetch() -> None:
            cache.create()
            cache.leave("slots", hold_slots(self._memory, key, stack) if self._offers(proposal) else b"[]")
            if not proposal.complete:
                nodes.fetch_index()
            elif self._topology.world > 1:  # else this rank has just made it
                data = self._consensus.read(name).encode()
                self._manifest = parse_manifest(key, data)
                cache.leave("manifest", data)

        self._together(lambda: fetch() if self._leads else None)
        if self._topology.rank == 0:
            self._consensus.remove(name)  # as large as the manifest, and every node has it
        if proposal.complete:
            manifest = self._manifest if self._leads else decode_manifest(cache.message("manifest"), key.manifest_name)
            assert manifest is not None
            return manifest
        index = nodes.index()
        if len(index.nodes) > 1:
            self._together(lambda: nodes.ask(index, self._objects, self._options))
            self._together(lambda: nodes.fetch_share(index))
        manifest = self._together(lambda: nodes.manifest(index), local=True)
        assert isinstance(manifest, Manifest)
        return manifest

    def _plan(
        self, manifest: Manifest, chunks: Chunks, files: PartFiles, cache: NodeCache, stack: contextlib.ExitStack
    ) -> Loading:
        """Plan what this rank needs.

        Raises:
            StateMismatch: On all ranks, if the checkpoint does not fit the objects of any rank.
        """
        topology = self._topology

        def plan() -> Loading:
            files.adopt(cache.message("slots"), stack)
            found = Loading(
                manifest,
                self._objects,
                rank=topology.rank,
                world=topology.world,
                options=self._options,
            )
            needs = set() if found.problems else found.needs(manifest, chunks, files.__contains__)
            cache.leave(f"needs.{topology.local}", pack_numbers(needs, len(chunks.all)))
            return found

        loading: Loading = self._together(plan, local=True)
        names = sorted(manifest.tensors)
        wanted = {i for i, name in enumerate(names) if name in loading.wanted}
        message = {
            "problems": [f"rank {topology.rank}: {each}" for each in loading.problems],
            "missing": loading.missing,
            "wanted": pack_numbers(wanted, len(names)).hex(),
        }

        def fits(messages: list[Any]) -> dict[str, list[str]]:
            unexpected: list[str] = []
            problems = [each for message in messages for each in message["problems"]]
            if not problems:
                taken = {names[i] for i in unpack_numbers([bytes.fromhex(message["wanted"]) for message in messages])}
                below = tuple(f"{prefix}." for prefix in loading.exclusive())
                unexpected = [name for name in names if name.startswith(below) and name not in taken]
                if self._options.is_strict:
                    problems = [f"{name} is in the checkpoint, and nothing here has it" for name in unexpected]
            missing = sorted({each for message in messages for each in message["missing"]})
            return {"problems": problems, "missing": missing, "unexpected": unexpected}

        agreed = self._consensus.agree(message, fits)
        if agreed["problems"]:
            raise StateMismatch(agreed["problems"])
        loading.missing, loading.unexpected = agreed["missing"], agreed["unexpected"]
        return loading

    def _read(
        self,
        manifest: Manifest,
        chunks: Chunks,
        loading: Loading,
        files: PartFiles,
        reader: ChunkReader,
        cache: NodeCache,
        peers: PeerParts,
    ) -> str:
        """Verify this rank's share of what the node needs, and what this rank alone takes; return the tier it was in.

        What comes from afar is brought into the node's memory; what goes into new tensors, into these.
        """
        topology = self._topology
        needed = unpack_numbers([cache.message(f"needs.{local}") for local in range(len(topology.ranks))])
        every = list_read_units([chunks.all[number] for number in needed], manifest)
        own = self._share([unit for unit in every if unit.part in files and not files.is_verified(unit.part)])
        first = loading.first_reads(manifest, files.__contains__)
        reader.read([*map(ChunkRead, own), *first])
        read = [*own, *(read.chunk for read in first)]
        far = [unit for unit in every if unit.part not in files]
        if self._leads:
            cache.check_room(sum(unit.length for unit in far))
        mine = self._share(far)
        self._bring(mine, manifest, cache, peers)
        self._bytes += sum(unit.length for unit in (*read, *mine))
        tiers = {files.tier(part) for part in {unit.part for unit in read}}
        tiers |= {PEER if manifest.parts[part].name in peers else STORE for part in {unit.part for unit in mine}}
        return max(tiers, key=_FARTHER.index, default=MEMORY)

    def _share(self, every: Sequence[Chunk]) -> list[Chunk]:
        return take_share(every, self._topology.local, len(self._topology.ranks))

    def _bring(self, mine: Sequence[Chunk], manifest: Manifest, cache: NodeCache, peers: PeerParts) -> None:
        """Read these chunks into the node's memory and verify them there."""
        cache.reserve(mine, manifest)
        # Mapped before the threads begin, which then share the mappings.
        parts = {unit.part: cache.part(unit.part, manifest) for unit in mine}

        def bring(run: Sequence[Chunk]) -> None:
            self._alive()
            name = manifest.parts[run[0].part].name
            source: Readable = peers if name in peers else self._store
            part = parts[run[0].part]
            into = part[run[0].offset : run[-1].offset + run[-1].length]
            self._retry(lambda: read_run(source, manifest, run, into))

        pool = ThreadPool(THREADS, thread_name_prefix="restore")
        try:
            for _ in pool.map(bring, iterate_runs(mine)):
                pass
        finally:
            pool.shutdown(cancel_futures=True)

    def _apply(
        self, manifest: Manifest, loading: Loading, files: PartFiles, reader: ChunkReader, cache: NodeCache
    ) -> dict[str, Any]:
        """Have the objects take in what was verified. UndefinedObjects when it is not what it was any more."""

        def read(reads: Sequence[ChunkRead]) -> None:
            try:
                reader.read(reads)
            except (Damaged, StoreError) as error:
                files.distrust()
                raise UndefinedObjects(str(error)) from error

        return loading.apply(manifest, cache, self._alive, files.__contains__, read)

    def _together(self, work: Callable[[], T], *, local: bool = False) -> Any:
        return run_restore_step(self._consensus, self._topology.rank, work, is_local=local)


def _iterate_own_slots(memory: Path, key: Key, run: str | None) -> Iterator[tuple[Claim, Manifest]]:
    """Yield what this node's memory holds of a checkpoint: a claim and a manifest for each slot."""
    for slot, manifest in iterate_held_slots(memory, run):
        claim = slot.claimed()
        if claim is not None and claim.key == manifest.key == key:
            yield claim, manifest
