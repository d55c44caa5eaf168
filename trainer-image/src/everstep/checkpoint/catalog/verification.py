"""Verified checkpoints: every byte was read back from the store, and each node has left a mark that says so.

    verified/<attempt>-<step>/<node>-<sum of its node manifest>      empty

A node reads back its own share when it has stored it, so that no node reads all of a checkpoint. A mark names the very
manifest that was verified. One that is missing, because its writer died, is made by whoever needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from everstep.checkpoint.catalog.candidates import OnBytes, check_present, is_committed, verify_checkpoint, verify_node
from everstep.checkpoint.catalog.manifests import parse_index, read_index
from everstep.checkpoint.catalog.needed_checkpoints import read_needs
from everstep.checkpoint.errors import CheckpointError, Damaged, Full, Missing, UnknownFormat, is_damage
from everstep.checkpoint.format.checksum import DEFAULT, compute_checksum
from everstep.checkpoint.format.index import CheckpointIndex, NodeShare
from everstep.checkpoint.format.keys import VERIFIED, Key
from everstep.checkpoint.store.base import Store, StoredObject

__all__ = [
    "OnBytes",
    "VerifiedCheckpoints",
    "list_marks",
    "list_unverified_nodes",
    "mark_name",
    "mark_node",
    "verify_and_mark",
]


def mark_node(store: Store, index: CheckpointIndex, node: int) -> None:
    """Leave the mark of a share that was verified.

    A full disk takes none. Whoever removes older checkpoints to make room reads such a share again.
    """
    with suppress(Full):
        store.replace(mark_name(index, node), b"")


def mark_name(index: CheckpointIndex, node: int) -> str:
    """Return the name of the mark that a node's share, as this index speaks of it, is verified."""
    return index.key.mark_name(index.nodes[node].name)


def list_unverified_nodes(store: Store, index: CheckpointIndex) -> list[int]:
    """Return the nodes of a checkpoint whose shares nobody has verified yet."""
    there = {entry.name for entry in store.list(index.key.mark_prefix)}
    return [node for node in range(len(index.nodes)) if mark_name(index, node) not in there]


def mark_all(store: Store, key: Key) -> None:
    """Leave the marks that are missing of a checkpoint that was verified."""
    index = read_index(store, key)
    for node in list_unverified_nodes(store, index):
        mark_node(store, index, node)


def verify_and_mark(
    store: Store, key: Key, *, mark: bool = True, threads: int = 4, on_bytes: OnBytes = lambda count: None
) -> None:
    """Verify the shares of a checkpoint that have no mark yet, and mark them if asked.

    Raises as verify_checkpoint() does.
    """
    index = read_index(store, key)
    for node in list_unverified_nodes(store, index):
        verify_node(store, index, node, threads=threads, on_bytes=on_bytes)
        if mark:
            mark_node(store, index, node)


@dataclass
class VerifiedCheckpoints:
    """Finds the newest verified checkpoints of a store; remembers what it has read of them.

    A mark says that a checkpoint was good once. Before one is counted as kept it is seen that its files are still
    there, as large as they were; and with `believe_marks` false all of its bytes are read again.

    `mark`: what is verified is marked. `bad`: those that did not verify when they were asked for, with the reason;
    `unknown`: those of another version of everstep, which only that one can verify; `removed`: those that others have
    removed since they were listed. `hold`: called with each before it is read, where others may remove it meanwhile.
    """

    store: Store
    mark: bool = True
    believe_marks: bool = True
    threads: int = 2
    bad: dict[Key, str] = field(default_factory=dict)
    unknown: dict[Key, str] = field(default_factory=dict)
    removed: set[Key] = field(default_factory=set)
    hold: Callable[[Key], None] = lambda key: None
    _known: dict[Key, tuple[str, tuple[NodeShare, ...]]] = field(default_factory=dict)
    _needs: dict[Key, tuple[Key, ...]] = field(default_factory=dict)
    _read: set[Key] = field(default_factory=set)

    def marked(self, keys: Iterable[Key], count: int | None = None) -> list[Key]:
        """Return those of these keys, greatest first, whose shares all have their marks; the first `count` of them."""
        there = list_marks(self.store)
        found: list[Key] = []
        for key in sorted(keys, reverse=True):
            if len(found) == count:
                break
            if key in there and key not in self.bad and self._needed(key) <= {entry.name for entry in there[key]}:
                found.append(key)
        return found

    def newest(self, keys: Iterable[Key], count: int, *, on_bytes: OnBytes = lambda count: None) -> list[Key]:
        """Return the `count` greatest of these keys that are verified, or as many as there are.

        Where too few have their marks, others are read back, the greatest first, and marked or passed over. Where
        something of one that has its marks is missing, whatever took it may have taken more: all that count are read.
        """
        keys = sorted(keys, reverse=True)
        read: set[Key] = set()
        is_alarmed = False
        while True:
            found = self.marked(keys, count) if self.believe_marks else []
            lost = {key for key in found if not self.is_whole(key)}
            is_alarmed = is_alarmed or bool(lost)
            if is_alarmed:
                unread = set(found) - lost - read
                lost |= {key for key in unread if not self.still_holds(key, on_bytes=on_bytes)}
                read |= unread
            if not lost:
                break
            keys = [key for key in keys if key not in lost]
        for key in keys:
            if len(found) >= count:
                break
            if key not in found and self._verify(key, on_bytes):
                found.append(key)
        return sorted(found, reverse=True)

    def is_whole(self, key: Key) -> bool:
        """Tell whether the files of a checkpoint are there, as large as they were; it loses its marks when not."""

        def look() -> None:
            data = self.store.read(key.manifest_name)
            sum_ = compute_checksum(DEFAULT, data)
            if self._known.get(key, ("", ()))[0] != sum_:
                self._parse(key, sum_, data)
            check_present(self.store, key, self._known[key][1])

        return self._holds(key, look)

    def still_holds(self, key: Key, *, on_bytes: OnBytes = lambda count: None) -> bool:
        """Read a checkpoint, whatever marks it has; they are removed when it is no longer good."""
        self.hold(key)
        return self._holds(key, lambda: verify_checkpoint(self.store, key, threads=self.threads, on_bytes=on_bytes))

    def _verify(self, key: Key, on_bytes: OnBytes) -> bool:
        def read() -> None:
            self.hold(key)
            if self.believe_marks:
                verify_and_mark(self.store, key, mark=self.mark, threads=self.threads, on_bytes=on_bytes)
                check_present(self.store, key, read_index(self.store, key).nodes)
                return
            verify_checkpoint(self.store, key, threads=self.threads, on_bytes=on_bytes)
            if self.mark:
                mark_all(self.store, key)
            self._read.add(key)  # what is asked for again in the same pass was read a moment ago

        return key in self._read or self._holds(key, read)

    def _holds(self, key: Key, check: Callable[[], object]) -> bool:
        """Tell whether a checkpoint passes; note why not."""
        if key in self.bad or key in self.unknown:
            return False
        try:
            check()
        except UnknownFormat as error:
            self.unknown[key] = str(error)
        except CheckpointError as error:
            self._fail(key, error)
        else:
            return True
        return False

    def _fail(self, key: Key, error: CheckpointError) -> None:
        """Note why a checkpoint does not count. Raises what says nothing about it: that the store is unavailable."""
        if not is_damage(error):
            raise error
        if not is_committed(self.store, key):
            self.removed.add(key)
            return
        self.bad[key] = str(error)
        if self.mark:
            self.store.delete([entry.name for entry in self.store.list(key.mark_prefix)])

    def needs(self, key: Key) -> tuple[Key, ...]:
        """Return the other checkpoints that one needs; none where that cannot be told."""
        self._needed(key)
        return self._needs.get(key, ())

    def _parse(self, key: Key, sum_: str, data: bytes) -> None:
        index = parse_index(key, data)
        self._known[key] = sum_, index.nodes
        self._needs[key] = read_needs(index.values)

    def _needed(self, key: Key) -> frozenset[str]:
        """Return the names of the marks of a checkpoint; one that nobody has where it cannot be told."""
        if key not in self._known:
            try:
                data = self.store.read(key.manifest_name)
                self._parse(key, compute_checksum(DEFAULT, data), data)
            except (Missing, Damaged, UnknownFormat):
                return frozenset({""})
        return frozenset(key.mark_name(share.name) for share in self._known[key][1])


def list_marks(store: Store) -> dict[Key, list[StoredObject]]:
    """Return all marks by the checkpoint that they are of; it may be gone."""
    found: dict[Key, list[StoredObject]] = {}
    for entry in store.list(VERIFIED):
        with suppress(ValueError):  # whoever put another file there
            found.setdefault(Key.of_mark(entry.name), []).append(entry)
    return found
