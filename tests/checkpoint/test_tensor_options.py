"""Options of an optimizer come back as what they were: tensors as tensors, in place, and numbers as numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import everstep  # noqa: E402
from everstep.checkpoint.errors import CheckpointError  # noqa: E402
from everstep.checkpoint.exchange import exporting, importing  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch


def tensor(value: float) -> Any:
    return torch.tensor(value)


OPTIONS: dict[str, Callable[[float], dict[str, Any]]] = {
    "numbers": lambda x: {"lr": x, "betas": (x, 0.75)},
    "tensors": lambda x: {"lr": tensor(x), "betas": (tensor(x), tensor(0.75))},
    "one-element": lambda x: {"lr": torch.tensor([x]), "betas": (x, 0.75)},
    "doubles": lambda x: {"lr": torch.tensor(x, dtype=torch.float64), "betas": (x, 0.75)},
    "capturable": lambda x: {"lr": tensor(x), "betas": (tensor(x), 0.75), "capturable": True},
}


def trained(options: dict[str, Any], seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    optimizer.param_groups[0].update(options)
    model(torch.rand(2, 3)).sum().backward()
    for param in model.parameters():
        state = {"step": torch.tensor(1.0), "exp_avg": torch.rand_like(param), "exp_avg_sq": torch.rand_like(param)}
        optimizer.state[param].update(state)
    return {"model": model, "optimizer": optimizer}


def flat(group: dict[str, Any]) -> list[Any]:
    return [group["lr"], *group["betas"]]


def check_same(group: dict[str, Any], expected: dict[str, Any]) -> None:
    for one, other in zip(flat(group), flat(expected), strict=True):
        assert type(one) is type(other)
        assert one == other
        if isinstance(one, torch.Tensor):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert type(group["betas"]) is tuple


@pytest.mark.parametrize("live", OPTIONS)
@pytest.mark.parametrize("saved", OPTIONS)
def test_options_come_back_as_what_they_were_saved_as(saved: str, live: str, tmp_path: Path) -> None:
    theirs, ours = trained(OPTIONS[saved](0.5), 1), trained(OPTIONS[live](0.25), 2)
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(1), dict(theirs))
    expected = theirs["optimizer"].param_groups[0]
    before = flat(ours["optimizer"].param_groups[0])
    ranks.restore(tmp_path / "store", tmp_path / "memory", ours)
    check_same(ours["optimizer"].param_groups[0], expected)
    if saved == live:  # a captured graph, or the script, reads a tensor where it was
        after = flat(ours["optimizer"].param_groups[0])
        assert all(one is other for one, other in zip(before, after, strict=True) if isinstance(one, torch.Tensor))
    check_same(everstep.load(tmp_path / "store")["optimizer"]["param_groups"][0], expected)


@pytest.mark.parametrize("kind", OPTIONS)
def test_options_go_through_dcp_as_what_they_are(kind: str, tmp_path: Path) -> None:
    theirs = trained(OPTIONS[kind](0.5), 1)
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(1), dict(theirs))
    exporting.export_dcp(tmp_path / "store", tmp_path / "dcp")
    importing.import_dcp(tmp_path / "dcp", tmp_path / "back")
    found = everstep.load(tmp_path / "back")["optimizer"]["param_groups"][0]
    assert [float(each) for each in flat(found)] == [0.5, 0.5, 0.75]
    assert [type(each) for each in flat(found)] == [type(each) for each in flat(theirs["optimizer"].param_groups[0])]


def test_groups_that_share_a_tensor_here_get_each_its_own_value(tmp_path: Path) -> None:
    def made(one: Any, other: Any) -> Any:
        params = [torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))]
        groups = [{"params": params[:1], "lr": one}, {"params": params[1:], "lr": other}]
        return torch.optim.SGD(groups, lr=1.0, foreach=False)

    ranks.save(PosixStore(tmp_path), ranks.key(1), {"optimizer": made(tensor(0.5), tensor(0.25))})
    shared = tensor(1.0)
    optimizer = made(shared, shared)
    ranks.restore(tmp_path, tmp_path / "memory", {"optimizer": optimizer})
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.25]


def test_an_option_of_several_elements_is_refused_by_its_name(tmp_path: Path) -> None:
    objects = trained({"betas": (0.5, torch.rand(3))}, 1)
    with pytest.raises(CheckpointError, match=r"the option betas .* tensor of 3 elements"):
        ranks.save(PosixStore(tmp_path), ranks.key(1), dict(objects))
