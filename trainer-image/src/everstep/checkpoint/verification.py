"""Verified checkpoints: every byte was read back from the store, and each node has left a mark that says so.

    verified/<attempt>-<step>/<node>-<sum of its node manifest>      empty

A node reads back its own share when it has stored it, so that no node reads all of a checkpoint. A mark names the very
manifest that was verified. One that is missing, because its writer died, is made by whoever needs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from everstep.checkpoint.candidates import OnBytes, verify, verify_node
from everstep.checkpoint.errors import Damaged, Missing, UnknownFormat
from everstep.checkpoint.index import CheckpointIndex
from everstep.checkpoint.keys import VERIFIED, Key
from everstep.checkpoint.manifests import read_index
from everstep.checkpoint.store.base import Entry, Store

__all__ = ["OnBytes", "VerifiedCheckpoints", "mark_name", "mark_node", "marks", "unmarked", "verify_and_mark"]


def mark_node(store: Store, index: CheckpointIndex, node: int) -> None:
    """Leave the mark of a share that was verified."""
    store.replace(mark_name(index, node), b"")


def mark_name(index: CheckpointIndex, node: int) -> str:
    """Return the name of the mark that a node's share, as this index speaks of it, is verified."""
    return index.key.mark_name(index.nodes[node].name)


def unmarked(store: Store, index: CheckpointIndex) -> list[int]:
    """Return the nodes of a checkpoint whose shares nobody has verified yet."""
    there = {entry.name for entry in store.list(index.key.mark_prefix)}
    return [node for node in range(len(index.nodes)) if mark_name(index, node) not in there]


def verify_and_mark(
    store: Store, key: Key, *, mark: bool = True, threads: int = 4, on_bytes: OnBytes = lambda count: None
) -> None:
    """Verify the shares of a checkpoint that have no mark yet, and mark them if asked. Raises as verify() does."""
    index = read_index(store, key)
    for node in unmarked(store, index):
        verify_node(store, index, node, threads=threads, on_bytes=on_bytes)
        if mark:
            mark_node(store, index, node)


@dataclass
class VerifiedCheckpoints:
    """Finds the newest verified checkpoints of a store; remembers what it has read of them.

    `mark`: what is verified is marked. `bad`: those that did not verify when they were asked for, with the reason;
    `unknown`: those of another version of everstep, which only that one can verify.
    """

    store: Store
    mark: bool = True
    bad: dict[Key, str] = field(default_factory=dict)
    unknown: dict[Key, str] = field(default_factory=dict)
    _marks: dict[Key, frozenset[str]] = field(default_factory=dict)

    def marked(self, keys: Iterable[Key], count: int | None = None) -> list[Key]:
        """Return those of these keys, greatest first, whose shares all have their marks; the first `count` of them."""
        there = marks(self.store)
        found: list[Key] = []
        for key in sorted(keys, reverse=True):
            if len(found) == count:
                break
            if key in there and key not in self.bad and self._needed(key) <= {entry.name for entry in there[key]}:
                found.append(key)
        return found

    def newest(
        self, keys: Iterable[Key], count: int, *, threads: int = 2, on_bytes: OnBytes = lambda count: None
    ) -> list[Key]:
        """Return the `count` greatest of these keys that are verified, or as many as there are.

        Where too few have their marks, others are read back, the greatest first, and marked or passed over.
        """
        keys = sorted(keys, reverse=True)
        found = self.marked(keys, count)
        for key in keys:
            if len(found) >= count:
                break
            if key not in found and self._verify(key, threads, on_bytes):
                found.append(key)
        return sorted(found, reverse=True)

    def still_holds(self, key: Key, *, threads: int = 2, on_bytes: OnBytes = lambda count: None) -> bool:
        """Read a checkpoint again, whatever marks it has; they are removed when it is no longer good."""
        try:
            verify(self.store, key, threads=threads, on_bytes=on_bytes)
        except (Missing, Damaged) as error:
            self.bad[key] = str(error)
            if self.mark:
                self.store.delete([entry.name for entry in self.store.list(key.mark_prefix)])
            return False
        return True

    def _needed(self, key: Key) -> frozenset[str]:
        """The names of the marks of a checkpoint; one that nobody has where it cannot be told."""
        if key not in self._marks:
            try:
                index = read_index(self.store, key)
            except (Missing, Damaged, UnknownFormat):
                return frozenset({""})
            self._marks[key] = frozenset(mark_name(index, node) for node in range(len(index.nodes)))
        return self._marks[key]

    def _verify(self, key: Key, threads: int, on_bytes: OnBytes) -> bool:
        if key in self.bad:
            return False
        try:
            verify_and_mark(self.store, key, mark=self.mark, threads=threads, on_bytes=on_bytes)
        except UnknownFormat as error:
            self.unknown[key] = str(error)
        except (Missing, Damaged) as error:
            self.bad[key] = str(error)
        else:
            return True
        return False


def marks(store: Store) -> dict[Key, list[Entry]]:
    """Return all marks by the checkpoint that they are of; it may be gone."""
    found: dict[Key, list[Entry]] = {}
    for entry in store.list(VERIFIED):
        with suppress(ValueError):  # whoever put another file there
            found.setdefault(Key.of_mark(entry.name), []).append(entry)
    return found
