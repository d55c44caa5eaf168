"""A store in a folder is in that folder: one that is moved away, deleted or unmounted is not made anew at its path."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint.errors import StoreError
from everstep.checkpoint.format.keys import RUN
from everstep.checkpoint.store.base import open_store
from everstep.checkpoint.store.files import Files
from everstep.checkpoint.store.posix import PosixStore

PART = "data/a/1/00000.part"


@pytest.mark.parametrize("call", ["write", "rename", "sync_folder"])
def test_a_store_that_is_moved_away_in_the_middle_of_a_write_may_come_back(tmp_path: Path, call: str) -> None:
    """Told by an error that may pass: the save is tried again."""

    class Moved(Files):
        """The folder goes right before one of the calls."""

    moved = Moved()
    real: Callable[..., Any] = getattr(Files, call).__get__(moved)

    def go(*what: Any) -> Any:
        if (tmp_path / "store" / "data").exists():
            (tmp_path / "store").rename(tmp_path / "elsewhere")
        return real(*what)

    store = PosixStore(tmp_path / "store", files=moved)
    store.put_whole("latest", [b"abc"], 3)
    setattr(moved, call, go)
    with pytest.raises(StoreError, match="its folder is gone") as caught:
        store.put_whole(PART, [b"abc"], 3)
    assert caught.value.may_pass


def test_a_store_that_is_not_mounted_any_more_is_not_made_again(tmp_path: Path) -> None:
    store, away = open_store(tmp_path / "store"), tmp_path / "away"
    store.put_if_absent(RUN, b"this")
    assert store.read(RUN) == b"this"
    (tmp_path / "store").rename(away)
    writes: list[Callable[[], object]] = [
        lambda: store.put(PART, [b"abc"], 3),
        lambda: store.put_whole(PART, [b"abc"], 3),
        lambda: store.put_if_absent("manifests/1", b"abc"),
        lambda: store.replace("latest", b"abc"),
    ]
    for is_there in (False, True):
        if is_there:
            (tmp_path / "store").mkdir()  # a mount point without its file system
        for write in writes:
            with pytest.raises(StoreError, match="unmounted") as caught:
                write()
            assert caught.value.may_pass
    assert list((tmp_path / "store").iterdir()) == []
    (tmp_path / "store").rmdir()
    shutil.copytree(away, tmp_path / "store")  # mounted again, under another number
    for write in writes:
        write()


@pytest.mark.parametrize("depth", [0, 1], ids=["the store", "its parent too"])
def test_a_store_that_goes_right_before_a_folder_of_it_is_made_is_not_made_again(tmp_path: Path, depth: int) -> None:
    """Retention and saves run beside whoever moves the store away and back: what is made in its place is in the way."""
    top, away = tmp_path / "mount", tmp_path / "away"
    folder = top / "store"
    goes = [folder, top][depth]

    class Moved(Files):
        is_due = False

        def make_folder(self, path: Path) -> None:
            if self.is_due:
                self.is_due = False
                goes.rename(away)
            super().make_folder(path)

    moved = Moved()
    store = PosixStore(folder, files=moved)
    store.put_if_absent(RUN, b"this")
    moved.is_due = True
    with pytest.raises(StoreError, match="its folder is gone") as caught:
        store.put_whole(PART, [b"abc"], 3)
    assert caught.value.may_pass
    assert not goes.exists()
    away.rename(goes)
    store.put_whole(PART, [b"abc"], 3)


def test_what_is_unmounted_while_it_is_written_is_not_taken_for_saved(tmp_path: Path) -> None:
    class Unmounted(Files):
        def link(self, old: Path, new: Path) -> None:
            super().link(old, new)
            (tmp_path / "store").rename(tmp_path / "away")
            (tmp_path / "store").mkdir()

    with pytest.raises(StoreError, match=r"unmounted|No such file"):
        PosixStore(tmp_path / "store", files=Unmounted()).put_if_absent("manifests/1", b"abc")
