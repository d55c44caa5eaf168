"""An optimizer of named parameters goes to torch.distributed.checkpoint and comes back with its groups and names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.exchange import exporting, importing  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

GROUPS = ["one", "two", "two-alike", "own-names", "without-names"]


def trained(groups: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    named: list[Any] = list(model.named_parameters())
    if groups == "own-names":
        named = [(f"backbone/{name}", param) for name, param in reversed(named)]
    elif groups == "without-names":
        named = [{"params": [param]} for _, param in named]
    elif groups != "one":
        named = [{"params": named[2:]}, {"params": named[:2], **({"lr": 0.5} if groups == "two" else {})}]
    optimizer = torch.optim.SGD(named, lr=0.1, momentum=0.9)
    model(torch.rand(2, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def check_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    states = [each["optimizer"].state_dict() for each in (one, other)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    for place, state in states[0]["state"].items():
        assert torch.equal(state["momentum_buffer"], states[1]["state"][place]["momentum_buffer"])


@pytest.mark.parametrize("groups", GROUPS)
def test_torch_loads_the_groups_and_the_names_that_were_saved(groups: str, tmp_path: Path) -> None:
    objects, other = trained(groups, seed=1), trained(groups, seed=2)
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(1), dict(objects))
    exporting.export_dcp(tmp_path / "store", tmp_path / "dcp")
    model, optimizer = get_state_dict(other["model"], other["optimizer"])
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(*other.values(), model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    check_same(other, objects)


@pytest.mark.parametrize("groups", GROUPS)
def test_what_was_imported_is_exported_again_with_its_groups_and_names(groups: str, tmp_path: Path) -> None:
    objects, other = trained(groups, seed=1), trained(groups, seed=2)
    model, optimizer = get_state_dict(objects["model"], objects["optimizer"])
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    importing.import_dcp(tmp_path / "dcp", tmp_path / "store")
    loaded = everstep.load(tmp_path / "store")["optimizer"]["param_groups"]
    if groups != "without-names":
        assert loaded == optimizer["param_groups"]
    assert [sorted(each["params"]) for each in loaded] == [sorted(each["params"]) for each in optimizer["param_groups"]]
    everstep.load_into(tmp_path / "store", **other)
    check_same(other, objects)


def test_a_parameter_that_is_renamed_has_its_new_name_there_too(tmp_path: Path) -> None:
    ranks.save(PosixStore(tmp_path), ranks.key(1), trained("one", seed=1))
    loaded = everstep.load(tmp_path, rename={"model.0.": "model.first."})
    expected = ["first.weight", "first.bias", "1.weight", "1.bias"]
    assert loaded["optimizer"]["param_groups"][0]["param_names"] == expected
    assert loaded["optimizer"]["param_groups"][0]["params"] == expected
