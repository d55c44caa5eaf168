"""Modules that begin to draw after some steps draw the same wherever the model is cut."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from everstep.pipeline import pipeline
from tests.checkpoint import ranks
from tests.pipeline.grouping import group_options
from tests.pipeline.models import squares

pytestmark = pytest.mark.torch


EPOCH = [0]
X = torch.ones(8, 8)


class Noise(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Adds noise after a warm-up, of which a variable of the script tells."""

    def forward(self, x: Any) -> Any:
        return x + torch.randn_like(x) if self.training and EPOCH[0] else x


class Always(nn.Module):  # type: ignore[misc]
    """Draws in evaluation mode too, as `dropout` does unless it is told of the mode."""

    def forward(self, x: Any) -> Any:
        return nn.functional.dropout(x, 0.5)


def _add_noise(_: nn.Module) -> None:
    EPOCH[0] = 1


def _drop(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5


def _train(rank: int, begin: Callable[[nn.Module], None], blocks_of_first: int) -> list[float]:
    torch.manual_seed(0)
    EPOCH[0] = 0
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), Noise(), nn.Dropout(0.1)) for _ in range(4)]
    model, losses = nn.Sequential(*blocks), []
    cut = {str(block): int(block >= blocks_of_first) for block in range(4)}
    options = group_options(microbatches=4, heartbeat=None, stage_of=cut)
    with warnings.catch_warnings(), pipeline(model, torch.ones(8, 8), squares, **options) as run:
        warnings.simplefilter("error")
        optimizer = torch.optim.SGD(run.groups(), lr=0.1)
        for step in range(4):
            if step == 2:
                begin(model)
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
            losses.append(run.step(x, x).loss)
            optimizer.step()
    return losses


@pytest.mark.parametrize("begin", [_add_noise, _drop])
def test_what_begins_to_draw_later_draws_the_same_wherever_the_model_is_cut(
    begin: Callable[[nn.Module], None],
) -> None:
    early, late = (ranks.run(2, _train, begin, blocks_of_first)[0] for blocks_of_first in (1, 3))
    assert early == pytest.approx(late, rel=1e-5)


def _train_in_evaluation_mode(rank: int, blocks_of_first: int) -> list[float]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), Always()) for _ in range(4)]
    cut = {str(block): int(block >= blocks_of_first) for block in range(4)}
    options = group_options(microbatches=4, heartbeat=None, stage_of=cut)
    with warnings.catch_warnings(), pipeline(nn.Sequential(*blocks), X, squares, **options) as run:
        warnings.simplefilter("error")
        run.eval()
        return [run.step(X, X).loss for _ in range(3)]


def test_what_draws_in_evaluation_mode_draws_the_same_in_a_step_wherever_the_model_is_cut() -> None:
    early, late = (ranks.run(2, _train_in_evaluation_mode, blocks_of_first)[0] for blocks_of_first in (1, 3))
    assert early == pytest.approx(late, rel=1e-5)
