"""A rank's part of each slot, mapped into its memory: the state is copied there, and that is the whole stall."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.format.manifest import HEADER, part_header
from everstep.checkpoint.host.own_mapping import map_for_this_process
from everstep.checkpoint.ranks.topology import Topology
from everstep.checkpoint.save.planning import WritePlan
from everstep.checkpoint.slots.slots import Box, Slot, Slots
from everstep.checkpoint.state.staging import Staging

_MADV_POPULATE_WRITE = 23  # Linux 5.14


class Window:
    """A part of a slot in this process's memory. Bytes of the file that the mapping covers already exist."""

    def __init__(self, path: Path, boxes: Sequence[Box], size: int, staging: Staging) -> None:
        self._path = path
        with path.open("r+b") as file:
            self._file = os.fstat(file.fileno())
            self._pages = map_for_this_process(file.fileno(), size)
        self._bytes = torch.frombuffer(self._pages, dtype=torch.uint8)
        populate_pages(self._bytes.data_ptr(), size)
        staging.adopt(self._bytes)
        self.targets = [_view_box(self._bytes, box) for box in boxes]

    @property
    def is_current(self) -> bool:
        """Tell whether the part is still the file that is mapped: nobody reads what is copied into a removed file."""
        try:
            return os.path.samestat(self._file, self._path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def head(self, header: bytes) -> None:
        """Write the part's header."""
        self._pages[:HEADER] = header


class Snapshots:
    """The windows of one rank, for one plan; all are made when the first is used."""

    def __init__(
        self,
        slots: Slots,
        plan: WritePlan,
        topology: Topology,
        checksum: str,
        staging: Staging,
        steady: Collection[str],
        count: int,
    ) -> None:
        """`steady`: names of tensors that nobody changes before the next step of an optimizer. `count`: of the slots
        that the run fills; another one, of an earlier run, may have no part for this rank."""
        self._slots = slots
        self._count = count
        self._plan = plan
        self._rank = topology.rank
        self._local = topology.local
        self._checksum = checksum
        self._staging = staging
        self._steady = [box.tensor in steady for box in plan.boxes]
        self._windows: dict[int, Window] = {}

    @property
    def are_current(self) -> bool:
        """Tell whether the parts of all slots are still those that are mapped."""
        return all(window.is_current for window in self._windows.values())

    def take(
        self, slot: Slot, key: Key, tensors: Mapping[str, torch.Tensor], *, is_beside_training: bool = True
    ) -> None:
        """Begin to copy the state into our part of the slot; see Staging for when it is there.

        `is_beside_training`: what is steady may be copied while training goes on.
        """
        if not self._windows:
            self._windows = {each.number: self._open(each) for each in self._slots.first(self._count)}
        window = self._windows[slot.number]
        window.head(part_header(key, self._rank, self._checksum))
        steady = self._steady if is_beside_training else ()
        self._staging.copy(window.targets, self._plan.sources(tensors), steady)

    def _open(self, slot: Slot) -> Window:
        size = self._plan.sizes[self._rank]
        return Window(slot.part(self._local), self._plan.boxes, size, self._staging)


def _view_box(data: torch.Tensor, box: Box) -> torch.Tensor:
    dtype = getattr(torch, box.dtype)
    return data[box.offset : box.offset + box.length].view(dtype).view(box.sizes)


def populate_pages(address: int, size: int) -> None:
    """Make this process's page tables, for pages that the slot has already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_POPULATE_WRITE) == 0:
        return
    if ctypes.get_errno() != errno.EINVAL:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # An older kernel: one byte of each page, read and written back.
    pages = (ctypes.c_ubyte * size).from_address(address)
    for offset in range(0, size, mmap.PAGESIZE):
        pages[offset] = pages[offset]
