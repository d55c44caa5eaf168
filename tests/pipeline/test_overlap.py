"""Gradients are reduced while the last backward still runs, and that changes nothing but when."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from everstep.pipeline.engine.engine import Engine  # noqa: E402
from everstep.pipeline.engine.options import EngineOptions  # noqa: E402
from everstep.pipeline.engine.overlap import last_backwards  # noqa: E402
from everstep.pipeline.engine.reduction import Reduction  # noqa: E402
from everstep.pipeline.frontend import split_model, trace_model  # noqa: E402
from everstep.pipeline.graph import Stage, make_chain_graph  # noqa: E402
from everstep.pipeline.schedules import lower_schedule, make_schedule  # noqa: E402
from everstep.pipeline.schedules.actions import parse_rank  # noqa: E402
from tests.pipeline.inprocess import Fabric, InProcess  # noqa: E402
from tests.pipeline.training import Setting, alone, apart, batch_of, engine_of, merged, piped, share, train  # noqa: E402

pytestmark = pytest.mark.torch

EACH = EngineOptions(bucket=1)  # each parameter is a bucket
CLOSE = 1e-10


def heard(engine: Engine, transport: InProcess) -> list[str]:
    """Record the order of events from now on: `begin` and `end` of a stage's backward, and `reduce`."""
    events: list[str] = []

    def wrap(stage: Any, name: str) -> None:
        run = getattr(stage, name)

        def wrapped(*args: Any) -> Any:
            events.append(f"begin {stage.index}")
            try:
                return run(*args)
            finally:
                events.append(f"end {stage.index}")

        setattr(stage, name, wrapped)

    for stage in engine._stages.values():
        wrap(stage, "backward")
        wrap(stage, "weight_grad")
    reduce = transport.all_reduce

    def all_reduce(tensor: Any, group: Any) -> Any:
        if group == engine.data and tensor.is_floating_point():  # others are words of the replicas
            events.append("reduce")
        return reduce(tensor, group)

    def exchange(parts: Any, sizes: Any, group: Any) -> Any:
        events.append("reduce")
        return trade(parts, sizes, group)

    trade = transport.exchange
    transport.all_reduce, transport.exchange = all_reduce, exchange  # type: ignore[method-assign]
    return events


@pytest.mark.parametrize(
    ("case", "schedule", "stages", "options"),
    [
        ("mlp", "1f1b", 2, EACH),
        ("gpt", "1f1b", 2, EACH),
        ("gpt", "interleaved", 4, EACH),
        ("gpt", "zb-h1", 2, EACH),
        ("gpt", "zb-v", 4, EACH),
        ("gpt", "1f1b", 2, replace(EACH, recompute=frozenset({0, 1}))),
    ],
)
def test_a_reduction_begins_before_the_last_backward_ends(
    case: str, schedule: str, stages: int, options: EngineOptions
) -> None:
    setting = Setting(case, schedule, stages, replicas=2, options=options)

    def work(transport: InProcess) -> tuple[list[str], dict[int, int]]:
        engine = engine_of(setting, transport)
        mine = share(setting, transport.replica, batch_of(setting, 0))
        engine.step(mine.inputs, mine.targets, last=False)
        events = heard(engine, transport)
        engine.step(mine.inputs, mine.targets)
        own = engine.parameters.reduction._own
        return events, {stage: len(own[stage]) for stage in engine._stages}

    for events, sizes in Fabric(2, 2).run(work):
        for stage, size in sizes.items():
            last = len(events) - 1 - events[::-1].index(f"begin {stage}")
            end = events.index(f"end {stage}", last)
            assert events[last:end].count("reduce") == size - 1, "all but the first layer's last parameter"
            assert len(sizes) > 1 or "reduce" not in events[:last], "not before the last backward"


@pytest.mark.parametrize(
    "setting",
    [
        Setting("gpt", "zb-v", 4, replicas=2, samples=13, options=replace(EACH, clip=0.05)),
        Setting("gpt", "interleaved", 4, replicas=3, samples=13, options=EACH),
        Setting("gpt", "interleaved", 4, replicas=2, samples=7, options=EACH),
        Setting("gpt", "zb-h1", replicas=2, samples=3, options=EACH),
        Setting("experts", "1f1b", replicas=2, options=EACH),
        Setting("experts", "zb-v", 4, replicas=2, options=replace(EACH, recompute=frozenset({0, 2}))),
        Setting("unet", "1f1b", replicas=2, samples=2, options=EACH),
        Setting("mlp", "zb-h1", replicas=2, options=replace(EACH, precision="fp16"), dtype=torch.float32),
    ],
    ids=str,
)
def test_gradients_have_the_bits_of_a_reduction_after_the_backward(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = piped(setting)
    if setting.options.precision == "full":
        assert apart(found, alone(setting)) < CLOSE
    monkeypatch.setattr(Reduction, "listen", lambda self, stage, nodes: contextlib.nullcontext())
    wanted = piped(setting)
    for name, gradient in wanted.gradients.items():
        assert (gradient is None) == (found.gradients[name] is None)
        assert gradient is None or torch.equal(found.gradients[name], gradient), name


def test_batches_that_are_added_up_are_reduced_once_with_parameters_that_freeze_between_steps() -> None:
    setting = Setting("gpt", "1f1b", replicas=2, options=EACH)
    frozen = ("h.0", "ln_f")

    def work(transport: InProcess) -> tuple[list[str], dict[str, Any]]:
        engine = engine_of(setting, transport)
        for name, each in engine.parameters.named.items():
            each.requires_grad_(not name.startswith(frozen))
        events = heard(engine, transport)
        for number in range(3):
            mine = share(setting, transport.replica, batch_of(setting, number))
            engine.step(mine.inputs, mine.targets, last=number == 2)
            if number < 2:
                assert "reduce" not in events
        return events, {name: each.grad for name, each in engine.parameters.named.items()}

    from tests.pipeline.models import CASES

    model = CASES["gpt"].build()
    parts = [CASES["gpt"].loss(model(**each.inputs), each.targets) for each in (batch_of(setting, n) for n in range(3))]
    (sum(total for total, _ in parts) / sum(count for _, count in parts)).backward()
    for events, gradients in Fabric(2, 2).run(work):
        assert "reduce" in events[: len(events) - 1 - events[::-1].index("end 0" if "end 0" in events else "end 1")]
        for name, gradient in gradients.items():
            if name.startswith(frozen):
                assert gradient is None
            else:
                torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-9, atol=1e-13)


class Reentrant(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """`late` is used above a reentrant checkpoint, and in it: autograd adds to its gradient twice in one backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.late = nn.Parameter(torch.randn(4, 4))
        self.double()

    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.first(x))
        x = checkpoint(lambda y: torch.tanh(self.inner(y)) @ self.late, x, use_reentrant=True)
        return torch.tanh(x) @ self.late


class Whole:
    """A module as a stage, whose parameters are used in the order of these names."""

    inputs, outputs = ("input:x",), ("output",)

    def __init__(self, module: nn.Module, uses: tuple[str, ...]) -> None:
        self.module = module
        self.uses = [name for each in uses for name, _ in module.named_parameters() if name.startswith(each)]

    def __call__(self, values: Any) -> dict[str, Any]:
        return {"output": self.module(values["input:x"])}


def squared(output: Any, target: Any) -> Any:
    return (output - target).square().sum(), output.numel()


@pytest.mark.parametrize("keeper", [None, 0, 1])
@pytest.mark.parametrize("samples", [(4, 4), (4, 1), (4, 0)])
def test_a_gradient_to_which_a_reentrant_checkpoint_adds_late_is_whole(
    samples: tuple[int, int], keeper: int | None
) -> None:
    x = torch.randn(sum(samples), 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.ones_like(x)

    def work(transport: InProcess) -> tuple[list[str], dict[str, Any]]:
        graph = make_chain_graph([Stage()], 1)
        stages: Any = {0: Whole(Reentrant(), ("first", "inner", "late"))}
        engine = Engine(stages, lower_schedule(make_schedule("1f1b", 1, 1, 2), graph), graph, transport, squared, EACH)
        if keeper is not None:
            engine.parameters.keep({engine.parameters.named["late"]: keeper})
        events = heard(engine, transport)
        part = slice(0, samples[0]) if transport.replica == 0 else slice(samples[0], None)
        engine.step({"x": x[part]}, y[part])
        return events, {name: each.grad for name, each in engine.parameters.named.items()}

    model = Reentrant()
    total, count = squared(model(x.clone().requires_grad_()), y)
    (total / count).backward()
    found = Fabric(1, 2).run(work)
    events = found[0][0]
    assert "reduce" in events[: len(events) - 1 - events[::-1].index("end 0")]
    for replica, (_, gradients) in enumerate(found):
        if keeper == 1 - replica:
            assert gradients.pop("late") is None
        for name, gradient in gradients.items():
            wanted = model.get_parameter(name).grad
            assert (gradient is None) == (wanted is None), name
            if wanted is not None:
                torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-13, msg=name)


class Backwards(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Its layers are registered in the order that is not theirs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.third, self.second, self.first = nn.Linear(4, 2), nn.Linear(8, 4), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Any) -> Any:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x * self.scale)))))


def test_what_a_forward_uses_last_is_reduced_first_in_whatever_order_it_was_registered() -> None:
    x = torch.ones(2, 16)

    def work(transport: InProcess) -> list[int]:
        (stage,) = split_model(trace_model(Backwards(), {"x": x}), {"output": 0})
        graph = make_chain_graph([Stage()], 1)
        engine = Engine(
            {0: stage},
            lower_schedule(make_schedule("1f1b", 1, 1, 1), graph),
            graph,
            transport,
            squared,
            replace(EACH, broadcast=False),
        )
        sizes, reduce = [], transport.all_reduce

        def all_reduce(tensor: Any, group: Any) -> Any:
            sizes.append(tensor.numel())
            return reduce(tensor, group)

        transport.all_reduce = all_reduce  # type: ignore[method-assign]
        engine.step({"x": x}, torch.ones(2, 2))
        return sizes

    weights = [2, 8, 4, 32, 8, 128]
    for sizes in Fabric(1, 2).run(work):
        place = sizes.index(weights[0] + 1)  # with its flag
        assert sizes[place : place + 6] == [each + 1 for each in weights]
        assert sizes[place + 6] > 16, "the parameter of no module is the last"


def test_only_the_last_backward_with_no_other_reduction_before_its_own_begins_it() -> None:
    """With fewer micro-batches another stage would be the first: all replicas must begin in one order."""

    def begins(line: str) -> set[str]:
        return set(map(str, last_backwards(parse_rank(line))))

    assert begins("0F0 1F0 1B0 0B0 1B1 1D 0B1 0D") == {"1B1", "0B1"}
    assert begins("0F0 1F0 1B0 0B0 1D 0D") == {"1B0"}
    assert begins("0F0 0I0 0W0 0I1 0W1 0T:wte") == set()
    assert begins("0I0 0I1 0W1 0W0 0T:wte 0D") == set()
    assert begins("0I0 0I1 0W1 0W0 0D 0T:wte") == {"0W0"}
    assert begins("0F0 0F1") == set()


@pytest.mark.parametrize("samples", [3, 5, 9])
def test_replicas_with_fewer_micro_batches_reduce_in_the_same_order(samples: int) -> None:
    """Else a transport would add up the gradients of different parameters."""
    setting = Setting("gpt", "zb-v", 4, replicas=2, samples=samples, options=EACH)
    found = merged(Fabric(2, 2, seed=samples).run(lambda transport: train(setting, transport)))
    assert apart(found, alone(setting)) < CLOSE
