"""Stores that fsspec serves, where a backend leaves most to fsspec: what fails is an error, and never an absence."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from everstep.checkpoint.errors import Damaged, StoreError
from everstep.checkpoint.retention.retention import prune_store
from everstep.checkpoint.store.objects import ObjectStore
from everstep.checkpoint.store.retry import Retry
from tests.checkpoint.builders import Training, key, load

TRAINING = Training(rows=2)


class Backend(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Folders of this machine, as fsspec has those of sftp, smb or hdfs; calls fail that concern paths in `fails`."""

    protocol = "everstep-backend"
    fails = ""

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return LocalFileSystem._strip_protocol(str(path).removeprefix("everstep-backend://"))

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        self._reach(path)
        return super().ls(path, detail=detail, **options)

    def info(self, path: str, **options: Any) -> Any:
        self._reach(getattr(path, "path", path))  # the entry of a folder, within ls()
        return super().info(path, **options)

    def _reach(self, path: str) -> None:
        if Backend.fails and Backend.fails in path:
            raise ConnectionResetError("the connection is lost")


class BucketFile(AbstractBufferedFile):  # type: ignore[misc]
    """A file whose object is made when it is closed, or when it is forgotten while it is open."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts.append(self.buffer.getvalue())
        if final:
            Bucket.objects[self.path] = b"".join(self.parts)
        return True


class Bucket(AbstractFileSystem):  # type: ignore[misc]
    """Objects as adlfs has them: see there what each call does with what it is given."""

    protocol = "everstep-bucket"
    objects: dict[str, bytes] = {}  # noqa: RUF012 - of all instances

    def _open(self, path: str, mode: str = "rb", **options: Any) -> BucketFile:
        return BucketFile(self, path, mode, block_size=64)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.objects[path]), "type": "file"}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        if (start or 0) >= self.info(path)["size"]:
            raise OSError("InvalidRange")
        return self.objects[path][start:end]

    def pipe_file(self, path: str, value: bytes, overwrite: bool = True, **options: Any) -> None:
        if options.pop("mode", "") == "create" and path in self.objects:
            raise FileExistsError(path)
        assert not options
        self.objects[path] = value

    def rm_file(self, path: str) -> None:
        self.objects.pop(path, None)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass


@pytest.fixture
def bucket() -> ObjectStore:
    fsspec.register_implementation("everstep-bucket", Bucket, clobber=True)
    Bucket.objects = {}
    return ObjectStore("everstep-bucket://store", retry=Retry(tries=2, first=0.001))


@pytest.mark.parametrize("size", [10, 1000])
def test_what_was_not_written_to_its_end_takes_no_later_ones_place(bucket: ObjectStore, size: int) -> None:
    def give_up() -> Iterator[bytes]:
        yield bytes(size)
        raise RuntimeError("given up")

    with pytest.raises(StoreError, match="given up") as failed:
        bucket.put("data/a", give_up(), 2 * size)
    bucket.put("data/a", [b"x" * size], size)
    del failed  # with the file that it was written into
    gc.collect()
    assert bucket.read("data/a") == b"x" * size


def test_an_object_that_ends_before_a_range_is_damaged(bucket: ObjectStore) -> None:
    bucket.put("data/a", [b"abc"], 3)
    for offset in (0, 2, 3, 10):
        with pytest.raises(Damaged, match=f"ends at byte 3, {offset + 2} bytes too early"):
            bucket.read_into("data/a", offset, memoryview(bytearray(5)))


def test_a_backend_that_takes_a_mode_among_others_decides_who_is_first(
    bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bucket.put_if_absent("attempts/a", b"one")
    other = ObjectStore(bucket.url)
    assert other.put_if_absent("attempts/b", b"two")
    # Both have looked, and nobody was there.
    monkeypatch.setattr(ObjectStore, "_is_there", lambda self, path: False)
    assert bucket.put_if_absent("attempts/c", b"one")
    assert not other.put_if_absent("attempts/c", b"two")
    assert bucket.read("attempts/c") == b"one"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    fsspec.register_implementation("everstep-backend", Backend, clobber=True)
    yield ObjectStore(f"everstep-backend://{tmp_path}/store", retry=Retry(tries=2, first=0.001))
    Backend.fails = ""


@pytest.mark.parametrize("folder", ["store", "manifests", "data/0000000000.0000000001/000000000010"])
def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(store: ObjectStore, folder: str) -> None:
    TRAINING.save(store, key(10))
    Backend.fails = folder
    with pytest.raises(StoreError, match="the connection is lost") as raised:
        list(store.list("" if folder == "store" else f"{folder.partition('/')[0]}/"))
    assert raised.value.may_pass


def test_what_a_listing_misses_is_no_fresh_start(store: ObjectStore) -> None:
    TRAINING.save(store, key(10))
    store.delete(["latest"])
    Backend.fails = "manifests"
    with pytest.raises(StoreError):
        load(store)


def test_leases_that_cannot_be_listed_let_nothing_be_removed(store: ObjectStore) -> None:
    TRAINING.save(store, key(10))
    TRAINING.save(store, key(20))
    Backend.fails = "/leases"
    with pytest.raises(StoreError):
        prune_store(store, {key(20)}, keep_last=1, clock=lambda: 0.0)
    Backend.fails = ""
    assert load(store).key == key(20)
    assert len(list(store.list("manifests/"))) == 2


def test_what_cannot_be_looked_at_is_not_overwritten(store: ObjectStore) -> None:
    assert store.put_if_absent("attempts/a", b"one")
    Backend.fails = "attempts"
    with pytest.raises(StoreError, match="the connection is lost"):
        store.put_if_absent("attempts/a", b"two")
    Backend.fails = ""
    assert store.read("attempts/a") == b"one"
    assert not store.put_if_absent("attempts/a", b"two")


def test_a_checkpoint_is_saved_found_and_removed(store: ObjectStore) -> None:
    assert list(store.list("")) == []
    for step in (10, 20):
        TRAINING.save(store, key(step))
    assert prune_store(store, {key(20)}, keep_last=1).removed == (key(10),)
    assert load(store).key == key(20)
    assert {entry.name.split("/")[0] for entry in store.list("")} == {"data", "latest", "manifests"}
