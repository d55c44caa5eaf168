"""Any other store that fsspec knows: gs://, az://, memory:// and so on, through the library that serves it there.

Who was first is decided by the backend where its `pipe_file` has an exclusive mode (gcsfs: if-generation-match 0,
adlfs: If-None-Match, memory). For the others the weaker rule holds: look, write. Two writers of one name within the
same moment can then both believe to have been first; names carry the attempt, so that this takes the same attempt
running twice. Timeouts of single requests are the backend's own; what fails is repeated here. An upload that dies
leaves nothing that a client could see or sweep: these services drop it after a week.
"""

from __future__ import annotations

import errno
import inspect
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from everstep.checkpoint.errors import CheckpointError, Damaged, Denied, Full, Missing, StoreError
from everstep.checkpoint.store.base import StoredObject, check_name, is_name
from everstep.checkpoint.store.retry import Retry

T = TypeVar("T")

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Programs, permissions and settings: nothing that waiting would mend. Of the rest nobody can tell for every backend.
_FOR_GOOD = (PermissionError, NotImplementedError, TypeError, ValueError, AttributeError, ImportError)
_MODIFIED = ("updated", "last_modified", "LastModified", "mtime", "created")  # of gcsfs, adlfs, s3fs, files, memory


class ObjectStore:
    """Objects below a URL of fsspec; `options` are those of the backend (`token`, `account_name`, `project`, …)."""

    def __init__(self, url: str, *, retry: Retry | None = None, **options: Any) -> None:
        self._url = url.rstrip("/")
        self._repeat = retry or Retry()
        with _translate_errors("open", self._url):
            # What others have written meanwhile counts, so nothing is remembered.
            self._system, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
        self._root = str(root).rstrip("/")
        # Whether the backend decides who is first; None: not known yet, as of one that may take `mode` among others.
        self._decides = _takes_mode(self._system)
        self._finds = _overrides(self._system, "find")

    @property
    def url(self) -> str:
        return self._url

    def put(self, name: str, data: Iterable[bytes | memoryview], size: int) -> None:
        self._put(name, self._path(name), data, size, is_own=True)

    def put_whole(self, name: str, data: Iterable[bytes | memoryview], size: int) -> None:
        path = self._path(name)
        if isinstance(self._system, AsyncFileSystem):  # an object store: whole when it is closed, and replaced at once
            self._put(name, path, data, size, is_own=False)
            return
        folder, _, last = path.rpartition("/")
        new = f"{folder}/.new-{secrets.token_hex(8)}-{last}"
        self._put(name, new, data, size, is_own=True)
        with _translate_errors(f"write {name}", self._url):
            self._system.mv(new, path)

    def _put(self, name: str, path: str, data: Iterable[bytes | memoryview], size: int, *, is_own: bool) -> None:
        """`is_own`: nobody else writes there, so that what a failed call has left may be removed."""
        what = f"write {name}"
        with _translate_errors(what, self._url):
            self._make_folder(name)
            file = self._system.open(path, "wb")
        try:
            with _translate_errors(what, self._url):
                count = sum(file.write(piece) for piece in data)
            if count != size:
                raise ValueError(f"{name}: {size} bytes were promised, {count} came")
        except BaseException:
            # Closing would make an object of what there is; some backends have made one already.
            _throw_away(file)
            if is_own:
                with suppress(Exception):
                    self._system.rm_file(path)
            raise
        try:
            with _translate_errors(what, self._url):
                file.close()
        except BaseException:
            _throw_away(file)
            raise

    def put_if_absent(self, name: str, data: bytes) -> bool:
        doubtful = False

        def put() -> bool:
            nonlocal doubtful
            try:
                self._create(name, data)
            except FileExistsError:
                # An earlier try, whose answer was lost, may be what is there.
                return doubtful and self.read(name) == data
            except StoreError as error:
                doubtful = doubtful or error.may_pass
                raise
            return True

        return self._repeat(put)

    def replace(self, name: str, data: bytes) -> None:
        path = self._path(name)

        def write() -> None:
            self._make_folder(name)
            self._system.pipe_file(path, data)

        self._call(f"write {name}", write)

    def read(self, name: str) -> bytes:
        return bytes(self._call(f"read {name}", partial(self._system.cat_file, self._path(name)), name))

    def read_into(self, name: str, offset: int, into: memoryview) -> None:
        into = into.cast("B")
        path, end = self._path(name), offset + len(into)

        def read() -> bytes:
            try:
                return bytes(self._system.cat_file(path, start=offset, end=end))
            except FileNotFoundError:
                raise
            except Exception:
                # For some backends a range behind the end is an error like any other.
                if (size := int(self._system.info(path)["size"])) < end:
                    raise Damaged(name, f"ends at byte {size}, {end - size} bytes too early") from None
                raise

        data = self._call(f"read {name}", read, name)
        if len(data) != len(into):
            raise Damaged(name, f"ends at byte {offset + len(data)}, {len(into) - len(data)} bytes too early")
        into[:] = data

    def list(self, prefix: str) -> Iterator[StoredObject]:
        folder = f"{self._root}/{prefix}".rpartition("/")[0]
        found = self._call(f"list {prefix}", partial(self._find, folder))
        for path, details in found.items():
            name = path[len(self._root) + 1 :]
            if name.startswith(prefix) and is_name(name):
                yield StoredObject(name, int(details["size"]), _get_modified_time(details))

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(Missing):
                self._call(f"remove {name}", partial(self._system.rm_file, self._path(name)), name)

    def sweep(self, prefix: str, before: float) -> int:
        return 0

    def _create(self, name: str, data: bytes) -> None:
        """FileExistsError if there is one."""
        path = self._path(name)
        with _translate_errors(f"write {name}", self._url):
            self._make_folder(name)
            if self._decides:
                self._system.pipe_file(path, data, mode="create")
                return
            self._system.invalidate_cache()
            if self._is_there(path):
                raise FileExistsError(name)
            if self._decides is None:
                self._decides = self._write_first(path, data)
            else:
                self._system.pipe_file(path, data)

    def _write_first(self, path: str, data: bytes) -> bool:
        """Write an object, and tell whether the backend decides who is first: it must reject the same a second time."""
        try:
            self._system.pipe_file(path, data, mode="create")
        except TypeError:
            self._system.pipe_file(path, data)
            return False
        try:
            self._system.pipe_file(path, data, mode="create")
        except FileExistsError:
            return True
        return False

    def _find(self, folder: str) -> dict[str, dict[str, Any]]:
        self._system.invalidate_cache()
        if not self._finds:
            return dict(self._walk(folder))
        found: dict[str, dict[str, Any]] = self._system.find(folder, detail=True)
        return found

    def _walk(self, folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
        # fsspec's own walk leaves out what could not be listed, for whatever reason.
        try:
            entries = self._system.ls(folder, detail=True)
        except FileNotFoundError:
            return  # it was never made, or is removed with its last file at this moment
        for entry in entries:
            path = entry["name"].rstrip("/")
            if entry["type"] != "directory":
                yield path, entry
            elif path != folder:  # some list a folder in itself
                yield from self._walk(path)

    def _is_there(self, path: str) -> bool:
        # fsspec's exists() is false for whatever error.
        try:
            self._system.info(path)
        except FileNotFoundError:
            return False
        return True

    def _call(self, what: str, call: Callable[[], T], name: str = "") -> T:
        def once() -> T:
            with _translate_errors(what, self._url, name):
                return call()

        return self._repeat(once)

    def _make_folder(self, name: str) -> None:
        # Where folders are real; object stores have none, and to make one can mean to make a bucket.
        if not isinstance(self._system, AsyncFileSystem):
            self._system.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"


def _takes_mode(system: AbstractFileSystem) -> bool | None:
    """Tell whether a backend can write exclusively; None where its `pipe_file` takes any arguments."""
    if not _overrides(system, "pipe_file"):
        return False  # fsspec's own way is to look and to write, and takes a failed look for an absence
    parameters = inspect.signature(getattr(system, "_pipe_file", system.pipe_file)).parameters
    if "mode" in parameters:
        return True
    return None if any(each.kind is each.VAR_KEYWORD for each in parameters.values()) else False


def _throw_away(file: Any) -> None:
    """Leave a file that was not written to its end, so that nothing becomes of it.

    One of fsspec that is forgotten while it is open is closed then, and its object made of what there is: in the place
    of what was written under the name since.
    """
    with suppress(Exception):
        file.discard()
    with suppress(Exception):
        file.closed = True


def _overrides(system: AbstractFileSystem, method: str) -> bool:
    """Tell whether a backend has a method of its own, in place of what fsspec does for any backend."""
    if isinstance(system, AsyncFileSystem):
        return getattr(type(system), f"_{method}") is not getattr(AsyncFileSystem, f"_{method}")
    return getattr(type(system), method) is not getattr(AbstractFileSystem, method)


@contextmanager
def _translate_errors(what: str, url: str, name: str = "") -> Iterator[None]:
    """Turn what a backend raises into an error of the store; with `name`, into that of an object which is read."""
    try:
        yield
    except (CheckpointError, FileExistsError):
        raise
    except FileNotFoundError as error:
        if name:
            raise Missing(f"{url}/{name}") from error
        raise StoreError(f"could not {what}: {error}", url) from error
    except IsADirectoryError as error:
        if name:
            raise Damaged(name, "is a folder, and was written as an object") from error
        raise StoreError(f"could not {what}: {error}", url) from error
    except Exception as error:
        why = f"could not {what}: {type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise Full(url, why) from error
        if isinstance(error, PermissionError):
            raise Denied(why, url) from error
        raise StoreError(why, url, may_pass=not isinstance(error, _FOR_GOOD)) from error


def _get_modified_time(details: dict[str, Any]) -> float:
    """Return the time of the last change in seconds since 1970.

    A store that does not tell has objects without age: nothing of it is swept by age.
    """
    found = next((value for key in _MODIFIED if (value := details.get(key)) is not None), None)
    match found:
        case datetime():
            return found.timestamp()
        case str():
            return datetime.fromisoformat(found).timestamp()
        case int() | float():
            return float(found)
        case _:
            return float("inf")
