"""The memory into which a restore reads, and its later use."""

from __future__ import annotations

import mmap
import multiprocessing
import subprocess
import sys
from pathlib import Path

from everstep.checkpoint.format.manifest import CHUNK, Attempt, CheckpointPart, Chunk, Key, Manifest, align_offset
from everstep.checkpoint.restore.node_cache import NodeCache, iterate_runs
from everstep.checkpoint.slots.slot_files import secure_directory

SIZE = 40 * mmap.PAGESIZE
KEY = Key(Attempt(0, 1), 20)
MANIFEST = Manifest(
    KEY, 1, 1, "", "xxh3_64", 0.0, (CheckpointPart(f"{KEY.data_prefix}0.part", SIZE, "0" * 16),), {}, {}
)


def filled(folder: Path, *, shared: bool) -> tuple[NodeCache, memoryview]:
    cache = NodeCache(folder / "memory", "here", shared=shared)
    cache.create()
    part = cache.part(0, MANIFEST)
    part[:] = b"x" * SIZE
    return cache, part


def test_pages_around_what_stays_in_use_go_back(tmp_path: Path) -> None:
    cache, part = filled(tmp_path, shared=False)
    page = mmap.PAGESIZE
    cache.keep({0: [(20 * page + 64, page), (3 * page, 2 * page)]})  # the first lies across two pages
    kept = {number for number in range(40) if part[number * page] == ord("x")}
    assert kept == {3, 4, 20, 21}
    assert bytes(part[20 * page + 64 : 21 * page + 64]) == b"x" * page
    cache.keep({})
    assert bytes(part) == bytes(SIZE)


def test_a_child_that_is_forked_meanwhile_keeps_no_memory_that_all_ranks_of_a_node_read(tmp_path: Path) -> None:
    cache, part = filled(tmp_path, shared=True)
    cache.keep({})
    assert bytes(part) == b"x" * SIZE, "other ranks of the node may still read it"
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=lambda: theirs.send(Path("/proc/self/maps").read_text()))
    child.start()
    maps = ours.recv()
    child.join()
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    assert str(tmp_path) not in maps


def test_only_memory_that_is_nobody_elses_is_given_away(tmp_path: Path) -> None:
    assert filled(tmp_path, shared=False)[0].gives(0)
    assert not filled(tmp_path, shared=True)[0].gives(0), "other ranks of the node read it"


def test_small_units_are_read_together_and_parts_apart() -> None:
    length = CHUNK // 3 - 5000
    units = [Chunk(part, 4096 + i * align_offset(length), length, "") for part in (0, 1) for i in range(5)]
    assert [len(run) for run in iterate_runs(units)] == [3, 2, 3, 2]
    assert [unit for run in iterate_runs(units) for unit in run] == units
    apart = [unit for unit in units if unit.offset != 4096 + align_offset(length)]
    assert [len(run) for run in iterate_runs(apart)] == [1, 3, 1, 3], "what lies between is not read"


# Not for ever: who makes it and who removes it take turns, and one of them would lose each time.
REMOVES = """
import contextlib, os, sys
removed = pause = 0
while removed < 60:
    with contextlib.suppress(OSError):
        os.rmdir(sys.argv[1])
        removed += 1
        pause = (7 * pause + 97) % 1009
        for _ in range(pause):
            pass
"""


def test_a_folder_that_other_processes_remove_at_any_moment_is_no_error(tmp_path: Path) -> None:
    folder = tmp_path / "memory"
    for _ in range(10):
        with subprocess.Popen([sys.executable, "-I", "-S", "-c", REMOVES, str(folder)]) as removing:
            try:
                while removing.poll() is None:
                    secure_directory(folder)
                    for _ in range(20):
                        NodeCache(folder, "here", shared=True)
            finally:
                removing.kill()
