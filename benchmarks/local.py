"""Measures what the agent costs the ranks that it carries: no cluster, the same agent as local processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from benchmarks.measure import REPEATS, Row, alternate
from e2e.harness import training_job

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
    for _ in range(REPEATS):
        command = [sys.executable, "-m", "benchmarks.crowd", str(agents)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=400, check=True)
        told = json.loads(done.stdout.splitlines()[-1])
        row.samples.setdefault("ours", []).append(agents / max(1, told["joined"]))
        row.samples.setdefault("floor", []).append(1.0)
        row.samples.setdefault("seconds", []).append(told["seconds"])
    return row
