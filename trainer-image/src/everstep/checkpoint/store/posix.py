"""A folder: local disk, NFS, a mounted volume. Durable means: the data and every directory entry that leads to it.

There is no timeout: a call into a file system that hangs cannot be taken back. Saving happens in another process than
training for this reason too; a network mount's own options (`soft`, `timeo`) turn a hang into an error.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from everstep.checkpoint.errors import Damaged, Denied, Full, Missing, StoreError
from everstep.checkpoint.format.keys import FOLDERS, RUN
from everstep.checkpoint.host.paths import make_absolute
from everstep.checkpoint.store.base import ObjectReader, StoredObject, check_name, is_name
from everstep.checkpoint.store.files import Files
from everstep.checkpoint.store.mounts import is_on_this_machine
from everstep.checkpoint.store.reader import open_file
from everstep.checkpoint.store.root import RootFolder
from everstep.checkpoint.store.writeback import WriteBehind

_log = logging.getLogger("everstep.checkpoint.store")

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_MAY_PASS = {errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT, errno.ESTALE, errno.EBUSY, errno.ENFILE, errno.EMFILE}
# Of this machine's memory, and of network mounts whose server, or daemon, is away.
_MAY_PASS |= {errno.ENOMEM, errno.ENOBUFS, errno.ENOTCONN, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED}
_MAY_PASS |= {errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ESHUTDOWN, errno.EREMOTEIO}
_GONE = {errno.ENOENT, errno.ENOTDIR}
_DENIED = {errno.EACCES, errno.EPERM}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}

# How file systems say that they sync no folders, some network and FUSE ones: there, an entry is as durable as it gets.
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF, errno.ENOSYS}

_TEMPORARY = ".new-"  # no name of an object begins with a dot
_OUR_TEMPORARY = re.compile(re.escape(_TEMPORARY) + "[0-9a-f]{16}", re.ASCII)  # in a folder that others use too


class PosixStore:
    """Objects are files under one folder, which is made when the first one is written, and never again."""

    def __init__(self, folder: str | os.PathLike[str], *, files: Files | None = None) -> None:
        # One folder has one name, however it is spelled: the slots of a store are found by it.
        self._root = Path(os.path.realpath(make_absolute(folder, "the store")))
        self._files = files or Files()
        self._folder = RootFolder(self._root)
        self._anchored = False
        self._syncs_folders = True  # until the file system says that it does not

    @property
    def url(self) -> str:
        return str(self._root)

    def put(self, name: str, data: Iterable[bytes | memoryview], size: int) -> None:
        path = self._path(name)
        with self._writing(name, path.parent):
            # Under its own name at once: no manifest speaks of it before it is durable.
            self._write(path, data, size, durable=True)
            self._sync_folders(path.parent)

    def put_whole(self, name: str, data: Iterable[bytes | memoryview], size: int) -> None:
        path = self._path(name)
        with self._writing(name, path.parent):
            new = path.with_name(_TEMPORARY + secrets.token_hex(8))
            self._write(new, data, size, durable=True)
            try:
                self._files.rename(new, path)
            except BaseException:
                with suppress(OSError):
                    self._files.remove(new)
                raise
            self._sync_folders(path.parent)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        with self._writing(name, path.parent):
            new = path.with_name(_TEMPORARY + secrets.token_hex(8))
            self._write(new, [data], len(data), durable=True)
            try:
                first = self._link(new, path)
                if first:
                    self._sync_folders(path.parent)
            finally:
                with suppress(OSError):
                    self._files.remove(new)
        return first

    def replace(self, name: str, data: bytes) -> None:
        path = self._path(name)
        with self._writing(name, path.parent):
            new = path.with_name(_TEMPORARY + secrets.token_hex(8))
            self._write(new, [data], len(data), durable=False)
            self._files.rename(new, path)

    def read(self, name: str) -> bytes:
        with _translate_errors(f"read {name}", self, name):
            data = self._path(name).read_bytes()
            self._folder.pin(data if name == RUN else None)
        return data

    def read_into(self, name: str, offset: int, into: memoryview) -> None:
        with self.open_object(name) as opened:
            opened.read_into(offset, into)

    @functools.cached_property
    def is_local(self) -> bool:
        return is_on_this_machine(self._root)

    @contextmanager
    def open_object(self, name: str) -> Iterator[ObjectReader]:
        with _translate_errors(f"read {name}", self, name), open_file(self._path(name), name) as opened:
            yield opened

    def list(self, prefix: str) -> Iterator[StoredObject]:
        folder = self._root / prefix.rpartition("/")[0]
        with _translate_errors(f"list {prefix}", self):
            for path, status in _iterate_files(folder):
                name = path.relative_to(self._root).as_posix()
                if name.startswith(prefix) and is_name(name):
                    yield StoredObject(name, status.st_size, status.st_mtime)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            path = self._path(name)
            with _translate_errors(f"remove {name}", self):
                with suppress(FileNotFoundError):
                    self._files.remove(path)
                self._remove_empty(path.parent)

    def sweep(self, prefix: str, before: float) -> int:
        count = 0
        with _translate_errors(f"sweep {prefix}", self):
            for path, status in self._files_of_stores(prefix.rpartition("/")[0]):
                if _OUR_TEMPORARY.fullmatch(path.name) and status.st_mtime < before:
                    with suppress(FileNotFoundError):
                        self._files.remove(path)
                        count += 1
        return count

    @contextmanager
    def _writing(self, name: str, folder: Path) -> Iterator[None]:
        """While an object is written into a folder of the store, which is made; both before and after that the store's
        own folder is the one that it was."""
        with _translate_errors(f"write {name}", self):
            self._folder.check()
            try:
                self._make_folders(folder)
                self._folder.pin()
                yield
            except OSError as error:
                if error.errno in _GONE:
                    self._folder.check()  # the store itself went meanwhile, and may come back
                raise
            self._folder.check()

    def _files_of_stores(self, folder: str) -> Iterator[tuple[Path, os.stat_result]]:
        """All files below a folder; of the root only what lies in it and in the folders of a store: the rest of it may
        be anybody's."""
        if folder:
            yield from _iterate_files(self._root / folder)
            return
        yield from _iterate_files(self._root, enter=False)
        for own in FOLDERS:
            yield from _iterate_files(self._root / own)

    def _path(self, name: str) -> Path:
        return self._root / check_name(name)

    def _remove_empty(self, folder: Path) -> None:
        # Folders of one attempt or step go with their last file; those that every attempt uses stay.
        while len(folder.relative_to(self._root).parts) > 1:
            try:
                if not _is_empty(folder):
                    return
                self._files.remove_folder(folder)
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    return
                raise
            folder = folder.parent

    def _make_folders(self, folder: Path) -> None:
        while True:
            if folder == self._root and self._folder.is_pinned:
                self._folder.check()  # it went since it was seen, or is there again
                return
            try:
                self._files.make_folder(folder)
            except FileExistsError:
                return
            except FileNotFoundError:
                # A parent is not there yet, or was removed with its last file a moment ago.
                self._make_folders(folder.parent)
            else:
                return

    def _write(self, path: Path, data: Iterable[bytes | memoryview], size: int, *, durable: bool) -> None:
        descriptor = self._files.create(path)
        try:
            try:
                count = 0
                behind = WriteBehind(descriptor, size)
                for piece in data:
                    rest = whole = memoryview(piece).cast("B")
                    while rest:
                        rest = rest[self._files.write(descriptor, rest) :]
                    behind.wrote(count, len(whole))
                    count += len(whole)
                if count != size:
                    raise ValueError(f"{path}: {size} bytes were promised, {count} came")
                if durable and size:  # an empty file is its entry, which is the folder's to sync
                    self._files.sync(descriptor)
                    behind.synced()
            finally:
                os.close(descriptor)
        except BaseException:
            # Room for who comes next; the file has no meaning, and after a failed fsync no bytes to rely on.
            with suppress(OSError):
                self._files.remove(path)
            raise

    def _link(self, new: Path, path: Path) -> bool:
        try:
            self._files.link(new, path)
        except FileExistsError:
            # NFS repeats a request whose answer was lost: then it is our own link that is in the way.
            return new.stat().st_ino == path.stat().st_ino
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return self._create_whole(path, new.read_bytes())
        return True

    def _create_whole(self, path: Path, data: bytes) -> bool:
        # Exclusive creation decides who is first; a reader may see a beginning, whose checksum does not hold.
        try:
            self._write(path, [data], len(data), durable=True)
        except FileExistsError:
            return False
        return True

    def _sync_folders(self, folder: Path) -> None:
        """Every entry that leads to `folder`'s files becomes durable, also one whose maker died before he synced it."""
        self._sync_folder(folder)
        if folder != self._root:
            self._sync_folders(folder.parent)
        elif not self._anchored:
            self._anchor()

    def _anchor(self) -> None:
        # Once, since nobody here removes the store's own folder: the entries that lead to it, up to its mount point.
        for folder in self._root.parents:
            if folder.stat().st_dev != self._root.stat().st_dev:
                break
            # A folder that this user may not read was not made by this user's run.
            with suppress(PermissionError):
                self._sync_folder(folder)
        self._anchored = True

    def _sync_folder(self, folder: Path) -> None:
        if not self._syncs_folders:
            return
        try:
            self._files.sync_folder(folder)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:
                raise
            self._syncs_folders = False
            _log.warning(
                "%s: its file system syncs no folders (fsync of %s: %s). Checkpoints are saved; whether the newest one "
                "survives a loss of power is up to the file system",
                self.url,
                folder,
                error.strerror,
            )


@contextmanager
def _translate_errors(what: str, store: PosixStore, name: str = "") -> Iterator[None]:
    """OSError becomes an error of the store; with `name`, that of an object which is read."""
    try:
        yield
    except OSError as error:
        url = store.url
        if name and error.errno in _GONE:
            raise Missing(f"{url}/{name}") from error
        if name and error.errno == errno.EISDIR:
            raise Damaged(name, "is a folder, and was written as a file") from error
        why = f"could not {what}: {os.strerror(error.errno) if error.errno else error}"
        if error.errno in _NO_ROOM:
            raise Full(url, why) from error
        if error.errno in _DENIED:
            raise Denied(why, url) from error
        # A disk that cannot read has lost what it held. NFS that is mounted `soft` says the same of a server that is
        # away, and so do other network mounts: that is no reason to train on from an older checkpoint.
        may_pass = error.errno in _MAY_PASS or (error.errno == errno.EIO and not store.is_local)
        raise StoreError(why, url, may_pass=may_pass) from error


def _iterate_files(folder: Path, *, enter: bool = True) -> Iterator[tuple[Path, os.stat_result]]:
    """All files in a folder, and with `enter` below it; those that vanish meanwhile are left out."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    for entry in entries:
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            if enter:
                yield from _iterate_files(path)
        else:
            with suppress(FileNotFoundError):
                yield path, entry.stat(follow_symlinks=False)


def _is_empty(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return next(entries, None) is None
