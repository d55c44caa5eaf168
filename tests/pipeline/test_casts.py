"""Under bf16 and fp16 a stage makes one low-precision copy of its weights for all micro-batches of a step."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from everstep.pipeline.engine import stage as stages
from everstep.pipeline.engine.options import EngineOptions
from everstep.pipeline.graph import Graph, GraphNode
from everstep.pipeline.profile import measure_graph
from everstep.pipeline.transport.base import Transport
from tests.pipeline import front, models
from tests.pipeline.inprocess import Fabric
from tests.pipeline.training import Setting, batch_of, engine_of

pytestmark = pytest.mark.torch

CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def saved_copies(engine: Any, batch: Any) -> int:
    """Count the pieces of memory, in the narrower type and as large as weights, that a step keeps for backward."""
    shapes = {tuple(each.shape) for each in engine.parameters.own if each.dim() == 2}
    shapes |= {shape[::-1] for shape in shapes}
    pieces: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        if tensor.dtype in CASTS.values() and tuple(tensor.shape) in shapes:
            pieces[tensor.untyped_storage().data_ptr()] = tensor  # held: its memory is no other's meanwhile
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.step(batch.inputs, batch.targets)
    return len(pieces)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_micro_batches_in_flight_share_the_copies_of_the_weights(precision: str, schedule: str) -> None:
    setting = Setting("mlp", schedule, 1, 1, microbatches=8, samples=24, dtype=torch.float32, steps=1)

    def work(transport: Transport) -> tuple[list[int], int]:
        engine = engine_of(setting, transport, options=EngineOptions(precision=precision))
        batch = batch_of(setting, 0)
        return [saved_copies(engine, batch) for _ in range(2)], sum(each.dim() == 2 for each in engine.parameters.own)

    ((found, weights),) = Fabric(1).run(work)
    assert all(0 < each <= weights for each in found)


def gradients(setting: Setting, *, again: frozenset[int], around: bool = False) -> dict[str, Any]:
    """Those of the second step, when weights are no longer those of the first."""

    def work(transport: Transport) -> dict[str, Any]:
        engine = engine_of(setting, transport, options=EngineOptions(precision="bf16", recompute=again))
        optimizer = torch.optim.SGD(engine.parameters.own, lr=0.1)
        for step in range(2):
            batch = batch_of(setting, step)
            if around:
                for stage in engine._stages.values():
                    within(stage.module.module)
            engine.step(batch.inputs, batch.targets)
            if not step:
                optimizer.step()
        assert not torch.is_autocast_enabled("cpu")
        return {name: each.grad for name, each in engine.parameters.named.items()}

    def within(module: Any) -> None:
        for layer in module.modules():
            if isinstance(layer, nn.Linear) and not hasattr(layer, "plain"):
                layer.plain = layer.forward
                layer.forward = lambda x, plain=layer.plain: checkpoint(plain, x, use_reentrant=x.requires_grad)

    return {name: each for rank in Fabric(2).run(work) for name, each in rank.items()}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_shared_copies_give_the_same_gradients_as_copies_of_each_micro_batch(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting("mlp", schedule, dtype=torch.float32)
    none = frozenset[int]()
    shared = gradients(setting, again=none)
    recomputed = gradients(setting, again=frozenset({0, 1}))
    checkpointed = gradients(setting, again=none, around=True) if schedule == "1f1b" else shared
    monkeypatch.setattr(torch, "autocast_increment_nesting", lambda: 1)
    monkeypatch.setattr(torch, "autocast_decrement_nesting", lambda: 0)
    apart = gradients(setting, again=none)
    assert shared.keys() == apart.keys()
    for name, expected in apart.items():
        for found in (shared, recomputed, checkpointed):
            assert expected.abs().sum() > 0
            assert torch.equal(found[name], expected), name


class Gated(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Gives float32 under autocast too, and narrows what it is given twice."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(12, 12), nn.Linear(12, 12)
        self.scale = nn.Parameter(torch.ones(12))

    def forward(self, x: Any) -> Any:
        return self.left(x) * self.right(x).sigmoid() * self.scale


def between(traced: Any, number: int) -> dict[str, int]:
    names = [each.name for each in traced.graph.nodes]
    second = next(index for index, name in enumerate(names) if name.startswith("1."))
    return {name: int(number > 1 and index >= second) for index, name in enumerate(names)}


def gated(depth: int, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """A chain of `depth` such layers on as many ranks."""

    def batch(samples: int, seed: int) -> models.Batch:
        x = torch.randn(samples, 12, generator=torch.Generator().manual_seed(seed))
        return models.Batch({"input": x}, x.flip(0))

    case = models.Case("gated", lambda: nn.Sequential(Gated(), Gated()), batch, models.squares)
    monkeypatch.setitem(models.CASES, "gated", case)
    monkeypatch.setattr(front, "even", between)
    return Setting("gated", "1f1b", depth, depth, 8, samples=24, dtype=torch.float32, steps=1, by_hand=False)


def of_gated(transport: Transport, setting: Setting) -> dict[str, Any]:
    engine, batch = engine_of(setting, transport, options=EngineOptions(precision="bf16")), batch_of(setting, 0)
    engine.step(batch.inputs, batch.targets)
    return {name: each.grad for name, each in engine.parameters.named.items()}


def test_what_a_stage_receives_is_not_kept_beyond_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    arrive, leaves = stages._make_leaves, list[Any]()
    most = 0

    def arrived(*given: Any) -> Any:
        nonlocal most
        found = arrive(*given)
        assert all(tensor.dtype is torch.float32 for tensor in found[1])
        leaves.extend(map(weakref.ref, found[1]))
        most = max(most, sum(each() is not None for each in leaves))
        return found

    monkeypatch.setattr(stages, "_make_leaves", arrived)
    setting = gated(2, monkeypatch)
    Fabric(2).run(lambda transport: of_gated(transport, setting))
    assert len(leaves) == 8
    assert most <= 2


def test_a_cut_changes_nothing_of_what_is_computed_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = gated(1, monkeypatch), gated(2, monkeypatch)
    (expected,) = Fabric(1).run(lambda transport: of_gated(transport, one))
    found = Fabric(2).run(lambda transport: of_gated(transport, two))
    for name, gradient in expected.items():
        assert any(torch.equal(rank[name], gradient) for rank in found if name in rank), name


class Shrinking(nn.Linear):  # type: ignore[misc]
    """Writes its weight in each forward."""

    def forward(self, x: Any) -> Any:
        found = super().forward(x)
        if torch.is_grad_enabled() and x.shape[0] == 3:  # a micro-batch, not the example
            with torch.no_grad():
                self.weight.mul_(0.5)
        return found


class ShrinkingData(nn.Linear):  # type: ignore[misc]
    """Writes it through `.data`, of which torch keeps no version."""

    def forward(self, x: Any) -> Any:
        found = super().forward(x)
        self.weight.data.mul_(0.5)
        return found


class ShrinkingUnseen(ShrinkingData):
    """Cannot be looked into, since its code depends on data."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) if x.abs().max() >= 0 else x


@pytest.mark.parametrize("layer", [Shrinking, ShrinkingData, ShrinkingUnseen])
def test_a_weight_that_a_forward_writes_is_copied_anew(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gated(1, monkeypatch)
    case = models.CASES["gated"]
    chain = models.Case("gated", lambda: nn.Sequential(layer(12, 12), Gated()), case.batch, case.loss)
    monkeypatch.setitem(models.CASES, "gated", chain)
    setting = Setting("gated", "1f1b", 1, 1, 8, samples=24, dtype=torch.float32, steps=1, by_hand=False)
    (shared,) = Fabric(1).run(lambda transport: of_gated(transport, setting))
    monkeypatch.setattr(torch, "autocast_increment_nesting", lambda: 1)
    monkeypatch.setattr(torch, "autocast_decrement_nesting", lambda: 0)
    (apart,) = Fabric(1).run(lambda transport: of_gated(transport, setting))
    for name, expected in apart.items():
        assert torch.equal(shared[name], expected), name


class Layer:
    """A node that is one linear layer."""

    inputs: tuple[str, ...] = ("input:x",)
    outputs: tuple[str, ...] = ("output",)

    def __init__(self) -> None:
        self.module = nn.Linear(64, 64, bias=False)

    def __call__(self, values: Any) -> dict[str, Any]:
        return {"output": self.module(values["input:x"])}


def test_a_plan_counts_the_copies_once_and_not_for_each_micro_batch() -> None:
    graph = Graph((GraphNode("layer", parameters=64 * 64 * 4),))
    inputs = {"x": torch.randn(2, 64, requires_grad=True)}

    def found(precision: Any) -> GraphNode:
        with torch.autocast("cpu", precision, enabled=precision is not None):
            (node,) = measure_graph(graph, {"layer": Layer()}, inputs, repeats=2, warmup=0).graph.nodes
        return node

    wide, narrow = found(None), found(torch.bfloat16)
    assert wide.cast == 0
    assert narrow.cast == 64 * 64 * 2
    assert narrow.activation <= wide.activation + 2 * 64 * 2  # the input is narrowed too, for each micro-batch
    (weighed,) = Graph((narrow,)).weigh_parameters(3.0).nodes
    assert weighed.parameters * 4 == 64 * 64 * 4 * 4 + 64 * 64 * 2
    assert weighed.cast == 0
