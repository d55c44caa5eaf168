"""A folder comes back as it was, whole or not at all."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from everstep.checkpoint.catalog.candidates import list_candidates, verify_checkpoint
from everstep.checkpoint.catalog.selection import NoSuchStep
from everstep.checkpoint.errors import CheckpointError, Damaged, Missing, WriterConflict
from everstep.checkpoint.host import unfinished
from everstep.checkpoint.publish import folder
from everstep.checkpoint.publish.folder import Changed, Contents, NoFolder
from everstep.checkpoint.store.base import Store, open_store
from tests.checkpoint.builders import Training, key


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """Files of many kinds: nested, empty, larger than a chunk, with names that need care; and an empty folder."""
    root = tmp_path / "given"
    files = {
        "model.bin": os.urandom((8 << 20) + 5000),
        "a.b/c.d/weights": b"w" * 100,
        "a.b/empty": b"",
        "100%": b"percent",
        "[0]": b"brackets",
        "na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve": b"text",
        os.fsdecode(b"\xff.txt"): b"no text",
    }
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (root / "model.bin").chmod(0o640)
    (root / "void" / "deep").mkdir(parents=True)
    return root


def state(root: Path) -> dict[str, tuple[bytes | None, int]]:
    return {
        str(path.relative_to(root)): (path.read_bytes() if path.is_file() else None, path.stat().st_mode)
        for path in root.rglob("*")
    }


def test_what_was_saved_comes_back(store: Store, given: Path, tmp_path: Path) -> None:
    folder.save_folder(store, key(5), given)
    verify_checkpoint(store, key(5))
    manifest, bad = folder.restore_folder(store, tmp_path / "new" / "back")
    assert (manifest.key, bad) == (key(5), [])
    assert state(tmp_path / "new" / "back") == state(given)
    assert Contents.of(tmp_path / "new" / "back") == Contents.of(given)
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "back"]


def test_an_empty_folder_is_one_too(store: Store, tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    folder.save_folder(store, key(), tmp_path / "given")
    folder.restore_folder(store, tmp_path / "back")
    assert state(tmp_path / "back") == {}


def test_the_newest_that_is_good_comes_back(tmp_path: Path, given: Path) -> None:
    store = open_store(tmp_path / "store")
    folder.save_folder(store, key(5), given)
    before = state(given)
    (given / "100%").write_bytes(b"later")
    folder.save_folder(store, key(6), given)
    (part,) = (tmp_path / "store").glob(f"{key(6).data_prefix}*.part")
    data = bytearray(part.read_bytes())
    data[5000] ^= 1
    part.write_bytes(data)
    manifest, bad = folder.restore_folder(store, tmp_path / "back")
    assert manifest.key == key(5)
    assert state(tmp_path / "back") == before
    assert len(bad) == 1
    assert str(key(6)) in bad[0]
    with pytest.raises(Damaged):
        folder.restore_folder(store, tmp_path / "other", step=key(6))
    assert not (tmp_path / "other").exists()


def test_what_changes_while_it_is_read_is_not_committed(tmp_path: Path, given: Path) -> None:
    store = open_store(tmp_path / "store")

    def write(_: int) -> None:
        with (given / "model.bin").open("ab") as file:
            file.write(b"more")

    with pytest.raises(Changed):
        folder.save_folder(store, key(5), given, on_bytes=write)
    assert list_candidates(store) == []
    assert list(store.list("")) == []
    folder.save_folder(store, key(5), given)
    verify_checkpoint(store, key(5))


def test_what_is_removed_while_it_is_read_is_not_committed(tmp_path: Path, given: Path) -> None:
    store = open_store(tmp_path / "store")
    contents = Contents.of(given)
    (given / "a.b/c.d/weights").unlink()
    with pytest.raises(Changed, match="weights"):
        folder.save_folder(store, key(5), given, contents=contents)
    assert list(store.list("")) == []


def test_a_checkpoint_is_committed_once(store: Store, given: Path) -> None:
    folder.save_folder(store, key(5), given)
    with pytest.raises(WriterConflict):
        folder.save_folder(store, key(5), given)
    verify_checkpoint(store, key(5))


def test_a_folder_with_files_is_replaced_only_on_demand(tmp_path: Path, given: Path) -> None:
    store = open_store(tmp_path / "store")
    folder.save_folder(store, key(5), given)
    target = tmp_path / "target"
    target.mkdir()
    folder.restore_folder(store, target)
    (target / "more").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):
        folder.restore_folder(store, target)
    assert (target / "more").exists()
    folder.restore_folder(store, target, replace=True)
    assert state(target) == state(given)


@pytest.mark.parametrize("place", ["run/store", "run", "run/store/data", "link"])
def test_a_store_is_never_replaced_by_what_is_restored_from_it(place: str, tmp_path: Path, given: Path) -> None:
    (tmp_path / "link").symlink_to("run")
    store = open_store(tmp_path / "run" / "store")
    folder.save_folder(store, key(5), given)
    with pytest.raises(CheckpointError, match=r"would be replaced, and .* the store .*: give another place"):
        folder.restore_folder(store, tmp_path / place, replace=True)
    verify_checkpoint(store, key(5))
    folder.restore_folder(store, tmp_path / "run" / "out")
    folder.restore_folder(store, tmp_path / "run" / "out", replace=True)
    verify_checkpoint(store, key(5))


def test_a_folder_that_holds_its_store_is_not_published(tmp_path: Path, given: Path) -> None:
    with pytest.raises(CheckpointError, match="holds the store"):
        folder.save_folder(open_store(given / "store"), key(5), given)


def test_what_a_killed_restore_left_goes_with_the_next(tmp_path: Path, given: Path) -> None:
    store = open_store(tmp_path / "store")
    folder.save_folder(store, key(5), given)
    with unfinished.make_unfinished_folder(tmp_path / "[target]") as place:
        pass
    (place / "new").mkdir(parents=True)
    folder.restore_folder(store, tmp_path / "[target]")
    assert not list(tmp_path.glob(".everstep-*"))


def test_what_another_machine_is_restoring_stays_until_it_must_be_dead(tmp_path: Path) -> None:
    with unfinished.make_unfinished_folder(tmp_path / "target") as place:
        pass
    mount = place.name.rsplit("-", 2)[1]
    theirs = place.with_name(place.name.replace(mount, "01234567.2a"))
    (theirs / "new" / "weights").mkdir(parents=True)
    file = theirs / "new" / "weights" / "1"
    file.write_text("half")
    os.utime(file, (1, 1))  # as it was when it was published
    unfinished.clear_unfinished(tmp_path / "target")
    assert file.exists()
    unfinished.clear_unfinished(tmp_path / "target", clock=lambda: time.time() + 7200)
    assert not theirs.exists()


def test_what_is_restored_to_one_place_by_several_is_whole(tmp_path: Path, given: Path) -> None:
    store = open_store(tmp_path / "store")
    folder.save_folder(store, key(5), given)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "torn").write_text("of an earlier run")
    halfway, other_done = threading.Event(), threading.Event()

    def wait(count: int) -> None:
        halfway.set()
        other_done.wait(20)

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(folder.restore_folder, store, tmp_path / "target", replace=True, on_bytes=wait)
        assert halfway.wait(20)
        folder.restore_folder(store, tmp_path / "target", replace=True)
        assert state(tmp_path / "target") == state(given)
        other_done.set()
        slow.result(20)
    assert state(tmp_path / "target") == state(given)
    assert not list(tmp_path.glob(".everstep-*"))


def test_links_to_files_are_followed_and_others_refused(tmp_path: Path) -> None:
    root = tmp_path / "given"
    root.mkdir()
    (root / "file").write_text("x")
    (root / "link").symlink_to("file")
    store = open_store(tmp_path / "store")
    folder.save_folder(store, key(5), root)
    folder.restore_folder(store, tmp_path / "back")
    assert (tmp_path / "back" / "link").read_text() == "x"
    (root / "loop").symlink_to(root)
    with pytest.raises(CheckpointError, match="loop is neither a file"):
        folder.save_folder(store, key(6), root)


def test_other_checkpoints_are_told_apart(store: Store, tmp_path: Path) -> None:
    with pytest.raises(Missing):
        folder.restore_folder(store, tmp_path / "back")
    Training().save(store, key(5))
    with pytest.raises(NoFolder, match="checkpointer"):
        folder.restore_folder(store, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path, given: Path) -> None:
    store = open_store(tmp_path / "store")
    folder.save_folder(store, key(5), given)
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "old").write_text("old")
    for name, leads in (("there", tmp_path / "large"), ("dangling", tmp_path / "later")):
        (tmp_path / name).symlink_to(leads)
        folder.restore_folder(store, tmp_path / name, replace=True)
        assert (tmp_path / name).readlink() == leads
        assert state(leads) == state(given)


def test_of_a_step_the_greatest_attempt_that_is_good_comes_back(tmp_path: Path, given: Path) -> None:
    store = open_store(tmp_path / "store")
    for generation in (1, 2, 3):
        (given / "100%").write_text(str(generation))
        folder.save_folder(store, key(5, generation), given)
    # A part that became a folder is damage too, and no error of the store.
    (part,) = (tmp_path / "store").glob(f"{key(5, 3).data_prefix}*.part")
    part.unlink()
    part.mkdir()
    manifest, bad = folder.restore_folder(store, tmp_path / "back", step=5)
    assert manifest.key == key(5, 2)
    assert (tmp_path / "back" / "100%").read_text() == "2"
    assert [each.partition(":")[0] for each in bad] == [str(key(5, 3))]
    with pytest.raises(NoSuchStep, match="no checkpoint of step 6"):
        folder.restore_folder(store, tmp_path / "other", step=6)
