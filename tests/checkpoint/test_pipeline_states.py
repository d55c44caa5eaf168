"""A checkpoint of a pipeline is one of its model for whoever loads or exports it: without the pipeline's own state."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import everstep
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.exchange.exporting import export_safetensors
from everstep.checkpoint.state.flat import bind_kinds
from everstep.checkpoint.store.posix import PosixStore
from everstep.pipeline.engine.engine import Engine
from everstep.pipeline.engine.scaling import LossScale
from everstep.pipeline.frontend.foreign_weights import PipelineOpen, mark_foreign
from tests.checkpoint import ranks

pytestmark = pytest.mark.torch


class Net(nn.Sequential):  # type: ignore[misc]  # torch is not where types are checked
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 1))


class Part(Net):
    """Has the state that a pipeline has beside its model's."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: Any = SimpleNamespace(steps=3, loss_scale=LossScale())

    def get_extra_state(self) -> Any:
        return Engine.state_dict(self.engine)

    def set_extra_state(self, state: Any) -> None:
        self.engine.steps = state["steps"]


def save(folder: Path, **objects: object) -> None:
    ranks.save(PosixStore(folder), ranks.key(1), objects)


def test_the_model_of_a_pipeline_takes_what_load_returns(tmp_path: Path) -> None:
    run = Part()
    save(tmp_path, model=run, both=nn.ModuleDict({"one": Part(), "other": Net()}))
    assert "_extra_state" in run.state_dict()
    for only in (None, "model.*"):
        model = Net()
        model.load_state_dict(everstep.load(tmp_path, only=only)["model"])
        assert all(torch.equal(each, run.state_dict()[name]) for name, each in model.state_dict().items())
    nn.ModuleDict({"one": Net(), "other": Net()}).load_state_dict(everstep.load(tmp_path)["both"])
    again = Part()
    again.engine.steps = 0
    everstep.load_into(tmp_path, model=again, both=nn.ModuleDict({"one": Part(), "other": Net()}))
    assert again.engine.steps == 3, "a pipeline has its own state again"
    assert everstep.load(tmp_path, only="model._extra_state")["model"]["_extra_state"]["steps"] == 3


def test_the_model_of_a_pipeline_is_exported(tmp_path: Path) -> None:
    run = Part()
    save(tmp_path / "store", model=run)
    export_safetensors(tmp_path / "store", tmp_path / "out", name="model")
    from safetensors.torch import load_file

    assert load_file(tmp_path / "out" / "model.safetensors").keys() == Net().state_dict().keys()


def test_another_extra_state_stays(tmp_path: Path) -> None:
    class Counting(Net):
        def get_extra_state(self) -> Any:
            return {"steps": 3}

    save(tmp_path, model=Counting())
    assert everstep.load(tmp_path)["model"]["_extra_state"] == {"steps": 3}


def test_an_optimizer_of_the_whole_model_is_refused_with_what_to_make_it_of() -> None:
    model = Net()
    elsewhere = {name: ("parameter", each) for name, each in model[1].named_parameters(prefix="1")}
    mark_foreign(elsewhere, dict.fromkeys(elsewhere, (1,)), [0, 1], PipelineOpen())
    with pytest.raises(CheckpointError, match=r"optimizer has <parameter '1.weight' .* and 1 more, .* run.groups\(\)"):
        bind_kinds({"model": model[0], "optimizer": torch.optim.AdamW(model.parameters())}, rank=0)
    bind_kinds({"model": model[0], "optimizer": torch.optim.AdamW(model[0].parameters())}, rank=0)
