"""A forward that sets the mode of a part of the model, as of a frozen teacher, has it wherever the model is cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as f  # noqa: E402

from everstep.pipeline import EngineOptions, PlanOptions, pipeline  # noqa: E402

pytestmark = pytest.mark.torch


class Teacher(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Goes by its training flag in its own code, in modules, and where it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        h = self.drop(self.norm(self.first(x)))
        return self.last(f.dropout(h, 0.5, self.training)) * (2.0 if self.training else 1.0)


class Distilled(nn.Module):  # type: ignore[misc]
    """Learns from a teacher that is to evaluate, whatever mode a script sets."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), Teacher()
        self.teacher.requires_grad_(False)

    def forward(self, x: Any) -> Any:
        self.teacher.eval()
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x) - wanted


def squares(output: Any, target: Any) -> Any:
    return f.mse_loss(output, target)


def test_a_teacher_that_forward_puts_in_evaluation_evaluates_wherever_the_model_is_cut(group: None) -> None:
    torch.manual_seed(0)
    model, x, target = Distilled().double(), torch.randn(8, 4).double(), torch.randn(8, 3).double()
    alone = copy.deepcopy(model)
    options: Any = {"plan": PlanOptions(costs="counted"), "engine": EngineOptions(heartbeat=None)}
    for _ in range(2):  # a model that is given again, too
        with pipeline(model, x, squares, targets=target, stages=4, microbatches=2, **options) as run:
            for train in (True, False, True):
                run.train(train)
                alone.train(train)
                loss = (run.step if train else run.evaluate)(x, target).loss
                assert abs(loss - squares(alone(x), target).item()) < 1e-12
            buffers = dict(alone.named_buffers())
            assert all(torch.equal(each, buffers[name]) for name, each in run.named_buffers())


@pytest.fixture
def group() -> Any:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()
