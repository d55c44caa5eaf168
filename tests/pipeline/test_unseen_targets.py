"""A mean over classes, masks or weights that the example lacks is refused in the first batch that has some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as f  # noqa: E402

from everstep.pipeline import EngineOptions, PlanOptions, counted_targets, pipeline, unseen_targets  # noqa: E402
from everstep.pipeline.counted_targets import CountedTargets  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

SAMPLES, WORDS, CLASSES = 8, 6, 5
WEIGHTS = torch.tensor([1.0, 1.0, 1.0, 1.0, 20.0])
Step = tuple[Any, Any]  # outputs and targets of a batch


def train(loss: CountedTargets, batches: list[Step], microbatch: int) -> None:
    for output, targets in batches:
        loss.see(targets)
        for start in range(0, SAMPLES, microbatch):
            rows = slice(start, start + microbatch)
            own = {key: each[rows] for key, each in targets.items()} if isinstance(targets, dict) else targets[rows]
            loss(output[rows], own)


def draw(number: int, *shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


def words(number: int) -> Step:
    drawn = torch.randint(1, CLASSES, (SAMPLES, WORDS), generator=torch.Generator().manual_seed(number))
    return draw(number, SAMPLES, WORDS, CLASSES), drawn


def classes(number: int, rare: bool) -> Step:
    found = torch.arange(SAMPLES) % 4
    found[5] = 4 if rare else 3
    return draw(number, SAMPLES, CLASSES), found


def padded(number: int, value: int) -> Step:
    output, targets = words(number)
    targets[2:4, 2:] = value  # alike in each micro-batch of two
    return output, targets


def masked(number: int, kind: Any, rare: bool) -> Step:
    output, targets = words(number)
    mask = torch.ones(SAMPLES, WORDS, dtype=kind)
    mask[3, 1:] = not rare
    return output, {"words": targets, "mask": mask}


def weighted(number: int, rare: bool) -> Step:
    output, targets = classes(number, False)
    return output, {"classes": targets, "weights": 1 + rare * draw(9, SAMPLES).abs()}


def of_classes(output: Any, targets: Any) -> Any:
    return f.cross_entropy(output, targets, weight=WEIGHTS)


def mean_of_words(ignored: int) -> Callable[[Any, Any], Any]:
    return lambda output, targets: f.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=ignored)


def mean_of_mask(output: Any, targets: Any) -> Any:
    losses = f.cross_entropy(output.flatten(0, 1), targets["words"].flatten(), reduction="none").view(-1, WORDS)
    return (losses * targets["mask"]).sum() / targets["mask"].sum()


def mean_of_weights(output: Any, targets: Any) -> Any:
    losses = f.cross_entropy(output, targets["classes"], reduction="none")
    return (losses * targets["weights"]).sum() / targets["weights"].sum()


def labels(number: int, rare: bool) -> Step:
    drawn = (draw(number, SAMPLES, CLASSES) > 0).float()
    drawn[0], drawn[1] = 0, 1
    drawn[4, 1:3] = torch.nan if rare else 0.0
    return draw(number, SAMPLES, CLASSES), drawn


def mean_of_labels(output: Any, targets: Any) -> Any:
    there = ~targets.isnan()
    return f.binary_cross_entropy_with_logits(output[there], targets[there])


LATER: dict[str, tuple[Callable[[Any, Any], Any], Callable[[int, bool], Step]]] = {
    "a rare class": (of_classes, classes),
    "-1": (mean_of_words(-1), lambda number, rare: padded(number, -1) if rare else words(number)),
    "a word for padding": (mean_of_words(0), lambda number, rare: padded(number, 0) if rare else words(number)),
    "a mask of numbers": (mean_of_mask, lambda number, rare: masked(number, torch.float32, rare)),
    "a mask of integers": (mean_of_mask, lambda number, rare: masked(number, torch.int64, rare)),
    "weights": (mean_of_weights, weighted),
    "labels that are missing": (mean_of_labels, labels),
}


@pytest.mark.parametrize("microbatch", [1, 2, 4])
@pytest.mark.parametrize("name", LATER)
def test_what_counts_otherwise_after_several_batches_shows_a_mean_over_it(name: str, microbatch: int) -> None:
    function, make = LATER[name]
    loss = CountedTargets(function, None)
    train(loss, [make(number, False) for number in range(5)], microbatch)
    with pytest.raises(PipelineError, match="is a mean over what counts"):
        train(loss, [make(6, True)], microbatch)


def test_samples_whose_outputs_are_alike_leave_open_what_a_loss_is_a_mean_of() -> None:
    loss, (output, targets) = CountedTargets(of_classes, None), classes(0, True)
    train(loss, [(torch.zeros_like(output), targets)] * 4, 4)
    with pytest.raises(PipelineError, match="is a mean over what counts"):
        train(loss, [(output, targets)], 4)


def test_what_a_model_returns_beside_its_samples_and_rounding_are_no_weights() -> None:
    output, targets = classes(0, True)

    def with_balances(both: Any, wanted: Any) -> Any:  # of as many layers as there are samples
        return f.cross_entropy(both["logits"], wanted) + both["balances"].sum()

    def from_copy(made: Any, wanted: Any) -> Any:  # of what rounding leaves of sums in another order
        own, other = made.unbind(1)
        return 100 * (own.sum() - other.flip(0, 1).sum()) / len(made) + (own - other).square().mean()

    def of_probabilities(made: Any, wanted: Any) -> Any:
        return f.binary_cross_entropy(made.sigmoid(), f.one_hot(wanted, CLASSES).to(made))

    def counts(made: Any, wanted: Any) -> Any:
        return f.cross_entropy(made, wanted, weight=WEIGHTS, reduction="sum"), WEIGHTS[wanted].sum()

    for loss in (of_probabilities, counts):
        train(CountedTargets(loss, None), [(output, targets), classes(1, True)], 4)
    train(CountedTargets(from_copy, None), [(torch.stack([output, output], 1), targets)], 4)
    beside = CountedTargets(with_balances, None)
    beside.see(targets)
    beside({"logits": output, "balances": torch.arange(float(SAMPLES))}, targets)


@pytest.mark.parametrize("names", [("logits", "balances"), ("balances", "logits")])
def test_balances_of_layers_that_are_larger_than_what_is_of_samples_are_no_weights(names: tuple[str, str]) -> None:
    output, targets = classes(0, True)
    own = {"logits": output, "balances": draw(1, SAMPLES, 4 * CLASSES).softmax(-1)}  # of as many layers as samples

    def balanced(made: Any, wanted: Any) -> Any:
        return f.cross_entropy(made["logits"], wanted) + made["balances"].square().sum()

    def of_classes_balanced(made: Any, wanted: Any) -> Any:
        return of_classes(made["logits"], wanted) + made["balances"].square().sum()

    honest, weighing = CountedTargets(balanced, None), CountedTargets(of_classes_balanced, None)
    for loss in (honest, weighing):
        loss.see(targets)
    honest({name: own[name] for name in names}, targets)
    with pytest.raises(PipelineError, match="is a mean over what counts"):
        weighing({name: own[name] for name in names}, targets)


def test_a_flag_of_each_sample_beside_its_class_has_no_class_ignored() -> None:
    def of_both(made: Any, wanted: Any) -> Any:
        flagged = f.binary_cross_entropy_with_logits(made[:, 0], wanted["flag"].float())
        return f.cross_entropy(made, wanted["class"]) + flagged

    output, targets = classes(0, False)
    train(CountedTargets(of_both, None), [(output, {"class": targets, "flag": output[:, 1] > 0})], 4)


def test_what_a_loss_rounds_itself_to_a_narrow_type_is_no_weight() -> None:
    def rounded(made: Any, wanted: Any) -> Any:
        return f.cross_entropy(made.bfloat16(), wanted).float()

    def of_classes_rounded(made: Any, wanted: Any) -> Any:
        return of_classes(made.bfloat16().float(), wanted)

    for number in range(4):
        train(CountedTargets(rounded, None), [classes(number, False), classes(number + 9, True)], 1)
    with pytest.raises(PipelineError, match="is a mean over what counts"):
        train(CountedTargets(of_classes_rounded, None), [classes(0, False), classes(1, True)], 4)


def test_targets_that_grow_with_time_are_looked_at_ever_more_rarely() -> None:
    calls = 0

    def squared(output: Any, targets: Any) -> Any:
        nonlocal calls
        calls += 1
        return (output - targets).square().mean()

    output = draw(0, SAMPLES)
    train(CountedTargets(squared, None), [(output, draw(0, SAMPLES) + number) for number in range(1024)], SAMPLES)
    assert calls - 1024 < 11 * 16 * 8


def test_outputs_that_a_device_may_have_no_room_for_twice_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unseen_targets, "_LARGEST", CLASSES - 1)
    loss = CountedTargets(of_classes, None)
    train(loss, [classes(0, False), classes(1, True)], 4)
    monkeypatch.setattr(unseen_targets, "_LARGEST", CLASSES)
    with pytest.raises(PipelineError, match="is a mean over what counts"):
        train(loss, [classes(2, True)], 4)


def test_a_step_goes_on_where_there_is_no_memory_to_compare_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory for a copy")

    monkeypatch.setattr(unseen_targets, "_make_pair", fail)
    train(CountedTargets(of_classes, None), [classes(0, False), classes(1, True)], 4)


def test_a_step_goes_on_where_there_is_no_memory_to_let_targets_count_less(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, ignoring = 0, mean_of_words(-100)

    def fail(*_: Any) -> Any:
        nonlocal calls
        calls += 1
        raise torch.OutOfMemoryError("no memory for a copy")

    output, targets = words(0)
    targets[3] = -100
    monkeypatch.setattr(counted_targets, "_take_pair", fail)
    monkeypatch.setattr(unseen_targets, "_LARGEST", 0)
    loss = CountedTargets(ignoring, None)
    train(loss, [(output, targets)] * 20, 4)
    assert calls == 16
    monkeypatch.undo()
    monkeypatch.setattr(unseen_targets, "_LARGEST", 0)
    with pytest.raises(PipelineError, match="is a mean over what counts"):
        train(CountedTargets(ignoring, None), [(output, targets)], 4)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_what_is_varied_on_a_device_that_asserts_its_inputs_stays_a_probability(kind: Any) -> None:
    for row in (torch.zeros(3, 5), torch.ones(3, 5), draw(0, 3, 5).sigmoid()):
        varied = row.to(kind, copy=True)
        unseen_targets.vary_within_bounds(varied)
        assert 0 <= float(varied.min()) <= float(varied.max()) <= 1
        assert float((varied - row.to(kind)).abs().max()) > 0.1


class Counting(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Weighs classes, and counts samples, as a metric does."""

    seen: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("weights", WEIGHTS.clone())

    def forward(self, output: Any, targets: Any) -> Any:
        self.seen += len(output)
        return f.cross_entropy(output, targets, weight=self.weights)


def _meet_a_rare_class(rank: int) -> tuple[float, str]:
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES)), Counting()
    x, (_, usual), (_, rare) = draw(0, SAMPLES, 4), classes(0, False), classes(0, True)
    plan, engine = PlanOptions(costs="counted"), EngineOptions(heartbeat=20.0)
    with pipeline(model, x, loss, targets=usual, microbatches=2, plan=plan, engine=engine) as run:
        for _ in range(2):
            run.step(x, usual)
        seen = float(loss.seen)
        try:
            run.step(x, rare)
        except Exception as error:  # of a rank that hears of it, too
            return seen, str(error)
    return seen, ""


def test_all_ranks_end_where_a_rare_class_shows_weights_and_a_loss_counts_no_sample_twice() -> None:
    first, last = ranks.run(2, _meet_a_rare_class)
    assert last[0] == 2 * SAMPLES
    assert "is a mean over what counts" in last[1]
    assert first[1]
