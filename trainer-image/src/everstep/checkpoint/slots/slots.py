"""Keep what a node's ranks last saved in slots of its shared memory, whatever happens to the ranks.

    <directory>/                 0700, by default /dev/shm/everstep-<hash of the store>-<place>
      control                    the writer's socket
      layouts/<hash>.json        where a rank's shards lie in its part; immutable, named by its content
      <slot>/claim.json          which checkpoint the slot is for, of how many local ranks, and of which node
      <slot>/<local rank>.part   the very bytes of the part: header, shards
      <slot>/<local rank>.json   that rank is done
      <slot>/slot.json           the node manifest: every chunk has its checksum
      <slot>/whole               the same is complete (a name to look at without reading a manifest)
      <slot>/stored              the same is durable in the store
      <slot>/verified            its bytes were read again and found good, after its ranks had gone (slot_marks.py)
      <slot>/lock                readers share it; a slot that is read is neither filled anew nor removed
      peer/<slot>/               the same of another node, whose copies are kept here (peers/replica_slots.py)
      port                       where other nodes' writers reach ours

What a slot is follows from these files alone, so that any process can tell after any crash: every small file is
replaced whole and names its key, and one that names another key than the claim says nothing.
The parts of `slot.json` are in the order of local ranks: bytes of its part *i* are in `<i>.part`.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from everstep.checkpoint.errors import CheckpointError, Damaged, Missing, NoSlot, UnknownFormat
from everstep.checkpoint.format.keys import Attempt, Key
from everstep.checkpoint.format.manifest import Manifest, decode_manifest, encode_manifest
from everstep.checkpoint.host import available_memory
from everstep.checkpoint.host.paths import make_absolute
from everstep.checkpoint.slots.own_files import COPIES, LAYOUTS, is_own_entry
from everstep.checkpoint.slots.slot_files import (
    MEMORY_VARIABLE,
    allocate_file,
    find_size,
    list_files,
    read_json,
    read_record,
    replace_file,
    secure_directory,
)

MEMORY = Path("/dev/shm")  # noqa: S108 - the node's own shared memory; the folder in it is ours alone
VERIFIED = "verified"
READ_TIMEOUT = 10.0  # seconds that a save or a copy waits for a slot which processes that restore still read


class SlotState(enum.Enum):
    """The stages of a slot; each one implies those before it."""

    EMPTY = "empty"
    FILLING = "filling"  # ranks may be writing: its bytes mean nothing
    FILLED = "filled"  # every local rank is done
    WHOLE = "whole"  # summed: a checkpoint may be restored from it
    STORED = "stored"  # durable in the store too: may be filled anew at any time


@dataclass(frozen=True)
class Box:
    """One shard of a tensor in a part: `offset` in bytes from the file's start."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True)
class Claim:
    """The checkpoint that a slot is claimed for: this node's share of one of `nodes` nodes, filled by `locals` ranks.

    `run`: what its store is called, empty where that could not be asked.
    """

    key: Key
    locals: int
    node: int
    nodes: int
    run: str = ""


@dataclass(frozen=True)
class PartRecord:
    """A rank's report that its part of a slot is filled. `size` is in bytes, header included; `values` are packed."""

    key: Key
    rank: int
    world: int
    size: int
    layout: str
    model: str
    checksum: str
    values: dict[str, object]


def default_memory() -> Path:
    """Return the node's shared memory: /dev/shm, or what EVERSTEP_CHECKPOINT_MEMORY names."""
    return make_absolute(os.environ.get(MEMORY_VARIABLE) or MEMORY, "the memory for checkpoints")


def default_directory(url: str, place: int) -> Path:
    """Return where the slots of a store are on a node.

    Args:
        url: The store.
        place: The node's number among the nodes that share the memory.
    """
    return default_memory() / f"everstep-{hashlib.sha256(url.encode()).hexdigest()[:16]}-{place}"


class Slot:
    """One of a node's slots. Ranks write parts and records, the writer everything else."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def number(self) -> int:
        return int(self.path.name)

    def part(self, local: int) -> Path:
        """Return the file of a local rank's part."""
        return self.path / f"{local}.part"

    def claim(self, claim: Claim) -> None:
        """Give the slot to this checkpoint; what was in it is gone, with the parts of ranks that it lacks.

        Raises:
            NoSlot: Somebody reads it: who holds reading() and finds it whole may rely on its bytes.
        """
        with ExitStack() as stack:
            if not self.lock_out_readers(stack):
                raise NoSlot(f"slot {self.number} is being read: it is not filled anew meanwhile")
            for name in (VERIFIED, "whole", "slot.json", "stored"):
                (self.path / name).unlink(missing_ok=True)
            for path in self.path.iterdir():
                if path.suffix in (".part", ".json") and path.stem.isdecimal() and int(path.stem) >= claim.locals:
                    path.unlink()  # an earlier run had more ranks here: their memory is given back
            replace_file(self.path / "claim.json", {**vars(claim), "key": str(claim.key)})

    def release(self) -> None:
        """Declare the slot free: nothing in it means anything any more."""
        (self.path / VERIFIED).unlink(missing_ok=True)
        (self.path / "claim.json").unlink(missing_ok=True)

    def claimed(self) -> Claim | None:
        """Return the claim on the slot; None when it is nobody's, or of another version of everstep."""
        return read_record(self.path / "claim.json", Claim)

    def record(self, local: int, record: PartRecord) -> None:
        """Record that this local rank is done."""
        replace_file(self.path / f"{local}.json", {**vars(record), "key": str(record.key)})

    def has_record(self, local: int, key: Key) -> bool:
        """Tell whether a local rank is done with its part of a checkpoint."""
        fields = read_json(self.path / f"{local}.json")
        return fields is not None and fields.get("key") == str(key)

    def records(self) -> list[PartRecord] | None:
        """Return the records of all local ranks in order; None when one is not done."""
        claim = self.claimed()
        if claim is None:
            return None
        found = []
        for local in range(claim.locals):
            record = read_record(self.path / f"{local}.json", PartRecord)
            if record is None or record.key != claim.key:
                return None
            found.append(record)
        return found

    def complete(self, manifest: Manifest) -> None:
        """Mark the slot as whole."""
        replace_file(self.path / "slot.json", encode_manifest(manifest))
        replace_file(self.path / "whole", str(manifest.key).encode())

    def manifest(self) -> Manifest | None:
        """Return the node manifest of a slot that is whole."""
        claim = self.claimed()
        try:
            found = _decode_slot_manifest((self.path / "slot.json").read_bytes(), str(self.path / "slot.json"))
        except (FileNotFoundError, Damaged, UnknownFormat):
            return None  # a writer of another version may have summed it: it is summed again
        return found if claim is not None and found.key == claim.key else None

    def told(self) -> bytes:
        """Return the same as bytes: encoded by who made the slot whole."""
        return (self.path / "slot.json").read_bytes()

    def store(self, key: Key) -> None:
        """Note that this checkpoint is durable elsewhere."""
        replace_file(self.path / "stored", str(key).encode())

    @property
    def state(self) -> SlotState:
        claim = self.claimed()
        if claim is None:
            return SlotState.EMPTY
        for name, state in (("stored", SlotState.STORED), ("whole", SlotState.WHOLE)):
            with contextlib.suppress(FileNotFoundError):
                if (self.path / name).read_text() == str(claim.key):
                    return state
        return SlotState.FILLING if self.records() is None else SlotState.FILLED

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the slot for reading: meanwhile it is neither filled anew nor removed; ends with the process too.

        Raises:
            Missing: The slot has been removed, as the writer of a run that has ended does.
        """
        path = self.path / "lock"
        with ExitStack() as stack:
            try:
                file = stack.enter_context(path.open("a"))
                fcntl.flock(file, fcntl.LOCK_SH)
                # Closing it is not enough: children forked meanwhile, as workers of a loader are, have it open too.
                stack.callback(fcntl.flock, file, fcntl.LOCK_UN)
                is_there = os.path.samestat(os.fstat(file.fileno()), path.stat())
            except FileNotFoundError:
                is_there = False
            if not is_there:  # or it was removed while we waited for the lock
                raise Missing(str(self.path))
            yield

    @property
    def is_read(self) -> bool:
        with contextlib.suppress(FileNotFoundError), ExitStack() as stack:
            return not self.lock_out_readers(stack)
        return False  # it has been removed

    def lock_out_readers(self, stack: ExitStack) -> bool:
        """Let nobody begin to read the slot until `stack` ends; false, and nothing is locked, while it is read."""
        file = stack.enter_context((self.path / "lock").open("a"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class Slots:
    """All slots of a node. `create` is the writer's; whoever only looks opens the directory as it is."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @classmethod
    def create(cls, directory: Path, count: int) -> Slots:
        """Make what is missing; CheckpointError when the directory is not ours alone."""
        secure_directory(directory)
        (directory / LAYOUTS).mkdir(mode=0o700, exist_ok=True)
        made = cls(directory)
        made._make_folders(count)
        return made

    def __iter__(self) -> Iterator[Slot]:
        return iter(Slot(path) for path in list_files(self.directory) if path.name.isdecimal())

    def __getitem__(self, number: int) -> Slot:
        return Slot(self.directory / str(number))

    def whole(self) -> list[tuple[Slot, Manifest]]:
        """Return the slots that a checkpoint may be restored from, newest first.

        Hold `reading()` and ask again before you restore from one.
        """
        found = [(slot, manifest) for slot in self if (manifest := slot.manifest()) is not None]
        return sorted(found, key=lambda pair: pair[1].key, reverse=True)

    def newest(self) -> Slot | None:
        """Return the slot of the greatest whole checkpoint."""
        whole = [
            (claim.key, slot.number)
            for slot in self
            if (claim := slot.claimed()) and slot.state in (SlotState.WHOLE, SlotState.STORED)
        ]
        return self[max(whole)[1]] if whole else None

    def find_claimed(self, key: Key) -> tuple[Slot, Claim] | None:
        """Return the slot that a checkpoint has claimed, with its claim."""
        return next(((slot, claim) for slot in self if (claim := slot.claimed()) and claim.key == key), None)

    def find_newest_claimed(self, run: str | None = None, without: Attempt | None = None) -> Key | None:
        """Return the greatest checkpoint that these slots are for and that may still get into the store.

        Args:
            run: What the store is called; slots of another one count for nothing. None or empty where it is not known.
            without: An attempt that does not count.
        """
        claims = [claim for slot in self if (claim := slot.claimed()) is not None]
        keys = [claim.key for claim in claims if not run or not claim.run or claim.run == run]
        return max((key for key in keys if key.attempt != without), default=None)

    def first(self, count: int) -> list[Slot]:
        """Return the slots that a run with so many of them fills; others that are there were an earlier run's."""
        return [slot for slot in self if slot.number < count]

    def surplus(self, count: int) -> list[Slot]:
        """Return the slots that a run with so many of them does not fill."""
        return [slot for slot in self if slot.number >= count and is_own_entry(slot.path)]

    def need(self, sizes: Sequence[int], count: int) -> int:
        """Return the bytes of memory that `count` slots, there or not, would take beyond what is there.

        `sizes` are those of their parts, one for each local rank.
        """
        every = [self[number] for number in range(count)]
        return sum(max(0, size - find_size(slot.part(local))) for slot in every for local, size in enumerate(sizes))

    def check(self, sizes: Sequence[int], count: int) -> None:
        """Raise room.InsufficientMemory when so many slots with parts of these sizes do not fit into the memory."""
        available_memory.check_memory(self.directory, self.need(sizes, count), copies=count)

    def reserve(self, sizes: Sequence[int], count: int) -> None:
        """Make so many slots and allocate their parts. Files never shrink. InsufficientMemory: nothing was made."""
        self.check(sizes, count)
        self._make_folders(count)
        for slot in self.first(count):
            for local, size in enumerate(sizes):
                allocate_file(slot.part(local), size)

    def move_away(self, slot: Slot) -> bool:
        """Take a slot away from here; clear_removed() gives its memory back.

        Returns:
            Whether it was taken away. While a process reads it, it stays as it is.
        """
        with ExitStack() as stack:
            if not slot.lock_out_readers(stack):
                return False
            name = f"{self._removed_prefix}{os.getpid()}-{slot.number}-{time.monotonic_ns()}"
            slot.path.rename(self.directory / name)
        return True

    def _layout_path(self, name: str) -> Path:
        return self.directory / LAYOUTS / f"{name}.json"

    def _make_folders(self, count: int) -> None:
        for number in range(count):
            (self.directory / str(number)).mkdir(mode=0o700, exist_ok=True)

    def save_layout(self, boxes: Sequence[Box]) -> str:
        """Keep where a rank's shards lie, and return its name."""
        text = json.dumps([[*vars(box).values()] for box in boxes], separators=(",", ":")).encode()
        name = hashlib.sha256(text).hexdigest()[:32]
        path = self._layout_path(name)
        try:
            if not path.exists() or path.read_bytes() != text:  # a damaged one would fail each save
                path.parent.mkdir(mode=0o700, exist_ok=True)
                replace_file(path, text)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be written: {error}; see the space and the inodes of its file system (df, df -i)"
            ) from error
        return name

    def has_layout(self, name: str) -> bool:
        """Tell whether there is a layout of this name: somebody may have emptied the memory."""
        return self._layout_path(name).exists()

    def layout(self, name: str) -> list[Box]:
        """Return the layout that save_layout() named so."""
        rows = json.loads(self._layout_path(name).read_bytes())
        return [
            Box(tensor, dtype, tuple(shape), tuple(offsets), tuple(sizes), offset, length)
            for tensor, dtype, shape, offsets, sizes, offset, length in rows
        ]

    def remove(self, *, is_forced: bool = False) -> bool:
        """Give the memory back, of copies for other nodes too, unless a process reads in it.

        Args:
            is_forced: Do so while a process reads. One that has its files open reads on (part_files.py), and the memory
                is given back when it closes them.

        Returns:
            Whether it was given back; else all is as it was.
        """
        with ExitStack() as stack:
            for slot in (*self, *Slots(self.directory / COPIES)):
                with contextlib.suppress(OSError):  # without a lock file, and with no inode left for one, nobody reads
                    if not slot.lock_out_readers(stack) and not is_forced:
                        return False
            # At once: a new writer that comes meanwhile makes a directory of its own, and loses nothing of it.
            try:
                self._move_away()
            except OSError:  # it is gone, or has no inode left for a folder within
                for path in filter(is_own_entry, list_files(self.directory)):
                    shutil.rmtree(path, ignore_errors=True)
        self.clear_removed()
        return True

    def clear_removed(self) -> None:
        """Finish what remove() began, here or in a process that died in the middle of it."""
        for path in self._list_removed():
            shutil.rmtree(path, ignore_errors=True)

    @property
    def hold_memory(self) -> bool:
        """Tell whether anything of these slots, or of copies, is still there, also where it is being removed."""
        return any((*self, *Slots(self.directory / COPIES), *self._list_removed()))

    def _list_removed(self) -> list[Path]:
        places = (*list_files(self.directory.parent), *list_files(self.directory))
        return [path for path in places if path.name.startswith(self._removed_prefix)]

    def _move_away(self) -> None:
        gone = self.directory.with_name(f"{self._removed_prefix}{os.getpid()}")
        if all(map(is_own_entry, self.directory.iterdir())):
            try:
                self.directory.rename(gone)
            except OSError as error:
                if error.errno not in (errno.EBUSY, errno.EXDEV, errno.EACCES):
                    raise
            else:
                return
        # A mount, or in a folder that is not ours, or somebody has put more into it: what is ours in it goes.
        inside = self.directory / gone.name
        inside.mkdir(mode=0o700)
        for path in self.directory.iterdir():
            if path != inside and is_own_entry(path):
                path.rename(inside / path.name)

    @property
    def _removed_prefix(self) -> str:
        return f".{self.directory.name}.removed-"


@functools.lru_cache(maxsize=8)
def _decode_slot_manifest(data: bytes, name: str) -> Manifest:
    # A restore asks for the same few again and again; one of ten thousand chunks takes a tenth of a second to decode.
    return decode_manifest(data, name)
