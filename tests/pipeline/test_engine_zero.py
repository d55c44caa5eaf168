"""Optimizer state that is spread over replicas: each parameter has one keeper, and nothing else changes."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

from everstep.pipeline import pipeline
from everstep.pipeline.engine.microbatch import compute_bounds
from everstep.pipeline.engine.options import EngineOptions
from everstep.pipeline.engine.zero import ShardedOptimizer, assign_owners
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.transport.base import Transport
from tests.checkpoint import ranks
from tests.pipeline.grouping import group_options
from tests.pipeline.inprocess import Fabric, InProcess
from tests.pipeline.models import CASES, slice_batch, squares
from tests.pipeline.training import Setting, alone, apart, batch_of, engine_of, optimizer_of, piped, share

pytestmark = pytest.mark.torch

QUICK: dict[str, Any] = {"schedule": "1f1b", "costs": "counted", "heartbeat": None, "check": False}
CLIP = 0.05


def test_shares_are_about_equal_and_the_same_whoever_asks() -> None:
    found = assign_owners({"a": 5, "b": 4, "c": 3, "d": 2, "e": 0}, 2)
    assert found == {"a": 0, "b": 1, "c": 1, "d": 0, "e": 0}
    assert assign_owners({"e": 0, "d": 2, "c": 3, "b": 4, "a": 5}, 2) == found


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
        assert kept == {name for name, p in engine.parameters.named.items() if p.grad is not None}
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
        under_way: list[weakref.ref[Any]] = []
        most, exchange = 0, transport.exchange

        def counted(parts: Sequence[torch.Tensor], sizes: Sequence[int], group: Any) -> Any:
            nonlocal most
            work = exchange(parts, sizes, group)
            under_way.append(weakref.ref(work))
            most = max(most, sum(each() is not None for each in under_way))
            return work

        transport.exchange = counted  # type: ignore[method-assign]
        sharded.step()
        return len(under_way), most

    for count, most in Fabric(2, 2).run(work):
        assert count > 6
        assert most == 2


def test_parameters_that_make_leaves_out_have_gradients_on_all_replicas_for_another_optimizer() -> None:
    setting = Setting("gpt", replicas=2, options=EngineOptions(bucket=1))

    def work(transport: InProcess) -> tuple[dict[str, Any], int]:
        engine = engine_of(setting, transport)

        def some(named: Mapping[str, Any]) -> torch.optim.Optimizer:
            return torch.optim.SGD([{"params": [p for n, p in named.items() if n.startswith("h.")]}], lr=0.1)

        sharded = ShardedOptimizer(engine, some)
        rest = {name: each for name, each in engine.parameters.named.items() if not name.startswith("h.")}
        optimizer = torch.optim.SGD(rest.values(), lr=0.1)
        for step in range(2):
            mine = share(setting, transport.replica, batch_of(setting, step))
            engine.step(mine.inputs, mine.targets)
            assert all(each.grad is not None for each in rest.values())
            missing = [n for n, p in engine.parameters.named.items() if p.grad is None]
            sharded.step()
            optimizer.step()
        return {name: each.detach() for name, each in engine.parameters.named.items()}, len(missing)

    model = CASES["gpt"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        batch = batch_of(setting, step)
        optimizer.zero_grad()
        total, count = CASES["gpt"].loss(model(**batch.inputs), batch.targets)
        (total / count).backward()
        optimizer.step()
    for weights, missing in Fabric(2, 2).run(work):
        assert missing > 0
        for name, weight in weights.items():
            torch.testing.assert_close(weight, model.get_parameter(name).detach(), rtol=1e-9, atol=1e-12)


def test_a_step_is_refused_where_only_some_replicas_made_a_sharded_optimizer() -> None:
    setting = Setting("mlp", replicas=2)

    def work(transport: InProcess) -> str:
        engine = engine_of(setting, transport)
        engine.parameters.keep({engine.parameters.own[0]: 0} if transport.replica else {})
        mine = share(setting, transport.replica, batch_of(setting, 0))
        with pytest.raises(PipelineError) as caught:
            engine.step(mine.inputs, mine.targets)
        return str(caught.value)

    for told in Fabric(2, 2).run(work):
        assert "replica 1 is at a step after 0 steps with a ShardedOptimizer" in told


def test_a_step_is_refused_where_one_of_two_sharded_optimizers_is_gone_on_some_replicas_only() -> None:
    setting = Setting("mlp", replicas=2)

    def work(transport: InProcess) -> str:
        engine = engine_of(setting, transport)
        own = engine.parameters.own
        engine.parameters.keep({own[0]: 0})
        if transport.replica:
            engine.parameters.keep({own[1]: 0})
        mine = share(setting, transport.replica, batch_of(setting, 0))
        with pytest.raises(PipelineError) as caught:
            engine.step(mine.inputs, mine.targets)
        return str(caught.value)

    for told in Fabric(2, 2).run(work):
        assert "replica 1 is at a step after 0 steps with a ShardedOptimizer" in told


def test_another_optimizer_after_a_sharded_one_has_all_gradients() -> None:
    setting = Setting("mlp", replicas=2)

    def work(transport: InProcess) -> dict[str, Any]:
        engine = engine_of(setting, transport)
        optimizer: Any = ShardedOptimizer(engine, lambda named: optimizer_of(list(named.values()), setting.dtype))
        for number in range(2):
            mine = share(setting, transport.replica, batch_of(setting, number))
            engine.step(mine.inputs, mine.targets)
            optimizer.step()
            optimizer = optimizer_of(engine.parameters.own, setting.dtype)
        return {name: each.detach().clone() for name, each in engine.parameters.named.items()}

    model = CASES["mlp"].build()
    for number in range(2):
        batch, optimizer = batch_of(setting, number), optimizer_of(list(model.parameters()), setting.dtype)
        model.zero_grad()
        total, count = CASES["mlp"].loss(model(**batch.inputs), batch.targets)
        (total / count).backward()
        optimizer.step()
    for weights in Fabric(2, 2).run(work):
        for name, weight in weights.items():
            torch.testing.assert_close(weight, model.get_parameter(name).detach(), rtol=1e-9, atol=1e-12)


def _sent() -> int:
    """The bytes that this process has sent over TCP, by what the kernel counts."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                        total += struct.unpack_from("<Q", info, 200)[0]  # tcpi_bytes_sent
    return total


def _traffic(rank: int, replicas: int) -> tuple[float, float, float]:
    """Return the bytes sent in a step, relative to those of the parameters.

    They are sent for gradients on all replicas, for gradients on their keepers, and for new values.
    """
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    x = torch.ones(4, 256)
    with pipeline(model, x, squares, stages=1, microbatches=1, **group_options(data_parallel=replicas, **QUICK)) as run:
        size = sum(each.nbytes for each in run.parameters())
        before = _sent()
        run.step(x, x)
        dist.barrier()
        for_all = _sent() - before
        sharded = ShardedOptimizer(run.engine, lambda named: torch.optim.SGD(named.values(), lr=0.1))
        before = _sent()
        run.step(x, x)
        dist.barrier()
        for_keepers = _sent() - before
        before = _sent()
        sharded.step()
        dist.barrier()
        return for_all / size, for_keepers / size, (_sent() - before) / size


def test_gradients_for_their_keepers_and_new_values_are_each_half_of_what_sums_for_all_are() -> None:
    replicas = 4
    for for_all, for_keepers, values in ranks.run(replicas, _traffic, replicas):
        assert for_all == pytest.approx(2 * (replicas - 1) / replicas, rel=0.1)  # of a ring
        assert for_keepers == pytest.approx((replicas - 1) / replicas, rel=0.2)  # shares are about equal
        assert values == pytest.approx((replicas - 1) / replicas, rel=0.2)


def _clipped(rank: int) -> tuple[list[float], dict[str, Any], int]:
    """The norms of some steps that `run` clips, the weights after them, and how many parameters are kept here."""
    case, norms = CASES["gpt"], []
    with pipeline(
        case.build(), case.example(8).inputs, case.loss, stages=2, microbatches=2, **group_options(**QUICK)
    ) as run:
        sharded = ShardedOptimizer(run.engine, lambda named: torch.optim.SGD(named.values(), lr=1.0, momentum=0.9))
        for step in range(3):
            start, stop = compute_bounds(8, run.replicas)[run.replica]
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
