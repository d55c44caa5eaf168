"""A checkpoint from one store into another: every byte is verified on its way, the manifest comes last, as it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from everstep.checkpoint.candidates import read_chunk
from everstep.checkpoint.checksum import DEFAULT, digest
from everstep.checkpoint.errors import Conflict, Missing
from everstep.checkpoint.format import HEADER, Chunk, Manifest
from everstep.checkpoint.keys import HINT, Key
from everstep.checkpoint.manifests import parse_index, parse_node
from everstep.checkpoint.store.base import Store


def copy(
    source: Store,
    target: Store,
    key: Key,
    *,
    threads: int = 4,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> bool:
    """True: `key` is in `target` now; False: it was there before. Takes `threads` times 8 MiB and what `target` takes.

    Damaged or Missing: the source is not good, and nothing was committed. Conflict: another checkpoint of this key.
    """
    data = source.read(key.manifest_name)
    index = parse_index(key, data)
    shares = []
    for node, share in enumerate(index.nodes):
        content = source.read(share.name)
        shares.append((content, parse_node(index, node, content)))
    with suppress(Missing):
        if target.read(key.manifest_name) == data:
            return False
        raise Conflict(key.manifest_name, f"is another checkpoint in {target.url}")
    _claim(target, key, data)
    # Whatever was verified there before: not what comes now.
    target.delete([entry.name for entry in target.list(key.mark_prefix)])
    # No data is removed first: another copy of the same may be under way, and commits what it finds under these names.
    pool = ThreadPoolExecutor(threads, thread_name_prefix="copy")
    try:
        for share, (content, manifest) in zip(index.nodes, shares, strict=True):
            target.put_whole(share.name, [content], len(content))
            for number, part in enumerate(manifest.parts):
                target.put_whole(part.name, _verified(source, manifest, number, pool, threads, on_bytes), part.size)
    finally:
        pool.shutdown(cancel_futures=True)
    if not target.put_if_absent(key.manifest_name, data) and target.read(key.manifest_name) != data:
        raise Conflict(key.manifest_name, f"was written by somebody else into {target.url}")
    _move_hint(target, key)
    return True


def _claim(target: Store, key: Key, manifest: bytes) -> None:
    """Claim the key: of two checkpoints of one key, whose parts have the same names, only one is copied here.

    Raises:
        Conflict: The other one's copy was begun before.
    """
    name, own = f"{key.data_prefix}copy", digest(DEFAULT, manifest).encode()
    if not target.put_if_absent(name, own) and target.read(name) != own:
        raise Conflict(
            key.manifest_name,
            f"a copy of another checkpoint of this key was begun in {target.url}: copy to another place, or delete "
            f"{key.data_prefix} there if nobody copies it any more",
        )


def _verified(
    source: Store,
    manifest: Manifest,
    number: int,
    pool: ThreadPoolExecutor,
    ahead: int,
    on_bytes: Callable[[int], None],
) -> Iterator[bytes | memoryview]:
    """The bytes of a part in order, zeros where no tensor is; a few chunks are read ahead."""

    def read(chunk: Chunk) -> bytearray:
        data = bytearray(chunk.length)
        read_chunk(source, manifest, chunk, memoryview(data))
        return data

    chunks = iter(_chunks(manifest, number))
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


def _chunks(manifest: Manifest, number: int) -> list[Chunk]:
    found = [Chunk(number, 0, HEADER, manifest.parts[number].header)]
    for tensor in manifest.tensors.values():
        found.extend(chunk for shard in tensor.shards for chunk in shard.chunks if chunk.part == number)
    return sorted(found, key=lambda chunk: chunk.offset)


def _move_hint(store: Store, key: Key) -> None:
    with suppress(Missing, ValueError):
        if Key.of_manifest(store.read(HINT).decode()) >= key:
            return
    store.replace(HINT, key.manifest_name.encode())
