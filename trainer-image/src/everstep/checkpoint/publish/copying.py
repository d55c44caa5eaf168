"""A checkpoint from one store into another: every byte is verified on its way, the manifest comes last, as it is."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress

from everstep.checkpoint.catalog.candidates import OnBytes, check_threads, read_chunk, verify_node
from everstep.checkpoint.catalog.leases import hold_read_lease
from everstep.checkpoint.catalog.manifests import parse_index, parse_node
from everstep.checkpoint.errors import CheckpointError, Missing, WriterConflict, is_damage
from everstep.checkpoint.format.checksum import DEFAULT, compute_checksum
from everstep.checkpoint.format.index import CheckpointIndex
from everstep.checkpoint.format.keys import HINT, Key
from everstep.checkpoint.format.manifest import HEADER, Chunk, Manifest
from everstep.checkpoint.host.thread_pool import ThreadPool
from everstep.checkpoint.store.base import Store


class CopyOutcome(enum.Enum):
    """The result of a copy: `COPIED`: it is in the target now. `PRESENT`: it was, and every byte of it is good.
    `REPAIRED`: it was, and what was damaged or missing there was written again."""

    COPIED = enum.auto()
    PRESENT = enum.auto()
    REPAIRED = enum.auto()


def copy_checkpoint(
    source: Store,
    target: Store,
    key: Key,
    *,
    threads: int = 4,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> CopyOutcome:
    """Copy a checkpoint, or verify and repair the copy that is there.

    Takes `threads` times 8 MiB, and what `target` takes.

    Args:
        source: Where it is; it is held there by a lease.
        target: Where it is to be.
        key: Which one.
        threads: Reads at a time.
        on_bytes: Called with the bytes that were read since, from any thread.

    Raises:
        Damaged, Missing: The source is not good, and nothing was committed.
        Removed: Retention has removed it from the source.
        WriterConflict: Another checkpoint of this key is in the target.
    """
    check_threads(threads)
    with hold_read_lease(source, key) as lease:

        def advance(count: int) -> None:
            lease.renew()
            on_bytes(count)

        data = source.read(key.manifest_name)
        index = parse_index(key, data)
        is_there = _is_there(target, key, data)
        if is_there:
            bad = [node for node in range(len(index.nodes)) if not _is_good(target, index, node, threads, advance)]
            if not bad:
                return CopyOutcome.PRESENT
        else:
            bad = list(range(len(index.nodes)))
            _claim_copy_key(target, key, data)
        # Whatever was verified there before: not what comes now.
        target.delete([entry.name for entry in target.list(key.mark_prefix)])
        _copy_shares(source, target, index, bad, threads, advance)
    if is_there:
        return CopyOutcome.REPAIRED
    if not target.put_if_absent(key.manifest_name, data) and target.read(key.manifest_name) != data:
        raise WriterConflict(key.manifest_name, f"was written by somebody else into {target.url}")
    _move_hint(target, key)
    return CopyOutcome.COPIED


def _is_there(target: Store, key: Key, data: bytes) -> bool:
    """Tell whether the target has this very index.

    Raises:
        WriterConflict: It has another one.
    """
    with suppress(Missing):
        if target.read(key.manifest_name) == data:
            return True
        raise WriterConflict(
            key.manifest_name,
            f"is another checkpoint in {target.url}, or a damaged copy of this one: copy to another place, or remove "
            "it there if `everstep checkpoint ls` calls it damaged",
        )
    return False


def _is_good(target: Store, index: CheckpointIndex, node: int, threads: int, on_bytes: OnBytes) -> bool:
    try:
        verify_node(target, index, node, threads=threads, on_bytes=on_bytes)
    except CheckpointError as error:
        if not is_damage(error):
            raise
        return False
    return True


def _copy_shares(
    source: Store, target: Store, index: CheckpointIndex, nodes: Sequence[int], threads: int, on_bytes: OnBytes
) -> None:
    """Write what these nodes have stored: whole files, the same whoever writes them.

    No data is removed first: another copy of the same may be under way, and commits what it finds under these names.
    """
    contents = {node: source.read(index.nodes[node].name) for node in nodes}
    manifests = {node: parse_node(index, node, content) for node, content in contents.items()}
    pool = ThreadPool(threads, thread_name_prefix="copy")
    try:
        for node, manifest in manifests.items():
            target.put_whole(index.nodes[node].name, [contents[node]], len(contents[node]))
            for number, part in enumerate(manifest.parts):
                target.put_whole(
                    part.name, _iterate_verified_bytes(source, manifest, number, pool, threads, on_bytes), part.size
                )
    finally:
        pool.shutdown(cancel_futures=True)


def _claim_copy_key(target: Store, key: Key, manifest: bytes) -> None:
    """Claim the key: of two checkpoints of one key, whose parts have the same names, only one is copied here.

    Raises:
        WriterConflict: The other one's copy was begun before.
    """
    name, own = f"{key.data_prefix}copy", compute_checksum(DEFAULT, manifest).encode()
    if not target.put_if_absent(name, own) and target.read(name) != own:
        raise WriterConflict(
            key.manifest_name,
            f"a copy of another checkpoint of this key was begun in {target.url}: copy to another place, or delete "
            f"{key.data_prefix} there if nobody copies it any more",
        )


def _iterate_verified_bytes(
    source: Store,
    manifest: Manifest,
    number: int,
    pool: ThreadPool,
    ahead: int,
    on_bytes: Callable[[int], None],
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a part in order, zeros where no tensor is; a few chunks are read ahead."""

    def read(chunk: Chunk) -> bytearray:
        data = bytearray(chunk.length)
        read_chunk(source, manifest, chunk, memoryview(data))
        return data

    chunks = iter(_list_part_chunks(manifest, number))
    coming: deque[tuple[Chunk, Future[bytearray]]] = deque()
    at = 0
    while True:
        while len(coming) < ahead and (chunk := next(chunks, None)) is not None:
            coming.append((chunk, pool.submit(read, chunk)))
        if not coming:
            break
        chunk, future = coming.popleft()
        data = future.result()
        yield bytes(chunk.offset - at)
        yield memoryview(data)
        at = chunk.offset + chunk.length
        on_bytes(chunk.length)
    yield bytes(manifest.parts[number].size - at)


def _list_part_chunks(manifest: Manifest, number: int) -> list[Chunk]:
    found = [Chunk(number, 0, HEADER, manifest.parts[number].header)]
    for tensor in manifest.tensors.values():
        found.extend(chunk for shard in tensor.shards for chunk in shard.chunks if chunk.part == number)
    return sorted(found, key=lambda chunk: chunk.offset)


def _move_hint(store: Store, key: Key) -> None:
    with suppress(Missing, ValueError):
        if Key.of_manifest(store.read(HINT).decode()) >= key:
            return
    store.replace(HINT, key.manifest_name.encode())
