"""Measures what the agent costs the ranks that it carries: no cluster, the same agent as local processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.measure import FEWEST, REPEATS, Row, alternate
from e2e.harness import training_job

LARGE = 2000

# A step of arithmetic in one thread; progress is reported at every step when somebody listens.
STEP = """
import hashlib, os, statistics, sys, time
block = b'x' * 4_000_000
progress = os.environ.get('EVERSTEP_PROGRESS')
fifo = os.open(progress, os.O_WRONLY | os.O_NONBLOCK) if progress else None
times = []
for step in range(300):
    began = time.perf_counter()
    hashlib.sha256(block).digest()
    if fifo is not None:
        os.write(fifo, b'step=%d total=300 loss=0.5\\n' % step)
    times.append(time.perf_counter() - began)
open(os.environ['RESULT'] + os.environ.get('RANK', '0'), 'w').write(str(statistics.median(times)))
"""

# A step that waits a tenth of a second for a device and prints 1,000 lines: a write that blocks makes it longer.
FLOOD = """
import os, statistics, sys, time
line = 'x' * 79 + '\\n'
times = []
for step in range(100):
    began = time.perf_counter()
    time.sleep(0.1)
    for _ in range(10):
        sys.stdout.write(line * 100)
    sys.stdout.flush()
    times.append(time.perf_counter() - began)
open(os.environ['RESULT'] + os.environ.get('RANK', '0'), 'w').write(str(statistics.median(times)))
"""


def under_agent(source: str, ranks: int) -> float:
    """Return the seconds of the ranks' median step, and of the worst, under `everstep run`."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "step"
        env = [{"name": "RESULT", "value": str(result)}]
        job = training_job("bench", [sys.executable, "-c", source], numProcPerNode=ranks, env=env)
        manifest = Path(folder) / "job.yaml"
        manifest.write_text(yaml.safe_dump(job))
        command = [sys.executable, "-m", "everstep.cli", "run", "-f", str(manifest), "--base", f"{folder}/base"]
        with (Path(folder) / "log").open("wb") as log:
            subprocess.run(command, stdout=log, stderr=log, check=True, timeout=300)
        return worst(result, ranks)


def alone(source: str, ranks: int) -> float:
    """Run the same ranks as plain processes that write to files."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "step"
        started = []
        for rank in range(ranks):
            environment = {**os.environ, "RESULT": str(result), "RANK": str(rank)}
            with (Path(folder) / f"log-{rank}").open("wb") as log:
                started.append(subprocess.Popen([sys.executable, "-c", source], stdout=log, env=environment))
        for process in started:
            if process.wait(300) != 0:
                raise AssertionError("a rank of the floor failed")
        return worst(result, ranks)


def worst(result: Path, ranks: int) -> float:
    return max(float(Path(f"{result}{rank}").read_text()) for rank in range(ranks))


def agent_overhead() -> Row:
    row = Row("agent-overhead", "s/step", 1.005)
    return alternate(row, lambda: under_agent(STEP, 1), lambda: alone(STEP, 1), repeats=7)


def log_flood() -> Row:
    row = Row("log-flood", "s/step", 1.02)
    return alternate(row, lambda: under_agent(FLOOD, 8), lambda: alone(FLOOD, 8))


def leader_1200(agents: int = 1200) -> Row:
    """Agents joined to one leader that may open 1,024 files at first: all in one generation."""
    row = Row("leader-1200", "wanted/joined", 1.0)
    for told in gatherings(agents, REPEATS):
        row.samples.setdefault("ours", []).append(agents / max(1, told["joined"]))
        row.samples.setdefault("floor", []).append(1.0)
        row.samples.setdefault("seconds", []).append(told["seconds"])
    return row


def leader_2000_start() -> Row:
    return _of_gatherings("leader-2000-start", "s", 20.0, lambda told: told["seconds"], "joined")


def leader_2000_restart() -> Row:
    return _of_gatherings("leader-2000-restart", "s", 20.0, lambda told: told["restart_seconds"], "restarted")


def leader_2000_memory() -> Row:
    return _of_gatherings("leader-2000-memory", "MB", 200.0, lambda told: told["leader_bytes"] / 1e6, "joined")


def leader_2000_beats() -> Row:
    return _of_gatherings("leader-2000-beats", "s", 2.0, lambda told: told["round_seconds"], "joined")


def _of_gatherings(name: str, unit: str, target: float, value: Callable[[Any], float], complete: str) -> Row:
    row = Row(name, unit, target, absolute=True)
    told = gatherings(LARGE, FEWEST)
    if any(each[complete] != LARGE for each in told):
        raise AssertionError(f"of {LARGE} agents, {[each[complete] for each in told]} {complete}")
    row.samples["ours"] = [value(each) for each in told]
    return row


@cache
def gatherings(agents: int, repeats: int) -> list[Any]:
    """Return what `benchmarks.crowd` measures, of several runs."""
    command = [sys.executable, "-m", "benchmarks.crowd", str(agents)]
    runs = [subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=True) for _ in range(repeats)]
    return [json.loads(run.stdout.splitlines()[-1]) for run in runs]
