"""Parameters are frozen and unfrozen between steps, as fine-tuning does; what cannot be is refused with what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline import EngineOptions, PlanOptions, pipeline  # noqa: E402
from everstep.pipeline.engine.zero import ShardedOptimizer  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.schedules import parse_schedule  # noqa: E402
from everstep.pipeline.transport.base import Transport, TransportError  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.pipeline.grouping import group_options  # noqa: E402
from tests.pipeline.inprocess import Fabric  # noqa: E402
from tests.pipeline.training import Setting, batch_of, engine_of, share  # noqa: E402

pytestmark = pytest.mark.torch

# Of each step: the parameters that learn, by the beginnings of their names, and the samples.
PHASES = (
    (("3.",), 8),  # before the first step, the whole first stage is frozen, and a part of the second
    (("0.", "1.", "2.", "3."), 8),
    (("2.", "3."), 8),
    (("0.",), 6),
    (("1.bias", "2.weight"), 8),
    (("",), 8),
)
RUNS: tuple[dict[str, Any], ...] = (
    {"schedule": "1f1b"},
    {"schedule": "zb-h1"},
    {"schedule": "1f1b", "recompute": True},
    {"schedule": "1f1b", "blocks": ["0", "1", "2", "3"]},
)


def layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()


def batch(step: int, samples: int) -> Any:
    return torch.randn(samples, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def squared(output: Any, target: Any) -> Any:
    return (output - target).square().mean()


def freeze(model: Any, learning: tuple[str, ...]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(learning))


def state(model: Any) -> dict[str, Any]:
    """The weights, and the gradients, None where there are none."""
    named = dict(model.named_parameters())
    gradients = {f"{name}.grad": each.grad for name, each in named.items()}
    return {name: None if each is None else each.detach().clone() for name, each in (named | gradients).items()}


def _frozen(rank: int) -> list[list[dict[str, Any]]]:
    found = []
    for how in RUNS:
        with pipeline(
            layers(),
            batch(0, 8),
            squared,
            microbatches=2,
            **group_options(stage_of={"0": 0, "1": 0, "2": 1, "3": 1}, costs="counted", heartbeat=None, **how),
        ) as run:
            optimizer, states = torch.optim.AdamW(run.groups(), lr=0.1), []
            for step, (learning, samples) in enumerate(PHASES):
                freeze(run, learning)
                x = batch(step, samples)
                run.step(x, x.flip(0))
                states.append(state(run))
                optimizer.step()
        found.append(states)
    return found


def test_parameters_that_are_frozen_and_unfrozen_between_steps_learn_as_in_one_process() -> None:
    model = layers()
    optimizer, expected = torch.optim.AdamW(model.parameters(), lr=0.1), list[dict[str, Any]]()
    for step, (learning, samples) in enumerate(PHASES):
        freeze(model, learning)
        optimizer.zero_grad()
        x = batch(step, samples)
        squared(model(x), x.flip(0)).backward()
        expected.append(state(model))
        optimizer.step()
    for how, one, other in zip(RUNS, *ranks.run(2, _frozen), strict=True):
        for step, wanted in enumerate(expected):
            found = one[step] | other[step]
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert (found[name] is None) == (tensor is None), (how, step, name)
                if tensor is not None:
                    torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12, msg=f"{how} {step} {name}")


def _refused(rank: int) -> list[str]:
    """Return the messages where parameters cannot be frozen."""
    how: dict[str, Any] = {"stage_of": {"0": 0, "1": 0, "2": 1, "3": 1}, "costs": "counted", "heartbeat": None}
    told, x = [], batch(0, 8)
    with pipeline(layers(), x, squared, **group_options(**how)) as run:
        run.step(x, x, last=False)
        freeze(run, ("3.",))
        for _ in range(2):  # nothing was begun: it may be put right
            with pytest.raises(PipelineError) as caught:
                run.step(x, x)
            told.append(str(caught.value))
        freeze(run, ("",))
        run.step(x, x)
    model = layers()
    freeze(model, ("3.",))
    with pipeline(model, x, squared, **group_options(**how)) as run:
        run.step(x, x)
        freeze(run, ("2.", "3."))
        told.append(str(run.step(x, x).count))  # a part of the graph that has gradients all the same
        assert all((each.grad is None) == (not each.requires_grad) for each in run.parameters())
        freeze(run, ("",))
        with pytest.raises((PipelineError, TransportError)) as ended:  # who has the parameters says why
            run.step(x, x)
        told.append(str(ended.value))
    return told


def test_what_cannot_learn_is_refused_with_what_to_do() -> None:
    for rank, (inside, again, count, unfrozen) in enumerate(ranks.run(2, _refused)):
        assert inside == again
        assert "frozen between the batches of one step" in inside
        assert float(count) == 8
        if not rank:
            assert "had none when pipeline() was called" in unfrozen
            assert "freeze them after it" in unfrozen


def test_replicas_and_owners_of_a_parameter_that_freeze_it_differently_are_told() -> None:
    setting = Setting("gpt", "1f1b", 2, 2, replicas=2)

    def work(transport: Transport) -> str:
        engine = engine_of(setting, transport)
        mine = share(setting, transport.replica, batch_of(setting, 0))
        last = engine.parameters.own[-1]
        last.requires_grad_(transport.replica == 0)
        with pytest.raises(PipelineError) as caught:
            engine.step(mine.inputs, mine.targets)
        last.requires_grad_(True)
        engine.step(mine.inputs, mine.targets)
        return str(caught.value)

    for told in Fabric(2, 2).run(work):
        assert "replica 1 is at a step after 0 steps with 1 frozen parameters (" in told

    def tied(transport: Transport) -> str:
        engine = engine_of(Setting("gpt", "1f1b", 2, 2), transport)
        mine = batch_of(setting, 0)
        next(iter(engine.parameters.shared.values())).requires_grad_(transport.rank == 0)
        with pytest.raises(Exception, match=r"shared parameter 'wte\.weight' is frozen on some") as caught:
            engine.step(mine.inputs, mine.targets)
        return str(caught.value)

    assert len(Fabric(2).run(tied)) == 2


def test_a_sharded_optimizer_takes_frozen_parameters_and_refuses_those_it_does_not_know() -> None:
    setting = Setting("mlp", "1f1b", 2, 2, replicas=2)

    def work(transport: Transport) -> bool:
        engine = engine_of(setting, transport)
        first, *others = engine.parameters.own
        first.requires_grad_(False)
        sharded = ShardedOptimizer(engine, lambda named: torch.optim.SGD(named.values(), lr=0.1))
        mine, before = share(setting, transport.replica, batch_of(setting, 0)), first.detach().clone()
        others[0].requires_grad_(False)
        kept = others[0].detach().clone()
        engine.step(mine.inputs, mine.targets)
        sharded.step()
        assert torch.equal(kept, others[0])
        first.requires_grad_(True)
        engine.step(mine.inputs, mine.targets)
        with pytest.raises(PipelineError, match="unfrozen after the ShardedOptimizer was made"):
            sharded.step()
        return bool(torch.equal(before, first))

    assert all(Fabric(2, 2).run(work))


def _planned(rank: int, path: str) -> list[tuple[Any, ...]]:
    """Pipelines of the same model by one file, with other parameters frozen each time."""
    found = []
    for learning in ("", "3.", "3.", ""):
        model = layers()
        freeze(model, (learning,))
        with pipeline(
            model,
            batch(0, 8),
            squared,
            schedule="1f1b",
            microbatches=2,
            plan=PlanOptions(costs="counted", file=path),
            engine=EngineOptions(heartbeat=None),
        ) as run:
            run.step(batch(0, 8), batch(1, 8))
            learned = sum(each.grad is not None for each in run.parameters())
            frozen = sum(node.frozen for node in run.plan.profile.graph.nodes)
            edges = [edge.gradient for edge in run.plan.stages.edges]
            found.append((frozen, sum(run.plan.prediction.memory), edges, learned))
    return found


def test_a_kept_plan_counts_what_is_frozen_today(tmp_path: Path) -> None:
    here, there = ranks.run(2, _planned, str(tmp_path / "plan.json"))
    sizes = [sum(each.numel() * each.element_size() for each in layer.parameters()) for layer in layers()]
    for step, ((frozen, memory, edges, _), other) in enumerate(zip(here, there, strict=True)):
        assert (frozen, memory, edges) == other[:3]
        some = step in (1, 2)
        assert frozen == (sum(sizes[:3]) if some else 0)
        assert edges == [not some]
        assert memory <= here[0][1] - 3 * frozen
    assert [one[3] + other[3] for one, other in zip(here, there, strict=True)] == [8, 2, 2, 8]


def _by_hand(rank: int) -> tuple[float, int]:
    with pipeline(
        layers(),
        batch(0, 8),
        squared,
        schedule="1f1b",
        microbatches=2,
        plan=PlanOptions(stage_of={"0": 0, "1": 0, "2": 1, "3": 1}, costs="counted", optimizer_factor=1.0),
        engine=EngineOptions(heartbeat=None),
    ) as run:
        more = replace(run.plan, optimizer_factor=3.0).predict()
        return run.plan.optimizer_factor, sum(more.memory) - sum(run.plan.prediction.memory)


def _too_large(rank: int) -> list[str]:
    told = []
    written = parse_schedule("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    for schedule in ("1f1b", None, written):
        with pytest.raises(PipelineError) as caught:
            pipeline(
                layers(),
                batch(0, 8),
                squared,
                schedule=schedule,
                microbatches=2,
                plan=PlanOptions(stage_of={"2": 1}, costs="counted", memory=100),
                engine=EngineOptions(heartbeat=None),
            )
        told.append(str(caught.value))
    return told


def test_a_plan_by_hand_that_does_not_fit_the_memory_is_refused() -> None:
    here, there = ranks.run(2, _too_large)
    assert here == there
    for told in here:
        assert "the memory" in told
        assert "needs" in told
        assert "GB, it has 1e-07" in told


def test_a_plan_by_hand_counts_the_optimizer_that_was_named() -> None:
    parameters = sum(each.numel() * each.element_size() for each in layers().parameters())
    assert ranks.run(2, _by_hand) == [(1.0, 2 * parameters)] * 2
