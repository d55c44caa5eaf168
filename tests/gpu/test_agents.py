"""The agent beside real GPUs: what it reads of the driver, waits for, and tells the ranks; and a job that crashes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from everstep.agent.system.gpu import count_gpus
from tests.agent_processes.node import SOURCE, Node
from tests.gpu.trainings import KIND, devices

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
cuda_only = pytest.mark.cuda_only

ROOT = Path(__file__).parents[2]
HOLD = """
import os, pathlib, sys, time, torch
held = torch.ones(1 << 20, device="cuda")
torch.cuda.synchronize()
told = pathlib.Path(sys.argv[1]) / "pid"
told.with_suffix(".new").write_text(str(os.getpid()))
told.with_suffix(".new").replace(told)
time.sleep(600)
"""


@cuda_only
def test_a_node_tells_of_its_gpus_and_waits_until_killed_ranks_have_given_them_back(tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="install nvidia-ml-py: the agent's query of GPUs was not tried")
    names = {torch.cuda.get_device_name(index) for index in range(len(devices()))}

    async def run() -> None:
        async with Node(tmp_path, [sys.executable, "-c", HOLD, str(tmp_path)], procs=len(devices())) as node:
            await node.call("watch", every=0.2)
            told: Any = (await node.event("Gpus"))["gpus"]
            assert {gpu["name"] for gpu in told} >= names
            assert all(gpu["uuid"].startswith("GPU-") and not gpu["problem"] for gpu in told)
            for _ in range(2):
                await node.start()
                await node.until((tmp_path / "pid").exists, "a rank that holds its GPU")
                (tmp_path / "pid").unlink()
                assert await node.stop() is None
            assert len(node.all("Gpus")) == 1, "nothing changed about them"

    assert count_gpus(os.environ) >= len(devices())
    asyncio.run(run())


@cuda_only
def test_the_driver_shows_the_process_that_holds_a_gpu(tmp_path: Path) -> None:
    """A node can tell by it that a killed rank still holds one; between PID namespaces drivers show none."""
    pytest.importorskip("pynvml", reason="install nvidia-ml-py: the agent's query of GPUs was not tried")

    async def run() -> None:
        async with Node(tmp_path, [sys.executable, "-c", HOLD, str(tmp_path)]) as node:
            await node.start()
            await node.until((tmp_path / "pid").exists, "a rank that holds its GPU")
            pid = int((tmp_path / "pid").read_text())
            shown = [each for gpu in await node.call("gpus") for each in gpu["pids"]]
            os.kill(pid, signal.SIGKILL)
            assert await node.stop() is None
            if not shown:
                pytest.skip("this driver shows no processes, as in some virtual machines")
            assert pid in shown

    asyncio.run(run())


TRAIN = """
import os, torch, everstep
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

kind = os.environ["EVERSTEP_TEST_DEVICE"]
device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else 0)
if kind == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if kind == "cuda" else "gloo")
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(64, 64).to(device))
optimizer = torch.optim.AdamW(model.parameters())
with everstep.checkpointer(every_steps=1, policy="wait") as ckpt:
    start = ckpt.restore(model=model, optimizer=optimizer)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} begins at {start.step}", flush=True)
    for step in range(start.step + 1, 9):
        optimizer.zero_grad()
        model(torch.randn(8, 64, device=device)).square().mean().backward()
        optimizer.step()
        ckpt.step(step)
        if step == 5 and start.step == 0:
            ckpt.wait()
            os._exit(3)
print("trained", flush=True)
dist.destroy_process_group()
"""


def test_a_job_on_all_gpus_that_crashes_goes_on_where_it_was(tmp_path: Path) -> None:
    """By `everstep run`: the agents, launching, and checkpoints in memory together."""
    (tmp_path / "train.py").write_text(TRAIN)
    procs = len(devices())
    manifest = {
        "apiVersion": "everstep.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "gpus"},
        "spec": {
            "image": "none",
            "command": ["python", str(tmp_path / "train.py")],
            "numNodes": 1,
            "numProcPerNode": procs,
            "resources": {"limits": {"nvidia.com/gpu": procs}} if KIND == "cuda" else {"requests": {"cpu": "1"}},
            "distribution": {"torch": {}},
        },
    }
    (tmp_path / "job.json").write_text(json.dumps(manifest))
    path = os.pathsep.join([str(SOURCE), str(ROOT / "operator" / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "everstep.cli", "run", "-f", str(tmp_path / "job.json")]
    command += ["--base", str(tmp_path / "base"), "--python", sys.executable]
    environ = {**os.environ, "PYTHONPATH": path}
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240, check=False)
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, said
    begins = [line.rsplit(" ", 1)[1] for line in ran.stdout.splitlines() if " begins at " in line]
    assert begins == ["0"] * procs + ["5"] * procs, said
    assert ran.stdout.count("trained") == procs
