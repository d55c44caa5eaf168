"""Code that does something else where gradients are off is refused where a cut would fix what it does with them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from everstep.pipeline import pipeline  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.pipeline.grouping import group_options  # noqa: E402

pytestmark = pytest.mark.torch


class Asks(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Code that asks, with a module inside or without."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.weight = way, nn.Parameter(torch.ones(4))
        self.inner: Any = None if way == "leaf" else nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        x = x * self.weight
        if self.way == "recomputes":
            return checkpoint(self.inner, x, use_reentrant=False) if torch.is_grad_enabled() else self.inner(x)
        asked = x.requires_grad if self.way == "tensor" else torch.is_grad_enabled()
        x = x if self.inner is None else self.inner(x)
        return 2.0 * x if asked else x


def make_model(way: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Asks(way), nn.Linear(4, 4)).double()


def mean_square(output: Any, targets: Any) -> Any:
    return (output - targets).square().mean()


def _evaluate(rank: int, ways: list[str]) -> list[str]:
    x, found = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64), []
    for way in ways:
        cut = {"1": 0, "2": 1}
        if way in ("mode", "tensor"):
            cut = {"1.inner": 0, "1:mul.1": 1}
        elif way == "recomputes":
            cut = {"1:mul": 0, "1.inner": 1}
        how = group_options(stage_of=cut, heartbeat=None, microbatches=2)
        try:
            with pipeline(make_model(way), x, mean_square, targets=x, schedule="1f1b", **how) as run:
                run.eval()
                found.append(f"{run.evaluate(x, x).loss:.12g}")
        except PipelineError as error:
            found.append(str(error))
    return found


def test_code_that_asks_for_the_gradient_mode_is_refused_where_a_cut_opens_it() -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ways = ["mode", "tensor", "leaf", "uncut", "recomputes"]
    for mode, tensor, *right in ranks.run(2, _evaluate, ways):
        for message in (mode, tensor):
            assert "forward does something else where they are off" in message
        with torch.no_grad():
            assert right == [f"{float(mean_square(make_model(way)(x), x)):.12g}" for way in ways[2:]]
