"""A process that has nothing sharded imports nothing that is for shards: it would wait a second for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.torch

PROGRAM = """
import sys
import torch
import torch.utils.data
from torch import nn

model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.rand(4, 3)).sum().backward()
optimizer.step()
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
before = set(sys.modules)

import everstep

objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "state": {"best": 0.5}}
for step in (1, 2):
    memory, times = everstep.MemoryOptions(directory=sys.argv[1] + "/memory"), everstep.TimeOptions(linger=1.0)
    with everstep.checkpointer(sys.argv[1] + "/store", memory=memory, times=times) as ckpt:
        assert ckpt.restore(**objects).step == step - 1
        ckpt.save(step)
        ckpt.wait()
everstep.load(sys.argv[1] + "/store")
everstep.load_into(sys.argv[1] + "/store", model=model, optimizer=optimizer)
slow = (
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo",
    "torch.distributed.algorithms._checkpoint",
)
print(*sorted(each for each in set(sys.modules) - before if each.startswith(slow)))
"""


def test_a_plain_save_and_restore_import_nothing_for_shards(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == []
