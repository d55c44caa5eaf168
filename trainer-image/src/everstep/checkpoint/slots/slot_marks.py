"""Marks that a slot's bytes were read again and found good, left by the writer while ranks are started again.

A restore trusts a mark only in a directory of our own that nobody else may enter, and only about the very files that
were read: by device, inode and size, of this boot, with this node manifest. Claiming the slot removes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

from everstep.checkpoint.catalog.chunk_reads import ChunkRead, ChunkReader
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.manifest import HEADER, Chunk, Manifest
from everstep.checkpoint.slots.slot_files import replace_file
from everstep.checkpoint.slots.slots import VERIFIED, Slot
from everstep.checkpoint.store.reader import open_file

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Interrupted(Exception):
    """Somebody needs the slot: the verification has ended without a result."""


def verify_slot(slot: Slot, manifest: Manifest, alive: Callable[[], None] = lambda: None) -> bytes | None:
    """Read all of a whole slot and check every sum.

    Args:
        slot: Of this node; its parts are in the order of the manifest's.
        manifest: Its node manifest.
        alive: Is called often, from several threads; what it raises ends the verification.

    Returns:
        The mark to leave with leave_mark() if the slot has not been claimed meanwhile; None when it is not good.
    """
    reader = ChunkReader(
        lambda number: open_file(slot.part(number), str(slot.part(number))),
        lambda number: str(slot.part(number)),
        manifest.checksum,
        alive,
    )
    reads = [ChunkRead(Chunk(number, 0, HEADER, part.header)) for number, part in enumerate(manifest.parts)]
    for tensor in manifest.tensors.values():
        reads += [ChunkRead(chunk) for shard in tensor.shards for chunk in shard.chunks]
    before = _identify_files(slot, manifest)
    try:
        reader.read(reads)
    except (CheckpointError, OSError):
        return None
    return before if before == _identify_files(slot, manifest) else None


def leave_mark(slot: Slot, mark: bytes) -> None:
    """Say that these files were verified. Only by the slot's writer, which alone claims it."""
    replace_file(slot.path / VERIFIED, mark)


def is_marked(slot: Slot, manifest: Manifest) -> bool:
    """Tell whether what lies in the slot, with this node manifest, was verified since it was filled."""
    try:
        found = slot.path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            return False
        return (slot.path / VERIFIED).read_bytes() == _identify_files(slot, manifest)
    except OSError:
        return False


def remove_mark(slot: Slot) -> None:
    """Remove the mark: what it says was not so, or is so no longer."""
    with contextlib.suppress(OSError):
        (slot.path / VERIFIED).unlink()


def _identify_files(slot: Slot, manifest: Manifest) -> bytes | None:
    """Return what tells these files from any others; None when they cannot be told."""
    try:
        parts = [slot.part(number).stat() for number in range(len(manifest.parts))]
        fields = {
            "key": str(manifest.key),
            "manifest": hashlib.sha256(slot.told()).hexdigest(),
            "boot": _BOOT.read_text().strip(),
            "parts": [[each.st_dev, each.st_ino, each.st_size] for each in parts],
        }
    except OSError:
        return None
    return json.dumps(fields, sort_keys=True).encode()
