"""A folder of files as a checkpoint: for programs that save in their own way (Hugging Face, scikit-learn, XGBoost).

Each file is a tensor of bytes called `file.<its path, escaped>`; the value `folder` says how the files lay. So the same
manifest, checks, copies and retention hold. A folder comes back whole or not at all.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from everstep.checkpoint.catalog.candidates import (
    check_threads,
    each_candidate,
    list_candidates,
    read_chunk,
    read_manifest,
)
from everstep.checkpoint.catalog.leases import ReadLease, hold_read_lease
from everstep.checkpoint.catalog.needed_checkpoints import FOLDER, NEEDS
from everstep.checkpoint.catalog.selection import is_meant, select_keys
from everstep.checkpoint.errors import CheckpointError, Damaged, Missing, Removed, is_damage
from everstep.checkpoint.format.manifest import CHUNK, Chunk, Key, Manifest, StoredTensor
from everstep.checkpoint.format.values import UnsupportedValue, pack_value, unpack_value
from everstep.checkpoint.host import unfinished
from everstep.checkpoint.host.thread_pool import ThreadPool
from everstep.checkpoint.publish.publication import WholeTensor, write_checkpoint
from everstep.checkpoint.state.names import escape_segment, join_segments
from everstep.checkpoint.store.base import Store
from everstep.checkpoint.store.overlap import check_leaves_store, holds_store

VALUE = FOLDER


class Changed(CheckpointError):
    """Somebody wrote into the folder while it was read; nothing was committed."""


class NoFolder(CheckpointError):
    """The checkpoint was saved by a training script, not from a folder."""


@dataclass(frozen=True)
class File:
    """`path` within the folder with slashes, `size` in bytes, permission bits, `modified` in nanoseconds since 1970."""

    path: str
    size: int
    mode: int
    modified: int


@dataclass(frozen=True)
class Contents:
    """The contents of a folder, in the order of names; `empty` folders have no other trace.

    Two that are equal mean that nobody wrote anything in between.
    """

    files: tuple[File, ...]
    empty: tuple[str, ...] = ()

    @property
    def changed(self) -> int:
        """Return when a file was last written to, in nanoseconds since 1970; 0 where there is none."""
        return max((file.modified for file in self.files), default=0)

    @classmethod
    def of(cls, folder: Path) -> Contents:
        """Return the contents of a folder as it is now; links to files count as what they lead to.

        Raises:
            CheckpointError: Something in it is neither a file nor a folder.
        """
        files: list[File] = []
        empty: list[str] = []
        for root, folders, names in os.walk(folder, onerror=_raise_error):
            folders.sort()
            here = Path(root)
            if not folders and not names and here != folder:
                empty.append(here.relative_to(folder).as_posix())
            for name in sorted([*names, *(each for each in folders if (here / each).is_symlink())]):
                path = here / name
                found = path.stat()
                if not stat.S_ISREG(found.st_mode):
                    raise CheckpointError(f"{path} is neither a file nor a link to one: it cannot be published")
                inside = path.relative_to(folder).as_posix()
                files.append(File(inside, found.st_size, stat.S_IMODE(found.st_mode), found.st_mtime_ns))
        return cls(tuple(files), tuple(empty))

    @classmethod
    def in_manifest(cls, manifest: Manifest) -> Contents:
        """Return the contents that were saved.

        Raises:
            NoFolder: The checkpoint holds no folder.
            Damaged: The checkpoint does not say how its files lay.
        """
        if VALUE not in manifest.values:
            raise NoFolder(f"{manifest.key} holds no folder: load it with everstep.checkpointer(…).restore()")
        try:
            found: Any = unpack_value(manifest.values[VALUE], VALUE)
            files = tuple(File(**each) for each in found["files"])
            return cls(files, tuple(found["empty"]))
        except (UnsupportedValue, KeyError, TypeError) as error:
            raise Damaged(manifest.key.manifest_name, f"does not say how its files lay: {error!r}") from error


def holds_contents(manifest: Manifest | None, contents: Contents) -> bool:
    """Tell whether a checkpoint is of a folder with exactly these contents."""
    with suppress(NoFolder, Damaged):
        return manifest is not None and Contents.in_manifest(manifest) == contents
    return False


def get_changed_time(manifest: Manifest) -> int:
    """Return when the folder of a checkpoint was last written to, in nanoseconds since 1970, or when it was saved."""
    with suppress(NoFolder, Damaged):
        return Contents.in_manifest(manifest).changed
    return int(manifest.created * 1e9)


def save_folder(
    store: Store,
    key: Key,
    folder: Path,
    *,
    contents: Contents | None = None,
    needs: Collection[Key] = (),
    fenced: Callable[[], str | None] = lambda: None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Manifest:
    """Put a folder (as `contents`, if given) and commit it as `key`; retention keeps what it `needs` as long as it.

    May be tried again after an error, and by several processes at the same time: one of them commits all of its own.

    Raises:
        CheckpointError: The store lies in the folder.
        Changed: Somebody wrote into the folder meanwhile.
        WriterConflict: `key` is committed already; it says by whom.
        Fenced: This attempt may not publish.
        StoreError: The store did not do it, or nobody can tell.
    """
    if holds_store(folder, store):
        raise CheckpointError(
            f"{folder} holds the store {store.url}, and would be published with it: give another place"
        )
    before = Contents.of(folder) if contents is None else contents
    tensors = {
        _get_tensor_name(file.path): WholeTensor(
            "uint8", (file.size,), file.size, partial(_iterate_file_bytes, folder, file, on_bytes)
        )
        for file in before.files
    }
    described: dict[str, object] = {"files": [asdict(file) for file in before.files], "empty": list(before.empty)}
    if needs:
        described[NEEDS] = [str(each) for each in sorted(needs)]
    values = {VALUE: pack_value(described)}

    def check() -> None:
        try:
            unchanged = Contents.of(folder) == before
        except FileNotFoundError as error:
            raise Changed(f"{folder} was written to while it was read: {error}") from error
        if not unchanged:
            raise Changed(f"{folder} was written to while it was read")

    return write_checkpoint(store, key, tensors, values, model=VALUE, content=repr(before), check=check, fenced=fenced)


def restore_folder(
    store: Store,
    into: Path,
    *,
    step: int | Key | None = None,
    replace: bool = False,
    threads: int = 4,
    on_start: Callable[[Manifest], None] = lambda manifest: None,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> tuple[Manifest, list[str]]:
    """Make `into` what was saved, as the newest that is good; the manifest, and why not newer ones.

    `into` must not exist, or be empty, unless it may be replaced: it is renamed into place when all is verified. A link
    stays, and what it leads to is made. With `replace`, several nodes may do so in one shared place: each puts all of
    it there, and the last one's stays.

    Args:
        store: Where it is. A lease keeps retention from it, where the store may be written.
        into: The folder.
        step: Exactly this step, of the greatest attempt that has it and is good; or a key.
        replace: Put it in the place of what is there.
        threads: Reads at a time.
        on_start: Called with the manifest of each one that is tried.
        on_bytes: Called with the bytes that were read since, from any thread.

    Raises:
        Missing: Nothing was ever saved.
        NoSuchStep: Nothing of this step was.
        CheckpointError: `into` is not empty, or the store would go with what is there.
        Damaged, NoFolder: None of what was saved can be restored.
        Removed: What was meant has been removed meanwhile.
    """
    check_threads(threads)
    into = into.resolve()
    check_leaves_store(into, store)
    if into.exists() and not replace and (not into.is_dir() or any(into.iterdir())):
        raise CheckpointError(
            f"{into} is there and not empty: restore to another place, or say that it may be replaced"
        )
    into.parent.mkdir(parents=True, exist_ok=True)
    unfinished.clear_unfinished(into)
    if step is not None:
        select_keys(list_candidates(store), step, store.url)
    bad: list[str] = []
    removed: Removed | None = None
    for each in each_candidate(store):
        if not is_meant(each, step):
            continue
        with unfinished.make_unfinished_folder(into) as place:
            try:
                with hold_read_lease(store, each) as lease:
                    manifest = read_manifest(store, each)
                    on_start(manifest)
                    _fill_folder(store, manifest, place / "new", threads, _combine_progress(on_bytes, lease))
            except Removed as error:
                removed = error
            except CheckpointError as error:
                if not is_damage(error):
                    raise
                bad.append(f"{each}: {error}")
            else:
                unfinished.put_in_place(place / "new", into, replace=replace)
                return manifest, bad
    if bad:
        raise Damaged(store.url, f"no checkpoint is good. {'; '.join(bad)}")
    raise removed or Missing(f"{store.url}/manifests")


def _combine_progress(on_bytes: Callable[[int], None], lease: ReadLease) -> Callable[[int], None]:
    def advance(count: int) -> None:
        lease.renew()
        on_bytes(count)

    return advance


def _raise_error(error: OSError) -> None:
    raise error


def _get_tensor_name(path: str) -> str:
    return join_segments("file", escape_segment(path))


def _iterate_file_bytes(folder: Path, file: File, on_bytes: Callable[[int], None]) -> Iterator[bytes]:
    path = folder / file.path
    left = file.size
    with _open_for_reading(path) as opened:
        while left:
            data = opened.read(min(CHUNK, left))
            if not data:
                raise Changed(f"{path} became shorter while it was read")
            yield data
            left -= len(data)
            on_bytes(len(data))


@contextmanager
def _open_for_reading(path: Path) -> Iterator[BinaryIO]:
    # Told apart here from errors of the store, which reads its bytes from us.
    try:
        opened = path.open("rb")
    except FileNotFoundError as error:
        raise Changed(f"{path} was removed while the folder was read") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    with opened:
        yield opened


def _fill_folder(store: Store, manifest: Manifest, folder: Path, threads: int, on_bytes: Callable[[int], None]) -> None:
    contents = Contents.in_manifest(manifest)
    for path in (*contents.empty, *(file.path for file in contents.files)):
        pure = PurePosixPath(path)
        if pure.is_absolute() or not pure.parts or ".." in pure.parts or "\0" in path:
            raise Damaged(manifest.key.manifest_name, f"names a file outside of its folder: {path!r}")
    folder.mkdir()
    for path in contents.empty:
        (folder / path).mkdir(parents=True, exist_ok=True)
    pool = ThreadPool(threads, thread_name_prefix="restore")
    try:
        for file in contents.files:
            tensor = manifest.tensors.get(_get_tensor_name(file.path))
            if tensor is None or tensor.shape != (file.size,):
                raise Damaged(manifest.key.manifest_name, f"has no bytes for {file.path!r}")
            _write_file(store, manifest, tensor, file, folder / file.path, pool, on_bytes)
    finally:
        pool.shutdown(cancel_futures=True)


def _write_file(
    store: Store,
    manifest: Manifest,
    tensor: StoredTensor,
    file: File,
    path: Path,
    pool: ThreadPool,
    on_bytes: Callable[[int], None],
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    every = [chunk for shard in tensor.shards for chunk in shard.chunks]
    with path.open("xb") as opened:
        begin = every[0].offset if every else 0

        def write(chunk: Chunk) -> None:
            data = bytearray(chunk.length)
            read_chunk(store, manifest, chunk, memoryview(data))
            rest, at = memoryview(data), chunk.offset - begin
            while rest:
                count = os.pwrite(opened.fileno(), rest, at)
                rest, at = rest[count:], at + count
            on_bytes(chunk.length)

        for _ in pool.map(write, every):
            pass
        os.fchmod(opened.fileno(), file.mode)
        # So that whoever publishes the folder again sees that nobody has changed it.
        os.utime(opened.fileno(), ns=(file.modified, file.modified))
