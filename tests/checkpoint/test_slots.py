"""The state of a slot follows from its files alone; whether there is memory for it is known beforehand."""

from __future__ import annotations

import json
import os
import resource
import shutil
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from everstep.checkpoint.errors import CheckpointError, Full, Missing, StoreError
from everstep.checkpoint.format.checksum import compute_checksum
from everstep.checkpoint.host import available_memory
from everstep.checkpoint.host.available_memory import InsufficientMemory
from everstep.checkpoint.slots.own_files import COPIES
from everstep.checkpoint.slots.slots import Claim, Slot, Slots, SlotState, default_directory
from everstep.checkpoint.store.posix import PosixStore
from everstep.checkpoint.writer.persist import GivenUp, Mappings, SaveProgress, store_slot, sum_slot
from tests.checkpoint.builders import key
from tests.checkpoint.slot_builders import fill, layout
from tests.checkpoint.writers import until

SIZES = [20_000, 8_192]


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[Slots]:
    made = Slots.create(tmp_path / "memory", 2)
    made.reserve(SIZES, 2)
    yield made
    made.remove()


def summed(slots: Slots, number: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        sum_slot(slots, slots[number], Mappings(), pool, SaveProgress())


def test_a_slot_goes_from_empty_to_stored(slots: Slots) -> None:
    slot = slots[0]
    seen = [slot.state]
    slot.claim(Claim(key(10), 2, 0, 1))
    seen.append(slot.state)
    fill(slots, 0, key(10), 0, SIZES[0])
    assert slot.state is SlotState.FILLING  # the other rank is not done
    fill(slots, 0, key(10), 1, SIZES[1])
    seen.append(slot.state)
    summed(slots, 0)
    seen.append(slot.state)
    slot.store(key(10))
    assert [*seen, slot.state] == list(SlotState)


@pytest.mark.parametrize("file", ["claim.json", "1.json"])
def test_what_another_version_says_of_a_slot_counts_for_nothing(slots: Slots, file: str) -> None:
    slots[0].claim(Claim(key(10), 2, 0, 1))
    for local, size in enumerate(SIZES):
        fill(slots, 0, key(10), local, size)
    said = json.loads((slots[0].path / file).read_text())
    for other in (said | {"later": 1}, {"key": said["key"]}, {**said, "key": "another"}, {}):
        (slots[0].path / file).write_text(json.dumps(other))
        assert slots[0].state is (SlotState.EMPTY if file == "claim.json" else SlotState.FILLING)
        assert slots.whole() == []
    slots[0].claim(Claim(key(20), 1, 0, 1))
    assert slots[0].claimed() == Claim(key(20), 1, 0, 1)


def test_the_node_manifest_speaks_of_the_very_bytes(slots: Slots) -> None:
    slots[0].claim(Claim(key(10), 2, 0, 1))
    data = [fill(slots, 0, key(10), local, size) for local, size in enumerate(SIZES)]
    summed(slots, 0)
    [(slot, manifest)] = slots.whole()
    assert [part.size for part in manifest.parts] == SIZES
    assert [slot.part(local).read_bytes()[:size] for local, size in enumerate(SIZES)] == data
    chunks = [chunk for tensor in manifest.tensors.values() for shard in tensor.shards for chunk in shard.chunks]
    assert len(chunks) == 2
    for chunk in chunks:
        there = data[chunk.part][chunk.offset : chunk.offset + chunk.length]
        assert compute_checksum(manifest.checksum, there) == chunk.sum


def test_a_claim_takes_the_slot_from_what_was_in_it(slots: Slots) -> None:
    slots[0].claim(Claim(key(10), 2, 0, 1))
    for local, size in enumerate(SIZES):
        fill(slots, 0, key(10), local, size)
    summed(slots, 0)
    slots[0].store(key(10))
    slots[0].claim(Claim(key(20), 2, 0, 1))
    assert slots[0].state is SlotState.FILLING  # the records of step 10 are still there, and mean nothing
    assert slots.whole() == []
    fill(slots, 0, key(20), 0, SIZES[0])
    assert slots[0].state is SlotState.FILLING


@pytest.mark.parametrize("name", ["claim.json", "0.json", "slot.json", "whole", "stored"])
def test_a_slot_with_a_file_missing_is_never_more_than_it_was(slots: Slots, name: str) -> None:
    slots[0].claim(Claim(key(10), 2, 0, 1))
    for local, size in enumerate(SIZES):
        fill(slots, 0, key(10), local, size)
    summed(slots, 0)
    slots[0].store(key(10))
    (slots[0].path / name).unlink()
    at_most = {"claim.json": SlotState.EMPTY, "stored": SlotState.WHOLE}
    assert slots[0].state is at_most.get(name, SlotState.STORED)
    whole = slots.whole()
    assert bool(whole) == (name not in ("claim.json", "slot.json"))


def test_the_newest_whole_slot_is_known(slots: Slots) -> None:
    for number, step in ((0, 20), (1, 10)):
        slots[number].claim(Claim(key(step), 2, 0, 1))
        for local, size in enumerate(SIZES):
            fill(slots, number, key(step), local, size)
        summed(slots, number)
    newest = slots.newest()
    assert newest is not None
    assert newest.number == 0
    assert [manifest.key.step for _, manifest in slots.whole()] == [20, 10]


def test_a_slot_that_is_read_is_seen_by_every_process(slots: Slots) -> None:
    with slots[0].reading(), slots[0].reading():
        assert slots[0].is_read
        assert not slots[1].is_read
    assert not slots[0].is_read


@pytest.mark.parametrize("folder", ["0", "peer/0"], ids=["a slot", "another node's copy"])
def test_slots_that_are_read_are_removed_after_that(slots: Slots, folder: str) -> None:
    copies = Slots.create(slots.directory / COPIES, 2)
    with Slot(slots.directory / folder).reading():
        assert not slots.remove()
        assert [slot.part(0).stat().st_size for slot in slots] == [SIZES[0], SIZES[0]]
        assert len(list(copies)) == 2
    assert slots.remove()
    assert list(slots.directory.parent.iterdir()) == []


def test_a_limit_of_files_is_known_before_any_is_made(slots: Slots) -> None:
    available_memory.check_files(slots.directory, 1 << 40, 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(InsufficientMemory, match=r"has up to 2\.0 MB, and a file of this user 1\.0 MB at most"):
            available_memory.check_files(slots.directory, 2_000_000, 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if os.statvfs(slots.directory).f_files:
        with pytest.raises(InsufficientMemory, match="inodes left"):
            available_memory.check_files(slots.directory, 1, 1 << 62)


def test_slots_are_removed_though_their_file_system_has_no_inode_left_for_a_lock(slots: Slots) -> None:
    for slot in slots:
        (slot.path / "lock").unlink(missing_ok=True)
        (slot.path / "lock").mkdir()  # cannot be opened either
    assert slots.remove()
    assert not slots.directory.exists()


def test_who_waited_for_a_slot_that_was_removed_meanwhile_is_told_so(slots: Slots) -> None:
    with ExitStack() as lock, ThreadPoolExecutor(1) as pool:
        assert slots[0].lock_out_readers(lock)
        reads = pool.submit(lambda: slots[0].reading().__enter__())
        waiter = f"{os.getpid()} "
        until(lambda: f"-> FLOCK  ADVISORY  READ {waiter}" in Path("/proc/locks").read_text(), "the reader waits")
        slots.directory.rename(slots.directory.with_name("gone"))
        Slots.create(slots.directory, 2)[0].path.joinpath("lock").touch()  # of the next run
        lock.close()
        with pytest.raises(Missing):
            reads.result()


def test_what_a_process_that_died_was_removing_is_removed_by_the_next(slots: Slots) -> None:
    slots.directory.rename(slots.directory.with_name(f".{slots.directory.name}.removed-123"))
    slots.clear_removed()
    assert list(slots.directory.parent.iterdir()) == []


def test_a_sum_that_nobody_wants_any_more_ends(slots: Slots) -> None:
    slots[0].claim(Claim(key(10), 2, 0, 1))
    for local, size in enumerate(SIZES):
        fill(slots, 0, key(10), local, size)
    progress = SaveProgress()
    progress.given_up = "a rank changed its mind"
    with ThreadPoolExecutor(2) as pool, pytest.raises(GivenUp, match="changed its mind"):
        sum_slot(slots, slots[0], Mappings(), pool, progress)
    assert slots[0].state is SlotState.FILLED


def test_a_store_that_has_failed_is_not_written_to_any_more(slots: Slots, tmp_path: Path) -> None:
    slots[0].claim(Claim(key(10), 2, 0, 1))
    for local, size in enumerate(SIZES):
        fill(slots, 0, key(10), local, size)
    begun, released, ended = threading.Event(), threading.Event(), threading.Event()

    class FailingStore(PosixStore):
        def put(self, name: str, data: Iterable[bytes | memoryview], size: int) -> None:
            if name == key(10).part_name(0):
                begun.wait(60)
                threading.Timer(0.3, released.set).start()
                raise StoreError("the connection is lost", self.url, may_pass=True)
            begun.set()
            released.wait(60)
            ended.set()

    progress = SaveProgress()
    with ThreadPoolExecutor(2) as pool:
        manifest = sum_slot(slots, slots[0], Mappings(), pool, progress)
        with pytest.raises(StoreError, match="the connection is lost"):
            store_slot(FailingStore(tmp_path / "store"), slots[0], 0, manifest, Mappings(), pool, progress)
        assert ended.is_set(), "what is stored again under this name would be removed by what is still on its way"


def test_a_save_that_finds_no_room_for_one_part_takes_none_for_the_others(slots: Slots, tmp_path: Path) -> None:
    """Else each save that fails fills a full disk with parts of no checkpoint, whatever somebody frees there."""
    slots[0].claim(Claim(key(10), 2, 0, 1))
    for local, size in enumerate(SIZES):
        fill(slots, 0, key(10), local, size)

    class FullStore(PosixStore):
        def put(self, name: str, data: Iterable[bytes | memoryview], size: int) -> None:
            if name == key(10).part_name(1):
                raise Full(self.url, f"could not write {name}: No space left on device")
            super().put(name, data, size)

    store = FullStore(tmp_path / "store")
    store.put(key(5).part_name(1), [b"earlier"], 7)
    with ThreadPoolExecutor(1) as pool:  # one part after the other
        manifest = sum_slot(slots, slots[0], Mappings(), pool, SaveProgress())
        with pytest.raises(Full):
            store_slot(store, slots[0], 0, manifest, Mappings(), pool, SaveProgress())
    assert [entry.name for entry in store.list("data/")] == [key(5).part_name(1)]


def test_memory_is_allocated_beforehand_and_reused(slots: Slots) -> None:
    for slot in slots:
        for local, size in enumerate(SIZES):
            found = slot.part(local).stat()
            assert found.st_size == size
            assert found.st_blocks * 512 >= size  # no holes: a copy into one could end in SIGBUS
    assert slots.need(SIZES, 2) == 0
    assert slots.need([SIZES[0] + 100, SIZES[1]], 2) == 200
    slots.reserve([100, 100], 2)  # a smaller plan: nothing shrinks under who has it mapped
    assert slots[0].part(0).stat().st_size == SIZES[0]


def test_too_little_memory_is_told_before_a_byte_is_taken(slots: Slots) -> None:
    with pytest.raises(
        InsufficientMemory, match=r"2 slots for checkpoints need .* GB more memory, .* or use MemoryOptions\(slots=1\)"
    ):
        slots.reserve([1 << 50], 2)
    assert slots[0].part(0).stat().st_size == SIZES[0]


def test_a_small_file_system_may_be_filled_and_what_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker and Kubernetes give a container a /dev/shm of 64 MB, unless they are told otherwise."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 64 << 20))
    available_memory.check_memory(tmp_path, 60_000_000, copies=2)
    with pytest.raises(
        InsufficientMemory,
        match=r"1 slot for checkpoints need 67.0 MB more memory, the file system of .* has 67.1 MB left, and 0.5 MB "
        r"must stay free: 0.4 MB are missing; give it more "
        r"\(spec.checkpoint.memory of a TrainingJob, .*--shm-size.*\)$",
    ):
        available_memory.check_memory(tmp_path, 67_000_000, copies=1)


def write(path: Path, **files: object) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(f"{content}\n")


def test_the_smallest_limit_of_all_cgroups_counts(tmp_path: Path) -> None:
    """Version 2: a limit of a parent holds too, and pages that only cache files can be had."""
    write(tmp_path, cgroup="0::/pod/trainer")
    write(tmp_path / "fs/pod/trainer", memory__max="max", memory__current=1000, memory__stat="inactive_file 0")
    write(
        tmp_path / "fs/pod", memory__max=10_000, memory__current=9000, memory__stat="inactive_file 500\nactive_file 200"
    )
    assert list(available_memory.iterate_cgroup_limits(tmp_path / "cgroup", tmp_path / "fs")) == [(1700, "/pod")]


def test_cgroups_of_version_1_count_too(tmp_path: Path) -> None:
    write(tmp_path, cgroup="5:cpu,cpuacct:/x\n4:memory:/pod")
    write(
        tmp_path / "fs/memory/pod",
        memory__limit_in_bytes=10_000,
        memory__usage_in_bytes=4000,
        memory__stat="inactive_file 0",
    )
    write(
        tmp_path / "fs/memory",
        memory__limit_in_bytes=9223372036854771712,
        memory__usage_in_bytes=4000,
        memory__stat="inactive_file 0",
    )
    assert list(available_memory.iterate_cgroup_limits(tmp_path / "cgroup", tmp_path / "fs")) == [(6000, "/pod")]


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir(mode=0o755)
    with pytest.raises(CheckpointError, match="not a directory of our own"):
        Slots.create(tmp_path / "memory", 1)


def test_a_link_that_somebody_put_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    (tmp_path / "memory").symlink_to(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="not a directory of our own"):
        Slots.create(tmp_path / "memory", 1)


def test_runs_and_nodes_have_directories_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EVERSTEP_CHECKPOINT_MEMORY", str(tmp_path))
    names = {default_directory(url, node) for url in ("s3://a/b", "s3://a/c") for node in (0, 1)}
    assert len(names) == 4
    assert all(name.parent == tmp_path for name in names)


def test_a_layout_is_kept_once(slots: Slots) -> None:
    boxes = layout(0, 100)
    assert slots.save_layout(boxes) == slots.save_layout(boxes)
    assert slots.layout(slots.save_layout(boxes)) == boxes
    [file] = (slots.directory / "layouts").iterdir()
    file.write_text("[")
    assert slots.layout(slots.save_layout(boxes)) == boxes, "what has been damaged is written again"


def test_nothing_of_anybody_else_s_goes_with_the_slots(slots: Slots) -> None:
    theirs = [slots.directory / name for name in ("notes", "run/store/a", "2024/a", ".profile", "peer/2024/a")]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("theirs")
    assert slots.surplus(2) == []
    assert slots.remove()
    assert [path.read_text() for path in theirs] == ["theirs"] * len(theirs)
    assert not (slots.directory / "0").exists()
