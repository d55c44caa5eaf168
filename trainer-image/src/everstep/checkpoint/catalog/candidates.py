"""List the checkpoints that there are, and verify one. A name promises nothing: what is read is verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from threading import local
from typing import Protocol

from everstep.checkpoint.catalog.manifests import assemble_manifest, read_index, read_manifest, read_node
from everstep.checkpoint.errors import Damaged, Missing, UnknownFormat
from everstep.checkpoint.format.checksum import compute_checksum
from everstep.checkpoint.format.index import CheckpointIndex, NodeShare
from everstep.checkpoint.format.keys import HINT, MANIFESTS, Key
from everstep.checkpoint.format.manifest import HEADER, Chunk, Manifest
from everstep.checkpoint.host.thread_pool import ThreadPool
from everstep.checkpoint.store.base import Store

__all__ = [
    "OnBytes",
    "Readable",
    "check_chunk",
    "check_present",
    "check_threads",
    "each_candidate",
    "is_committed",
    "list_candidates",
    "read_chunk",
    "read_index",
    "read_manifest",
    "read_run",
    "verify_checkpoint",
    "verify_node",
]  # fmt: skip

OnBytes = Callable[[int], None]  # with the bytes that have been verified since


def list_candidates(store: Store) -> list[Key]:
    """All that was committed, greatest first, good or not.

    The hint adds what a stale listing (a network mount's cache) does not show yet; it is never believed instead.
    """
    keys = set()
    for entry in store.list(MANIFESTS):
        with suppress(ValueError):  # whoever put another file there
            keys.add(Key.of_manifest(entry.name))
    hinted = _read_hint(store)
    if hinted is not None and hinted not in keys:
        try:
            keys.add(read_index(store, hinted).key)
        except UnknownFormat:
            keys.add(hinted)
        except (Missing, Damaged):
            pass
    return sorted(keys, reverse=True)


def each_candidate(store: Store) -> Iterator[Key]:
    """Yield what was committed, the greatest first, and list it anew before each: while one is read others come and go.

    Each is given once, and only while it is there.
    """
    given: set[Key] = set()
    while (key := next((each for each in list_candidates(store) if each not in given), None)) is not None:
        given.add(key)
        yield key


def check_threads(threads: int) -> None:
    """Refuse a number of reads at a time that is none.

    Raises:
        ValueError: It is less than 1.
    """
    if threads < 1:
        raise ValueError(f"threads is {threads}, and how many reads go on at a time is at least 1: leave it out for 4")


def _read_hint(store: Store) -> Key | None:
    try:
        return Key.of_manifest(store.read(HINT).decode())
    except (Missing, Damaged, ValueError):
        return None


class Readable(Protocol):
    """A place where parts of a checkpoint can be read: a store, or what stands for one."""

    def read_into(self, name: str, offset: int, into: memoryview) -> None:
        """See Store.read_into."""
        ...


def read_chunk(store: Readable, manifest: Manifest, chunk: Chunk, into: memoryview) -> None:
    """Fill `into`, of `chunk.length` bytes, and verify what came. Missing, Damaged."""
    store.read_into(manifest.parts[chunk.part].name, chunk.offset, into)
    check_chunk(manifest, chunk, into)


def read_run(store: Readable, manifest: Manifest, chunks: Sequence[Chunk], into: memoryview) -> None:
    """Read and check chunks of one part that lie one after the other, in one call of the store.

    `into` is for all from the first to the last, with what lies between them. Raises Missing, Damaged.
    """
    first = chunks[0]
    name = manifest.parts[first.part].name
    store.read_into(name, first.offset, into)
    for chunk in chunks:
        start = chunk.offset - first.offset
        check_chunk(manifest, chunk, into[start : start + chunk.length])


def check_chunk(manifest: Manifest, chunk: Chunk, data: memoryview) -> None:
    """Raise Damaged unless these are the bytes of the chunk."""
    if compute_checksum(manifest.checksum, data) != chunk.sum:
        name = manifest.parts[chunk.part].name
        raise Damaged(name, f"bytes {chunk.offset} to {chunk.offset + chunk.length} are not those that were written")


def verify_checkpoint(store: Store, key: Key, *, threads: int = 4, on_bytes: OnBytes = lambda count: None) -> Manifest:
    """Read all of a checkpoint and check every checksum; takes `threads` times 8 MiB.

    Args:
        store: Where it is.
        key: Which one.
        threads: Reads at a time.
        on_bytes: Called from the threads with the bytes that have been verified since.

    Returns:
        Its manifest.

    Raises:
        Missing, Damaged: It is not good.
        UnknownFormat: Another version of everstep wrote it.
    """
    index = read_index(store, key)
    nodes = range(len(index.nodes))
    return assemble_manifest(
        index, {node: verify_node(store, index, node, threads=threads, on_bytes=on_bytes) for node in nodes}
    )


def verify_node(
    store: Store,
    index: CheckpointIndex,
    node: int,
    *,
    threads: int = 4,
    on_bytes: OnBytes = lambda count: None,
) -> Manifest:
    """Read back what one node of a checkpoint wrote; the same as verify_checkpoint() for its share alone.

    Raises Missing, Damaged.

    The index may be what that node announced: then `node` is 0, whatever its number.
    """
    check_threads(threads)
    manifest = read_node(store, index, node)
    _check_sizes(store, manifest, _list_part_sizes(store, manifest.key))
    chunks = _all_chunks(manifest)
    longest = max((chunk.length for chunk in chunks), default=0)
    own = local()

    def read(chunk: Chunk) -> None:
        if not hasattr(own, "buffer"):
            own.buffer = memoryview(bytearray(longest))
        read_chunk(store, manifest, chunk, own.buffer[: chunk.length])
        on_bytes(chunk.length)

    pool = ThreadPool(threads, thread_name_prefix="verify")
    try:
        for _ in pool.map(read, chunks):
            pass
    finally:
        # The first bad chunk decides; the others need not be read.
        pool.shutdown(cancel_futures=True)
    return manifest


def is_committed(store: Store, key: Key) -> bool:
    """Tell whether a checkpoint is listed, good or not: one that is not was removed, and that is no damage."""
    return any(entry.name == key.manifest_name for entry in store.list(key.manifest_name))


def check_present(store: Store, key: Key, shares: Sequence[NodeShare]) -> None:
    """See that every file of a checkpoint is there and as large as it was written, by one listing. Nothing is read.

    Args:
        store: Where it is.
        key: Which one.
        shares: The nodes of its index.

    Raises:
        Missing, Damaged: A file is not there, or has another size.
        UnknownFormat: Another version of everstep wrote it.
    """
    sizes = _list_part_sizes(store, key)
    for node, share in enumerate(shares):
        found = [sizes.get(key.part_name(rank)) for rank in share.ranks]
        seen = None if None in found else sum(size or 0 for size in found)
        if sizes.get(share.name) != share.size or seen != share.bytes:
            # What is wrong, or whether parts are called by their writers, the node manifest says.
            _check_sizes(store, read_node(store, read_index(store, key), node), sizes)


def _list_part_sizes(store: Store, key: Key) -> dict[str, int]:
    return {entry.name: entry.size for entry in store.list(key.data_prefix)}


def _check_sizes(store: Store, manifest: Manifest, sizes: Mapping[str, int]) -> None:
    """See that every part of a manifest is there and as large as it was written. Raises Missing, Damaged."""
    for part in manifest.parts:
        size = sizes.get(part.name, 0)
        if size < part.size:
            # A network mount may show an old list for a while; who opens a file gets what is there.
            store.read_into(part.name, part.size - 1, memoryview(bytearray(1)))
        elif size > part.size:
            raise Damaged(part.name, f"has {size} bytes, {part.size} were written")


def _all_chunks(manifest: Manifest) -> list[Chunk]:
    """Return all chunks, the headers too, in the order in which they lie in the parts."""
    chunks = [Chunk(number, 0, HEADER, part.header) for number, part in enumerate(manifest.parts)]
    for tensor in manifest.tensors.values():
        for shard in tensor.shards:
            chunks.extend(shard.chunks)
    return sorted(chunks, key=lambda chunk: (chunk.part, chunk.offset))
