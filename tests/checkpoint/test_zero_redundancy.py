"""Ranks of a ZeroRedundancyOptimizer hold the state of some parameters each; any number of ranks goes on with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.errors import CheckpointError  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.sessions import session  # noqa: E402

pytestmark = pytest.mark.torch

SAVED, STOP = 3, 6


def network() -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 2))


def build(**options: Any) -> tuple[Any, Any]:
    model = DistributedDataParallel(network())
    groups = [
        {"params": [each for each in model.parameters() if (each.dim() == 2) is decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    return model, ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW, lr=0.01, **options)


def train(rank: int, folder: Path, stop: int) -> tuple[int, dict[str, Any], list[float]]:
    """Train until `stop` with a save at SAVED, and return where it began, the weights and the rates."""
    model, optimizer = build()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    rates = []
    with session(folder, every_steps=SAVED) as ckpt:
        start = ckpt.restore(model=model, optimizer=optimizer, scheduler=scheduler)
        for step in range(start.step, stop):
            batch = torch.rand(5, 4, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
            rates.append(optimizer.optim.param_groups[0]["lr"])
            scheduler.step()
            ckpt.step(step + 1)
    return start.step, {name: each.clone() for name, each in model.module.state_dict().items()}, rates


def test_a_run_that_begins_again_goes_on_bit_for_bit(tmp_path: Path) -> None:
    straight = ranks.run(2, train, tmp_path / "straight", STOP)
    ranks.run(2, train, tmp_path / "run", SAVED)
    resumed = ranks.run(2, train, tmp_path / "run", STOP)
    for (_, weights, rates), (start, again, later) in zip(straight, resumed, strict=True):
        assert start == SAVED
        assert later == rates[SAVED:]
        assert ranks.same(weights, again)


@pytest.mark.parametrize("world", [2, 3])
def test_any_number_of_ranks_takes_the_state_of_each_parameter(world: int, tmp_path: Path) -> None:
    ranks.run(2, train, tmp_path, SAVED)
    model = network()
    everstep.load_into(tmp_path / "store", model=model)
    saved = everstep.load(tmp_path / "store")["optimizer"]
    assert saved["state"].keys() == dict(model.named_parameters()).keys()
    assert saved["param_groups"][0]["lr"] == 0.005
    found = ranks.run(world, consolidate, tmp_path)[0]
    assert len(found) == len(saved["state"])
    for name, param in enumerate_in_groups(model):
        assert ranks.same(found[param], saved["state"][name])


def enumerate_in_groups(model: Any) -> list[tuple[str, int]]:
    """Names of the parameters and their numbers, as torch gives them group by group."""
    named = sorted(model.named_parameters(), key=lambda each: each[1].dim() != 2)
    return [(name, number) for number, (name, _) in enumerate(named)]


def consolidate(rank: int, folder: Path) -> Any:
    """Return the state of all ranks in torch's own words."""
    model, optimizer = build()
    with session(folder) as ckpt:
        assert ckpt.restore(model=model, optimizer=optimizer).step == SAVED
        optimizer.consolidate_state_dict(to=0)
        return optimizer.state_dict()["state"] if rank == 0 else None


def test_an_optimizer_of_all_parameters_takes_what_ranks_have_saved_in_pieces(tmp_path: Path) -> None:
    ranks.run(2, train, tmp_path, SAVED)
    model = network()
    groups = [[each for each in model.parameters() if (each.dim() == 2) is decays] for decays in (True, False)]
    optimizer = torch.optim.AdamW([{"params": each} for each in groups])
    everstep.load_into(tmp_path / "store", model=model, optimizer=optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    saved = everstep.load(tmp_path / "store")["optimizer"]["state"]
    assert all(ranks.same(optimizer.state[param], saved[name]) for name, param in model.named_parameters())


def train_lists(rank: int, folder: Path, rate: float) -> tuple[int, Any, list[float]]:
    """Train parameters of no module for three steps; no rank but one has a parameter of the last group."""
    params = [nn.Parameter(torch.linspace(0.0, 1.0, 4 + number)) for number in range(4)]
    groups = [{"params": params[:3]}, {"params": params[3:]}]
    optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW, lr=rate)
    with session(folder, every_steps=SAVED) as ckpt:
        start = ckpt.restore(params=[each.detach() for each in params], optimizer=optimizer)
        rates = [group["lr"] for group in (*optimizer.param_groups, *optimizer.optim.param_groups)]
        for step in range(start.step, start.step + SAVED):
            optimizer.zero_grad()
            for each in params:
                each.square().sum().backward()
            optimizer.step()
            ckpt.step(step + 1)
    return start.step, {str(number): each.detach().clone() for number, each in enumerate(params)}, rates


@pytest.mark.parametrize("world", [2, 3])
def test_parameters_of_no_module_go_on_with_the_options_of_all_groups(world: int, tmp_path: Path) -> None:
    straight = [torch.linspace(0.0, 1.0, 4 + number, requires_grad=True) for number in range(4)]
    optimizer = torch.optim.AdamW([{"params": straight[:3]}, {"params": straight[3:]}], lr=0.01)
    for _ in range(2 * SAVED):
        optimizer.zero_grad()
        for each in straight:
            each.square().sum().backward()
        optimizer.step()
    expected = {str(number): each.detach() for number, each in enumerate(straight)}
    ranks.run(2, train_lists, tmp_path, 0.01)
    for start, found, rates in ranks.run(world, train_lists, tmp_path, 0.5):
        assert start == SAVED
        assert rates == [0.01] * 4
        assert ranks.same(found, expected)


def test_one_that_overlaps_its_steps_with_ddp_is_rejected(tmp_path: Path) -> None:
    ranks.run(2, refuse_overlap, tmp_path)


def refuse_overlap(rank: int, folder: Path) -> None:
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01, overlap_with_ddp=True
    )
    ckpt = session(folder)
    with pytest.raises(CheckpointError, match="overlap_with_ddp=True, whose state cannot be saved"):
        ckpt.restore(model=model, optimizer=optimizer)
    dist.barrier()


def load_its_own(rank: int, folder: Path) -> bool:
    """Each rank loads by itself, and takes the state of the parameters that it holds."""
    train(rank, folder, SAVED)
    model, optimizer = build()
    everstep.load_into(folder / "store", model=model, optimizer=optimizer)
    whole = everstep.load(folder / "store")["optimizer"]["state"]
    named = {id(param): name for name, param in model.module.named_parameters()}
    held = {named[id(param)]: state["exp_avg"] for param, state in optimizer.optim.state.items()}
    return 0 < len(held) < len(whole) and all(torch.equal(whole[name]["exp_avg"], each) for name, each in held.items())


def test_load_into_fills_what_a_rank_holds(tmp_path: Path) -> None:
    assert ranks.run(2, load_its_own, tmp_path) == [True, True]
