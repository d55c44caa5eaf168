"""Gradients of bfloat16 parameters are added up in float32, and rounded once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline import pipeline  # noqa: E402
from everstep.pipeline.engine.microbatch import compute_bounds  # noqa: E402
from everstep.pipeline.engine.options import EngineOptions  # noqa: E402
from everstep.pipeline.engine.wide import compute_wide_factor  # noqa: E402
from everstep.pipeline.transport.base import Transport  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.pipeline.grouping import group_options  # noqa: E402
from tests.pipeline.inprocess import Fabric  # noqa: E402
from tests.pipeline.models import CASES, slice_batch, squares  # noqa: E402
from tests.pipeline.training import Setting, batch_of, engine_of, share  # noqa: E402

pytestmark = pytest.mark.torch

WIDE = EngineOptions(fp32_gradients=True)
STEPS = 3  # batches that are added up


def gradients(setting: Setting, *, sharded: bool = False) -> dict[str, Any]:
    """Return the gradients of one step by name, from whichever replica has them."""

    def work(transport: Transport) -> dict[str, Any]:
        engine = engine_of(setting, transport)
        if sharded:
            engine.parameters.keep({each: place % 2 for place, each in enumerate(engine.parameters.own)})
        for number in range(STEPS):
            mine = share(setting, transport.replica, batch_of(setting, number))
            engine.step(mine.inputs, mine.targets, last=number == STEPS - 1)
        return {name: each.grad for name, each in engine.parameters.named.items() if each.grad is not None}

    found: dict[str, Any] = {}
    for each in Fabric(setting.ranks, setting.replicas).run(work):
        for name, gradient in each.items():
            assert torch.equal(found.setdefault(name, gradient), gradient)
    return found


def sums(setting: Setting) -> tuple[dict[str, Any], float]:
    """In float32, of the gradients of each micro-batch alone, in their order and that of replicas; and the count."""
    case, totals, count = CASES[setting.case], list[dict[str, Any]](), 0.0
    model = case.build(dtype=torch.bfloat16)
    for replica in range(setting.replicas):
        total = {name: torch.zeros(each.shape) for name, each in model.named_parameters()}
        for number in range(STEPS):
            mine = share(setting, replica, batch_of(setting, number))
            for start, stop in compute_bounds(setting.samples // setting.replicas, setting.microbatches):
                part = slice_batch(mine, start, stop)
                model.zero_grad()
                part_sum, part_count = case.loss(model(**part.inputs), part.targets)
                part_sum.backward()
                count += float(part_count)
                for name, each in model.named_parameters():
                    total[name] += each.grad.float()
        totals.append(total)
    return {name: sum((each[name] for each in totals[1:]), totals[0][name]) for name in totals[0]}, count


@pytest.mark.parametrize(
    ("schedule", "stages", "replicas", "sharded"),
    [("1f1b", 2, 1, False), ("zb-v", 4, 1, False), ("1f1b", 2, 2, False), ("zb-h1", 2, 2, True)],
)
def test_sums_in_float32_are_rounded_once(schedule: str, stages: int, replicas: int, sharded: bool) -> None:
    setting = Setting("mlp", schedule, stages, replicas=replicas, samples=32, microbatches=8, dtype=torch.bfloat16)
    wanted, count = sums(setting)
    plain = gradients(setting, sharded=sharded)
    found = gradients(replace(setting, options=replace(WIDE, bucket=1)), sharded=sharded)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        assert gradient.dtype is torch.bfloat16
        assert torch.equal(gradient, (wanted[name] * (1.0 / count)).bfloat16()), name
    assert any(not torch.equal(plain[name], found[name]) for name in found), "the sums in bfloat16 lose something"


def test_hooks_and_whoever_comes_after_a_step_have_gradients_of_the_type_of_the_parameter() -> None:
    setting = Setting("mlp", dtype=torch.bfloat16, options=replace(WIDE, clip=1e-3))

    def work(transport: Transport) -> set[Any]:
        engine, heard = engine_of(setting, transport), set[Any]()
        if transport.rank:  # on one rank alone
            engine.parameters.own[0].register_hook(lambda gradient: heard.add(gradient.dtype))
        optimizer = torch.optim.AdamW(engine.parameters.own)
        for number in range(2):
            mine = batch_of(setting, number)
            engine.step(mine.inputs, mine.targets)
            assert {each.grad.dtype for each in engine.parameters.own} == {torch.bfloat16}
            optimizer.step()
        engine.step(mine.inputs, mine.targets, last=False)
        engine.close()
        assert {each.grad_dtype for each in engine.parameters.own} == {torch.bfloat16}
        return heard

    assert Fabric(2).run(work) == [set(), {torch.bfloat16}]


def _planned(rank: int) -> list[tuple[float, int]]:
    """The words of plans, and the bytes that they predict for this rank."""
    found = []
    x = torch.ones(4, 8, dtype=torch.bfloat16)
    how: dict[str, Any] = {"schedule": "1f1b", "costs": "counted", "heartbeat": None, "check": False}
    for wide in (False, True):
        model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)).bfloat16()
        with pipeline(model, x, squares, stages=2, microbatches=2, **group_options(fp32_gradients=wide, **how)) as run:
            found.append((run.plan.optimizer_factor, run.plan.prediction.memory[run.engine.rank]))
            size = sum(each.nbytes for each in run.parameters())
    assert found[1][1] - found[0][1] == size
    return found


def test_a_plan_counts_gradients_of_twice_the_width() -> None:
    for found in ranks.run(2, _planned):
        assert [words for words, _ in found] == [3.0, 4.0]
    mixed = nn.ModuleList([nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4), nn.Linear(9, 9).requires_grad_(False)])
    assert compute_wide_factor(mixed.parameters()) == pytest.approx(1 / 3)
