"""A run that is resumed draws the random numbers that it would have drawn uninterrupted."""

from __future__ import annotations

import contextlib
import copy
from itertools import combinations
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from everstep.pipeline import pipeline
from everstep.pipeline.engine.rng import Random
from tests.checkpoint import ranks
from tests.pipeline.grouping import group_options
from tests.pipeline.models import squares

pytestmark = pytest.mark.torch


class Quiet(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """A module that draws nothing, which only its calls show."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.inner(x)


class Block(nn.Module):  # type: ignore[misc]
    """A module whose own code draws between calls of modules that draw nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Quiet(), Quiet()

    def forward(self, x: Any) -> Any:
        hidden = functional.dropout(torch.relu(self.one(x)), 0.3, self.training)
        return x + functional.dropout(self.two(hidden), 0.5, self.training)


class Sometimes(nn.Module):  # type: ignore[misc]
    """A module that draws in some of its calls."""

    def forward(self, x: Any, draws: bool) -> Any:
        return functional.dropout(x, 0.5) if draws else x


class Calls(nn.Module):  # type: ignore[misc]
    """Calls one module again and again, of which only some calls draw, and draws itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Sometimes()

    def forward(self, x: Any) -> Any:
        for draws in (False, True, False, False, True):
            x = functional.dropout(self.inner(x, draws), 0.1)
            x = self.inner(self.inner(x, False), True)
        return x


def _train(run: Any, steps: range) -> list[float]:
    optimizer, losses = torch.optim.SGD(run.groups(), lr=0.1), []
    for step in steps:
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        losses.append(run.step(x, x).loss)
        optimizer.step()
    return losses


def _resume(rank: int) -> tuple[list[float], list[float]]:
    how: dict[str, Any] = {"microbatches": 2, "heartbeat": None, "costs": "counted"}
    found = []
    state: dict[str, Any] = {}
    for start in (0, 2):
        torch.manual_seed(0)
        with pipeline(
            nn.Sequential(*(Block() for _ in range(4))), torch.ones(8, 8), squares, **group_options(**how)
        ) as run:
            if start:
                run.load_state_dict(state)
            else:
                _train(run, range(2))
                state = copy.deepcopy(run.state_dict())
            found.append(_train(run, range(2, 5)))
    return found[0], found[1]


def test_a_resumed_run_draws_what_it_would_have_drawn_uninterrupted() -> None:
    for uninterrupted, resumed in ranks.run(2, _resume):
        assert resumed == uninterrupted


@pytest.mark.parametrize("model", [Block, Calls])
def test_the_numbers_of_a_step_do_not_depend_on_the_steps_before_it(model: Any) -> None:
    torch.manual_seed(0)
    module, x, found = nn.Sequential(model()), torch.ones(4, 8), []
    for start in (0, 3):
        random = Random(dict(module.named_modules()), torch.device("cpu"), 1)
        random.step = start
        while random.step < 3:
            with random.kept(), random.of(0):
                module(x)
            random.next_step()
        with random.kept(), random.of(0):
            found.append(module(x))
        random.close()
    assert torch.equal(*found)


def test_calls_that_draw_nothing_are_repeated_in_their_places() -> None:
    """An activation checkpoint draws the same again where calls of one module draw and others of it do not."""
    module, found = nn.Sequential(Calls()), []
    for again in (False, True):
        x = torch.ones(64, requires_grad=True)
        random = Random(dict(module.named_modules()), torch.device("cpu"), 1)
        for _ in range(2):  # in the second step it is known what draws
            x.grad = None
            with random.kept(), random.of(0):
                result = checkpoint(module, x, use_reentrant=False) if again else module(x)
            with random.kept(), random.again(0):
                result.square().sum().backward()
            random.next_step()
        random.close()
        found.append(x.grad)
    assert torch.equal(*found)


def test_a_backward_draws_its_own_numbers_also_after_its_forward_was_done_again() -> None:
    random, found, before = Random({}, torch.device("cpu"), 1), [], torch.get_rng_state()
    with random.kept():
        for microbatch, stage in ((0, 0), (1, 0), (0, 1)):
            with random.of(microbatch, stage=stage):
                torch.rand(5)
        for microbatch, stage, draws in ((0, 0, 0), (0, 0, 5), (1, 0, 0), (0, 1, 0)):
            with random.again(microbatch, stage=stage):
                with random.of(microbatch, stage=stage) if draws else contextlib.nullcontext():
                    torch.rand(draws)
                found.append(torch.rand(3))
    assert torch.equal(found[0], found[1])
    assert not any(torch.equal(*each) for each in combinations(found[1:], 2))
    assert torch.equal(torch.get_rng_state(), before)
