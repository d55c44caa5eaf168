"""Stores that fsspec serves, where a backend leaves most to fsspec: what fails is an error, and never an absence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from everstep.checkpoint.errors import StoreError
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
