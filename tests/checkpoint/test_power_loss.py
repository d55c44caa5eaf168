"""Power goes at any call and takes any of what was not synced: what was committed is loaded; no fsync is in vain."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.keys import Attempt, Key
from everstep.checkpoint.publish import attempts
from everstep.checkpoint.retention.retention import prune_store
from everstep.checkpoint.store.posix import PosixStore
from tests.checkpoint.builders import Training, is_good, key, load
from tests.checkpoint.crash import Watched, everything
from tests.checkpoint.disk import Disk, Materialised, Record, Recorder, Tree, subsets

SMALL = Training(rows=8, chunk=256)
LARGE = Training(rows=8000, chunk=65536)
STORE = "made/by/everstep"  # only the folder above exists


@dataclass(frozen=True)
class Committed:
    key: Key


@dataclass(frozen=True)
class Claimed:
    attempt: Attempt


def recorded(folder: Path, training: Training) -> list[Record]:
    """A run: an attempt is claimed, two checkpoints are saved by two processes each, the first one is removed."""
    recorder = Recorder(folder)

    def process() -> PosixStore:
        return PosixStore(folder / STORE, files=Watched(recorder))

    attempt = attempts.claim_next_attempt(process())
    recorder.mark(Claimed(attempt))
    node_0, node_1 = process(), process()
    for step in (10, 20):
        training.write(node_1, Key(attempt, step), 1)
        training.write(node_0, Key(attempt, step), 0)
        training.commit(node_0, Key(attempt, step))
        recorder.mark(Committed(Key(attempt, step)))
    prune_store(node_0, {Key(attempt, 20)}, keep_last=1)
    recorder.mark("pruned")
    return recorder.records


@cache
def small_run() -> tuple[Record, ...]:
    with TemporaryDirectory() as name:
        return tuple(recorded(Path(name), SMALL))


def crashes(records: tuple[Record, ...], samples: int, pieces: int) -> Iterator[tuple[int, Tree, list[object]]]:
    """All trees that may be found, each with the number of calls before the crash and what was promised until then."""
    disk, chance, promises = Disk(pieces), random.Random(1), []
    seen: set[int] = set()
    for number, record in enumerate(records):
        if record[0] == "mark":
            promises.append(record[1])
        else:
            disk.apply(record)
        for there in subsets(disk.atoms(), chance, samples):
            tree = disk.after_power_loss(there)
            found = hash((frozenset(tree.items()), len(promises)))
            if found not in seen:
                seen.add(found)
                yield number, tree, list(promises)


def broken(folder: Path, training: Training, promises: list[object]) -> str | None:
    """Return the promise that is broken for a reader of `folder`; None if all are kept."""
    store = PosixStore(folder / STORE)
    loaded = load(store)
    committed = max((each.key for each in promises if isinstance(each, Committed)), default=None)
    if loaded.key is not None and not is_good(training, loaded):
        return f"{loaded.key} is loaded, and is not what was saved"
    if committed is not None and (loaded.key is None or loaded.key < committed):
        return f"{committed} is lost, {loaded.key} is loaded: {loaded.fell_back}"
    for claimed in (each.attempt for each in promises if isinstance(each, Claimed)):
        try:
            attempts.check_not_superseded(store, Attempt(0, claimed.generation - 1))
        except attempts.Superseded:
            continue
        except CheckpointError as error:
            return str(error)
        return f"attempt {claimed} would be given to another run"
    return None


def check_all(folder: Path, training: Training, records: tuple[Record, ...], samples: int, pieces: int) -> int:
    shown = Materialised(folder)
    count = 0
    for number, tree, promises in crashes(records, samples, pieces):
        shown.show(tree)
        wrong = broken(folder, training, promises)
        assert wrong is None, f"after {number} of {len(records)} calls, {records[number]}: {wrong}\n{sorted(tree)}"
        count += 1
    return count


def test_power_may_go_at_any_call_and_take_whatever_was_not_synced(tmp_path: Path) -> None:
    count = check_all(tmp_path, SMALL, small_run(), samples=4, pieces=2)
    print(f"{count} different disks after {len(small_run())} calls")
    assert count > 500


@pytest.mark.chaos
@pytest.mark.timeout(1200)
def test_power_may_go_at_any_call_of_a_save_of_a_mebibyte(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "after").mkdir()
    records = tuple(recorded(tmp_path / "run", LARGE))
    print(f"{check_all(tmp_path / 'after', LARGE, records, samples=40, pieces=8)} different disks")


def synced(record: Record) -> str | None:
    """Return the name, the same in every run, of what a call makes durable; None if it makes nothing durable."""
    return f"{record[0]} {record[1]}" if record[0] in ("sync", "sync_folder") else None


def without(records: tuple[Record, ...], target: str) -> tuple[Record, ...]:
    return tuple(record for record in records if synced(record) != target)


def test_every_fsync_is_needed(tmp_path: Path) -> None:
    """Without the fsync of any one file or folder, by whatever process, something that was promised is lost."""
    shown = Materialised(tmp_path)
    judged: set[int] = set()  # most disks are those of the record without another fsync, too

    def loses(records: tuple[Record, ...]) -> bool:
        for _, tree, promises in crashes(records, samples=0, pieces=2):
            found = hash((frozenset(tree.items()), len(promises)))
            if found not in judged:
                shown.show(tree)
                if broken(tmp_path, SMALL, promises):
                    return True
                judged.add(found)
        return False

    targets = {target for record in small_run() if (target := synced(record))}
    assert len(targets) == 20
    assert [target for target in sorted(targets) if not loses(without(small_run(), target))] == []


def test_all_that_must_be_durable_is_synced() -> None:
    """Files and folders by hand, so that an fsync that is missing in the record is missed here."""
    attempt = str(key().attempt)
    folders = {
        ".", "made", "made/by", STORE, f"{STORE}/attempts", f"{STORE}/manifests", f"{STORE}/data",
        f"{STORE}/data/{attempt}", f"{STORE}/data/{attempt}/000000000010", f"{STORE}/data/{attempt}/000000000020",
    }  # fmt: skip
    assert {record[1] for record in small_run() if record[0] == "sync_folder"} == folders
    files = {record[1] for record in small_run() if record[0] == "sync"}
    parts = {f"{STORE}/{key(step).part_name(rank)}" for step in (10, 20) for rank in (0, 1)}
    assert parts < files
    manifests = sorted(name.rpartition("/")[0] for name in files - parts)
    node_manifests = [f"{STORE}/data/{attempt}/{step:012d}" for step in (10, 10, 20, 20)]
    assert manifests == [*node_manifests, *[f"{STORE}/manifests"] * 2]


# The disk itself


def test_a_disk_that_lost_nothing_shows_what_programs_saw(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    disk = Disk()
    for record in recorded(tmp_path / "run", SMALL):
        disk.apply(record)
    tree = disk.after_power_loss(set(disk.atoms()))
    files = {name: data for name, data in tree.items() if data is not None}
    assert files == everything(tmp_path / "run")


def test_a_disk_keeps_only_what_was_synced() -> None:
    disk = Disk(pieces=2)
    for record in (("create", "a"), ("write", "a", b"1234"), ("sync", "a"), ("write", "a", b"5678")):
        disk.apply(record)
    assert disk.after_power_loss(set()) == {}
    disk.apply(("sync_folder", "."))
    assert disk.after_power_loss(set()) == {"a": b"1234"}
    size, first, second = disk.atoms()
    assert disk.after_power_loss({size}) == {"a": b"1234\0\0\0\0"}
    assert disk.after_power_loss({first}) == {"a": b"123456"}
    assert disk.after_power_loss({second}) == {"a": b"1234\0\x0078"}
    disk.apply(("rename", "a", "b"))
    assert disk.after_power_loss(set()) == {"a": b"1234"}
    assert disk.after_power_loss(set(disk.atoms())) == {"b": b"12345678"}
