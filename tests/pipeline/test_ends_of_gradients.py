"""A value that a later stage or a loss does not differentiate through gives its makers no gradient, as in one process:
not one of zeros, by which an optimizer with weight decay would change them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline import EngineOptions, PlanOptions, pipeline  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

X = torch.linspace(-1.0, 1.0, 40, dtype=torch.float64).view(8, 5)
CUTS = ({"head": 1}, {"body": 1}, {"gate": 0, ":argmax": 1, "body": 1}, {"target": 0, ":detach": 1, "head": 1})


class Net(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Experts are chosen by a gate that learns nothing, and a target is compared with; neither was frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.gate, self.target, self.body, self.head = (nn.Linear(5, 5) for _ in range(5))
        self.auxiliary = nn.Linear(5, 2)
        self.double()

    def forward(self, x: Any) -> Any:
        x = self.first(x).tanh()
        gate, target = self.gate(x), self.target(x)
        chosen = gate.argmax(-1, keepdim=True) > 1
        found = self.body(x).tanh()
        found = torch.where(chosen, found, -found)
        with torch.no_grad():
            scale = gate.abs().mean(-1, keepdim=True)
        return self.head(found) * scale + target.detach(), self.auxiliary(x)


def squared(output: Any, target: Any) -> Any:
    return (output[0] - target).square().mean()  # the rest of the output is for others


def _train(step: Any, parameters: Any) -> None:
    optimizer = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)
    for _ in range(3):
        step(optimizer)
        optimizer.step()


def _piped(rank: int) -> list[dict[str, Any]]:
    every = []
    for stage_of in CUTS:
        for schedule in ("1f1b", "zb-h1"):
            with pipeline(
                Net(),
                X,
                squared,
                targets=X,
                microbatches=2,
                schedule=schedule,
                plan=PlanOptions(stage_of=stage_of, costs="counted"),
                engine=EngineOptions(heartbeat=20.0),
            ) as run:
                _train(lambda optimizer, run=run: run.step(X, X.flip(0)), run.groups())
                every.append({name: each.detach().clone() for name, each in run.named_parameters()})
    return every


def test_a_value_that_is_used_without_gradients_gives_none_back_wherever_the_cut_falls() -> None:
    model = Net()

    def step(optimizer: Any) -> None:
        optimizer.zero_grad()
        squared(model(X), X.flip(0)).backward()

    _train(step, model.parameters())
    for name in ("gate", "target", "auxiliary"):
        assert torch.equal(model.get_submodule(name).weight, Net().get_submodule(name).weight)
    for one, other in zip(*ranks.run(2, _piped), strict=True):
        for name, each in model.named_parameters():
            torch.testing.assert_close((one | other)[name], each.detach(), rtol=1e-9, atol=1e-11, msg=name)


class Tasks(nn.Module):  # type: ignore[misc]
    """Two tasks, of which the first has its head in an earlier stage than the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.own, self.body, self.head = (nn.Linear(5, 5) for _ in range(4))
        self.double()

    def forward(self, x: Any) -> Any:
        x = self.first(x).tanh()
        return {"one": self.own(x), "other": self.head(self.body(x).tanh())}


def by_task(output: Any, targets: Any) -> Any:
    """The loss of the one result or of the other, by the task of the batch."""
    return (output["one" if targets["task"][0] == 0 else "other"] - targets["y"]).square().mean()


def _give_task(task: int) -> dict[str, Any]:
    return {"y": X.flip(0), "task": torch.full((len(X),), task)}


def _train_by_turns(step: Any, optimizer: Any) -> None:
    for task in (0, 1, 1, 0, 1):
        step(_give_task(task))
        optimizer.step()


def _piped_by_turns(rank: int) -> list[dict[str, Any]]:
    every = []
    for microbatches, targets in ((2, _give_task(0)), (2, _give_task(1)), (2, None), (1, _give_task(0))):
        with pipeline(
            Tasks(),
            X,
            by_task,
            targets=targets,
            microbatches=microbatches,
            schedule="1f1b",
            plan=PlanOptions(stage_of={"own": 0, "body": 1}, costs="counted"),
            engine=EngineOptions(heartbeat=20.0),
        ) as run:
            optimizer = torch.optim.AdamW(run.groups(), lr=0.1, weight_decay=0.1)
            _train_by_turns(lambda targets, run=run: run.step(X, targets), optimizer)
            every.append({name: each.detach().clone() for name, each in run.named_parameters()})
    return every


def test_a_result_that_the_loss_of_a_step_leaves_out_gives_no_gradient_back_in_that_step() -> None:
    model = Tasks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)

    def step(targets: Any) -> None:
        optimizer.zero_grad()
        by_task(model(X), targets).backward()

    _train_by_turns(step, optimizer)
    for one, other in zip(*ranks.run(2, _piped_by_turns), strict=True):
        for name, each in model.named_parameters():
            torch.testing.assert_close((one | other)[name], each.detach(), rtol=1e-9, atol=1e-11, msg=name)
