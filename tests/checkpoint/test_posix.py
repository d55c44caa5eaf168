"""A folder keeps what the stores promise, and says clearly what it cannot."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint.errors import CheckpointError, Damaged, Full, Missing, StoreError, is_damage
from everstep.checkpoint.host import available_memory
from everstep.checkpoint.store import writeback
from everstep.checkpoint.store.base import check_name, open_store
from everstep.checkpoint.store.files import Files
from everstep.checkpoint.store.posix import PosixStore

PART = "data/a/1/00000.part"


class Failing(Files):
    """One kind of call fails with an error of the system, `times` times; calls are counted."""

    def __init__(self, call: str, number: int, times: int = 10**6) -> None:
        self.count = 0

        def fail(*_: Any) -> Any:
            self.count += 1
            if self.count <= times:
                raise OSError(number, os.strerror(number))
            return real(*_)

        real: Callable[..., Any] = getattr(Files, call).__get__(self)
        setattr(self, call, fail)


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_below_the_home_is_found_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert PosixStore("~/runs").url == str(tmp_path / "runs")
    with pytest.raises(CheckpointError, match=r"~nobody-of-this-name/runs: .* give an absolute path, or set HOME"):
        PosixStore("~nobody-of-this-name/runs")


def test_what_is_put_is_read(tmp_path: Path) -> None:
    store = open_store(tmp_path / "deep" / "store")
    store.put(PART, [b"abc", memoryview(b"defg")], 7)
    assert store.read(PART) == b"abcdefg"
    into = bytearray(3)
    store.read_into(PART, 2, memoryview(into))
    assert into == b"cde"


def test_a_store_is_opened_by_path_or_url(tmp_path: Path) -> None:
    assert open_store(f"file://{tmp_path}").url == open_store(tmp_path).url == str(tmp_path)
    with pytest.raises(ValueError, match="no store serves"):
        open_store("nothing-serves-this://bucket")


def test_a_name_that_is_used_is_not_put_again(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    store.put(PART, [b"one"], 3)
    with pytest.raises(StoreError, match="File exists"):
        store.put(PART, [b"two"], 3)
    assert store.read(PART) == b"one"


def test_a_read_beyond_the_end_is_damage(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    store.put(PART, [b"abc"], 3)
    with pytest.raises(Damaged, match="ends at byte 3, 2 bytes too early"):
        store.read_into(PART, 1, memoryview(bytearray(4)))


def test_what_is_not_there_is_missing(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "nowhere")
    with pytest.raises(Missing, match="nowhere/latest"):
        store.read("latest")
    with pytest.raises(Missing):
        store.read_into("data/x", 0, memoryview(bytearray(1)))
    assert list(store.list("")) == []
    store.delete(["data/x"])
    assert store.sweep("", 1e12) == 0


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../b", "a//b", ".hidden", "a/.new-1", "a/", "a\n", "ä"])
def test_a_name_that_leads_out_of_the_store_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not the name"):
        check_name(name)
    for call in (PosixStore(tmp_path).read, lambda each: PosixStore(tmp_path).delete([each])):
        with pytest.raises(ValueError, match="not the name"):
            call(name)


def test_of_many_writers_one_is_first(tmp_path: Path) -> None:
    results: list[tuple[bool, bytes]] = []
    start = threading.Barrier(8)

    def write(data: bytes) -> None:
        start.wait()
        results.append((PosixStore(tmp_path).put_if_absent("manifests/x.json", data), data))

    threads = [threading.Thread(target=write, args=(bytes([i]) * 100,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ((_, winner),) = [each for each in results if each[0]]
    assert everything(tmp_path) == {"manifests/x.json": winner}


def test_without_links_exclusive_creation_decides(tmp_path: Path) -> None:
    store = PosixStore(tmp_path, files=Failing("link", errno.EOPNOTSUPP))
    assert store.put_if_absent("manifests/x", b"first")
    assert not store.put_if_absent("manifests/x", b"second")
    assert everything(tmp_path) == {"manifests/x": b"first"}


def test_a_link_whose_answer_was_lost_is_one_s_own(tmp_path: Path) -> None:
    class Lossy(Files):
        def link(self, old: Path, new: Path) -> None:
            super().link(old, new)
            raise FileExistsError(errno.EEXIST, "the client asked twice")

    assert PosixStore(tmp_path, files=Lossy()).put_if_absent("manifests/x", b"first")


def test_a_replaced_object_is_never_seen_half(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    store.replace("latest", b"a" * 10_000)
    stop = threading.Event()

    def replace() -> None:
        while not stop.is_set():
            store.replace("latest", b"b" * 10_000)
            store.replace("latest", b"a" * 10_000)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        seen = {store.read("latest") for _ in range(300)}
    finally:
        stop.set()
        thread.join()
    assert seen <= {b"a" * 10_000, b"b" * 10_000}


def test_objects_are_listed_by_the_beginning_of_their_names(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    for name in ("data/a/1/x", "data/a/12/y", "data/b/1/x", "latest"):
        store.replace(name, b"12")
    (tmp_path / "data" / "a" / ".new-1").touch()
    assert {(entry.name, entry.size) for entry in store.list("data/a/1")} == {("data/a/1/x", 2), ("data/a/12/y", 2)}
    assert {entry.name for entry in store.list("")} == {"data/a/1/x", "data/a/12/y", "data/b/1/x", "latest"}


def test_the_last_file_takes_the_folders_of_its_step_and_attempt_along(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    for name in ("data/a/1/x", "data/a/2/x"):
        store.replace(name, b"")
    store.delete(["data/a/1/x"])
    assert sorted(path.name for path in tmp_path.glob("data/*/*")) == ["2"]
    store.delete(["data/a/2/x"])
    assert list(tmp_path.rglob("*")) == [tmp_path / "data"]


def test_sweep_removes_old_temporary_files_only(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    store.replace("manifests/x", b"")
    old, young = f".new-{'0' * 16}", f".new-{'1' * 16}"
    for path, age in (
        (tmp_path / old, 100.0),
        (tmp_path / "manifests" / old, 100.0),
        (tmp_path / "manifests" / young, 300.0),
    ):
        path.touch()
        os.utime(path, (age, age))
    assert store.sweep("", 200.0) == 2
    assert {path.name for path in (tmp_path / "manifests").iterdir()} == {"x", young}
    assert not (tmp_path / old).exists()


def test_sweep_leaves_what_other_programs_have_in_the_same_folder(tmp_path: Path) -> None:
    PosixStore(tmp_path).replace("manifests/x", b"")
    foreign = [tmp_path / "home" / f".new-{'0' * 16}", tmp_path / ".new-draft", tmp_path / "manifests" / ".new-draft"]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, (100.0, 100.0))
    assert PosixStore(tmp_path).sweep("", 200.0) == 0
    assert all(path.exists() for path in foreign)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["make_folder", "create", "write", "sync"])
def test_a_full_disk_is_told_as_such_and_leaves_what_was_there(tmp_path: Path, call: str, number: int) -> None:
    PosixStore(tmp_path).put(PART, [b"good"], 4)
    before = everything(tmp_path)
    store = PosixStore(tmp_path, files=Failing(call, number))
    with pytest.raises(Full, match=os.strerror(number)):
        store.put("data/a/2/00000.part", [b"new"], 3)
    with pytest.raises(Full, match=os.strerror(number)):
        store.put_if_absent("manifests/x", b"new")
    assert everything(tmp_path) == before


@pytest.mark.parametrize("call", ["create", "write", "sync", "sync_folder", "link", "rename"])
def test_a_failing_disk_leaves_what_was_there(tmp_path: Path, call: str) -> None:
    store = PosixStore(tmp_path)
    store.put(PART, [b"good"], 4)
    store.replace("latest", b"good")
    failing = PosixStore(tmp_path, files=Failing(call, errno.EIO))
    for write in (
        lambda: failing.put("data/a/2/00000.part", [b"new"], 3),
        lambda: failing.put_if_absent("manifests/x", b"new"),
        lambda: failing.replace("latest", b"new"),
    ):
        try:
            write()
        except StoreError as error:
            assert "Input/output error" in str(error)  # noqa: PT017 (not every write makes every call)
    assert store.read(PART) == b"good"
    assert store.read("latest") == (b"good" if call in ("create", "write", "rename") else b"new")


@pytest.mark.parametrize("call", ["sync", "sync_folder"])
def test_a_failed_fsync_is_not_repeated(tmp_path: Path, call: str) -> None:
    files = Failing(call, errno.EIO, times=1)
    with pytest.raises(StoreError, match="Input/output"):
        PosixStore(tmp_path, files=files).put(PART, [b"data"], 4)
    assert files.count == 1


class FoldersOfProc(Files):
    """Folders are synced as those of /proc are: the kernel itself says that this file system has no such call."""

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(Path("/proc/self"))


def test_a_file_system_that_syncs_no_folders_is_used_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        FoldersOfProc().sync_folder(tmp_path)
    store = PosixStore(tmp_path / "store", files=FoldersOfProc())
    store.put(PART, [b"data"], 4)
    assert store.put_if_absent("manifests/x", b"one")
    assert not store.put_if_absent("manifests/x", b"two")
    assert store.read(PART) == b"data"
    assert [record.getMessage().count("syncs no folders") for record in caplog.records] == [1], "said once"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EBADF])
def test_a_file_that_cannot_be_synced_is_a_failure_whatever_the_error_is(tmp_path: Path, number: int) -> None:
    with pytest.raises(StoreError):
        PosixStore(tmp_path, files=Failing("sync", number)).put(PART, [b"data"], 4)
    PosixStore(tmp_path, files=Failing("sync_folder", number)).put("data/a/2/00000.part", [b"data"], 4)


def test_an_error_of_a_slow_network_mount_may_pass(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        PosixStore(tmp_path, files=Failing("write", errno.ETIMEDOUT)).put(PART, [b"data"], 4)
    assert caught.value.may_pass


@pytest.mark.parametrize("is_local", [True, False])
def test_an_input_error_of_a_network_mount_is_a_server_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_local: bool
) -> None:
    """NFS that is mounted `soft` says EIO where its server does not answer; a disk says it of what it has lost."""
    PosixStore(tmp_path).put(PART, [b"data"], 4)
    monkeypatch.setattr(PosixStore, "is_local", is_local)
    with pytest.raises(StoreError, match="Input/output error") as written:
        PosixStore(tmp_path, files=Failing("sync", errno.EIO)).put("data/a/2/00000.part", [b"data"], 4)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StoreError, match="Input/output error") as read:
        PosixStore(tmp_path).read_into(PART, 0, memoryview(bytearray(4)))
    assert [written.value.may_pass, read.value.may_pass] == [not is_local] * 2
    assert is_damage(read.value) is is_local


def test_a_short_write_is_continued(tmp_path: Path) -> None:
    class Short(Files):
        def write(self, descriptor: int, data: bytes | memoryview) -> int:
            return super().write(descriptor, memoryview(data)[:3])

    PosixStore(tmp_path, files=Short()).put(PART, [b"abcdefg", b"hi"], 9)
    assert PosixStore(tmp_path).read(PART) == b"abcdefghi"


def test_another_size_than_promised_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="4 bytes were promised, 3 came"):
        PosixStore(tmp_path).put(PART, [b"abc"], 4)
    assert everything(tmp_path) == {}


def test_a_folder_that_was_removed_a_moment_ago_is_made_again(tmp_path: Path) -> None:
    class Racing(Files):
        removed = False

        def make_folder(self, path: Path) -> None:
            super().make_folder(path)
            if path.name == "a" and not self.removed:
                self.removed = True
                path.rmdir()

    PosixStore(tmp_path, files=Racing()).put(PART, [b"abc"], 3)
    assert PosixStore(tmp_path).read(PART) == b"abc"


def cached(path: Path) -> bool:
    """Tell whether the first page of a file is in memory; skip where the file system does not tell."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(descriptor, [bytearray(4096)], 0, os.RWF_NOWAIT) == 4096
    except BlockingIOError:
        return False
    except OSError as error:
        pytest.skip(f"this file system does not tell what is in memory: {error}")
    finally:
        os.close(descriptor)


LARGE = [b"1" * (8 << 20)] * 10


def test_a_file_that_is_large_for_the_machine_does_not_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PosixStore(tmp_path)
    store.put("data/a/1/0.part", LARGE, 80 << 20)
    if not cached(tmp_path / "data/a/1/0.part"):
        pytest.skip("no file stays in memory here")
    monkeypatch.setattr(available_memory, "get_available_memory", lambda: 100 << 20)
    # The system keeps a page that another processor has at hand in that moment, as busy machines do.
    for step in range(2, 12):
        store.put(f"data/a/{step}/0.part", LARGE, 80 << 20)
        if not cached(tmp_path / f"data/a/{step}/0.part"):
            break
        (tmp_path / f"data/a/{step}/0.part").unlink()
    else:
        pytest.fail("none of ten large files was let go")
    assert (tmp_path / f"data/a/{step}/0.part").stat().st_size == 80 << 20
    assert (tmp_path / f"data/a/{step}/0.part").read_bytes() == b"".join(LARGE)


def test_an_error_of_the_disk_is_told_by_whoever_hears_of_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells it once: to a wait for earlier bytes, and then no more to fsync."""

    def call(descriptor: int, offset: int, length: int, flags: int) -> int:
        ctypes.set_errno(errno.EIO)
        return -1

    monkeypatch.setattr(available_memory, "get_available_memory", lambda: 100 << 20)
    monkeypatch.setattr(writeback, "_call", call)
    with pytest.raises(StoreError, match="Input/output error"):
        PosixStore(tmp_path).put(PART, LARGE, 80 << 20)
    assert not everything(tmp_path)


def test_a_file_url_is_read_as_the_standard_says(tmp_path: Path) -> None:
    for url in (f"file://{tmp_path}/a%20b/%25", f"file://localhost{tmp_path}/a%20b/%25"):
        assert open_store(url).url == f"{tmp_path}/a b/%"
    for url in ("file://elsewhere/path", "file://path"):
        with pytest.raises(
            ValueError, match="as a machine, and only folders of this one can be opened: write file:///"
        ):
            open_store(url)


def read_piece(store: PosixStore, name: str) -> None:
    store.read_into(name, 0, memoryview(bytearray(1)))


@pytest.mark.parametrize("read", [PosixStore.read, read_piece])
def test_a_folder_in_the_place_of_an_object_is_damage(tmp_path: Path, read: Any) -> None:
    (tmp_path / PART).mkdir(parents=True)
    with pytest.raises(Damaged, match="is a folder, and was written as a file"):
        read(PosixStore(tmp_path), PART)
    (tmp_path / "data" / "b").touch()
    with pytest.raises(Missing):
        read(PosixStore(tmp_path), "data/b/1/00000.part")


def test_a_folder_is_one_store_however_it_is_spelled(tmp_path: Path) -> None:
    """Its slots, and so its writer, are found by the store's name."""
    (tmp_path / "link").symlink_to(tmp_path / "real")
    spellings = ["real", "link", "x/../real", "./real/"]
    urls = {open_store(f"{tmp_path}/{each}").url for each in spellings}
    urls |= {open_store(f"file://{host}{tmp_path}/{each}").url for each in spellings for host in ("", "localhost")}
    assert urls == {str(tmp_path / "real")}
