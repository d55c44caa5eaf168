"""A loss that takes the samples of a batch together is refused, before it trains something else in micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as f  # noqa: E402

from everstep.pipeline import PlanOptions, pipeline  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend.arguments import Arguments  # noqa: E402
from everstep.pipeline.frontend.trace import trace_model  # noqa: E402
from everstep.pipeline.meeting_samples import FirstLook, check_samples  # noqa: E402
from everstep.pipeline.sample_differences import SampleDifference  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.pipeline import front  # noqa: E402
from tests.pipeline.architectures import Mlp  # noqa: E402
from tests.pipeline.grouping import group_options  # noqa: E402
from tests.pipeline.models import CASES  # noqa: E402

pytestmark = pytest.mark.torch

IGNORED = -100


class Twins(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Two views of each sample, as their embeddings or, with `compares`, as how alike all are to all."""

    def __init__(self, compares: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(6, 4), nn.Linear(6, 4)
        self.compares = compares

    def forward(self, left: Any, right: Any) -> Any:
        left, right = f.normalize(self.one(left)), f.normalize(self.other(right))
        return left @ right.T / 0.1 if self.compares else (left, right)


class Words(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(9, 8), nn.Linear(8, 9)

    def forward(self, tokens: Any) -> Any:
        return self.out(self.embed(tokens).tanh())


def info_nce(output: Any, targets: Any) -> Any:
    left, right = output
    return f.cross_entropy(left @ right.T / 0.1, torch.arange(len(left)))


def among_all(output: Any, targets: Any) -> Any:
    return f.cross_entropy(output, torch.arange(len(output)))


def variance(output: Any, targets: Any) -> Any:
    left, right = output
    return (left - right).square().mean() + (1 - left.var(0)).relu().mean()


def mean_of_words(output: Any, targets: Any) -> Any:
    return f.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def weighted(output: Any, targets: Any) -> Any:
    weight = torch.arange(1.0, 10.0)
    return f.cross_entropy(output.flatten(0, 1), targets.flatten(), weight=weight, ignore_index=IGNORED)


def words_counted(output: Any, targets: Any) -> Any:
    return (targets != IGNORED).sum()


def noisy(output: Any, targets: Any) -> Any:
    left, right = output
    return (left - right + torch.randn(left.shape)).square().mean()


def twins(samples: int = 16) -> dict[str, Any]:
    random = torch.Generator().manual_seed(1)
    return {name: torch.randn(samples, 6, generator=random) for name in ("left", "right")}


def sentences(samples: int = 16) -> tuple[Any, Any]:
    random = torch.Generator().manual_seed(2)
    tokens = torch.randint(9, (samples, 7), generator=random)
    lengths = torch.arange(samples) % 6 + 1
    return tokens, tokens.where(torch.arange(7) < lengths[:, None], IGNORED)


def look(
    model: nn.Module,
    inputs: dict[str, Any],
    targets: Any,
    loss: Any,
    weight: Any = None,
    microbatch: int = 0,
    least: int = 1,
) -> None:
    before = {name: each.clone() for name, each in model.state_dict().items()}
    state = torch.get_rng_state()
    try:
        check_samples(model, trace_model(model, inputs), inputs, targets, loss, weight, frozenset(), microbatch, least)
    finally:
        assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), state)


MEETING: list[tuple[nn.Module, Any, Any, Callable[..., Any], str]] = [
    (Twins(compares=False), twins(), torch.arange(16), info_nce, "the loss takes them together"),
    (Twins(compares=True), twins(), torch.arange(16), among_all, "they meet in the model"),
    (Twins(compares=False), twins(), torch.arange(16), variance, "the loss takes them together"),
    (
        Words(),
        {"tokens": sentences()[0]},
        sentences()[1],
        mean_of_words,
        r"give \(sum, count\) or EngineOptions.loss_weight",
    ),
    (Words(), {"tokens": sentences()[0]}, sentences()[1], weighted, "counts something else than samples"),
]


@pytest.mark.parametrize(("model", "inputs", "targets", "loss", "why"), MEETING)
def test_where_samples_meet_is_refused(model: nn.Module, inputs: Any, targets: Any, loss: Any, why: str) -> None:
    with pytest.raises(PipelineError, match=why):
        look(model, inputs, targets, loss)
    few = 3 if isinstance(model, Words) else 4
    with pytest.raises(PipelineError, match=f"the loss of {few} samples is"):
        look(model, {name: each[:few] for name, each in inputs.items()}, targets[:few], loss)


@pytest.mark.parametrize("name", list(CASES))
def test_ordinary_losses_pass_and_so_does_a_balance_of_experts(name: str) -> None:
    case = CASES[name]
    found, batch = front.traced(case), case.example()
    inputs = Arguments(found.model).name(batch.inputs)
    check_samples(found.model, found, inputs, batch.targets, case.loss, None, frozenset())


class Routed(Words):
    """Returns a loss with a balance of experts, and what its router says of each word, as models of transformers do."""

    def __init__(self, has_loss: bool) -> None:
        super().__init__()
        self.router, self.has_loss = nn.Linear(8, 4), has_loss

    def forward(self, tokens: Any) -> Any:
        logits, routed = super().forward(tokens), self.router(self.embed(tokens)).flatten(0, 1)
        loss = {"loss": f.cross_entropy(logits.mT, tokens) + 0.1 * self.balance(routed)} if self.has_loss else {}
        return {**loss, "logits": logits, "routed": (routed,)}

    def balance(self, routed: Any) -> Any:
        chances = routed.softmax(-1)
        return 4 * (f.one_hot(chances.argmax(-1), 4).to(chances).mean(0) * chances.mean(0)).sum()


def test_a_balance_of_experts_passes_beside_what_a_router_says_of_the_words_of_all_samples() -> None:
    model, (tokens, _) = Routed(has_loss=False), sentences()
    look(Routed(has_loss=True), {"tokens": tokens}, tokens, lambda output, targets: output["loss"])
    with pytest.raises(PipelineError, match="the loss takes them together"):
        look(model, {"tokens": tokens}, tokens, lambda output, targets: model.balance(output["routed"][0]))


def test_a_mean_that_is_weighted_by_what_it_counts_passes_and_so_does_what_is_drawn() -> None:
    tokens, targets = sentences()
    look(Words(), {"tokens": tokens}, targets, mean_of_words, words_counted)
    look(Twins(compares=False), twins(), torch.arange(16), noisy)
    look(Mlp(), {"x": torch.randn(1, 12)}, torch.randn(1, 5), nn.functional.mse_loss)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_not_taken_for_samples_that_meet(dtype: Any) -> None:
    for seed in range(5):
        random = torch.Generator().manual_seed(seed)
        inputs, targets = torch.randn(8, 12, generator=random), torch.randn(8, 5, generator=random)
        look(Mlp().to(dtype), {"x": inputs.to(dtype)}, targets.to(dtype), nn.functional.mse_loss)


def test_without_targets_the_first_micro_batch_that_has_two_samples_is_looked_at() -> None:
    model = Twins(compares=False)
    loss = FirstLook(info_nce, None, 2)
    loss(model(**twins(1)), torch.arange(1))
    with torch.no_grad():
        loss(model(**twins(8)), torch.arange(8))
    with pytest.raises(PipelineError, match="the loss takes them together"):
        loss(model(**twins(8)), torch.arange(8))
    words = FirstLook(mean_of_words, words_counted, 2)
    tokens, targets = sentences()
    given = words(Words()(tokens), targets)
    assert torch.equal(given, mean_of_words(Words()(tokens), targets))
    # Samples may be another dimension of the same size.
    FirstLook(lambda output, targets: output[0].sum() / 7, None, 2)(torch.randn(7, 7, 3), torch.arange(7))


def test_without_targets_two_micro_batches_of_one_sample_each_are_looked_at() -> None:
    def mean_of_scores(output: Any, targets: Any) -> Any:
        return (output * targets).mean()

    def alone(loss: Any, *shapes: tuple[int, ...]) -> None:
        looking, random = FirstLook(loss, None, 2), torch.Generator().manual_seed(1)
        for shape in shapes:
            looking(torch.randn(1, *shape, generator=random), torch.ones(1, 1))

    with pytest.raises(PipelineError, match=r"the loss of 2 samples .* the loss takes them together"):
        alone(lambda output, targets: output.square().mean() - output.mean(0).square().sum(), (5,), (3,), (3,))
    alone(mean_of_scores, (1,), (1,), (3,))
    # A number that may be of no sample; and a loss that takes one sample only.
    alone(lambda output, targets: output.sum(), (), ())
    alone(lambda output, targets: output.square().sum(1).squeeze(), (3,), (3,))


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("targets", [(), 0, torch.tensor(0.5), {"temperature": torch.tensor(0.5)}])
def test_where_targets_are_no_samples_those_of_the_output_are_looked_at(targets: Any, size: int) -> None:
    def look_at_parts(given: Any) -> None:
        looking = FirstLook(lambda output, targets: info_nce(output, None), None, 2)
        for part in twins(8)["left"].split(size):
            looking((part, part.roll(1, 1)), given)

    for given in (targets, {"labels": torch.ones(size), "more": targets}):
        with pytest.raises(PipelineError, match="the loss takes them together"):
            look_at_parts(given)


def test_after_micro_batches_of_one_number_those_of_several_samples_are_looked_at() -> None:
    looking = FirstLook(lambda output, targets: (output - output.mean()).square().mean() + output.sum(), None, 2)
    looking(torch.randn(1), torch.ones(1))
    with pytest.raises(PipelineError, match="the loss takes them together"):
        looking(torch.randn(4, generator=torch.Generator().manual_seed(1)), torch.ones(4))


def test_gradients_that_are_no_numbers_are_not_told_of() -> None:
    def text(gradients: float) -> str:
        return str(SampleDifference(4, 2, 1.0, 2.0, gradients, alike=False).error("here"))

    assert "gradients differ by 50.0%" in text(0.5)
    assert "gradients" not in text(float("nan"))


def test_labels_that_number_the_samples_of_a_batch_are_said_to_leave_micro_batches_without_them(caplog: Any) -> None:
    given, labels = twins(8), torch.arange(8)

    def compared_with_all(output: Any, targets: Any) -> Any:
        return f.cross_entropy(output, targets)

    look(Twins(compares=True), given, labels, compared_with_all)  # the step ends with torch's own error
    assert "take 4 samples, and not 2 parts of them (IndexError: Target 2 is out of bounds.)" in caplog.text
    assert "take microbatches=1 and one replica" in caplog.text


def _train(rank: int, example: int, with_targets: bool, microbatches: int, is_empty: bool) -> str:
    torch.manual_seed(0)
    model, weights = Twins(compares=False), {}
    if is_empty:
        weights = {"weights": model.state_dict()}
        with torch.device("meta"):
            model = Twins(compares=False)
    targets = torch.arange(16)
    options: dict[str, Any] = {"targets": targets[:example]} if with_targets else {}
    try:
        run = pipeline(
            model,
            twins(example),
            info_nce,
            microbatches=microbatches,
            **group_options(costs="counted", global_batch=16, **weights, **options),
        )
        run.step(twins(), targets)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize(
    ("example", "with_targets", "microbatches", "is_empty"),
    [(16, True, 2, False), (16, False, 2, False), (1, True, 2, False), (1, True, 16, False), (16, True, 2, True)],
)
def test_all_ranks_end_with_the_reason(example: int, with_targets: bool, microbatches: int, is_empty: bool) -> None:
    for said in ranks.run(2, _train, example, with_targets, microbatches, is_empty):
        assert "would train something else than the batch: the loss takes them together" in said


def _train_at_once(rank: int) -> float:
    run = pipeline(
        Twins(compares=False),
        twins(),
        info_nce,
        microbatches=1,
        targets=torch.arange(16),
        plan=PlanOptions(costs="counted"),
    )
    with run:
        return float(run.step(twins(), torch.arange(16)).loss)


def test_a_batch_that_is_not_cut_trains_any_loss() -> None:
    expected = float(info_nce(Twins(compares=False)(**twins()), None))
    assert ranks.run(2, _train_at_once) == [pytest.approx(expected)] * 2


class OwnLoss(Words):
    """Computes its loss itself, as models of transformers do."""

    def forward(self, tokens: Any, targets: Any) -> Any:  # type: ignore[override]  # as those models do
        found = super().forward(tokens)
        return {"loss": mean_of_words(found, targets), "logits": found}


def test_words_that_count_differently_show_before_training_when_all_their_losses_are_alike() -> None:
    """Losses differ by less than a thousandth, gradients by a tenth and more."""
    tokens, targets = sentences()
    for model, inputs, loss in (
        (Words(), {"tokens": tokens}, mean_of_words),
        (OwnLoss(), {"tokens": tokens, "targets": targets}, lambda output, targets: output["loss"]),
    ):
        with torch.no_grad():
            for each in (model.out.weight, model.out.bias):
                each.mul_(1e-3)
        with pytest.raises(PipelineError, match=r"gradients differ by .*loss_weight"):
            look(model, inputs, targets, loss)
        look(model, inputs, targets, loss, words_counted)
    output = Words()(tokens).detach() * 1e-3
    with pytest.raises(PipelineError, match=r"gradients differ by .*loss_weight"):
        FirstLook(mean_of_words, None, 2)(output, targets)
    FirstLook(mean_of_words, words_counted, 2)(output, targets)


class Counted(nn.Module):  # type: ignore[misc]
    def __init__(self, by: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.by = nn.Linear(6, 6), nn.Linear(6, 6), by

    def forward(self, x: Any) -> Any:
        x = self.one(x).tanh()
        return self.two(x * (1 + 0.01 * x.shape[0]) if self.by == "number" else x - 0.2 * x.mean(0))


@pytest.mark.parametrize("by", ["number", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_in_which_samples_meet_a_little_is_refused(by: str, dtype: Any) -> None:
    random = torch.Generator().manual_seed(3)
    inputs, targets = (torch.randn(8, 6, generator=random, dtype=dtype) for _ in range(2))
    with pytest.raises(PipelineError, match="they meet in the model"):
        look(Counted(by).to(dtype), {"x": inputs}, targets, nn.functional.mse_loss)


class Centred(nn.Module):  # type: ignore[misc]
    """Takes off the mean of a batch: always, or in training only; or draws noise, which says nothing."""

    def __init__(self, when: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.drop, self.when = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.5), when
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Any) -> Any:
        x = self.drop(self.norm(self.one(x)))
        if self.when == "always" or (self.when == "in training" and self.training):
            x = x - x.mean(0)
        return self.two(x + torch.randn_like(x) if self.when == "draws" else x)


@pytest.mark.parametrize("when", ["always", "in training", "never", "draws"])
def test_where_samples_meet_in_a_model_shows_without_targets_too(when: str) -> None:
    model, inputs = Centred(when).double(), {"x": torch.randn(8, 6, dtype=torch.float64)}
    found = trace_model(model, inputs)
    flags = [each.training for each in model.modules()]
    if when in ("never", "draws"):
        check_samples(model, found, inputs, None, None, None, frozenset())
    else:
        with pytest.raises(PipelineError, match=r"what the model returns of 4 samples .* they meet in the model"):
            check_samples(model, found, inputs, None, None, None, frozenset())
    assert flags == [each.training for each in model.modules()]


class WithAuxiliary(nn.Module):  # type: ignore[misc]
    """Returns what an auxiliary head makes besides, in training only, as Inception does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.auxiliary = nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        x = self.body(x).tanh()
        return {"out": self.head(x), "aux": self.auxiliary(x)} if self.training else {"out": self.head(x)}


def both_heads(output: Any, targets: Any) -> Any:
    return f.cross_entropy(output["out"], targets) + 0.4 * f.cross_entropy(output["aux"], targets)


def over_positives(output: Any, targets: Any) -> Any:
    counted = (targets > 0).double()
    losses = sum(f.cross_entropy(each, targets, reduction="none") for each in (output["out"], output["aux"]))
    return (losses * counted).sum() / counted.sum()


def test_a_loss_of_what_a_model_returns_in_training_only_is_compared_in_training() -> None:
    """As of detectors, which take a mean over what is in the images of a batch."""
    model, inputs = WithAuxiliary().double(), {"x": torch.randn(8, 6, dtype=torch.float64)}
    found, targets = trace_model(model, inputs), torch.tensor([0, 0, 1, 2, 3, 0, 1, 1])
    assert check_samples(model, found, inputs, targets, both_heads, None, frozenset()) == []
    targets[0] = 3
    with pytest.raises(PipelineError, match="counts something else than samples"):
        look(model, inputs, targets, over_positives)


@pytest.mark.parametrize("counting", [[0, 0, 1, 1], [0, 0, 0, 1]])
def test_parts_in_which_nothing_counts_show_a_mean_over_what_counts(counting: list[int]) -> None:
    inputs, mask = {"x": torch.randn(4, 12)}, torch.tensor(counting).float()

    def mean(output: Any, targets: Any) -> Any:
        return (output.square().sum(1) * targets).sum() / targets.sum()

    with pytest.raises(PipelineError, match="counts something else than samples"):
        look(Mlp(), inputs, mask, mean)
    look(Mlp(), inputs, mask, mean, lambda output, targets: targets.sum())


def test_sums_that_come_in_another_order_each_time_do_not_keep_a_loss_from_being_compared() -> None:
    """As on GPUs, by atomic additions."""
    orders = itertools.cycle([0.0, 1e-7])

    def reordered(output: Any, targets: Any) -> Any:
        return info_nce(output, targets) * (1.0 + next(orders))

    with pytest.raises(PipelineError, match="the loss takes them together"):
        look(Twins(compares=False), twins(), torch.arange(16), reordered)
