"""The states of an optimizer come back in the order in which it holds them, under other names too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import everstep
from everstep.checkpoint.store.posix import PosixStore
from tests.checkpoint import ranks
from tests.checkpoint.sessions import session

pytestmark = pytest.mark.torch

HELD = ["last.weight", "last.bias", "first.weight", "first.bias"]


class Both(nn.Module):  # type: ignore[misc]
    """Two layers, of which the first is used later than the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)


def make() -> tuple[Both, torch.optim.Optimizer]:
    model = Both()
    if ranks.world_size() > 1:
        fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained() -> tuple[Both, torch.optim.Optimizer]:
    model, optimizer = make()
    for layers in ([model.last], [model.first, model.last]):
        for param in (each for layer in layers for each in layer.parameters()):
            param.grad = torch.ones_like(param)
        optimizer.step()
    return model, optimizer


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    named = {id(param): name for name, param in model.named_parameters()}
    return [named[id(param)] for param in optimizer.state]


def restored(rank: int, folder: Path) -> list[list[str]]:
    saved, fresh, used = trained(), make(), trained()
    ranks.save(PosixStore(folder), ranks.key(1), dict(zip(("model", "optimizer"), saved, strict=True)))
    found = [held(*saved)]
    for each in (fresh, used):
        ranks.restore(folder, folder / "memory", dict(zip(("model", "optimizer"), each, strict=True)))
        found.append(held(*each))
    return found


def test_states_come_back_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    """An optimizer that sums over all of them goes on bit for bit."""
    assert restored(0, tmp_path / "alone") == [HELD] * 3
    assert list(everstep.load(tmp_path / "alone")["optimizer"]["state"]) == HELD
    assert ranks.run(2, restored, tmp_path / "sharded") == [[HELD] * 3] * 2


RENAMED = {"model.first.": "model.begin."}


@pytest.mark.parametrize(
    "rename",
    [RENAMED, {**RENAMED, "sgd.": "optimizer."}, {**RENAMED, "optimizer.state.first.": "optimizer.state.begin."}],
)
def test_a_mapping_that_renames_a_module_or_its_states_renames_all_that_is_said_of_them(
    rename: dict[str, str], tmp_path: Path
) -> None:
    model, optimizer = trained()
    for param in model.parameters():
        state = optimizer.state[param]
        state["same"] = state["momentum_buffer"]
    with session(tmp_path) as ckpt:
        ckpt.track(**{"model": model, "sgd" if "sgd." in rename else "optimizer": optimizer})
        ckpt.save(1)

    class Renamed(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.begin, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    other = Renamed()
    sgd = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    objects: dict[str, Any] = {"model": other, "optimizer": sgd}
    with session(tmp_path, directory=tmp_path / "other") as ckpt:
        assert ckpt.restore(**objects, rename=rename).step == 1
    assert held(other, sgd) == [name.replace("first", "begin") for name in HELD]
    for state in sgd.state.values():
        assert state["same"] is state["momentum_buffer"]


def test_a_mapping_renames_nothing_else_of_a_module_that_has_a_part_called_state(tmp_path: Path) -> None:
    def made(**parts: nn.Module) -> nn.ModuleDict:
        return nn.ModuleDict({"state": nn.ModuleDict(parts), "order": nn.ModuleDict({"a": nn.Linear(2, 2)})})

    saved, here = made(a=nn.Linear(2, 2)), made(b=nn.Linear(2, 2))
    with session(tmp_path) as ckpt:
        ckpt.track(model=saved, optimizer=torch.optim.SGD(saved.parameters(), lr=0.1))
        ckpt.save(1)
    with session(tmp_path, directory=tmp_path / "other") as ckpt:
        ckpt.restore(model=here, rename={"model.state.a.": "model.state.b."})
    for one, other in zip(here.parameters(), saved.parameters(), strict=True):
        assert torch.equal(one, other)
