"""Numbers that must not depend on how a model is cut: random draws, statistics, clipping, narrow formats."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch.nn import functional as F

from everstep.pipeline.engine.options import EngineOptions
from everstep.pipeline.transport.base import Transport
from tests.pipeline.inprocess import Fabric
from tests.pipeline.models import CASES, slice_batch
from tests.pipeline.training import Setting, alone, apart, batch_of, engine_of, piped, share

pytestmark = pytest.mark.torch

MLP = Setting("mlp", steps=1)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_recomputation_changes_nothing_and_runs_each_forward_once_more(schedule: str) -> None:
    calls = {False: 0, True: 0}

    def work(transport: Transport) -> dict[str, Any]:
        setting = Setting("gpt-dropout", schedule, steps=1, options=EngineOptions(recompute=recompute))
        engine = engine_of(setting, transport)
        batch = batch_of(setting, 0)
        for stage in engine._stages.values():
            for module in stage.module.module.modules():
                if isinstance(module, torch.nn.LayerNorm):
                    module.register_forward_hook(
                        lambda *_: calls.__setitem__(bool(recompute), calls[bool(recompute)] + 1)
                    )
        engine.step(batch.inputs, batch.targets)
        return {name: parameter.grad for name, parameter in engine.parameters.named.items()}

    recompute: frozenset[int] = frozenset()
    plain = Fabric(2).run(work)
    recompute = frozenset({0, 1})
    again = Fabric(2).run(work)
    for one, other in zip(plain, again, strict=True):
        for name, gradient in one.items():
            assert torch.equal(gradient, other[name])
    assert calls[True] == 2 * calls[False]


@pytest.mark.parametrize(("schedule", "stages", "ranks"), [("simple", 3, 3), ("zb-v", 4, 2), ("1f1b", 2, 2)])
def test_dropout_depends_on_neither_stages_nor_schedule_nor_replicas(schedule: str, stages: int, ranks: int) -> None:
    whole = piped(Setting("gpt-dropout", "simple", 1, 1, microbatches=4))
    assert apart(piped(Setting("gpt-dropout", schedule, stages, ranks, microbatches=4)), whole) < 1e-10
    assert apart(piped(Setting("gpt-dropout", schedule, stages, ranks, microbatches=2, replicas=2)), whole) < 1e-10


def test_dropout_differs_between_steps_micro_batches_and_seeds() -> None:
    def work(transport: Transport) -> list[float]:
        losses: list[float] = []

        def loss(output: Any, targets: Any) -> Any:
            total, count = CASES["gpt-dropout"].loss(output, targets)
            losses.append(total.item())
            return total, count

        tokens = CASES["gpt-dropout"].example(1).inputs["input_ids"].repeat(2, 1)
        for seed in (0, 1):
            setting = Setting("gpt-dropout", "simple", 1, 1, microbatches=2)
            engine = engine_of(setting, transport, loss, EngineOptions(seed=seed))
            for _ in range(2):
                engine.step({"input_ids": tokens}, tokens)
        return losses

    (losses,) = Fabric(1).run(work)
    assert len(set(losses)) == 8


@pytest.mark.parametrize("act", ["step", "evaluate"])  # an evaluation in training mode finds statistics anew
def test_running_statistics_are_those_of_the_whole_batch(act: str) -> None:
    setting = Setting("resnet", "1f1b", 3, 3, samples=12, microbatches=2, replicas=2, steps=1)
    model = CASES["resnet"].build()
    seen: dict[str, list[Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.register_forward_hook(lambda m, i, o, name=name: seen.setdefault(name, []).append(i[0].detach()))
    batch = batch_of(setting, 0)
    for start, stop in ((0, 3), (3, 6), (6, 9), (9, 12)):
        model(slice_batch(batch, start, stop).inputs["images"])

    def work(transport: Transport) -> dict[str, Any]:
        engine = engine_of(setting, transport)
        mine = share(setting, transport.replica, batch)
        getattr(engine, act)(mine.inputs, mine.targets)
        return engine.parameters.buffers

    found: dict[str, Any] = {}
    for mine in Fabric(3, 2).run(work):
        for name, each in mine.items():
            assert torch.equal(found.setdefault(name, each), each), name
    for name, inputs in seen.items():
        every = torch.cat(inputs).transpose(0, 1).flatten(1)
        torch.testing.assert_close(found[f"{name}.running_mean"], 0.1 * every.mean(1), rtol=1e-10, atol=1e-12)
        expected = 0.9 + 0.1 * every.var(1)
        torch.testing.assert_close(found[f"{name}.running_var"], expected, rtol=1e-10, atol=1e-12)
        assert found[f"{name}.num_batches_tracked"] == 1


def test_clipping_is_that_of_one_process() -> None:
    setting = Setting("mlp", "zb-h1", 3, 3, replicas=2, options=EngineOptions(clip=0.05))
    assert apart(piped(setting), alone(setting)) < 1e-10


def test_bf16_computes_in_bf16_and_keeps_gradients_of_full_width() -> None:
    seen: list[torch.dtype] = []

    def loss(output: Any, targets: Any) -> Any:
        seen.append(output.dtype)
        return F.mse_loss(output.float(), targets, reduction="sum"), output.numel()

    def work(transport: Transport) -> dict[str, Any]:
        setting = Setting("mlp", "zb-h1", dtype=torch.float32)
        engine = engine_of(setting, transport, loss, EngineOptions(precision="bf16"))
        batch = batch_of(setting, 0)
        engine.step(batch.inputs, batch.targets)
        return {name: parameter.grad for name, parameter in engine.parameters.named.items()}

    found = {name: gradient for rank in Fabric(2).run(work) for name, gradient in rank.items()}
    assert set(seen) == {torch.bfloat16}
    for name, gradient in alone(MLP).gradients.items():
        assert found[name].dtype is torch.float32
        torch.testing.assert_close(found[name].double(), gradient, rtol=0.1, atol=0.02)


def test_an_overflow_in_one_stage_skips_the_step_on_all_and_halves_the_scale() -> None:
    def work(transport: Transport) -> tuple[list[bool], list[float], bool]:
        setting = Setting("mlp", dtype=torch.float32, stages=3, ranks=3)
        engine = engine_of(setting, transport, options=EngineOptions(precision="fp16", loss_scale=1024.0))
        batch = batch_of(setting, 0)
        skipped, scales = [], []
        for step in range(2):
            if transport.rank == 1:
                handle = engine.parameters.own[0].register_hook(
                    lambda g, step=step: g * float("inf") if step == 0 else g
                )
            skipped.append(engine.step(batch.inputs, batch.targets).skipped)
            scales.append(engine.loss_scale.value)
            if transport.rank == 1:
                handle.remove()
            empty = all(parameter.grad is None for parameter in engine.parameters.own)
            assert empty == skipped[-1]
        return skipped, scales, empty

    for found in Fabric(3).run(work):
        assert found == ([True, False], [512.0, 512.0], False)


def test_the_loss_scale_does_not_show_in_gradients() -> None:
    def work(transport: Transport) -> dict[str, Any]:
        setting = Setting("mlp", dtype=torch.float32)
        engine = engine_of(setting, transport, options=EngineOptions(precision="fp16", loss_scale=64.0))
        batch = batch_of(setting, 0)
        engine.step(batch.inputs, batch.targets)
        return {name: parameter.grad for name, parameter in engine.parameters.named.items()}

    expected = alone(MLP).gradients
    for rank in Fabric(2).run(work):
        for name, gradient in rank.items():
            torch.testing.assert_close(gradient.double(), expected[name], rtol=0.05, atol=0.01)


def test_a_run_goes_on_with_the_same_random_numbers_after_a_restart() -> None:
    setting = Setting("gpt-dropout", "simple", 1, 1)

    def work(transport: Transport) -> tuple[float, float]:
        tokens = batch_of(setting, 0).inputs["input_ids"]
        one = engine_of(setting, transport)
        one.step({"input_ids": tokens}, tokens)
        other = engine_of(setting, transport)
        other.load_state_dict(one.state_dict())
        return one.step({"input_ids": tokens}, tokens).loss, other.step({"input_ids": tokens}, tokens).loss

    ((went_on, restarted),) = Fabric(1).run(work)
    assert went_on == restarted


def test_every_order_of_events_gives_the_same_bits() -> None:
    setting = Setting("unet", "zb-v", 4, 2, samples=7, replicas=2, microbatches=2, steps=1)
    first = piped(setting, blocking=True)
    for seed in range(3):
        assert apart(piped(setting, seed=seed), first) == 0.0
