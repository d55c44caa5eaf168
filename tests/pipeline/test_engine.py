"""Promises of the engine beside equal mathematics: agreement, normalisation, and rejected input."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from everstep.pipeline.engine.engine import Engine
from everstep.pipeline.engine.microbatch import batch_size, compute_bounds, split_batch
from everstep.pipeline.engine.options import EngineOptions
from everstep.pipeline.engine.step_result import StepResult
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.schedules import ActionKind, lower_schedule, make_schedule
from everstep.pipeline.transport.base import Transport
from tests.pipeline.by_hand import cut, recipe
from tests.pipeline.inprocess import Fabric
from tests.pipeline.models import CASES, slice_batch
from tests.pipeline.training import Setting, alone, batch_of, engine_of, piped, schedule_of, share

pytestmark = pytest.mark.torch

MLP = Setting("mlp", steps=1)


def test_parts_of_a_batch_are_as_equal_as_can_be_and_none_is_empty() -> None:
    assert compute_bounds(10, 4) == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert compute_bounds(2, 4) == [(0, 1), (1, 2)]
    assert compute_bounds(0, 4) == []
    found = split_batch({"x": torch.arange(5), "n": 3, "deep": (torch.ones(5, 2), [None])}, 5, 2)
    assert [part["x"].tolist() for part in found] == [[0, 1, 2], [3, 4]]
    assert found[1]["n"] == 3
    assert found[1]["deep"][0].shape == (2, 2)


@pytest.mark.parametrize(
    ("are_targets", "advice"),
    [(False, r"EngineOptions\.unsplit_inputs"), (True, r"give the loss .* itself, as by functools\.partial")],
)
def test_tensors_without_samples_are_told_with_what_can_be_done_there(are_targets: bool, advice: str) -> None:
    with pytest.raises(PipelineError, match=rf"of different first dimensions \(y 8, w 3\): .*{advice}"):
        batch_size({"y": torch.ones(8), "w": torch.ones(3)}, are_targets=are_targets)


def test_who_reads_what_is_stated_and_others_may_leave_it_out() -> None:
    def work(transport: Transport) -> tuple[frozenset[str], bool, float]:
        engine = engine_of(replace(MLP, stages=3, ranks=3), transport)
        batch = batch_of(MLP, 0)
        reads = engine.reads
        output = engine.step(batch.inputs if reads.inputs else None, batch.targets if reads.targets else None)
        return reads.inputs, reads.targets, output.loss

    first, middle, last = Fabric(3).run(work)
    assert first[:2] == (frozenset({"x"}), False)
    assert middle[:2] == (frozenset(), False)
    assert last[:2] == (frozenset(), True)
    assert first[2] == middle[2] == last[2] == pytest.approx(alone(MLP).losses[0])


@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        ("inputs", "rank 0: it reads the arguments x: the batch must name them"),
        ("name", "rank 0: its batch lacks x, which its stages use; it has y"),
        ("targets", "rank 1: it runs the loss, and got no targets"),
        ("samples", "rank 0 has a batch of 8; rank 1 has a batch of 7"),
    ],
)
def test_a_batch_that_a_rank_cannot_use_is_refused_on_all_ranks(lacks: str, says: str) -> None:
    def work(transport: Transport) -> tuple[str, float]:
        engine = engine_of(MLP, transport)
        batch = batch_of(MLP, 0)
        inputs: Any = {"inputs": None, "name": {"y": batch.inputs["x"]}}.get(lacks, batch.inputs)
        targets: Any = {"targets": None, "samples": batch.targets[:7]}.get(lacks, batch.targets)
        with pytest.raises(PipelineError) as caught:
            engine.step(inputs, targets)
        # Nothing was begun: the next batch goes on as if this one had not been.
        return str(caught.value), engine.step(batch.inputs, batch.targets).loss

    found = Fabric(2).run(work)
    assert says in found[0][0]
    assert found[0] == found[1]
    assert found[0][1] == pytest.approx(alone(MLP).losses[0])


@pytest.mark.parametrize("parts", ["inputs and targets", "inputs", "targets"])
def test_ranks_that_read_other_samples_of_the_same_number_are_refused(parts: str) -> None:
    """Each rank has shuffled by itself: the loss would be that of inputs with the targets of others."""

    def work(transport: Transport) -> tuple[str, float]:
        engine = engine_of(MLP, transport)
        batch = batch_of(MLP, 0)
        order = torch.randperm(len(batch.targets), generator=torch.Generator().manual_seed(transport.rank))
        inputs = {"x": batch.inputs["x"][order]} if "inputs" in parts or engine.reads.inputs else None
        targets = batch.targets[order] if "targets" in parts or engine.reads.targets else None
        with pytest.raises(PipelineError) as caught:
            engine.step(inputs, targets)
        return str(caught.value), engine.step(batch.inputs, batch.targets).loss

    first, last = Fabric(2).run(work)
    assert "rank 0 and rank 1 were given other samples than each other" in first[0]
    assert first == last
    assert first[1] == pytest.approx(alone(MLP).losses[0])


def test_each_rank_may_change_its_inputs_by_itself_where_targets_stay_the_same() -> None:
    """As images that are turned and cropped: only those of the first stage are trained on."""

    def work(transport: Transport) -> float:
        batch = batch_of(MLP, 0)
        noise = torch.zeros_like(batch.inputs["x"]) if transport.rank == 0 else torch.randn_like(batch.inputs["x"])
        return engine_of(MLP, transport).step({"x": batch.inputs["x"] + noise}, batch.targets).loss

    assert Fabric(2).run(work) == [pytest.approx(alone(MLP).losses[0])] * 2


def test_shapes_may_change_from_step_to_step_and_be_as_before_again() -> None:
    case = CASES["gpt"]

    def work(transport: Transport) -> list[float]:
        engine = engine_of(Setting("gpt"), transport)
        losses = []
        for length in (9, 5, 9, 5, 7):
            tokens = case.example(6, seed=length).inputs["input_ids"][:, :length]
            losses.append(engine.step({"input_ids": tokens}, tokens).loss)
        return losses

    model, expected = case.build(), []
    for length in (9, 5, 9, 5, 7):
        tokens = case.example(6, seed=length).inputs["input_ids"][:, :length]
        total, count = case.loss(model(tokens), tokens)
        expected.append((total / count).item())
    assert Fabric(2).run(work)[0] == pytest.approx(expected, rel=1e-12)


def test_gradients_of_several_batches_are_those_of_one() -> None:
    def work(transport: Transport) -> tuple[StepResult, dict[str, Any]]:
        engine = engine_of(MLP, transport)
        batch = batch_of(MLP, 0)
        for start, stop in ((0, 3), (3, 4)):
            part = slice_batch(batch, start, stop)
            engine.step(part.inputs, part.targets, last=False)
        part = slice_batch(batch, 4, 8)
        return engine.step(part.inputs, part.targets), {n: p.grad for n, p in engine.parameters.named.items()}

    expected = alone(MLP)
    for output, gradients in Fabric(2).run(work):
        assert output.loss == pytest.approx(expected.losses[0], rel=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-10, atol=1e-12)


def test_a_mean_is_weighted_by_samples_or_by_what_the_user_says() -> None:
    batch = batch_of(MLP, 0)
    weights = torch.arange(1.0, 9.0, dtype=torch.float64)

    def mean(output: Any, targets: Any) -> Any:
        return (output - targets["y"]).square().mean()

    def weighted(output: Any, targets: Any) -> Any:
        return ((output - targets["y"]).square().mean(1) * targets["w"]).sum() / targets["w"].sum()

    def work(transport: Transport) -> tuple[float, float]:
        # 7 samples in 4 micro-batches: the last is smaller.
        targets = {"y": batch.targets[:7], "w": weights[:7]}
        inputs = {"x": batch.inputs["x"][:7]}
        plain = engine_of(MLP, transport, mean).step(inputs, targets).loss
        options = EngineOptions(loss_weight=lambda output, targets: targets["w"].sum())
        return plain, engine_of(MLP, transport, weighted, options).step(inputs, targets).loss

    model = CASES["mlp"].build()
    targets = {"y": batch.targets[:7], "w": weights[:7]}
    output = model(batch.inputs["x"][:7])
    expected = mean(output, targets).item(), weighted(output, targets).item()
    assert Fabric(2).run(work)[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", frozenset()), ("zb-h1", frozenset()), ("1f1b", {0, 1})])
def test_a_micro_batch_in_which_nothing_counts_adds_nothing_to_a_weighted_mean(
    schedule: str, recompute: frozenset[int]
) -> None:
    batch = batch_of(MLP, 0)
    weights = torch.tensor([0, 0, 1, 2, 0, 0, 0, 3], dtype=torch.float64)  # two of four micro-batches count nothing
    targets = {"y": batch.targets, "w": weights}

    def weighted(output: Any, targets: Any) -> Any:
        return ((output - targets["y"]).square().mean(1) * targets["w"]).sum() / targets["w"].sum()

    def work(transport: Transport) -> tuple[list[float], dict[str, Any]]:
        options = EngineOptions(loss_weight=lambda output, targets: targets["w"].sum(), recompute=frozenset(recompute))
        engine = engine_of(replace(MLP, schedule=schedule), transport, weighted, options)
        losses = [engine.evaluate(batch.inputs, targets).loss, engine.step(batch.inputs, targets).loss]
        return losses, {name: parameter.grad for name, parameter in engine.parameters.named.items()}

    model = CASES["mlp"].build()
    expected = weighted(model(batch.inputs["x"]), targets)
    expected.backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    for losses, found in Fabric(2).run(work):
        assert losses == pytest.approx([expected.item()] * 2, rel=1e-12)
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-10, atol=1e-12)


def test_metrics_of_a_loss_are_sums_over_its_count() -> None:
    def loss(output: Any, targets: Any) -> Any:
        total, count = CASES["resnet"].loss(output, targets)
        return total, count, {"right": (output.argmax(1) == targets).sum()}

    def work(transport: Transport) -> StepResult:
        setting = Setting("resnet", replicas=2, samples=6, microbatches=2)
        engine = engine_of(setting, transport, loss)
        mine = share(setting, transport.replica, batch_of(setting, 0))
        return engine.step(mine.inputs, mine.targets)

    first, last, _, other = Fabric(2, 2).run(work)
    assert first.metrics == {}
    assert last.metrics == other.metrics
    assert last.metrics["right"] * 6 == pytest.approx(round(last.metrics["right"] * 6))


def test_metrics_that_only_some_replicas_have_are_theirs_by_name() -> None:
    def work(transport: Transport) -> list[dict[str, float]]:
        setting, replica, found = Setting("resnet", replicas=3, samples=6, microbatches=2), transport.replica, []
        metrics: dict[str, float] = {}

        def loss(output: Any, targets: Any) -> Any:
            total, count = CASES["resnet"].loss(output, targets)
            return (total, count, metrics) if "none" not in metrics else (total * 0, 0, metrics)

        engine, mine = engine_of(setting, transport, loss), share(setting, replica, batch_of(setting, 0))
        for metrics in (  # noqa: B007 - the loss gives them
            {f"class {replica}": 6.0 + replica, "all": 1.0},
            {"rare": 3.0} if replica == 1 else {},
            {"none": 2.0},
        ):
            found.append(dict(engine.step(mine.inputs, mine.targets).metrics))
        return found

    _, *others = Fabric(2, 3).run(work)
    lasts = [each for each in others if each[0]]
    assert lasts[0][:2] == lasts[1][:2] == lasts[2][:2]
    first, second, third = lasts[0]
    assert first == pytest.approx({"all": 1.0, "class 0": 2.0, "class 1": 7 / 3, "class 2": 8 / 3})
    assert second == pytest.approx({"rare": 1.0})
    assert list(third) == ["none"]
    assert math.isnan(third["none"])


def test_a_replica_without_samples_takes_part_with_nothing() -> None:
    setting = replace(MLP, samples=3)

    def work(transport: Transport) -> tuple[float, dict[str, Any]]:
        engine = engine_of(replace(setting, replicas=2), transport)
        batch = batch_of(setting, 0)
        mine = batch if transport.replica == 0 else slice_batch(batch, 0, 0)
        return engine.step(mine.inputs, mine.targets).loss, {n: p.grad for n, p in engine.parameters.named.items()}

    expected = alone(setting)
    for loss, gradients in Fabric(2, 2).run(work):
        assert loss == pytest.approx(expected.losses[0], rel=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected.gradients[name], rtol=1e-10, atol=1e-12)


def test_a_batch_in_which_nothing_counts_changes_nothing() -> None:
    def work(transport: Transport) -> tuple[StepResult, bool]:
        engine = engine_of(MLP, transport, lambda output, targets: ((output * 0).sum(), 0))
        batch = batch_of(MLP, 0)
        output = engine.step(batch.inputs, batch.targets)
        return output, all(parameter.grad is None for parameter in engine.parameters.own)

    for output, empty in Fabric(2).run(work):
        assert output.skipped
        assert empty


def test_an_evaluation_gives_the_loss_and_the_outputs_and_no_gradients() -> None:
    def work(transport: Transport) -> tuple[StepResult, StepResult, bool]:
        engine = engine_of(replace(MLP, schedule="zb-v", stages=4), transport)
        batch = batch_of(MLP, 0)
        with_loss = engine.evaluate(batch.inputs, batch.targets)
        without = engine.evaluate(batch.inputs)
        return with_loss, without, all(parameter.grad is None for parameter in engine.parameters.own)

    found = Fabric(2).run(work)
    assert found[0][0].loss == found[1][0].loss == pytest.approx(alone(MLP).losses[0])
    assert all(each[2] for each in found)
    outputs = found[0][1].outputs  # in a V, the first rank has the last stage
    torch.testing.assert_close(torch.cat(outputs), CASES["mlp"].build()(batch_of(MLP, 0).inputs["x"]))
    assert found[1][1].outputs == ()


def test_a_value_whose_shape_depends_on_data_is_refused_until_it_is_named() -> None:
    class Filter(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return x[x[:, 0] > 0]

    from everstep.pipeline.graph import Edge, Stage, StageGraph
    from tests.pipeline.by_hand import Part, Step

    def work(transport: Transport) -> list[float]:
        model = torch.nn.ModuleDict({"first": torch.nn.Linear(2, 2), "filter": Filter(), "last": torch.nn.Linear(2, 1)})
        torch.nn.init.eye_(model["first"].weight)
        torch.nn.init.zeros_(model["first"].bias)
        steps = [
            Step("kept", ("input:x",), ("first", "filter"), lambda m, x: m.filter(m.first(x))),
            Step("output", ("kept",), ("last",), lambda m, kept: m.last(kept)),
        ]
        part = Part(model, [steps[transport.rank]], [steps[transport.rank].name])
        graph = StageGraph((Stage(), Stage()), (Edge("kept", 0, (1,)),))
        schedule = lower_schedule(make_schedule("1f1b", 2, 2, 2), graph)
        loss = lambda output, targets: (output.sum() * 0, len(output))  # noqa: E731
        engine = Engine({transport.rank: part}, schedule, graph, transport, loss, options)
        counts = []
        for positive in (3, 1):
            x = torch.full((4, 2), -1.0)
            x[:positive] = 1.0
            counts.append(engine.step({"x": x}, torch.zeros(4)).count)
        return counts

    options = EngineOptions(dynamic=frozenset({"kept"}))
    assert Fabric(2).run(work)[1] == [3.0, 1.0]
    options = EngineOptions()
    with pytest.raises(PipelineError, match=r"value 'kept' .* name it in EngineOptions.dynamic"):
        Fabric(2).run(work)


def test_a_stage_that_cannot_split_its_backward_is_refused_a_schedule_that_does() -> None:
    def work(transport: Transport) -> None:
        model = CASES["mlp"].build()
        model[0].register_full_backward_hook(lambda *_: None)
        parts, graph = cut(model, recipe("mlp", model), 2)
        schedule = schedule_of(Setting("mlp", "zb-h1"), graph)
        Engine({transport.rank: parts[transport.rank]}, schedule, graph, transport, CASES["mlp"].loss)

    with pytest.raises(PipelineError, match=r"stage 0, which cannot be split: 0 has backward hooks"):
        Fabric(2).run(work)


def test_two_parameters_of_one_name_are_refused() -> None:
    def work(transport: Transport) -> None:
        model = CASES["mlp"].build()
        parts, graph = cut(model, recipe("mlp", model), 2)
        parts[1].module.add_module("0", torch.nn.Linear(2, 2))
        Engine(
            dict(enumerate(parts)),
            lower_schedule(make_schedule("simple", 2, 1, 2), graph),
            graph,
            transport,
            CASES["mlp"].loss,
        )

    with pytest.raises(PipelineError, match=r"stage 1 has a parameter '0.weight' that is another one in an earlier"):
        Fabric(1).run(work)


def test_a_schedule_beyond_the_allowed_micro_batches_in_flight_is_refused() -> None:
    with pytest.raises(PipelineError, match="4 micro-batches in flight, 2 are allowed"):
        piped(replace(MLP, schedule="simple", options=EngineOptions(in_flight=2)))
    piped(replace(MLP, schedule="1f1b", options=EngineOptions(in_flight=2)))


def test_a_schedule_without_a_reduction_is_refused_where_there_are_replicas() -> None:
    def work(transport: Transport) -> None:
        model = CASES["mlp"].build()
        parts, graph = cut(model, recipe("mlp", model), 2)
        schedule = lower_schedule(make_schedule("1f1b", 2, 2, 2), graph, reduce=False)
        assert not any(action.kind is ActionKind.REDUCE for rank in schedule.ranks for action in rank)
        Engine({transport.rank: parts[transport.rank]}, schedule, graph, transport, CASES["mlp"].loss)

    Fabric(2).run(work)
    with pytest.raises(PipelineError, match=r"does not reduce the gradients of stages \[0\] over the replicas"):
        Fabric(2, 2).run(work)
