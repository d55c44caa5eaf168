"""A pipeline computes what one process computes, whatever the model, the cut, the schedule and the batch."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch

from tests.pipeline.training import Setting, alone, apart, piped

pytestmark = pytest.mark.torch

SETTINGS = [
    Setting("mlp", "simple", 2, 2),
    Setting("mlp", "1f1b", 4, 4, samples=11, replicas=2, microbatches=3),
    Setting("mlp", "zb-h1", 4, 4, samples=10),
    Setting("unet", "1f1b", 4, 4, samples=9),
    Setting("unet", "zb-v", 4, 2, samples=7),
    Setting("unet", "interleaved", 4, 2, replicas=2),
    Setting("gpt", "1f1b", 3, 3, samples=7),
    Setting("gpt", "zb-h1", 3, 3, replicas=2, microbatches=3),
    Setting("gpt", "zb-v", 4, 2, samples=5),
    Setting("t5", "1f1b", 4, 4, samples=9, microbatches=4),
    Setting("t5", "zb-interleaved", 4, 2, samples=9, replicas=2),
    Setting("experts", "1f1b", 3, 3, samples=6),
    Setting("experts", "zb-h1", 2, 2, samples=7, replicas=2),
    Setting("custom", "zb-h1", 3, 3, samples=10),
    Setting("custom", "1f1b", 2, 2, replicas=2),
    Setting("pair", "zb-v", 2, 1, samples=5, microbatches=3),
    Setting("pair", "simple", 3, 3, samples=5, microbatches=3),
    Setting("resnet", "1f1b", 3, 3, samples=8, microbatches=2),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_weights_after_some_steps_are_those_of_one_process(setting: Setting) -> None:
    torch.set_num_threads(1)
    assert apart(piped(setting), alone(setting)) < 1e-10
