"""A checkpoint that one process writes alone: a folder that is published, an import.

Several processes may write the same key at the same moment: two publishers that an operator gave the same attempt. So
the part of each has a name of its own, which says whose it is, and nobody removes what another one may still commit.
The commit decides, once: what is committed is all of one process's, and the others are told whose.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from everstep.checkpoint.catalog.manifests import read_manifest
from everstep.checkpoint.errors import CheckpointError, WriterConflict
from everstep.checkpoint.format.checksum import DEFAULT, compute_checksum
from everstep.checkpoint.format.keys import Attempt, Key
from everstep.checkpoint.format.manifest import (
    HEADER,
    CheckpointPart,
    Chunk,
    Manifest,
    Shard,
    StoredTensor,
    align_offset,
    part_header,
    writer_of,
)
from everstep.checkpoint.publish import attempts, commit, fence
from everstep.checkpoint.store.base import Store

_PROCESS = secrets.token_hex(8)  # with the process id: a child that was forked is another one
_doubtful: set[tuple[str, str]] = set()  # parts of this process that a commit without an answer may speak of


@dataclass(frozen=True)
class WholeTensor:
    """A tensor that is written in one piece: its `size` in bytes, and where its bytes come from, at most CHUNK at a
    time."""

    dtype: str
    shape: tuple[int, ...]
    size: int
    read: Callable[[], Iterable[bytes | memoryview]]


def claim_attempt(store: Store) -> Attempt:
    """Claim the attempt of a process that writes checkpoints alone: the one that it was given, or the next.

    Args:
        store: Where to. One that is given its attempt claims the store for its job too.

    Raises:
        StoreTaken, Superseded, AttemptTaken: It is not to write there: see attempts.claim_store().
        StoreError: The store cannot be asked.
    """
    claimed = fence.get_given_attempt()
    if claimed is None:
        claimed = attempts.claim_next_attempt(store)
    else:
        machines = (attempts.identify_machine(),)
        attempts.claim_store(store, claimed, attempts.RunIdentity(attempts.get_own_job(), machines))
    attempts.run_of(store)  # by which a folder is known again when its file system comes back under another number
    return claimed


def write_checkpoint(
    store: Store,
    key: Key,
    tensors: Mapping[str, WholeTensor],
    values: Mapping[str, object],
    *,
    model: str,
    content: str = "",
    check: Callable[[], None] = lambda: None,
    fenced: Callable[[], str | None] = lambda: None,
) -> Manifest:
    """Put whole tensors and packed values as one rank's checkpoint, and commit it; after an error it may be repeated.

    Args:
        store: Where to.
        key: What it is called. Another process may be writing the same.
        tensors: By name, in the order in which they are written.
        values: By name.
        model: What tells apart checkpoints of different objects.
        content: Anything that differs where the tensors may. A try of this process with the same content goes to the
            same part.
        check: Called when all is written; what it raises keeps it from being committed.
        fenced: Why this attempt may not publish now, or None.

    Raises:
        WriterConflict: `key` is committed already; it says by whom.
        StoreError: The store did not do it; where it failed within the commit, that may be there or not.
    """
    _check_free(store, key)
    writer = compute_checksum(DEFAULT, f"{_PROCESS}/{os.getpid()}/{content}".encode())
    header = part_header(key, 0, writer=f"process {os.getpid()} on {socket.gethostname()}")
    chunks: dict[str, list[Chunk]] = {name: [] for name in tensors}
    part = CheckpointPart(key.part_name(0, writer), _compute_end(tensors.values()), compute_checksum(DEFAULT, header))
    try:
        store.put_whole(part.name, _iterate_body(header, tensors, chunks), part.size)
        check()
    except CheckpointError:
        # The name is this process's own, and no manifest speaks of it unless an earlier try's does.
        if (store.url, part.name) not in _doubtful:
            with suppress(CheckpointError):
                store.delete([part.name])
        raise
    described = {name: _describe_tensor(tensor, chunks[name]) for name, tensor in tensors.items()}
    manifest = Manifest(key, 1, 1, model, DEFAULT, time.time(), (part,), described, dict(values))
    _doubtful.add((store.url, part.name))
    try:
        commit.commit_alone(store, manifest, fenced=fenced)
    except WriterConflict as error:
        raise _make_conflict(store, key) from error
    _doubtful.discard((store.url, part.name))
    return manifest


def may_not_publish(store: Store, key: Key) -> str | None:
    """Return why a publisher may not commit this checkpoint now: it has a successor, or its node is fenced; or None."""
    return attempts.find_successor(store, key.attempt) or fence.explain_fence(key.attempt)


def _check_free(store: Store, key: Key) -> None:
    if any(entry.name == key.manifest_name for entry in store.list(key.manifest_name)):
        raise _make_conflict(store, key)


def _make_conflict(store: Store, key: Key) -> WriterConflict:
    return WriterConflict(key.manifest_name, f"is already committed by {find_writer(store, key)}")


def find_writer(store: Store, key: Key) -> str:
    """Return who committed a checkpoint, as far as it says so, for a message."""
    with suppress(CheckpointError):
        header = bytearray(HEADER)
        store.read_into(read_manifest(store, key).parts[0].name, 0, memoryview(header))
        return writer_of(bytes(header)) or "somebody else with the same attempt"
    return "somebody else with the same attempt"


def _compute_end(tensors: Iterable[WholeTensor]) -> int:
    end = HEADER
    for tensor in tensors:
        end = align_offset(end) + tensor.size
    return end


def _iterate_body(
    header: bytes, tensors: Mapping[str, WholeTensor], chunks: Mapping[str, list[Chunk]]
) -> Iterator[bytes | memoryview]:
    yield header
    at = len(header)
    for name, tensor in tensors.items():
        yield bytes(align_offset(at) - at)
        at = align_offset(at)
        chunks[name].clear()  # a store may begin again
        for piece in tensor.read():
            chunks[name].append(Chunk(0, at, len(piece), compute_checksum(DEFAULT, piece)))
            yield piece
            at += len(piece)


def _describe_tensor(tensor: WholeTensor, chunks: Sequence[Chunk]) -> StoredTensor:
    whole = Shard((0,) * len(tensor.shape), tensor.shape, tuple(chunks))
    return StoredTensor(tensor.dtype, tensor.shape, (whole,) if chunks else ())
