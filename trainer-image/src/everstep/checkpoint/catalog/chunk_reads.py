"""Reads chunks from files in pieces that stay in a core's cache until they are summed, and puts them where they belong.

A chunk of 8 MiB that is read as one and summed after that comes from main memory twice. Pieces of 512 KiB are summed
in the second-level cache, where the read has left them: the sum then costs a tenth of the read.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from everstep.checkpoint.errors import Damaged
from everstep.checkpoint.format.checksum import begin_checksum, compute_checksum
from everstep.checkpoint.format.manifest import CHUNK, Chunk, align_offset
from everstep.checkpoint.host.thread_pool import ThreadPool
from everstep.checkpoint.store.base import ObjectReader

PIECE = 512 << 10  # bytes
THREADS = 4  # of one rank

_FEW = 4 << 20  # bytes for which threads are not worth their start


@dataclass(frozen=True, slots=True)
class Destination:
    """Bytes [start, stop) of a chunk belong at `address` of this process's memory."""

    address: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """A chunk that is read and verified, and where its bytes go: nowhere when it is only verified."""

    chunk: Chunk
    destinations: tuple[Destination, ...] = ()

    @property
    def whole(self) -> Destination | None:
        """Return the only destination, when it takes all of the chunk: the bytes are read right into it."""
        if len(self.destinations) != 1:
            return None
        [found] = self.destinations
        return found if (found.start, found.stop) == (0, self.chunk.length) else None


OpenPart = Callable[[int], AbstractContextManager[ObjectReader]]


class ChunkReader:
    """Reads chunks of a checkpoint's parts by several threads."""

    def __init__(
        self,
        open_part: OpenPart,
        name: Callable[[int], str],
        algorithm: str,
        alive: Callable[[], None],
        retry: Callable[[Callable[[], None]], None] = lambda read: read(),
    ) -> None:
        """
        Args:
            open_part: Opens the part of this number.
            name: What the part of this number is called, for messages.
            algorithm: Of the checksums.
            alive: Is called often, from any thread.
            retry: Calls a read again where its error may pass.
        """
        self._open_part = open_part
        self._name = name
        self._algorithm = algorithm
        self._alive = alive
        self._retry = retry
        self._own = threading.local()

    def read(self, reads: Sequence[ChunkRead]) -> None:
        """Read all of them, each part in the order of its bytes.

        Raises:
            Damaged: Bytes are not those that were written; what was read until then is at its destination.
            StoreError: A part cannot be read.
        """
        runs = list(_iterate_runs(sorted(reads, key=_get_place)))
        if sum(read.chunk.length for read in reads) < _FEW or len(runs) < 2:
            for run in runs:
                self._read_run(run)
            return
        pool = ThreadPool(min(THREADS, len(runs)), thread_name_prefix="restore")
        try:
            for _ in pool.map(self._read_run, runs):
                pass
        finally:
            pool.shutdown(cancel_futures=True)  # the first bad chunk decides

    def _read_run(self, run: Sequence[ChunkRead]) -> None:
        self._alive()
        self._retry(lambda: self._read_once(run))

    def _read_once(self, run: Sequence[ChunkRead]) -> None:
        first, last = run[0].chunk, run[-1].chunk
        with self._open_part(first.part) as source:
            source.expect(first.offset, last.offset + last.length - first.offset)
            at = 0
            while at < len(run):
                end = _find_batch_end(run, at)
                if end - at > 1 or (run[at].whole is None and run[at].chunk.length <= PIECE):
                    self._read_small(source, run[at:end])
                else:
                    self._read_pieces(source, run[at])
                at = end

    def _read_small(self, source: ObjectReader, batch: Sequence[ChunkRead]) -> None:
        """Chunks that fit into one piece together, by one read."""
        start = batch[0].chunk.offset
        hot, address = self._hot()
        source.read_into(start, hot[: batch[-1].chunk.offset + batch[-1].chunk.length - start])
        for read in batch:
            at, length = read.chunk.offset - start, read.chunk.length
            if compute_checksum(self._algorithm, hot[at : at + length]) != read.chunk.sum:
                raise self._damaged(read.chunk)
            for to in read.destinations:
                ctypes.memmove(to.address, address + at + to.start, to.stop - to.start)

    def _read_pieces(self, source: ObjectReader, read: ChunkRead) -> None:
        chunk, whole = read.chunk, read.whole
        hot, address = self._hot()
        target = None if whole is None else memory_at(whole.address, chunk.length)
        running = begin_checksum(self._algorithm)
        for start in range(0, chunk.length, PIECE):
            stop = min(start + PIECE, chunk.length)
            piece = hot[: stop - start] if target is None else target[start:stop]
            source.read_into(chunk.offset + start, piece)
            running.update(piece)
            for to in () if target is not None else read.destinations:
                low, high = max(start, to.start), min(stop, to.stop)
                if low < high:
                    ctypes.memmove(to.address + low - to.start, address + low - start, high - low)
        if running.hexdigest() != chunk.sum:
            raise self._damaged(chunk)

    def _hot(self) -> tuple[memoryview, int]:
        """This thread's buffer for a piece, and where it lies."""
        if not hasattr(self._own, "hot"):
            pages = bytearray(PIECE)
            self._own.hot = memoryview(pages), ctypes.addressof(ctypes.c_char.from_buffer(pages))
        found: tuple[memoryview, int] = self._own.hot
        return found

    def _damaged(self, chunk: Chunk) -> Damaged:
        where = f"bytes {chunk.offset} to {chunk.offset + chunk.length}"
        return Damaged(self._name(chunk.part), f"{where} are not those that were written")


def memory_at(address: int, length: int) -> memoryview:
    """Memory of this process as something to read into; it must stay as long as this is used."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def _get_place(read: ChunkRead) -> tuple[int, int]:
    return read.chunk.part, read.chunk.offset


def _iterate_runs(reads: Sequence[ChunkRead]) -> Iterator[list[ChunkRead]]:
    """Yield what one thread reads at a time: chunks of one part with nothing but padding between them, up to the
    bytes of the largest chunk. Those of one chunk become one."""
    run: list[ChunkRead] = []
    for read in reads:
        if run and _get_place(run[-1]) == _get_place(read):
            run[-1] = ChunkRead(read.chunk, run[-1].destinations + read.destinations)
            continue
        last = run[-1].chunk if run else None
        if last is not None and not (
            read.chunk.part == last.part
            and read.chunk.offset == align_offset(last.offset + last.length)
            and read.chunk.offset + read.chunk.length <= run[0].chunk.offset + CHUNK
        ):
            yield run
            run = []
        run.append(read)
    if run:
        yield run


def _find_batch_end(run: Sequence[ChunkRead], at: int) -> int:
    """Return the end of those from `at` on that one piece holds together; at least one."""
    start, end = run[at].chunk.offset, at + 1
    while end < len(run) and run[end].chunk.offset + run[end].chunk.length <= start + PIECE:
        end += 1
    return end
