"""Sizes that only a module knows which runs as it is: what computes with them computes as in one process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend import split_model, trace_model  # noqa: E402
from everstep.pipeline.frontend.check import run_stages  # noqa: E402
from tests.pipeline.small_nets import Block, Net  # noqa: E402

pytestmark = pytest.mark.torch


def iterate_stages(model: nn.Module, example: Any) -> Iterator[Any]:
    """The stages of each cut in two that there is, between any two nodes."""
    traced = trace_model(model, example)
    nodes = traced.graph.nodes
    groups = [node.colocate or node.name for node in nodes]
    for place in range(1, len(nodes)):
        if set(groups[:place]).isdisjoint(groups[place:]):
            yield split_model(traced, {node.name: int(at >= place) for at, node in enumerate(nodes)})


def flip(x: Any) -> Any:
    return x if x.sum() > -1e9 else -x


def scan(x: Any) -> Any:
    found, total = [], torch.zeros_like(x[:, 0])
    for step in range(x.shape[1]):
        total = (total + x[:, step]).tanh()
        found.append(total)
        if total.max() > 1e9:
            break
    return torch.stack(found, 1)


class Averaging(Net):
    """Takes the mean of what a module gives, with positions."""

    def __init__(self, between: Any) -> None:
        super().__init__(between)
        self.places = nn.Embedding(32, 4)

    def forward(self, x: Any) -> Any:
        y = self.between(self.one(x))
        y = self.two(y + self.places(torch.arange(y.shape[1])))
        return y.sum(1) / y.shape[1] + x.sum(1) / x.shape[1]


@pytest.mark.parametrize(
    "between",
    [
        scan,
        lambda x: flip(x.repeat_interleave(2, 1)),
        lambda x: flip(x[:, ::2]),
        lambda x: flip(torch.cat([x, x[:, :2]], 1)),
        lambda x: flip(nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 4))),
        lambda x: flip(nn.functional.pad(x, (0, 0, 0, -int(x.shape[1]) % 4))),
        lambda x: flip(x / math.sqrt(x.shape[1])),
    ],
)
def test_other_lengths_are_computed_with_as_they_are(between: Any) -> None:
    torch.manual_seed(0)
    model = Averaging(Block(between))
    count = 0
    for stages in iterate_stages(model, {"x": torch.randn(3, 5, 4)}):
        for length in (5, 7, 2, 9):
            inputs = {"x": torch.randn(2, length, 4)}
            assert torch.allclose(run_stages(stages, inputs), model(**inputs))
            count += 1
    assert count > 8


def double_some(x: Any) -> Any:
    return x.repeat_interleave(2, 1) if x.sum() > 0 else x


def cut_by_scores(x: Any) -> Any:
    return x[:, : 1 + int((x[..., 0] > 0).sum(1).max())]


def select_by_scores(x: Any) -> Any:
    return x[(x[..., 0] > 0) | (torch.arange(x.shape[1]) == 0)]


class Pooling(Net):
    """Takes the mean of all words that a module gives, and of all that the model was given."""

    def forward(self, x: Any) -> Any:
        y = self.two(self.between(self.one(x)))
        return y.sum(-2) / y.shape[-2] + (x.sum(1) / x.shape[1]).sum()


@pytest.mark.parametrize("between", [double_some, cut_by_scores, select_by_scores])
def test_a_length_that_follows_from_scores_is_that_of_each_micro_batch(between: Any) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        model, count, found = Pooling(Block(between)), 0, set()
        for stages in iterate_stages(model, {"x": torch.randn(3, 5, 4)}):
            for x in (
                torch.randn(2, 5, 4),
                torch.randn(4, 7, 4),
                *(torch.full((2, 5, 4), each) for each in (-9.0, 9.0)),
            ):
                found.add(tuple(model.between(model.one(x)).shape))
                assert torch.allclose(run_stages(stages, {"x": x}), model(x), atol=1e-6)
                count += 1
        assert count > 8
        assert len(found) > 2


def test_a_number_of_samples_that_follows_from_scores_is_not_taken_for_the_examples() -> None:
    class Counting(Net):
        def forward(self, x: Any) -> Any:
            y = self.between(self.one(x))
            return self.two(y).sum(0) / len(y)

    torch.manual_seed(0)
    model, refused = Counting(Block(lambda x: x[(x.mean((1, 2)) > 0).logical_or(torch.arange(x.shape[0]) == 0)])), 0
    for stages in iterate_stages(model, {"x": torch.randn(3, 5, 4)}):
        for _ in range(4):
            x = torch.randn(4, 5, 4)
            try:
                computed = run_stages(stages, {"x": x})
            except PipelineError:
                refused += 1
            else:
                assert torch.allclose(computed, model(x), atol=1e-6)
    assert refused


def test_words_that_are_the_same_are_seen_to_be_fewer() -> None:
    class Distinct(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 4)

        def forward(self, x: Any) -> Any:
            found, places = x.unique(return_inverse=True)
            return self.words(found), places

    class Reading(Net):
        def forward(self, x: Any) -> Any:
            words, places = self.between(x)
            return self.two(self.one(words))[places].sum(1) / words.shape[0]

    traced = trace_model(Reading(Distinct()), {"x": torch.randint(9, (3, 5))})
    assert {"one", "two"} <= traced.varying
    for stages in iterate_stages(traced.model, {"x": torch.randint(9, (3, 5))}):
        for x in (torch.randint(9, (2, 5)), torch.full((2, 4), 3)):
            assert torch.allclose(run_stages(stages, {"x": x}), traced.model(x), atol=1e-6)


class Packed(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Gives what is as long as the longest text, however long the batch is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Any, lengths: Any) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]


class Reading(Net):
    def __init__(self, *, is_early: bool) -> None:
        super().__init__(Packed())
        self.score, self.is_early = nn.Linear(4, 1), is_early

    def forward(self, x: Any, lengths: Any) -> Any:  # type: ignore[override]
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        y = self.two(self.between(self.one(x), lengths)).tanh()
        mask = mask[:, : y.shape[1]] if self.is_early else torch.arange(y.shape[1]) < lengths[:, None]
        weights = self.score(y)[..., 0].masked_fill(~mask, -1e9).softmax(1)
        return (weights[..., None] * y).sum(1)


@pytest.mark.parametrize("is_early", [True, False])
def test_a_length_that_depends_on_data_is_that_of_each_micro_batch(is_early: bool) -> None:
    torch.manual_seed(0)
    model = Reading(is_early=is_early)
    count = 0
    for stages in iterate_stages(model, {"x": torch.randn(3, 5, 4), "lengths": torch.tensor([5, 3, 2])}):
        for lengths in ([5, 5, 1], [4, 2, 3], [2, 1]):
            inputs = {"x": torch.randn(len(lengths), 5, 4), "lengths": torch.tensor(lengths)}
            assert torch.allclose(run_stages(stages, inputs), model(**inputs))
            count += 1
    assert count > 8


def test_a_length_that_depends_on_data_may_be_relied_on_to_be_that_of_an_argument() -> None:
    class Residual(Net):
        def forward(self, x: Any, lengths: Any) -> Any:  # type: ignore[override]
            x = self.one(x)
            return self.two(self.between(x, lengths) + x).sum(1)

    model = Residual(Packed())
    for stages in iterate_stages(model, {"x": torch.randn(3, 5, 4), "lengths": torch.tensor([5, 3, 2])}):
        inputs = {"x": torch.randn(2, 7, 4), "lengths": torch.tensor([7, 2])}
        assert torch.allclose(run_stages(stages, inputs), model(**inputs))


def test_two_modules_that_give_the_same_length_by_data_are_added() -> None:
    """The longest text has one word where lengths are tried, and one word could be added to all."""

    class AtLeastOne(Packed):
        def forward(self, x: Any, lengths: Any) -> Any:
            return super().forward(x, lengths.clamp(min=1))

    class Adding(Net):
        def __init__(self) -> None:
            super().__init__(AtLeastOne())
            self.again = AtLeastOne()

        def forward(self, x: Any, lengths: Any) -> Any:  # type: ignore[override]
            y = self.between(self.one(x), lengths)
            return self.two(y + self.again(y, lengths)).sum(1)

    torch.manual_seed(0)
    model, example = Adding(), {"x": torch.randn(3, 5, 4), "lengths": torch.tensor([4, 3, 2])}
    wanted = torch.autograd.grad(model(**example).square().sum(), list(model.parameters()))
    for stages in iterate_stages(model, example):
        found = torch.autograd.grad(run_stages(stages, example).square().sum(), list(model.parameters()))
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, wanted, strict=True))


class Encoder(nn.Module):  # type: ignore[misc]
    """Adds what such a module gives to what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.packed, self.two = nn.Linear(4, 4), Packed(), nn.Linear(4, 4)

    def forward(self, x: Any, lengths: Any) -> Any:
        x = self.one(x)
        return self.two(x + self.packed(x, lengths))


def test_a_module_that_relies_on_such_a_length_is_cut() -> None:
    class Model(Net):
        def forward(self, x: Any, lengths: Any) -> Any:  # type: ignore[override]
            return self.two(self.between(self.one(x), lengths)).sum(1)

    model, count = Model(Encoder()), 0
    example = {"x": torch.randn(3, 5, 4), "lengths": torch.tensor([5, 3, 2])}
    names = {node.name for node in trace_model(model, example).graph.nodes}
    assert {"between.one", "between.packed", "between.two"} <= names
    for stages in iterate_stages(model, example):
        inputs = {"x": torch.randn(2, 7, 4), "lengths": torch.tensor([7, 2])}
        assert torch.allclose(run_stages(stages, inputs), model(**inputs))
        count += 1
    assert count > 4


def test_a_size_that_only_one_kind_of_input_has_is_known() -> None:
    """The module is the first, and takes one number of features only."""

    class First(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.between, self.two = (
                Block(lambda x: flip(x @ torch.ones(4, 4) / math.sqrt(x.shape[1]))),
                nn.Linear(4, 4),
            )

        def forward(self, x: Any) -> Any:
            y = self.two(self.between(x))
            return y.sum(1) / y.shape[1]

    model = First()
    for stages in iterate_stages(model, {"x": torch.randn(3, 4, 4)}):
        inputs = {"x": torch.randn(2, 7, 4)}
        assert torch.allclose(run_stages(stages, inputs), model(**inputs))


@pytest.mark.parametrize(("multiple", "length"), [(64, 128), (64, 48), (7, 14), (2, 2)])
def test_what_is_padded_to_a_multiple_is_not_taken_for_the_length_or_a_number_that_it_is_in_the_example(
    multiple: int, length: int
) -> None:
    class Model(Net):
        def forward(self, x: Any) -> Any:
            y = self.between(self.one(x))
            return self.two(y.sum(1) / y.shape[1])

    model = Model(Block(lambda x: flip(nn.functional.pad(x, (0, 0, 0, -x.shape[1] % multiple)))))
    for stages in iterate_stages(model, {"x": torch.randn(3, length, 4)}):
        for other in (length, length + 1, length - 1, 3 * length + 1):
            inputs = {"x": torch.randn(2, other, 4)}
            assert torch.allclose(run_stages(stages, inputs), model(**inputs))


class Crossing(Net):
    """A text of one length looks at a part of another one, which is as long in the example."""

    def forward(self, x: Any, text: Any) -> Any:  # type: ignore[override]
        y, t = self.between(self.one(x)), self.two(text)
        return nn.functional.scaled_dot_product_attention(t, y, y) / y.shape[1] + t * (x.shape[1] / t.shape[1])


@pytest.mark.parametrize(("length", "step"), [(16, 2), (64, 4), (20, 4)])
def test_a_part_of_a_length_is_not_taken_for_another_length_that_it_equals_in_the_example(
    length: int, step: int
) -> None:
    model = Crossing(Block(lambda x: flip(x[:, ::step])))
    example = {"x": torch.randn(3, length, 4), "text": torch.randn(3, length // step, 4)}
    for stages in iterate_stages(model, example):
        for one, other in ((9, 3), (20, 5), (5, 7)):
            inputs = {"x": torch.randn(2, one, 4), "text": torch.randn(2, other, 4)}
            assert torch.allclose(run_stages(stages, inputs), model(**inputs))


GOING_BY: dict[str, Any] = {
    "a choice": lambda y, x: (y.tanh() if y.shape[1] < 4 else y).mean(1),
    "a choice by an argument": lambda y, x: (y.tanh() if y.shape[1] * 2 == x.shape[1] else y).mean(1),
    "a root": lambda y, x: y.sum(1) / math.sqrt(y.shape[1]),
    "a number": lambda y, x: y.sum(1) / int(y.shape[1]),
    "a loop": lambda y, x: sum(y[:, place] * place for place in range(y.shape[1])),
    "words": lambda y, x: sum(each * place for place, each in enumerate(y.unbind(1))),
    "parts": lambda y, x: sum(each.softmax(1).cumsum(1).mean(1) for each in y.split(2, 1)),
    "a slice": lambda y, x: y[:, :4].sum(1) / y[:, :4].shape[1],
    "the last words": lambda y, x: y[:, -3:].sum(1) / y[:, -3:].shape[1],
}


class GoingBy(Net):
    def __init__(self, code: Any) -> None:
        super().__init__(Block(lambda x: flip(x[:, ::2])))
        self.code = code

    def forward(self, x: Any) -> Any:
        return self.two(self.code(self.between(self.one(x)), x))


@pytest.mark.parametrize("how", list(GOING_BY))
def test_code_that_goes_by_such_a_length_is_refused_where_it_would_do_something_else(how: str) -> None:
    model = GoingBy(GOING_BY[how])
    refused = []
    for stages in iterate_stages(model, {"x": torch.randn(3, 6, 4)}):
        for length in (6, 5, 20, 3):
            inputs = {"x": torch.randn(2, length, 4)}
            try:
                computed = run_stages(stages, inputs)
            except PipelineError:
                refused.append(length)
            else:
                assert torch.allclose(computed, model(**inputs))
    assert refused
    assert 6 not in refused


def test_any_such_length_is_taken_where_the_same_is_computed() -> None:
    model = GoingBy(lambda y, x: y[:, :5].mean(1) + torch.cat(y.chunk(2, 1), 1).mean(1))
    for stages in iterate_stages(model, {"x": torch.randn(3, 8, 4)}):
        for length in (5, 20, 8):
            inputs = {"x": torch.randn(2, length, 4)}
            assert torch.allclose(run_stages(stages, inputs), model(**inputs))


class Telling(nn.Module):  # type: ignore[misc]
    """Gives no tensor that shows the length, beside a number or positions."""

    def __init__(self, told: Any) -> None:
        super().__init__()
        self.part, self.layer, self.told = Block(lambda x: flip(x[:, ::2])), nn.Linear(4, 4), told

    def forward(self, x: Any) -> Any:
        y = self.part(x)
        return self.layer(y).mean(1), self.told(y)


class Hearing(Net):
    def forward(self, x: Any) -> Any:
        y, told = self.between(self.one(x))
        return self.two(y) / (told if isinstance(told, torch.Tensor | int | torch.SymInt) else told[1])


@pytest.mark.parametrize(
    "told", [lambda y: y.shape[1], lambda y: y.shape, lambda y: torch.arange(y.shape[1]).sum() + 1]
)
def test_a_length_that_only_a_number_tells_is_known_in_any_stage(told: Any) -> None:
    model = Hearing(Telling(told))
    for stages in iterate_stages(model, {"x": torch.randn(3, 9, 4)}):
        for length in (9, 5, 20):
            inputs = {"x": torch.randn(2, length, 4)}
            assert torch.allclose(run_stages(stages, inputs), model(**inputs))


class Noisy(nn.Module):  # type: ignore[misc]
    """Draws, so that it is never cut, and has a module inside that depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.layer = Block(lambda x: flip(x[:, ::2])), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.layer(self.part(x)) + torch.rand(()) * 0


def test_a_length_from_inside_a_module_that_is_never_cut_is_known_in_any_stage() -> None:
    model = Averaging(Noisy())
    for stages in iterate_stages(model, {"x": torch.randn(3, 9, 4)}):
        for length in (9, 5, 20):
            inputs = {"x": torch.randn(2, length, 4)}
            assert torch.allclose(run_stages(stages, inputs), model(**inputs))
