"""Only processes that we started are ever signalled: a pid alone is not enough."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from e2e.cluster.processes import ProcessTable, marked, parse_stat
from e2e.cluster.waiting import until

STAT = "4242 ({name}) {state} 1 4242 4242 0 -1 4194560 90 0 0 0 0 0 0 0 20 0 1 0 {ticks} 2940928 230 184467 1 1"


@pytest.fixture
def table(tmp_path: Path) -> ProcessTable:
    return ProcessTable(tmp_path / "processes")


@pytest.mark.parametrize("name", ["sleep", "a b", "evil) R 1 2 3", "((", "))"])
def test_start_time_is_read_whatever_the_program_is_called(name: str) -> None:
    assert parse_stat(STAT.format(name=name, state="S", ticks=777)) == ("S", 777)


def test_a_zombie_is_not_alive(table: ProcessTable, tmp_path: Path) -> None:
    ended = table.start("ended", ["true"], tmp_path / "log")

    def found() -> list[int]:
        return [process.pid for process in marked(str(table.folder))]

    until(lambda: found() == [started.pid], "the mark of the program", timeout=60)
    ProcessTable(table.folder).sweep()
    assert not started.alive


def test_many_may_be_stopped_at_once(table: ProcessTable, tmp_path: Path) -> None:
    names = [f"sleeper-{number}" for number in range(12)]
    started = [table.start(name, ["sleep", "1000"], tmp_path / "log") for name in names]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda name: ProcessTable(table.folder).stop([name]), names))
    assert not any(process.alive for process in started)


def test_sweeping_spares_other_tables(table: ProcessTable, tmp_path: Path) -> None:
    other = ProcessTable(tmp_path / "other")
    started = other.start("sleeper", ["sleep", "1000"], tmp_path / "log")
    table.sweep()
    assert started.alive
    other.stop()


def test_die_with_parent_leaves_nothing_behind_a_killed_test(tmp_path: Path) -> None:
    program = f"""
        import os
        from pathlib import Path
        from e2e.cluster.processes import ProcessTable
        table = ProcessTable(Path({str(tmp_path / "processes")!r}))
        table.start("sleeper", ["sleep", "1000"], Path({str(tmp_path / "log")!r}), die_with_parent=True)
        until_exec = Path(f"/proc/{{table.all()[0].pid}}/comm")
        while until_exec.read_text().strip() != "sleep": pass
        os.kill(os.getpid(), 9)
    """
    here = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=here, check=False)
    (left,) = ProcessTable(tmp_path / "processes").all()
    until(lambda: not left.alive, "the orphan is killed", 5)
