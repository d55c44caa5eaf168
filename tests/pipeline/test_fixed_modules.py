"""A model that is changed after it was cut: what a stage would not see is refused wherever the cut falls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline import EngineOptions, PlanOptions, pipeline  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

X = torch.linspace(-1.0, 1.0, 32, dtype=torch.float64).view(8, 4)
CUTS = ({"head": 1}, {"block.two": 1}, {"block.one": 0, "block.two": 1})


class Block(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Any) -> Any:
        return self.two(self.one(x).tanh() * self.scale)


class Net(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.layers = nn.Linear(4, 4), Block(), nn.ModuleList([nn.Linear(4, 4)])
        self.head, self.offset = nn.Linear(4, 4), nn.Parameter(torch.zeros(4), requires_grad=False)
        self.double()

    def forward(self, x: Any) -> Any:
        return self.head(self.layers[0](self.block(self.first(x)))) + self.offset


def squared(output: Any, target: Any) -> Any:
    return (output - target).square().mean()


def _set(module: nn.Module, name: str, value: Any) -> Callable[[], None]:
    before = getattr(module, name)
    setattr(module, name, value)
    return lambda: setattr(module, name, before)


def _set_forward(module: nn.Module) -> Callable[[], None]:
    module.forward = lambda x: x
    return lambda: delattr(module, "forward")


CHANGES: dict[str, tuple[Callable[[Any], Callable[[], Any]], str]] = {
    "module": (
        lambda model: _set(model, "head", nn.Linear(4, 4).double()),
        "the model (Net) has another module 'head'",
    ),
    "module in a list": (
        lambda model: _set(model.layers, "0", nn.Linear(4, 4).double()),
        "module 'layers' (ModuleList) has another module '0'",
    ),
    "buffer": (
        lambda model: _set(model.block, "scale", torch.full((), 2.0)),
        "module 'block' (Block) has another buffer 'scale'",
    ),
    "frozen parameter": (
        lambda model: _set(model, "offset", nn.Parameter(torch.ones(4), requires_grad=False)),
        "the model (Net) has another parameter 'offset'",
    ),
    "hook": (
        lambda model: model.block.register_forward_hook(lambda module, given, found: found * 2).remove,
        "module 'block' (Block) has other hooks",
    ),
    "hook on all": (
        lambda model: model.register_forward_pre_hook(lambda module, given: None).remove,
        "the model (Net) has other hooks",
    ),
    "forward": (lambda model: _set_forward(model.block), "module 'block' (Block) has another forward"),
}


def _count(calls: list[int]) -> Callable[..., None]:
    return lambda *_: calls.append(1)


def _changed(rank: int) -> list[dict[str, str]]:
    every = []
    for stage_of in CUTS:
        model, told = Net(), {}
        options = EngineOptions(heartbeat=None)
        plan = PlanOptions(stage_of=stage_of, costs="counted")
        with pipeline(model, X, squared, targets=X, microbatches=2, plan=plan, engine=options) as run:
            wanted = run.step(X, X).loss
            for name, (change, _) in CHANGES.items():
                undo = change(model)
                with pytest.raises(PipelineError) as caught:
                    run.step(X, X)
                told[name] = str(caught.value)
                undo()
                assert run.step(X, X).loss == wanted
            calls: list[int] = []
            hook = run.get_submodule("head" if rank else "first").register_forward_hook(_count(calls))
            model.block.scale.fill_(1.0)
            run.step(X, X)
            hook.remove()
            assert len(calls) == 2 or "head" not in stage_of
            run.register_forward_hook(lambda *_: None)
            with pytest.raises(PipelineError, match="has other hooks"):
                run.step(X, X)
        every.append(told)
    return every


def test_a_change_that_a_stage_would_not_see_is_refused_on_all_ranks_wherever_the_cut_falls() -> None:
    one, other = ranks.run(2, _changed)
    assert one == other
    for told in one:
        for name, (_, words) in CHANGES.items():
            assert words in told[name]
            assert "call pipeline() again" in told[name]
