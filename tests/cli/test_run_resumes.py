"""`everstep run` of a program that saves: what is killed goes on where it was, and ends with the same weights."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

pytest.importorskip("torch")
from everstep.checkpoint.catalog.candidates import list_candidates
from everstep.checkpoint.store.posix import PosixStore

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]

STEPS = 160  # those that are left after a kill take longer than ranks need to hear of it
TRAINS = f"""
import os, time, torch, everstep
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(4, 4)
parallel = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with everstep.checkpointer(every_steps=5) as checkpoints:
    start = checkpoints.restore(model=model, optimizer=optimizer)
    for step in range(start.step + 1, {STEPS} + 1):
        data = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        parallel(data).square().sum().backward()
        optimizer.step()
        checkpoints.step(step)
        everstep.progress(step)
        print(f"rank {{dist.get_rank()}} pid {{os.getpid()}} did step {{step}}", flush=True)
        time.sleep(0.05)
print("weights", model.weight.double().sum().item(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the job in a folder for all temporary files, whose memory for copies lies there too."""
    started: list[subprocess.Popen[str]] = []
    (tmp_path / "train.py").write_text(TRAINS)
    spec = {
        "image": "none", "command": [sys.executable, "train.py"], "numNodes": 2, "numProcPerNode": 1,
        "restart": {"application": 3, "maxBackoff": "0s"}, "checkpoint": {"store": "s3://of-the-cluster/run"},
    }  # fmt: skip
    job = {"apiVersion": "everstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "saves"}, "spec": spec}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    (tmp_path / "memory").mkdir()

    def run(*options: str, keeps_memory: bool = True) -> subprocess.Popen[str]:
        environ = {**os.environ, "TMPDIR": str(tmp_path), "COLUMNS": "300", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        environ["EVERSTEP_CHECKPOINT_MEMORY"] = str(tmp_path / "memory" if keeps_memory else tmp_path / "fresh")
        process = subprocess.Popen(
            [sys.executable, "-m", "everstep.cli", "run", "-f", "job.yaml", *options],
            cwd=tmp_path, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def wait_for_step(process: subprocess.Popen[str], rank: int, step: int) -> int:
    """Read until a rank has done a step, and return its process."""
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(rf"rank {rank} pid (\d+) did step (\d+)", line)
        if found and int(found[2]) >= step:
            return int(found[1])
    raise AssertionError("everstep has ended")


def finish(process: subprocess.Popen[str]) -> tuple[str, set[str]]:
    """Return all that is printed until the end, and the weights that the ranks end with."""
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    return out, set(re.findall(r"weights (\S+)", out))


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 120
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"{pid} outlives its job"
        time.sleep(0.05)


def test_a_killed_rank_and_a_killed_command_cost_no_more_than_the_steps_since_the_last_save(start: Start) -> None:
    _, undisturbed = finish(start())
    assert len(undisturbed) == 1

    process = start("--new")
    os.kill(wait_for_step(process, 1, 17), signal.SIGKILL)
    assert process.stdout is not None
    told = next(line for line in process.stdout if "continues from step" in line)
    assert int(re.findall(r"step (\d+) from memory", told)[0]) in {10, 15, 20}
    rank = wait_for_step(process, 0, 32)
    process.kill()
    wait_until_gone(rank)

    out, weights = finish(start())  # the same command
    assert re.search(r"continues from the checkpoints of an earlier run in \S+; --new begins anew", out)
    assert int(re.findall(r"generation 1.1 continues from step (\d+)", out)[0]) >= 25
    assert weights == undisturbed


ENDS = """
import os, sys, torch, everstep

checkpoints = everstep.checkpointer(every="1h")
checkpoints.restore(weight=torch.zeros(4_000_000))
checkpoints.save(7)
if sys.argv[1] == "at once":
    os._exit(0)
"""


@pytest.mark.parametrize("how", ["at once", "as usual"])
def test_what_was_saved_last_is_stored_though_the_session_was_left_open(start: Start, tmp_path: Path, how: str) -> None:
    (tmp_path / "train.py").write_text(ENDS)
    job = yaml.safe_load((tmp_path / "job.yaml").read_text())
    job["spec"].update(command=[sys.executable, "train.py", how], numNodes=1)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    finish(start("--base", "base"))
    stored = PosixStore(tmp_path / "base" / "checkpoints" / "1")
    assert [key.step for key in list_candidates(stored)] == [7]


@pytest.mark.chaos
def test_what_memory_has_lost_comes_from_the_store(start: Start) -> None:
    process = start()
    rank = wait_for_step(process, 0, 40)
    process.kill()
    wait_until_gone(rank)
    out, _ = finish(start(keeps_memory=False))
    assert int(re.findall(r"continues from step (\d+) from the store", out)[0]) >= 25


def test_a_run_after_a_success_trains_from_the_beginning(start: Start) -> None:
    finish(start())
    out, _ = finish(start())
    assert "did step 1\n" in out
    assert "not in s3://of-the-cluster/run" in out
