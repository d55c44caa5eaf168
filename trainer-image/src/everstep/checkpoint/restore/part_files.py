"""Parts of a checkpoint that are files of this machine: in slots of the node's memory, or in a store's folder.

They are read twice, once to verify them and once into the objects, and take no memory meanwhile. Parts from elsewhere
are brought into the node's memory once (node_cache.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from everstep.checkpoint.errors import Damaged, Missing, StoreError
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.format.manifest import Manifest
from everstep.checkpoint.peers.peer_server import iterate_held_slots
from everstep.checkpoint.restore.proposals import MEMORY, STORE
from everstep.checkpoint.slots import slot_marks
from everstep.checkpoint.slots.slots import Slot
from everstep.checkpoint.store.base import LocalStore, ObjectReader, Store
from everstep.checkpoint.store.reader import FileReader, open_file


def hold_slots(memory: Path, key: Key, stack: ExitStack) -> bytes:
    """Hold the slots below `memory` that have something of a checkpoint until `stack` ends: nobody fills them anew.

    Returns:
        What PartFiles.adopt() needs to know, on every rank of the node.
    """
    rows = []
    for slot, own in iterate_held_slots(memory):
        if own.key != key:
            continue
        try:
            stack.enter_context(slot.reading())
        except Missing:  # removed just now, as the writer of a run that has ended does
            continue
        if slot.manifest() == own:  # else it was filled anew since
            parts = [[*each] for each in zip([part.name for part in own.parts], _digest_parts(own), strict=True)]
            rows.append([str(slot.path), slot_marks.is_marked(slot, own), parts])
    return json.dumps(rows).encode()


class PartFiles:
    """The parts of one checkpoint, by their numbers in its manifest, that are files for this process."""

    def __init__(self, manifest: Manifest, store: Store) -> None:
        self._manifest = manifest  # as it was saved: slots are compared with it
        self._store = store if isinstance(store, LocalStore) and store.is_local else None
        self._elsewhere: set[str] = set()
        self._slots: dict[int, tuple[Slot, FileReader]] = {}
        self._marked: set[int] = set()

    def adopt(self, message: bytes, stack: ExitStack) -> None:
        """Take the parts that hold_slots() found on the node's leader, and hold their slots until `stack` ends.

        Their files stay open until then: what is verified can still be read into the objects, whoever removes them.

        Raises:
            Damaged: A slot is there no more, although it is held: one rank must not read elsewhere what the others of
                its node, who share the work, read here.
        """
        numbers = {part.name: i for i, part in enumerate(self._manifest.parts)}
        digests = _digest_parts(self._manifest) if (found := json.loads(message)) else []
        for path, is_marked, parts in found:
            slot = Slot(Path(path))
            with self._expect_slot(slot):
                stack.enter_context(slot.reading())
            for local, (name, digest) in enumerate(parts):
                number = numbers.get(name)
                # Two starts of one attempt may have saved the same part with other bytes.
                if number is not None and number not in self._slots and digests[number] == digest:
                    with self._expect_slot(slot):
                        file = stack.enter_context(open_file(slot.part(local), f"{name} in this node's memory"))
                    self._slots[number] = slot, file
                    self._marked |= {number} if is_marked else set()

    @contextmanager
    def _expect_slot(self, slot: Slot) -> Iterator[None]:
        try:
            yield
        except (Missing, FileNotFoundError) as error:
            raise Damaged(str(slot.path), "was removed from this node's memory while it was held") from error

    def leave_out(self, names: set[str]) -> None:
        """Leave out the parts of these names, which are read from elsewhere, unless they are in the node's memory."""
        self._elsewhere = names

    def __contains__(self, number: int) -> bool:
        if number in self._slots:
            return True
        return self._store is not None and self._manifest.parts[number].name not in self._elsewhere

    def tier(self, number: int) -> str:
        """Return the tier that this part lies in: memory or store."""
        return MEMORY if number in self._slots else STORE

    def is_verified(self, number: int) -> bool:
        """Tell whether the writer has read all of the part since it was filled."""
        return number in self._marked

    def distrust(self) -> None:
        """Note that something in memory was not as its mark says: who restores next verifies all of it."""
        for number in self._marked:
            slot_marks.remove_mark(self._slots[number][0])

    def name(self, number: int) -> str:
        """Return the name of the part in messages."""
        name = self._manifest.parts[number].name
        return f"{name} in this node's memory" if number in self._slots else name

    @contextmanager
    def open(self, number: int) -> Iterator[ObjectReader]:
        """Open the file of a part. Missing, Damaged, StoreError."""
        name = self._manifest.parts[number].name
        if number not in self._slots:
            assert self._store is not None
            with self._store.open_object(name) as opened:
                yield opened
            return
        slot, file = self._slots[number]
        try:
            yield file
        except OSError as error:
            raise StoreError(f"cannot be read: {error}", str(slot.path)) from error


def _digest_parts(manifest: Manifest) -> list[str]:
    """Return for each part what tells its bytes from any others of its name, by its size and the sums of all chunks."""
    chunks: list[list[tuple[int, int, str]]] = [[] for _ in manifest.parts]
    for tensor in manifest.tensors.values():
        for shard in tensor.shards:
            for chunk in shard.chunks:
                chunks[chunk.part].append((chunk.offset, chunk.length, chunk.sum))
    described = [(part.size, part.header, sorted(own)) for part, own in zip(manifest.parts, chunks, strict=True)]
    return [hashlib.sha256(json.dumps(each).encode()).hexdigest() for each in described]
