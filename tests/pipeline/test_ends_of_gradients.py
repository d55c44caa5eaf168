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
