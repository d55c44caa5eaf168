"""FSDP2 leaves the parameters of its outermost module whole after a forward pass without a backward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.save import planning  # noqa: E402
from everstep.checkpoint.state.loaded import is_dtensor  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.sessions import session  # noqa: E402

pytestmark = pytest.mark.torch

PARAMS = ["0.bias", "0.weight", "2.bias", "2.weight"]


def make(momentum: float) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    fully_shard(model[0])
    fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


def evaluate(model: Any) -> None:
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert not all(map(is_dtensor, model.parameters()))


def train_with_evaluations(rank: int, folder: Path, momentum: float) -> tuple[list[float], int]:
    """Return the losses, and how many plans were made for saves after the first one."""
    plans = 0
    make_plan = planning.make_save_plan

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal plans
        plans += 1
        return make_plan(*args, **options)

    planning.make_save_plan = counting
    model, optimizer = make(momentum)
    losses = []
    with session(folder, every_steps=1000) as ckpt:
        for step in range(ckpt.restore(model=model, optimizer=optimizer).step, 5):
            torch.manual_seed(10 * step + rank)
            optimizer.zero_grad()
            loss = model(torch.randn(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            evaluate(model)
            if step == 1:
                plans = 0
            if step in (0, 1, 2):
                assert ckpt.save(step + 1).saves
    return losses, plans


def load_after_an_evaluation(rank: int, store: Path, momentum: float) -> int:
    model, optimizer = make(momentum)
    evaluate(model)
    return everstep.load_into(store, model=model, optimizer=optimizer).step


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_save_after_an_evaluation_has_the_names_of_parameters_and_the_plan_of_the_one_before(
    momentum: float, tmp_path: Path
) -> None:
    straight = ranks.run(2, train_with_evaluations, tmp_path, momentum)
    state = everstep.load(tmp_path / "store")
    assert sorted(state["optimizer"]["param_groups"][0]["params"]) == PARAMS
    resumed = ranks.run(2, train_with_evaluations, tmp_path, momentum)
    assert [losses[3:] for losses, _ in straight] == [losses for losses, _ in resumed]
    assert [plans for _, plans in straight] == [0, 0]


def test_load_into_an_optimizer_after_an_evaluation(tmp_path: Path) -> None:
    ranks.run(2, train_with_evaluations, tmp_path, 0.9)
    assert ranks.run(2, load_after_an_evaluation, tmp_path / "store", 0.9) == [3, 3]
