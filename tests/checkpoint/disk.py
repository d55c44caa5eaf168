"""A disk that loses power: what of a record of calls may be there afterwards, in the manner of ALICE.

Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014: between two crashes a file system may have written
any part of what was not synced, in any order. Here these parts are *atoms*: an entry of a folder (a rename is one), the
size of a file, or a piece of a write. What fsync has covered is there; of the other atoms any subset may be.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path
from typing import Any

# What is recorded: the name of a call of the seam, its paths relative to the folder that the disk had, and its data.
Record = tuple[Any, ...]
Tree = dict[str, bytes | None]  # None: a folder


class Recorder:
    """A watcher of Files (see crash.py) that keeps what happened under `folder`; `mark` notes what was promised."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: dict[int, str] = {}
        self._temporary: dict[str, str] = {}
        self.records: list[Record] = []

    def mark(self, promise: object) -> None:
        self.records.append(("mark", promise))

    def __call__(self, name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        result = call()
        if name in ("write", "sync"):
            path = self._names[arguments[0]]
            data = (bytes(arguments[1])[:result],) if name == "write" else ()
            self.records.append((name, path, *data))
            return result
        if all(path == self._folder or self._folder in path.parents for path in arguments):
            paths = [self._named(path) for path in arguments]
            self.records.append((name, *paths))
            if name == "create":
                self._names[result] = paths[0]
        return result

    def _named(self, path: Path) -> str:
        """Temporary files are numbered, so that the same run is the same record."""
        if not path.name.startswith(".new-"):
            return path.relative_to(self._folder).as_posix()
        number = self._temporary.setdefault(path.name, f".new-{len(self._temporary)}")
        return path.with_name(number).relative_to(self._folder).as_posix()


@dataclass(eq=False)
class _File:
    writes: list[tuple[int, bytes]] = field(default_factory=list)  # offset, data
    synced: int = 0  # so many of the writes are on the disk

    @property
    def size(self) -> int:
        return sum(len(data) for _, data in self.writes)


@dataclass(eq=False)
class _Folder:
    changes: list[tuple[tuple[str, _File | _Folder | None], ...]] = field(default_factory=list)  # each atomic
    synced: int = 0

    def entries(self) -> dict[str, _File | _Folder]:
        return _applied(self.changes)


Node = _File | _Folder
Atom = tuple[Any, ...]  # (_Folder, change), or (_File, write, piece); piece -1 is the size


class Disk:
    """A disk after a number of calls: the state that programs see, and the states that a power loss may leave."""

    def __init__(self, pieces: int = 2) -> None:
        self._root = _Folder()
        self._pieces = pieces  # of each write

    def apply(self, record: Record) -> None:
        """One call more."""
        name, *rest = record
        match name:
            case "make_folder":
                self._change(rest[0], _Folder())
            case "create":
                self._change(rest[0], _File())
            case "write":
                file = self._file(rest[0])
                file.writes.append((file.size, rest[1]))
            case "sync":
                file = self._file(rest[0])
                file.synced = len(file.writes)
            case "sync_folder":
                folder = self._folder(rest[0])
                folder.synced = len(folder.changes)
            case "link":
                self._change(rest[1], self._file(rest[0]))
            case "rename":
                folder, old = self._place(rest[0])
                same, new = self._place(rest[1])
                assert folder is same, "across folders a rename is no longer one atom"
                folder.changes.append(((old, None), (new, folder.entries()[old])))
            case "remove" | "remove_folder":
                folder, last = self._place(rest[0])
                folder.changes.append(((last, None),))

    def atoms(self) -> list[Atom]:
        """Return the changes that were not synced, in the order in which a folder or file was changed."""
        found: list[Atom] = []
        seen: set[int] = set()

        def visit(node: Node) -> None:
            if id(node) in seen:
                return
            seen.add(id(node))
            if isinstance(node, _Folder):
                found.extend((node, number) for number in range(node.synced, len(node.changes)))
                for change in node.changes:
                    for _, target in change:
                        if target is not None:
                            visit(target)
                return
            for number in range(node.synced, len(node.writes)):
                found.append((node, number, -1))
                found.extend((node, number, piece) for piece in range(self._pieces))

        visit(self._root)
        return found

    def after_power_loss(self, there: set[Atom]) -> Tree:
        """The tree that is found when of all atoms these reached the disk."""
        tree: Tree = {}

        def visit(path: str, node: Node) -> None:
            if isinstance(node, _File):
                tree[path] = self._content(node, there)
                return
            if path:
                tree[path] = None
            changes = [
                change for number, change in enumerate(node.changes) if number < node.synced or (node, number) in there
            ]
            for name, target in _applied(changes).items():
                visit(f"{path}/{name}".lstrip("/"), target)

        visit("", self._root)
        return tree

    def _content(self, file: _File, there: set[Atom]) -> bytes:
        content = bytearray()
        for number, (offset, data) in enumerate(file.writes):
            for piece in range(-1, self._pieces):
                if number >= file.synced and (file, number, piece) not in there:
                    continue
                # Cut off any boundary of sectors: a torn sector is a torn piece.
                start, stop = (piece * len(data) // self._pieces, (piece + 1) * len(data) // self._pieces)
                end = offset + (len(data) if piece < 0 else stop)
                content.extend(b"\0" * (end - len(content)))
                if piece >= 0:
                    content[offset + start : offset + stop] = data[start:stop]
        return bytes(content)

    def _place(self, path: str) -> tuple[_Folder, str]:
        parent, _, last = path.rpartition("/")
        return self._folder(parent), last

    def _folder(self, path: str) -> _Folder:
        node: Node = self._root
        for name in path.split("/") if path not in ("", ".") else ():
            assert isinstance(node, _Folder)
            node = node.entries()[name]
        assert isinstance(node, _Folder)
        return node

    def _file(self, path: str) -> _File:
        folder, last = self._place(path)
        node = folder.entries()[last]
        assert isinstance(node, _File)
        return node

    def _change(self, path: str, node: Node) -> None:
        folder, last = self._place(path)
        folder.changes.append(((last, node),))


def _applied(changes: list[tuple[tuple[str, Node | None], ...]]) -> dict[str, Node]:
    entries: dict[str, Node] = {}
    for change in changes:
        for name, target in change:
            if target is None:
                entries.pop(name, None)
            else:
                entries[name] = target
    return entries


def subsets(atoms: list[Atom], chance: random.Random, samples: int, exhaustive: int = 5) -> Iterator[set[Atom]]:
    """None and all first; then all subsets of few atoms; of many, beginnings, each alone, each missing, some more."""
    yield set()
    if not atoms:
        return
    yield set(atoms)
    if len(atoms) <= exhaustive:
        for each in chain.from_iterable(combinations(atoms, size) for size in range(1, len(atoms))):
            yield set(each)
        return
    for number, atom in enumerate(atoms):
        yield set(atoms[:number])
        yield {atom}
        yield set(atoms) - {atom}
    for _ in range(samples):
        yield {atom for atom in atoms if chance.random() < 0.5}


class Materialised:
    """A folder that is made to hold one tree after the other, touching only what differs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._now: Tree = {}

    def show(self, tree: Tree) -> None:
        for name in sorted(self._now.keys() - tree.keys(), reverse=True):
            path = self._folder / name
            if self._now[name] is None:
                path.rmdir()
            else:
                path.unlink()
        for name in sorted(tree):
            data = tree[name]
            if name in self._now and self._now[name] == data:
                continue
            if data is None:
                (self._folder / name).mkdir()
            else:
                (self._folder / name).write_bytes(data)
        self._now = tree
