"""Only processes that we started are ever signalled: a pid alone is not enough."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from e2e.cluster.ports import free_ports
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
    until(lambda: not ended.alive, "a child that nobody waited for counts as ended", 5)
    assert Path(f"/proc/{ended.pid}").exists()
    table.stop()


def test_stopped_means_that_its_ports_are_free(table: ProcessTable, tmp_path: Path) -> None:
    """The main thread of a program dies before the others; they hold its sockets."""
    (port,) = free_ports(1)
    program = f"""
        import socket, threading, time
        server = socket.create_server(("127.0.0.1", {port}))
        for _ in range(200):
            threading.Thread(target=time.sleep, args=(1000,)).start()
        print("ready", flush=True)
        time.sleep(1000)
    """
    for _ in range(5):
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        table.start("server", [sys.executable, "-c", textwrap.dedent(program)], log)
        until(lambda log=log: "ready" in log.read_text(), "the server listens", 10)  # type: ignore[misc]
        # Another table: not the parent, whose wait would hide the difference.
        ProcessTable(table.folder).stop()
        socket.create_server(("127.0.0.1", port)).close()


def test_a_recorded_process_is_found_by_another_table_and_stopped(table: ProcessTable, tmp_path: Path) -> None:
    started = table.start("sleeper", ["sleep", "1000"], tmp_path / "log")
    other = ProcessTable(table.folder)
    assert other.find("sleeper") == started
    other.stop(["sleeper"])
    assert not started.alive
    assert table.all() == []


@pytest.mark.parametrize("change", [{"ticks": 1}, {"boot": "another boot"}])
def test_a_recycled_pid_is_never_killed(table: ProcessTable, tmp_path: Path, change: dict[str, object]) -> None:
    running = table.start("sleeper", ["sleep", "1000"], tmp_path / "log")
    impostor = dataclasses.replace(running, **change)  # type: ignore[arg-type]
    assert not impostor.alive
    impostor.kill()
    assert running.alive
    table.stop()


def test_a_process_whose_record_was_never_written_is_swept(table: ProcessTable, tmp_path: Path) -> None:
    started = table.start("sleeper", ["sleep", "1000"], tmp_path / "log")
    (table.folder / "sleeper.json").unlink()

    def found() -> list[int]:
        return [process.pid for process in marked(str(table.folder))]

    # The kernel shows a program's environment a moment after whoever started it has heard that it runs.
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
