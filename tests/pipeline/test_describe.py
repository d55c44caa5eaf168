"""Ranks whose models or losses do something else are told so, and what each may have of its own is no difference."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline import EngineOptions, PlanOptions, pipeline  # noqa: E402
from everstep.pipeline.describe import describe_callable, describe_model  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.pipeline.models import squares  # noqa: E402

pytestmark = pytest.mark.torch

X, Y = torch.ones(4, 4), torch.zeros(4, 4)
BLOCK = """
class Block(nn.Module):
    def __init__(self, act=nn.functional.relu, device=None, rank=0, power=1.0):
        super().__init__()
        self.act, self.device, self.rank, self.power = act, device, rank, power

    def forward(self, x):
        zero = torch.zeros((), device=self.device)
        return self.activated(x) ** self.power + zero

    def activated(self, x):
        return ACTIVATED

def scaled(output, targets, by=1.0):
    total, count = squares(output, targets)
    return total * by, count
"""


def namespace(module: str = "here", activated: str = "self.act(x)") -> dict[str, Any]:
    """A script with a class and a loss, as another node may have it in another version."""
    found: dict[str, Any] = {"__name__": module, "nn": nn, "torch": torch, "squares": squares}
    exec(BLOCK.replace("ACTIVATED", activated), found)
    return found


def model(*parts: Any) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), *parts, nn.Linear(4, 4))


class Scaled(nn.Module):  # type: ignore[misc]
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, output: Any, targets: Any) -> Any:
        total, count = squares(output, targets)
        return total * self.by, count


class Called:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, output: Any, targets: Any) -> Any:
        total, count = squares(output, targets)
        return total * self.by, count


def two_kinds() -> list[tuple[str, Any, Any]]:
    """Return what the message is about, with what each rank has: a model, or a loss."""
    here, there, changed = namespace(), namespace("there"), namespace(activated="self.act(x) * 2")
    relu, gelu = nn.functional.relu, nn.functional.gelu
    return [
        ("module '1': torch.nn.modules.activation.ReLU on rank 0, torch.nn", model(nn.ReLU()), model(nn.GELU())),
        ("module '1': here.Block (", model(here["Block"]()), model(there["Block"]())),
        ("module '1': here.Block (", model(here["Block"]()), model(changed["Block"]())),
        ("attribute 'p' of module '1': 0.0 on rank 0, 0.1 on", model(nn.Dropout(0.0)), model(nn.Dropout(0.1))),
        ("attribute 'eps' of module '1': ", model(nn.LayerNorm(4)), model(nn.LayerNorm(4, eps=0.1))),
        ("attribute 'act' of module '1': ", model(here["Block"](relu)), model(here["Block"](gelu))),
        ("attribute 'power' of module '1': ", model(here["Block"]()), model(here["Block"](power=2.0))),
        ("loss: here.scaled (", here["scaled"], there["scaled"]),
        ("loss: tests.pipeline", lambda o, t: here["scaled"](o, t, 1.0), lambda o, t: here["scaled"](o, t, 2.0)),
        ("loss: partial(", functools.partial(here["scaled"], by=1.0), functools.partial(here["scaled"], by=2.0)),
        ("loss: tests.pipeline.test_describe.Scaled", Scaled(1.0), Scaled(2.0)),
        ("loss: tests.pipeline.test_describe.Called", Called(1.0), Called(2.0)),
    ]


def _meets(rank: int) -> list[str]:
    told = []
    for _, *kinds in two_kinds():
        mine = kinds[rank]
        of, loss = (mine, squares) if isinstance(mine, nn.Sequential) else (model(), mine)
        with pytest.raises(PipelineError) as caught:
            pipeline(
                of,
                X,
                loss,
                targets=Y,
                schedule="1f1b",
                microbatches=2,
                plan=PlanOptions(costs="counted"),
                engine=EngineOptions(heartbeat=60.0),
            )
        told.append(str(caught.value))
    return told


def test_models_and_losses_that_compute_something_else_are_refused_on_all_ranks() -> None:
    here, there = ranks.run(2, _meets)
    assert here == there
    for (about, *_), told in zip(two_kinds(), here, strict=True):
        assert told.startswith(f"the ranks do not agree on {about}")
        assert " on rank 0, " in told
        assert " on rank 1; " in told


def test_what_ranks_may_have_of_their_own_is_no_difference() -> None:
    block = namespace()["Block"]
    mine, other = model(block(rank=0, device="cuda:0")), model(block(rank=1, device="cuda:1"))
    other[1].log = "/logs/rank-1"
    assert describe_model(mine) == describe_model(other)
    mine[1].device, other[1].device = torch.device("cuda", 0), torch.device("cuda", 1)
    other.register_forward_hook(lambda *given: None)
    assert describe_model(mine) == describe_model(other)


def test_a_copy_is_described_alike_also_where_objects_hold_one_another() -> None:
    block = namespace()["Block"](act=nn.functional.gelu)
    encoder = nn.TransformerEncoderLayer(4, 2, batch_first=True)
    whole = model(
        block, encoder, nn.LSTM(4, 4), nn.BatchNorm1d(4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    )
    block.act = block.activated
    block.table = {"self": [block]}
    called = Called(1.0)
    called.by = functools.partial(called.__call__, called)  # type: ignore[assignment]
    assert describe_model(copy.deepcopy(whole)) == describe_model(whole)
    assert describe_callable(called) == describe_callable(called)
    assert "attribute 'activation' of module '2'" in describe_model(whole)
