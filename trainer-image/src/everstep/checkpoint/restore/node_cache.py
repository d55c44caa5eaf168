"""Keep what comes from afar while the ranks of a node restore it: one copy for all of them.

What lies in files of this machine is not brought here but read twice (part_files.py). For each part from afar that the
node needs there is a file of memory, with the same offsets as in the store and holes where nobody needs anything. A
node with one rank uses that rank's own memory instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.manifest import CHUNK, HEADER, Chunk, Manifest, align_offset
from everstep.checkpoint.host import available_memory
from everstep.checkpoint.host.own_mapping import map_for_this_process
from everstep.checkpoint.slots.own_files import RESTORES
from everstep.checkpoint.slots.slot_files import naming_full_memory, secure_directory

_LOCK = "lock"  # held by the process that made the folder, for as long as it lives
_SECONDS = 10.0


class NodeCache:
    """One rank's view of its node's copy. `name` is the same on all of them and new for every attempt to restore."""

    def __init__(self, memory: Path, name: str, *, shared: bool) -> None:
        # Beside the slots, not among them: they are a run's, which may remove them when it ends.
        self._folder = _get_neighbour_path(memory, f"{RESTORES}{name}")
        self._pattern = _get_neighbour_path(memory, f"{RESTORES}*").name
        self._lock: int | None = None
        self._shared = shared
        self._parts: dict[int, memoryview] = {}
        self._messages: dict[str, bytes] = {}

    def create(self) -> None:
        """Make the folder, and remove what dead restores left. One rank of the node calls it, before the others look.

        Raises:
            CheckpointError: The folder cannot be locked.
        """
        if not self._shared:
            return
        until = time.monotonic() + _SECONDS
        while self._lock is None:
            secure_directory(self._folder)
            # Before it was locked somebody may have taken it for a dead one's.
            self._lock = _try_lock(self._folder / _LOCK, os.O_CREAT)
            if time.monotonic() > until:
                raise CheckpointError(f"{self._folder / _LOCK} cannot be locked: see that its file system has locks")
        for left in self._folder.parent.glob(self._pattern):
            # Others may restore from the same store at this moment: theirs is locked.
            lock = None if left == self._folder else _try_lock(left / _LOCK)
            if lock is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)

    def remove(self) -> None:
        """Remove the folder; what is mapped stays until it is dropped.

        One rank calls it, when none needs the folder any more.
        """
        if self._shared:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def leave(self, name: str, data: bytes) -> None:
        """A small message to the other ranks of the node; they may read it after the next round of the consensus."""
        if self._shared:
            with naming_full_memory(self._folder / name, len(data)):
                (self._folder / name).write_bytes(data)
        else:
            self._messages[name] = data

    def message(self, name: str) -> bytes:
        """Return what was left under this name."""
        return (self._folder / name).read_bytes() if self._shared else self._messages[name]

    def check_room(self, need: int) -> None:
        """Raise room.InsufficientMemory unless the node has so many bytes of memory; called before it is taken."""
        if self._shared:
            available_memory.check_memory(self._folder, need, copies=1)

    def part(self, number: int, manifest: Manifest) -> memoryview:
        """Return the bytes of a part, as far as somebody has put them there."""
        if number not in self._parts:
            size = manifest.parts[number].size
            self._parts[number] = memoryview(self._open(number, size) if self._shared else _map_private_memory(size))
        return self._parts[number]

    def gives(self, number: int) -> bool:
        """Tell whether tensors may stay in the memory of this part: it is this rank's own, and nobody else's."""
        return not self._shared

    def keep(self, ranges: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """Give pages of all parts back to the system, but those that stay in use.

        What other ranks of the node may still read goes with the folder, and with the process that has mapped it.

        Args:
            ranges: For each part by its number, the ranges (offset, length) in bytes that stay in use.
        """
        if self._shared:
            return
        for number, part in self._parts.items():
            pages, at = part.obj, 0
            assert isinstance(pages, mmap.mmap)
            for offset, length in [*sorted(ranges.get(number, ())), (len(pages), 0)]:
                start, stop = -(-at // mmap.PAGESIZE), offset // mmap.PAGESIZE
                if start < stop:
                    pages.madvise(mmap.MADV_DONTNEED, start * mmap.PAGESIZE, (stop - start) * mmap.PAGESIZE)
                at = offset + length

    def reserve(self, units: Sequence[Chunk], manifest: Manifest) -> None:
        """Take the memory of these bytes. OSError when there is none: writing into a hole would end in SIGBUS."""
        for unit in units if self._shared else ():
            self.part(unit.part, manifest)
            descriptor = os.open(self._file(unit.part), os.O_RDWR | os.O_CLOEXEC)
            try:
                with naming_full_memory(self._file(unit.part), unit.length):
                    os.posix_fallocate(descriptor, unit.offset, unit.length)
            finally:
                os.close(descriptor)

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.part"

    def _open(self, number: int, size: int) -> mmap.mmap:
        descriptor = os.open(self._file(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, size)
            return map_for_this_process(descriptor, size)
        finally:
            os.close(descriptor)


def _get_neighbour_path(memory: Path, name: str) -> Path:
    """Return a path in the same memory as the folder `memory`, there or not.

    It is the folder's neighbour, or in it where it is a mount.
    """
    if os.path.ismount(memory):  # Path.is_mount() raises where a writer that ends removes it meanwhile
        return memory / name
    return memory.with_name(f".{memory.name}.{name}")


def _try_lock(path: Path, flags: int = 0) -> int | None:
    """Return the descriptor that holds this file's lock.

    None when another process holds it, or it is not ours to lock.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _map_private_memory(size: int) -> mmap.mmap:
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def list_read_units(chunks: Sequence[Chunk], manifest: Manifest) -> list[Chunk]:
    """List what is read and verified for these chunks: they, and the header of each part.

    The chunks are in the order of the files.
    """
    found: list[Chunk] = []
    for chunk in chunks:
        if not found or found[-1].part != chunk.part:
            found.append(Chunk(chunk.part, 0, HEADER, manifest.parts[chunk.part].header))
        found.append(chunk)
    return found


def iterate_runs(units: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    """Yield what one thread reads or verifies at a time.

    That is units of one part with nothing but padding between them, up to the bytes of the largest chunk.
    """
    run: list[Chunk] = []
    for unit in units:
        if run and not (
            unit.part == run[0].part
            and unit.offset == align_offset(run[-1].offset + run[-1].length)
            and unit.offset + unit.length <= run[0].offset + CHUNK
        ):
            yield run
            run = []
        run.append(unit)
    if run:
        yield run


def take_share(every: Sequence[Chunk], which: int, of: int) -> list[Chunk]:
    """Return the share of one of a node's ranks: about as many bytes for each, one after the other in the files."""
    total = sum(unit.length for unit in every)
    mine, passed = [], 0
    for unit in every:
        # By its middle, so that each unit is in one share and the shares differ by a unit at most.
        if (passed + unit.length // 2) * of // max(total, 1) == which:
            mine.append(unit)
        passed += unit.length
    return mine


def pack_numbers(numbers: set[int], count: int) -> bytes:
    """Return a set of numbers below `count` as bits."""
    bits = bytearray(-(-count // 8))
    for number in numbers:
        bits[number // 8] |= 1 << number % 8
    return bytes(bits)


def unpack_numbers(packed: Sequence[bytes]) -> list[int]:
    """All numbers of these sets, in order."""
    merged = 0
    for each in packed:
        merged |= int.from_bytes(each, "little")
    return [8 * i + bit for i, byte in enumerate(_count_number_bytes(merged)) for bit in range(8) if byte >> bit & 1]


def _count_number_bytes(number: int) -> bytes:
    return number.to_bytes(-(-number.bit_length() // 8), "little")
