"""Optimizer state that is spread over replicas: each parameter has one keeper, and nothing else changes."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from everstep.pipeline import pipeline
from everstep.pipeline.engine.microbatch import bounds
from everstep.pipeline.engine.zero import ShardedOptimizer, shares
from everstep.pipeline.transport.base import Transport
from everstep.pipeline.transport.inprocess import Fabric, InProcess
from tests.checkpoint import ranks
from tests.pipeline.models import CASES, slice_batch
from tests.pipeline.training import Setting, alone, apart, batch_of, engine_of, piped, share

pytestmark = pytest.mark.torch

QUICK: dict[str, Any] = {"schedule": "1f1b", "costs": "counted", "heartbeat": None, "check": False}
CLIP = 0.05


def test_shares_are_about_equal_and_the_same_whoever_asks() -> None:
    found = shares({"a": 5, "b": 4, "c": 3, "d": 2, "e": 0}, 2)
    assert found == {"a": 0, "b": 1, "c": 1, "d": 0, "e": 0}
    assert shares({"e": 0, "d": 2, "c": 3, "b": 4, "a": 5}, 2) == found


@pytest.mark.parametrize("case", ["mlp", "gpt"])
def test_weights_are_those_of_one_process(case: str) -> None:
    setting = Setting(case, replicas=2, microbatches=2, steps=3, sharded=True)
    assert apart(piped(setting), alone(setting)) < 1e-10


def test_the_state_of_each_parameter_is_kept_by_one_replica() -> None:
    setting = Setting("gpt", replicas=2, microbatches=2)

    def work(transport: Transport) -> tuple[set[str], set[str]]:
        engine = engine_of(setting, transport)
        sharded = ShardedOptimizer(engine, lambda named: torch.optim.AdamW(named.values()))
        mine = share(setting, transport.replica, batch_of(setting, 0))
        engine.step(mine.inputs, mine.targets)
        sharded.step()
        kept = {name for name, p in engine.parameters.named.items() if p in sharded.optimizer.state}
        return kept, set(engine.parameters.named)

    first, last, other_first, other_last = Fabric(2, 2).run(work)
    for (kept, named), (other_kept, _) in ((first, other_first), (last, other_last)):
        assert kept | other_kept == named
        assert not kept & other_kept


def test_a_replica_that_keeps_nothing_has_an_optimizer_too() -> None:
    setting = Setting("mlp", replicas=8, microbatches=1, samples=8)

    def work(transport: Transport) -> tuple[int, list[int]]:
        engine = engine_of(setting, transport)
        sharded = ShardedOptimizer(engine, lambda named: torch.optim.AdamW(named.values(), lr=0.5))
        torch.optim.lr_scheduler.StepLR(sharded.optimizer, 1)
        mine = share(setting, transport.replica, batch_of(setting, 0))
        engine.step(mine.inputs, mine.targets)
        sharded.step()
        return len(engine.parameters.named), [len(group["params"]) for group in sharded.optimizer.param_groups]

    found = Fabric(2, 8).run(work)
    assert any(kept == [0] for _, kept in found)
    for rank in range(2):
        assert sum(kept[0] for _, kept in found[rank::2]) == found[rank][0]


def test_new_values_are_on_their_way_two_buckets_at_a_time() -> None:
    """Else the parameters would be there twice."""
    setting = Setting("gpt", replicas=2, microbatches=2)

    def work(transport: InProcess) -> tuple[int, int]:
        engine = engine_of(setting, transport)
        engine.options = replace(engine.options, bucket=1)
        sharded = ShardedOptimizer(engine, lambda named: torch.optim.AdamW(named.values()))
        mine = share(setting, transport.replica, batch_of(setting, 0))
        engine.step(mine.inputs, mine.targets)
        buffers: list[weakref.ref[torch.Tensor]] = []
        most, reduce = 0, transport.all_reduce

        def counted(tensor: torch.Tensor, group: Any) -> Any:
            nonlocal most
            work = reduce(tensor, group)
            buffers.append(weakref.ref(tensor))
            del tensor
            most = max(most, sum(each() is not None for each in buffers))
            return work

        transport.all_reduce = counted  # type: ignore[method-assign]
        sharded.step()
        return len(buffers), most

    for count, most in Fabric(2, 2).run(work):
        assert count > 6
        assert most <= 4, "two that are on their way, and what this test holds itself"


def _clipped(rank: int) -> tuple[list[float], dict[str, Any], int]:
    """The norms of some steps that `run` clips, the weights after them, and how many parameters are kept here."""
    case, norms = CASES["gpt"], []
    with pipeline(case.build(), case.example(8).inputs, case.loss, stages=2, microbatches=2, **QUICK) as run:
        sharded = ShardedOptimizer(run.engine, lambda named: torch.optim.SGD(named.values(), lr=1.0, momentum=0.9))
        for step in range(3):
            start, stop = bounds(8, run.replicas)[run.replica]
            mine = slice_batch(case.example(8, seed=step), start, stop)
            run.step(mine.inputs, mine.targets)
            norms.append(float(run.clip_grad_norm_(CLIP)))
            sharded.step()
        weights = {name: each.detach().clone() for name, each in run.named_parameters()}
        return norms, weights, len(sharded.optimizer.state)


def test_gradients_that_a_run_clips_are_stepped_by_a_sharded_optimizer_as_in_one_process() -> None:
    case = CASES["gpt"]
    model, wanted = case.build(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    for step in range(3):
        batch = case.example(8, seed=step)
        optimizer.zero_grad()
        total, count = case.loss(model(**batch.inputs), batch.targets)
        (total / count).backward()
        wanted.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    assert min(wanted) > CLIP  # something was clipped
    every = ranks.run(4, _clipped)
    for norms, weights, kept in every:
        assert norms == pytest.approx(wanted, rel=1e-9)
        assert 0 < kept < len(weights)  # the states of the others are with the other replica
        for name, weight in weights.items():
            torch.testing.assert_close(weight, model.get_parameter(name).detach(), rtol=1e-7, atol=1e-10)
