"""Whatever process of a save is killed at whatever call: the last good state is loaded, and the next save works."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.checkpoint.catalog.candidates import verify_checkpoint
from everstep.checkpoint.store.posix import PosixStore
from tests.checkpoint.builders import Training, is_good, key, load
from tests.checkpoint.crash import (
    CALLS,
    Point,
    count_calls,
    everything,
    in_memory,
    killed,
    node_task,
    points,
    prune_task,
)

SMALL = Training(rows=40, chunk=1024)
LARGE = Training(rows=8000, chunk=65536)  # 1 MB in all, 1 KiB short of a mebibyte
ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with in_memory(tmp_path) as found:
        yield found


def copied(base: Path, to: Path) -> PosixStore:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(base, to)
    return PosixStore(to)


def check_every_point(folder: Path, training: Training, first: bool) -> int:
    """Kills the save of step 20 everywhere; the number of points."""
    base, trial = folder / "base", folder / "trial"
    base.mkdir()
    if not first:
        training.save(PosixStore(base), key(10))
    before = None if first else key(10)
    # Node 0 comes last: its commit finds what the others have written.
    copied(base, trial)
    traces = [(node, count_calls(trial, node_task, training, key(20), node)) for node in (1, 0)]
    assert load(PosixStore(trial)).key == key(20)
    links = [number for number, name in enumerate(traces[1][1]) if name == "link"]
    assert len(links) == 2  # its node manifest, and the commit
    for node, trace in traces:
        for point in points(len(trace)):
            store = copied(base, trial)
            if node == 0:
                node_task(store, training, key(20), 1)
            killed(trial, node_task, training, key(20), node, point)
            loaded = load(store)
            committed = node == 0 and (point.number, point.after) >= (links[1], True)
            assert loaded.key == (key(20) if committed else before), f"node {node}, {point}, {trace[point.number]}"
            assert loaded.key is None or is_good(training, loaded), f"node {node}, {point}"
            assert loaded.fell_back == ()
            training.save(store, key(15, generation=2))
            assert is_good(training, load(store))
            assert verify_checkpoint(store, key(15, generation=2))
    return sum(2 * len(trace) for _, trace in traces)


def test_a_save_that_is_killed_at_any_call_loses_nothing(folder: Path) -> None:
    count = check_every_point(folder, SMALL, first=False)
    print(f"killed at {count} points")
    assert count > 60


def test_the_first_save_may_be_killed_at_any_call(folder: Path) -> None:
    assert check_every_point(folder, SMALL, first=True) > 60


@pytest.mark.chaos
def test_a_save_of_a_mebibyte_may_be_killed_at_any_call(folder: Path) -> None:
    print(f"killed at {check_every_point(folder, LARGE, first=False)} points")


def test_retention_that_is_killed_at_any_call_loses_nothing(folder: Path) -> None:
    base, trial = folder / "base", folder / "trial"
    for step in (10, 20, 30):
        SMALL.save(PosixStore(base), key(step))
    copied(base, trial)
    trace = count_calls(trial, prune_task, SMALL, key(30), 0)
    # Of each two parts, two announcements, two node manifests, one index; and what the store's clock was asked with.
    assert trace.count("remove") == 2 * 7 + 1
    for point in points(len(trace)):
        store = copied(base, trial)
        killed(trial, prune_task, SMALL, key(30), 0, point)
        loaded = load(store)
        assert loaded.key == key(30), str(point)
        assert is_good(SMALL, loaded)
        prune_task(store, SMALL, key(30), 0)
        assert {name.split("/")[0] for name in names(store)} >= {"manifests", "data", "latest"}
        assert is_good(SMALL, load(store))


def names(store: PosixStore) -> set[str]:
    return {entry.name for entry in store.list("")}


CALL = re.compile(r"^(?:\d+ +)?(\w+)\((.*)\) += (-?\d+)")
KINDS = {
    "mkdir": "make_folder", "openat": "create", "write": "write", "link": "link", "rename": "rename",
    "unlink": "remove", "rmdir": "remove_folder",
}  # fmt: skip


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_no_call_of_a_save_goes_past_the_seam(folder: Path) -> None:
    """The seam recorded each mutating call that the kernel saw: none was left out of the tests above."""
    mine, theirs = folder / "mine", folder / "theirs"
    for node in (1, 0):
        recorded = Counter(count_calls(mine, node_task, SMALL, key(20), node))
        assert seen_by_the_kernel(theirs, node) == recorded
    assert everything(mine) == everything(theirs)


def seen_by_the_kernel(folder: Path, node: int) -> Counter[str]:
    """Calls by the seam's names that touch `folder` or lie on the way to it, from strace."""
    out = folder.with_suffix(".strace")
    traced = "trace=%file,write,pwrite64,writev,fsync,fdatasync,ftruncate,fallocate,sync,syncfs,sync_file_range"
    program = [sys.executable, "-B", "-m", "tests.checkpoint.crash", str(folder), "20", str(node), str(SMALL.rows)]
    command = ["strace", "-f", "-y", "-s", "0", "-e", traced, "-o", str(out), *program]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'trainer-image' / 'src'}", "PATH": "/usr/bin:/bin"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=60)
    counts: Counter[str] = Counter()
    unknown = []
    for line in out.read_text().splitlines():
        found = CALL.match(line)
        if not found:
            continue
        name, arguments, _ = found.groups()
        if name in ("fsync", "fdatasync"):
            is_folder = not re.search(r"\.part>|/\.new-[0-9a-f]+>", arguments)
            counts["sync_folder" if is_folder else "sync"] += 1
        elif str(folder) not in arguments:
            continue
        elif name == "openat":
            counts["create"] += "O_CREAT" in arguments
        elif name in KINDS:
            counts[KINDS[name]] += 1
        elif re.search(r"write|trunc|alloc|sync|link|rename|mk|chmod|chown|utime|xattr", name) and name != "readlink":
            unknown.append(line)
    assert unknown == []
    return +counts


def test_points_are_before_and_after_each_call() -> None:
    assert points(2) == [Point(0, False), Point(0, True), Point(1, False), Point(1, True)]
    assert {"link", "sync", "sync_folder", "write", "create"} <= set(CALLS)
