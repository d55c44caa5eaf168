"""Define the promises that every store keeps. The commit rule is built on these promises alone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable
from urllib.parse import unquote

from everstep.checkpoint.errors import Damaged, Full, Missing, StoreError

__all__ = [
    "Damaged",
    "Full",
    "LocalStore",
    "Missing",
    "ObjectReader",
    "Store",
    "StoreError",
    "StoredObject",
    "check_name",
    "open_store",
]  # fmt: skip

# Names are made by keys.py or are lease ids; anything else is a mistake or a manifest that wants out of its store.
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*", re.ASCII)

# What pathlib makes of a URL. A folder of this name would be taken for the store, and end with its machine.
_CUT_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/([^/].*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object: `size` in bytes, `modified` in seconds since 1970 by the store's clock."""

    name: str
    size: int
    modified: float


class Store(Protocol):
    """Named, immutable objects of bytes, and a few small ones that are replaced.

    Errors of every call: StoreError, of which Full is a place without room. A call that fails leaves what was there.
    Every call that waits for a network has a timeout, and bounded retries where repeating it is safe.
    """

    @property
    def url(self) -> str:
        """Return what open_store() was given, made absolute."""
        ...

    def put(self, name: str, data: Iterable[bytes | memoryview], size: int) -> None:
        """Write `size` bytes under a name that was never used; durable when this returns, with all its directories."""
        ...

    def put_whole(self, name: str, data: Iterable[bytes | memoryview], size: int) -> None:
        """Write like put(), but whole or not at all, whatever was there under this name.

        For bytes that several may write at the same time, all of them the same: none takes away what another has put.
        """
        ...

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write a small object, atomically and durably. False: somebody was first, and nothing has changed."""
        ...

    def replace(self, name: str, data: bytes) -> None:
        """Write a small object, whatever was there. Readers see the old or the new one; a power loss may lose it.

        For messages between running processes and for what nobody believes: node manifests, hints, leases.
        """
        ...

    def read(self, name: str) -> bytes:
        """Return a small object. Missing."""
        ...

    def read_into(self, name: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset`. Missing; Damaged if there are fewer. Safe to call from threads."""
        ...

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Yield the objects whose names begin with `prefix`, at any depth, in no order."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; those that are absent are fine."""
        ...

    def sweep(self, prefix: str, before: float) -> int:
        """Remove what calls that died left behind and nobody can read: unfinished uploads, temporary files.

        Only those under `prefix` that were begun before the time `before`, and only a store's own, by their names: the
        bucket or the folder may be others' too. Returns how many.
        """
        ...


class ObjectReader(Protocol):
    """An object that is open. One thread at a time."""

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset`. Damaged if there are fewer; StoreError."""
        ...

    def expect(self, offset: int, length: int) -> None:
        """Say that these bytes are read next, so that the system may fetch them meanwhile."""
        ...


@runtime_checkable
class LocalStore(Protocol):
    """A store whose objects may be files of this machine: the system's cache gives them a second time for little."""

    @property
    def is_local(self) -> bool:
        """Tell whether the files are on this machine.

        Elsewhere each read costs the network, and what was read is kept instead.
        """
        ...

    def open_object(self, name: str) -> AbstractContextManager[ObjectReader]:
        """Open an object for many small reads. Missing, StoreError."""
        ...


def is_name(name: str) -> bool:
    """Tell whether an object may have this name. What has another one is somebody else's: no store lists it."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str) -> str:
    """`name` itself; ValueError unless it is a relative path of plain segments of which none begins with a dot."""
    if not is_name(name):
        raise ValueError(f"not the name of an object: {name!r}")
    return name


def open_store(url: str | os.PathLike[str], **options: Any) -> Store:
    """Return the store at a folder's path or at a URL. ValueError for a URL that no store serves.

    `options` go to the store of that kind. Only the module that serves `url` is imported.
    """
    text = os.fspath(url)
    if cut := _CUT_URL.match(text):
        raise ValueError(
            f"{text} is a URL with a slash too few, as pathlib makes of one: give it as text, {cut[1]}://{cut[2]}; for "
            f"a folder of this name give ./{text}"
        )
    scheme, found, _ = text.partition("://")
    if not found or scheme == "file":
        from everstep.checkpoint.store.posix import PosixStore

        return PosixStore(_local_path(text) if found else text, **options)
    if scheme == "s3":
        from everstep.checkpoint.store.s3 import S3Store

        return S3Store(text, **options)
    import fsspec

    if scheme not in fsspec.available_protocols():
        raise ValueError(f"no store serves {scheme}://")
    from everstep.checkpoint.store.objects import ObjectStore

    return ObjectStore(text, **options)


def _local_path(url: str) -> str:
    """Return the path that a file URL names (RFC 8089). ValueError for one of another machine, or of none."""
    host, slash, path = url.partition("://")[2].partition("/")
    if host not in ("", "localhost") or not slash:
        raise ValueError(
            f"{url} names {host!r} as a machine, and only folders of this one can be opened: write file:///path, or "
            "the path alone"
        )
    return unquote(f"/{path}")
