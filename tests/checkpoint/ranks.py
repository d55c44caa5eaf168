"""Ranks as real processes on this machine, and a plain synchronous save, so that a restore is tested by itself."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from everstep.checkpoint.format.checksum import compute_checksum
from everstep.checkpoint.format.keys import Attempt, Key
from everstep.checkpoint.format.manifest import (
    HEADER,
    CheckpointPart,
    Chunk,
    Manifest,
    Shard,
    StoredTensor,
    chunk_lengths,
    part_header,
)
from everstep.checkpoint.format.merging import merge_node_manifests
from everstep.checkpoint.publish import commit
from everstep.checkpoint.ranks import topology
from everstep.checkpoint.ranks.host_group import ERRORS
from everstep.checkpoint.ranks.topology import Topology
from everstep.checkpoint.restore.restorer import Restored, Restorer
from everstep.checkpoint.save import planning
from everstep.checkpoint.state.flat import flatten_objects
from everstep.checkpoint.store.base import Store
from everstep.checkpoint.store.posix import PosixStore
from everstep.coordination.consensus import Consensus
from everstep.coordination.group import RankGroup
from everstep.coordination.kv_store import SharedKVStore
from tests.checkpoint.forked import forkserver

Work = Callable[..., Any]


class RankFailed(AssertionError):
    """An error that a rank raised, with its own trace."""


def run(world: int, work: Work, *args: Any, timeout: float = 200.0, dies: Sequence[int] = ()) -> list[Any]:
    """`work(rank, *args)` on every rank of a gloo group; what each returned, None for those that are meant to die."""
    context = forkserver()
    pipes, processes = [], []
    rendezvous = Path(os.environ.get("TMPDIR", "/tmp")) / f"everstep-ranks-{os.getpid()}-{os.urandom(4).hex()}"
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, world, str(rendezvous), theirs, work, args))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _results(pipes, timeout, dies)
    finally:
        for process in processes:
            # With what it started: the workers of its loaders notice nothing when it is killed.
            assert process.pid
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        rendezvous.unlink(missing_ok=True)


def _results(pipes: list[Connection], timeout: float, dies: Sequence[int]) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), timeout)
        if not ready:
            raise RankFailed(f"ranks {sorted(waiting.values())} have not ended in {timeout} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                failure, results[rank] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                failure = None if rank in dies else "died"
            if failure:
                raise RankFailed(f"rank {rank}: {failure}")
    return results


def _rank(rank: int, world: int, rendezvous: str, pipe: Connection, work: Work, args: Sequence[Any]) -> None:
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    os.environ.pop("GROUP_RANK", None)
    try:
        if world > 1:
            dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
        # By plain pickle: torch's own would pass tensors by file descriptors of a process that ends.
        pipe.send_bytes(pickle.dumps((None, work(rank, *args))))
    except BaseException:
        pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))
    finally:
        # The result counts: a group that cannot be left in order, because a rank died, is no failure.
        pipe.close()
        with contextlib.suppress(Exception):
            if world > 1:
                dist.barrier()
    os._exit(0)


def key(step: int, generation: int = 1) -> Key:
    return Key(Attempt(0, generation), step)


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_group() -> RankGroup:
    """Return the group of all ranks, with the errors of checkpoints."""
    return RankGroup(dist.group.WORLD if world_size() > 1 else None, ERRORS)


def save(store: Store, key: Key, objects: dict[str, object]) -> Manifest:
    """Every rank writes its part, then rank 0 commits; done on all ranks when it returns."""
    rank, world = own_rank(), world_size()
    group = world_group()
    flat = flatten_objects(objects, rank=rank, step=key.step)
    plan = planning.make_save_plan(lambda: flat, rank, group)
    data = bytearray(plan.sizes[rank])
    data[:HEADER] = part_header(key, rank)
    tensors: dict[str, StoredTensor] = {}
    for box, source in zip(plan.boxes, plan.sources(flat.tensors), strict=True):
        copied = torch.empty(source.shape, dtype=source.dtype).copy_(source.detach())  # as staging does
        raw = copied.reshape(-1).view(torch.uint8).numpy().tobytes()
        data[box.offset : box.offset + box.length] = raw
        chunks, at = [], box.offset
        for length in chunk_lengths(box.length):
            chunks.append(Chunk(0, at, length, compute_checksum("xxh3_64", data[at : at + length])))
            at += length
        known = tensors[box.tensor].shards if box.tensor in tensors else ()
        shards = (*known, Shard(box.offsets, box.sizes, tuple(chunks)))
        tensors[box.tensor] = StoredTensor(box.dtype, box.shape, shards)
    part = CheckpointPart(key.part_name(rank), len(data), compute_checksum("xxh3_64", data[:HEADER]))
    store.put(part.name, [bytes(data)], len(data))
    mine = Manifest(key, world, 1, plan.model, "xxh3_64", 0.0, (part,), tensors, flat.values)
    manifest = merge_node_manifests(group.gather(mine))
    commit.announce_node(store, rank, mine)
    if rank == 0:
        commit.commit_checkpoint(store, key, world, fenced=lambda: None, timeout=30)
    group.barrier()
    return manifest


def restore(
    store: Store | Path,
    memory: Path,
    objects: dict[str, object],
    *,
    patience: float = 20.0,
    nodes: int = 1,
) -> Restored:
    """A restore by all ranks, on `nodes` nodes that each have a memory of their own below `memory`."""
    rank, world = own_rank(), world_size()
    group = world_group()
    kv_store = SharedKVStore.open(group, 30.0)
    found = topology.find_topology(group)
    if nodes > 1:
        size = world // nodes
        node = rank // size
        found = Topology(rank, world, node, nodes, tuple(range(node * size, (node + 1) * size)))
    place = memory / str(found.node)
    consensus = Consensus(kv_store, rank, world, patience, purpose="during the restore")
    opened = PosixStore(store) if isinstance(store, Path) else store
    return Restorer(objects, opened, found, consensus, place).restore()


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell whether two dictionaries of tensors are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
