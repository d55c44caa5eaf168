"""Several processes with GPUs: over gloo on one, over NCCL, with a device that each sees; and what the agent asks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from tests.gpu.processes import start_ranks
from tests.gpu.ranks import train
from tests.gpu.trainings import Training, assert_same, devices, restored, slots_folder

pytestmark = pytest.mark.gpu
cuda_only = pytest.mark.cuda_only


def ranks(folder: Path, world: int, backend: str) -> None:
    with slots_folder() as memory:
        start_ranks(train, (world, backend, str(folder), str(memory), 0), world)
    meant: dict[str, torch.Tensor] = torch.load(folder / "meant.pt")
    assert_same(restored(folder / "store", Training(devices()[0]), 3), meant)


def test_several_processes_on_one_gpu_over_gloo(tmp_path: Path) -> None:
    ranks(tmp_path, 2, "gloo")


@cuda_only
def test_ddp_over_nccl_on_all_gpus(tmp_path: Path) -> None:
    ranks(tmp_path, len(devices()), "nccl")


SEES = """
import sys, torch
from pathlib import Path
from tests.gpu.trainings import Training, restored, session
store, memory = map(Path, sys.argv[1:])
assert torch.cuda.device_count() == 1
training = Training(torch.device("cuda", 0))
with session(store, memory) as ckpt:
    ckpt.track(**training.objects())
    training.step()
    torch.save(training.state(), store.with_name("meant.pt"))
    ckpt.save(1)
    training.step()
"""


@cuda_only
def test_a_rank_that_sees_one_gpu_only(tmp_path: Path) -> None:
    """As the agent sets it for each rank where a script asks for that."""
    with slots_folder() as memory:
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": str(len(devices()) - 1)}
        subprocess.run([sys.executable, "-c", SEES, str(tmp_path / "store"), str(memory)], env=env, check=True)
    meant: dict[str, torch.Tensor] = torch.load(tmp_path / "meant.pt")
    assert_same(restored(tmp_path / "store", Training(devices()[0]), 1), meant)


@cuda_only
def test_the_agent_reads_all_gpus_of_the_driver() -> None:
    """By the query that it gives to the image's Python, on the real library."""
    pytest.importorskip("pynvml", reason="install nvidia-ml-py: the agent's query of GPUs was not tried")
    from everstep.agent.system import gpu

    ran = subprocess.run([sys.executable, "-c", gpu._QUERY], capture_output=True, text=True, timeout=60, check=True)

    class Ran:
        async def run(self, *_: Any, **__: Any) -> tuple[int, str]:
            return 0, ran.stdout

    found: Any = asyncio.run(gpu.query_devices(Ran(), os.environ))  # type: ignore[arg-type]
    assert len(found) >= len(devices())
    assert all(each.uuid.startswith("GPU-") and each.name and not each.error for each in found)
