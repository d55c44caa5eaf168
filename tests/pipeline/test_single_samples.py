"""Micro-batches of one sample, where a model's own code asks whether there are several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend.check import run_stages  # noqa: E402
from everstep.pipeline.frontend.split import split_model  # noqa: E402
from everstep.pipeline.frontend.trace import trace_model  # noqa: E402

pytestmark = pytest.mark.torch

WIDTH = 4


class Model(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Two layers, and `code` of the model's own with what the first one gives and positions."""

    def __init__(self, code: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.one, self.two, self.code = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), code

    def forward(self, x: Any) -> Any:
        x = self.one(x)
        return self.two(self.code(x, torch.arange(x.shape[1])[None]))


def expand(x: Any, positions: Any) -> Any:
    """Add positions, as models of transformers make masks of them: they are repeated if there are several samples."""
    if x.shape[0] != positions.shape[0]:
        positions = positions.expand(x.shape[0], -1)
    return x + positions.diff(prepend=positions[:, :1] - 1, dim=-1).cumsum(-1)[..., None]


def expand_to_text(x: Any, positions: Any) -> Any:
    if x.shape[0] > 1:
        positions = torch.broadcast_to(positions, x.shape[:2])
    return x * positions[..., None]


def leave_out_mean(x: Any, positions: Any) -> Any:
    return x - x.mean(0, keepdim=True) if x.shape[0] > 1 else x


def repeat(x: Any, positions: Any) -> Any:
    if x.shape[0] > 1:
        positions = positions.repeat(x.shape[0], 2)[:, : x.shape[1]]
    return x + positions[..., None]


def widen(x: Any, positions: Any) -> Any:
    positions = positions[..., None]
    if x.shape[0] > 1:
        positions = positions.expand(x.shape)
    return x + positions.sum(-1, keepdim=True)


def choose_above_three(x: Any, positions: Any) -> Any:
    if x.shape[0] > 3:
        positions = positions.expand(x.shape[0], -1)
    return x + positions[..., None]


def make_stages(model: nn.Module, samples: int) -> Any:
    return split_model(trace_model(model, torch.ones(samples, 3, WIDTH)), {"two": 1})


@pytest.mark.parametrize("code", [expand, expand_to_text])
@pytest.mark.parametrize("samples", [1, 4])
def test_a_micro_batch_of_one_sample_is_computed_where_code_only_repeats_something_for_several(
    code: Callable[[Any, Any], Any], samples: int
) -> None:
    model = Model(code)
    stages = make_stages(model, samples)
    for count, words in ((1, 3), (2, 3), (1, 5), (4, 2), (1, 1)):
        x = torch.randn(count, words, WIDTH)
        torch.testing.assert_close(run_stages(stages, {"x": x}), model(x))


@pytest.mark.parametrize("code", [leave_out_mean, repeat, widen, choose_above_three])
def test_another_way_for_one_sample_is_refused(code: Callable[[Any, Any], Any]) -> None:
    model = Model(code)
    stages = make_stages(model, 4)
    x = torch.randn(4, 3, WIDTH)
    torch.testing.assert_close(run_stages(stages, {"x": x}), model(x))
    with pytest.raises(PipelineError, match=r"another path through the model's code.*take fewer micro-batches"):
        run_stages(stages, {"x": x[:1]})
