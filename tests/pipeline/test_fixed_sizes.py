"""Sizes that a model's code takes for numbers: a batch of another size is computed as the model would, or refused."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline import pipeline  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend.check import run_stages  # noqa: E402
from everstep.pipeline.frontend.split import split_model  # noqa: E402
from everstep.pipeline.frontend.trace import trace_model  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.pipeline.grouping import group_options  # noqa: E402
from tests.pipeline.models import squares  # noqa: E402

pytestmark = pytest.mark.torch

Code = Callable[[Any], Any]


class Inner(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    def __init__(self, code: Code) -> None:
        super().__init__()
        self.code = code

    def forward(self, x: Any) -> Any:
        return self.code(x)


class Model(nn.Module):  # type: ignore[misc]
    """Two layers, and code between them that is the model's own, which a cut opens, or a module's, which none does."""

    def __init__(self, code: Code, *, is_inside: bool = False) -> None:
        super().__init__()
        self.one, self.middle, self.two = nn.Linear(4, 4), Inner(code), nn.Linear(4, 4)
        self.code, self.is_inside = code, is_inside
        self.double()

    def forward(self, x: Any, mask: Any = None) -> Any:
        x = self.one(x)
        x = self.middle(x) if self.is_inside else self.code(x)
        return self.two(x if mask is None or mask.shape[1] != x.shape[1] else x * mask[..., None])


def scan(x: Any) -> Any:
    found, state = [], torch.zeros_like(x[:, 0])
    for index in range(x.shape[1]):
        state = torch.tanh(state + x[:, index])
        found.append(state)
    return torch.stack(found, 1)


def make_positions() -> Code:
    """Make a function with a cache; tests freeze those that there are at their begin (gc.freeze)."""
    return functools.cache(lambda length: torch.arange(length, dtype=torch.float64))


POSITIONS = make_positions()
TABLES: dict[Any, Any] = {}


def looked_up(x: Any) -> Any:
    key = x.shape[1], "rows"
    if key not in TABLES:
        TABLES[key] = ({"rows": torch.arange(x.shape[1], dtype=torch.float64)},)
    return x + TABLES[key][0]["rows"][:, None]


NUMBERS: dict[str, Code] = {
    "int": lambda x: x * int(x.shape[1]),
    "float": lambda x: x + x.new_full((x.shape[0], 1, 1), float(x.shape[1])),
    "len": lambda x: x / len(x[0]),
    "math": lambda x: x / math.sqrt(x.shape[1]),
    "loop": scan,
    "cache": lambda x: x + POSITIONS(x.shape[1])[:, None],
    "dictionary": looked_up,
}


def made(length: int, samples: int = 3) -> Any:
    return torch.linspace(-1.0, 1.0, samples * length * 4, dtype=torch.float64).view(samples, length, 4)


@pytest.mark.parametrize("code", list(NUMBERS))
def test_a_size_that_is_taken_for_a_number_is_fixed_where_a_cut_may_open_the_code(code: str) -> None:
    opened = trace_model(Model(NUMBERS[code]), made(5)).sizes
    assert all(type(each["rows"]) is torch.Tensor for (each,) in TABLES.values())
    opened.check({"x": made(5, samples=2)})
    with pytest.raises(
        PipelineError, match=r"dimension 1 of the argument 'x' is 7, and was 5 in the example.*shape\[1\]"
    ):
        opened.check({"x": made(7)})
    model = Model(NUMBERS[code], is_inside=True)
    found = trace_model(model, made(5))
    found.sizes.check({"x": made(7)})
    torch.testing.assert_close(run_stages(split_model(found, {"two": 1}), {"x": made(7)}), model(made(7)))


class Keeping(nn.Module):  # type: ignore[misc]
    """Keeps a table for each length."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.rows = nn.Linear(4, 4), nn.Linear(4, 4), dict[Any, Any]()
        self.double()

    def forward(self, x: Any) -> Any:
        key = x.shape[1], "rows"
        if key not in self.rows:
            self.rows[key] = torch.arange(x.shape[1], dtype=torch.float64)
        return self.two(self.one(x) + self.rows[key][:, None])


def test_a_length_by_which_a_model_keeps_tables_is_fixed() -> None:
    model = Keeping()
    found = trace_model(model, made(5))
    assert not model.rows
    with pytest.raises(PipelineError, match="is 7, and was 5 in the example"):
        found.sizes.check({"x": made(7)})
    given = {"x": made(5, samples=2)}
    torch.testing.assert_close(run_stages(split_model(found, {"two": 1}), given), model(**given))


class Placing(nn.Module):  # type: ignore[misc]
    """Looks positions up around a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.positions = nn.Linear(4, 4), make_positions()

    def forward(self, x: Any) -> Any:
        return self.inner(x) + self.positions(x.shape[1])[:, None]


def test_a_length_by_which_a_module_inside_looks_a_table_up_may_be_another() -> None:
    model = Model(Placing())
    model(made(5))  # as pipeline() does, so that the table is there
    found = trace_model(model, made(5))
    found.sizes.check({"x": made(7)})
    torch.testing.assert_close(run_stages(split_model(found, {"two": 1}), {"x": made(7)}), model(made(7)))


def test_what_is_computed_with_sizes_themselves_takes_any() -> None:
    found = trace_model(Model(lambda x: x * x.shape[1] ** -0.5 + torch.arange(x.size(1))[:, None]), made(5))
    assert {dim for (_, _, dim), _ in found.sizes.numbers} == {2}  # the features of a layer
    assert not found.sizes.pairs


def test_sizes_that_the_code_compares_stay_equal() -> None:
    found = trace_model(Model(torch.tanh), {"x": made(5), "mask": made(5)[..., 0]})
    found.sizes.check({"x": made(6), "mask": made(6)[..., 0]})
    found.sizes.check({"x": made(6)})  # what another process reads
    with pytest.raises(PipelineError, match="they were equal in the example"):
        found.sizes.check({"x": made(6), "mask": made(7)[..., 0]})


def test_a_module_that_hands_on_what_it_is_given_may_do_otherwise_with_other_sizes() -> None:
    model = Model(lambda x: x * 2 if x.shape[1] > 6 else x, is_inside=True)
    stages = split_model(trace_model(model, made(5)), {"two": 1})
    torch.testing.assert_close(run_stages(stages, {"x": made(6)}), model(made(6)))
    with pytest.raises(PipelineError, match="another path through the model's code"):
        run_stages(stages, {"x": made(7)})


def test_what_is_padded_to_a_multiple_is_cut() -> None:
    def padded(x: Any) -> Any:
        more = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 4)).view(x.shape[0], -1, 4, 4)
        return (more - more.mean(2, keepdim=True)).flatten(1, 2)[:, : x.shape[1]]

    model = Model(padded)
    stages = split_model(trace_model(model, made(5)), {"two": 1})
    torch.testing.assert_close(run_stages(stages, {"x": made(7)}), model(made(7)))


def scaled(x: Any) -> Any:
    """A mean over words as scripts write it, by a size."""
    return x.sum(1) / x.shape[1]


# Torch gives other sizes, or other numbers of results, for some lengths, and the code computes with these.
ASSUMED: dict[str, tuple[Code, int, int]] = {
    "a slice of what is shorter": (lambda x: scaled(x[:, :6]), 9, 5),
    "a slice of what is longer": (lambda x: scaled(x[:, :6]) + torch.arange(x[:, :6].shape[1]).sum(), 5, 9),
    "the last words": (lambda x: scaled(x[:, -4:]), 9, 3),
    "parts": (lambda x: sum(scaled(each) for each in x.split(4, 1)), 8, 12),
    "chunks": (lambda x: sum(scaled(each) for each in x.tensor_split(3, 1)), 9, 4),
    "words": (lambda x: sum(each * place for place, each in enumerate(x.unbind(1))), 5, 8),
    "words of a loop": (lambda x: sum(each * place for place, each in enumerate(x.transpose(0, 1))), 5, 8),
    "a dimension of size 1": (lambda x: (found := x.squeeze(1)).flatten(1).sum(1, keepdim=True) / found.shape[1], 5, 1),
}


class Behind(Model):
    """Its code computes with the size of what the code between its layers gives."""

    def forward(self, x: Any, mask: Any = None) -> Any:
        return scaled(torch.tanh(super().forward(x, mask)))


@pytest.mark.parametrize("name", list(ASSUMED))
def test_a_length_for_which_torch_gives_other_sizes_is_refused_if_the_code_computes_with_them(name: str) -> None:
    code, length, other = ASSUMED[name]
    model = Model(lambda x: code(x).reshape(x.shape[0], -1).sum(1, keepdim=True).expand(-1, 4))
    found = trace_model(model, made(length))
    found.sizes.check({"x": made(length, samples=2)})
    with pytest.raises(
        PipelineError, match=rf"dimension 1 of the argument 'x' is {other}.*(made for .*|takes this )size"
    ):
        found.sizes.check({"x": made(other)})


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("code", [lambda x: x[:, :6], lambda x: x[:, : min(6, x.shape[1])]])
def test_a_slice_by_a_module_that_runs_as_it_is_is_known_to_those_behind_it(code: Code, is_inside: bool) -> None:
    model = Behind(code, is_inside=is_inside)
    for length, others in ((9, (5,)), (5, (9,))):
        found = trace_model(model, made(length))
        stages = split_model(found, {"two": 1})
        for other in (length, *others):
            try:
                found.sizes.check({"x": made(other)})
                computed = run_stages(stages, {"x": made(other)})
            except PipelineError:
                assert other != length
            else:
                torch.testing.assert_close(computed, model(made(other)))


FREE: dict[str, Code] = {
    "a slice": lambda x: x[:, :6].mean(1, keepdim=True),
    "the last word": lambda x: x[:, -1:],
    "the last words": lambda x: torch.cat([x[:, -4:], x[:, :1]], 1),
    "two chunks": lambda x: torch.cat([each.flip(1) / each.shape[1] for each in x.chunk(2, 1)], 1),
    "all but some": lambda x: x[:, 1:] - x[:, :-1],
    "every other": lambda x: x[:, ::2] * x.shape[1],
    "a table": lambda x: x + torch.linspace(0, 1, 64, dtype=x.dtype)[: x.shape[1], None],
    "a mask": lambda x: torch.ones(64, 64, dtype=x.dtype).tril()[: x.shape[1], : x.shape[1]] @ x / x.shape[1],
    "another dimension": lambda x: x[:, None].squeeze(1) * x.shape[1],
}


@pytest.mark.parametrize("length", [5, 9])
@pytest.mark.parametrize("name", list(FREE))
def test_any_length_is_taken_where_the_same_is_computed(name: str, length: int) -> None:
    model = Model(FREE[name])
    found = trace_model(model, made(length))
    stages = split_model(found, {"two": 1})
    for other in (2, 3, 5, 6, 7, 9, 12):
        found.sizes.check({"x": made(other)})
        torch.testing.assert_close(run_stages(stages, {"x": made(other)}), model(made(other)))


class Choosing(nn.Module):  # type: ignore[misc]
    """Depends on data, so that it is run on random numbers to be traced; gives as many features as the example has
    words, at the end or before the words."""

    def __init__(self, *, is_transposed: bool) -> None:
        super().__init__()
        self.inner, self.is_transposed = nn.Linear(4, 5), is_transposed

    def forward(self, x: Any, lengths: Any) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(self.inner(x), lengths, batch_first=True, enforce_sorted=False)
        found = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0]
        return found.mT if self.is_transposed else found


class AfterChoosing(nn.Module):  # type: ignore[misc]
    """Its code computes with the length of what such a module gives, and with its features."""

    def __init__(self, *, is_transposed: bool) -> None:
        super().__init__()
        self.one, self.middle, self.two = nn.Linear(4, 4), Choosing(is_transposed=is_transposed), nn.Linear(5, 5)
        self.words = 2 if is_transposed else 1
        self.double()

    def forward(self, x: Any, lengths: Any) -> Any:
        x = self.middle(self.one(x), lengths)
        x = x / x.shape[3 - self.words] + torch.arange(x.shape[self.words]).sum()
        return self.two(x.sum(self.words) / x.shape[self.words])


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_length_is_not_taken_for_the_features_that_it_equals_in_the_example(is_transposed: bool) -> None:
    model = AfterChoosing(is_transposed=is_transposed)
    found = trace_model(model, {"x": made(5), "lengths": torch.tensor([5, 3, 5])})
    assert "without data" in found.leaves["middle"]
    for number in ({"middle": 1}, {"two": 1}):
        stages = split_model(found, number)
        for length in (5, 3, 8):
            given = {"x": made(length), "lengths": torch.tensor([2, length, 1])}
            torch.testing.assert_close(run_stages(stages, given), model(**given))


class Asking(nn.Module):  # type: ignore[misc]
    """Blocks that all choose by the length, the later ones by what follows from the choices before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Model(self.choose(least), is_inside=False) for least in (4, 4, 3))

    @staticmethod
    def choose(least: int) -> Code:
        return lambda x: torch.tanh(x) if x.shape[1] >= least else x

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_choice_that_an_earlier_module_has_made_too_is_not_taken_for_the_examples() -> None:
    model = Asking()
    found = trace_model(model, made(6))
    names, refused = [node.name for node in found.graph.nodes], list[int]()
    for place in range(1, len(names)):
        stages = split_model(found, {name: int(at >= place) for at, name in enumerate(names)})
        for length in (6, 5, 3, 2):
            try:
                computed = run_stages(stages, {"x": made(length)})
            except PipelineError:
                refused.append(length)
            else:
                torch.testing.assert_close(computed, model(made(length)))
    assert {*refused} == {2, 3}


class Towers(nn.Module):  # type: ignore[misc]
    """Two arguments, of each of which another stage makes a mean, and a choice by both lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.double()

    def forward(self, x: Any, y: Any) -> Any:
        one, two = self.one(x).mean(1), self.two(y).mean(1)
        return one + two if x.shape[1] > y.shape[1] else one - two


def test_a_choice_by_sizes_of_which_each_stage_sees_one_is_not_taken_for_the_examples() -> None:
    model = Towers()
    stages = split_model(trace_model(model, {"x": made(7), "y": made(5)}), {"one": 0, "two": 1})
    longer, shorter = {"x": made(6), "y": made(3)}, {"x": made(3), "y": made(6)}
    torch.testing.assert_close(run_stages(stages, longer), model(**longer))
    with pytest.raises(PipelineError, match="another path through the model's code"):
        run_stages(stages, shorter)


def _other_length(rank: int) -> str:
    torch.manual_seed(0)
    how: dict[str, Any] = {"stage_of": {"two": 1}, "heartbeat": None, "costs": "counted"}
    with pipeline(Model(NUMBERS["int"]), made(5, 4), squares, **group_options(**how)) as run:
        run.step(made(5, 4), made(5, 4))
        with pytest.raises(PipelineError) as caught:
            run.step(made(7, 4), made(7, 4))
        run.step(made(5, 4), made(5, 4))
    return str(caught.value)


def test_a_step_of_another_length_is_refused_on_all_ranks_and_the_next_goes_on() -> None:
    one, other = ranks.run(2, _other_length)
    assert one == other
    assert "dimension 1 of the argument 'x' is 7, and was 5" in one


def test_a_length_that_equals_the_features_by_chance_may_be_another() -> None:
    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.one, self.rnn = nn.Linear(8, 8), nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: Any) -> Any:
            return self.rnn(self.one(x))[0]

    found = trace_model(Model(), torch.ones(4, 8, 8)).sizes
    assert [place for place, _ in found.numbers] == [("x", (), 2)]


def repeat_rows(x: Any) -> Any:
    return x * int(x.shape[1])


@pytest.mark.parametrize("length", [5, 8])
@pytest.mark.parametrize(
    ("code", "behind"),
    [
        (lambda x: x * (2 if int(x.shape[1]) > 4 else 1), None),
        (lambda x: x * (1 + int(x.shape[1]) % 2), None),
        (lambda x: x * (2 if len(x[0]) > 4 else 1), None),
        (repeat_rows, lambda x: x * (2 if x.shape[1] > 4 else 1)),
        (repeat_rows, lambda x: x * (1 + x.shape[1] % 2)),
        (repeat_rows, lambda x: x[:, :4] / x[:, :4].shape[1]),
    ],
)
def test_a_choice_by_a_number_made_of_a_size_is_seen_where_twice_the_size_chooses_alike(
    code: Code, behind: Code | None, length: int
) -> None:
    class Choosing(Model):
        def forward(self, x: Any, mask: Any = None) -> Any:
            x = self.one(x)
            return self.two(self.code(x) if behind is None else behind(self.middle(x)))

    model = Choosing(code)
    found = trace_model(model, made(length))
    stages = split_model(found, {"two": 1})
    for other in (length, 3, 7, 12):
        try:
            found.sizes.check({"x": made(other)})
        except PipelineError:
            assert other != length
        else:
            torch.testing.assert_close(run_stages(stages, {"x": made(other)}), model(made(other)))


def move_windows(x: Any) -> Any:
    """Pad an image to windows of two by three, and add to each word what is beside it, as Swin does."""
    high, wide = x.shape[1:3]
    padded = nn.functional.pad(x, (0, 0, 0, (3 - wide % 3) % 3, 0, (2 - high % 2) % 2)).roll(1, 1)
    rows, columns = padded.shape[1] // 2, padded.shape[2] // 3
    windows = padded.view(x.shape[0], rows, 2, columns, 3, -1).transpose(2, 3).flatten(0, 2)
    whole = windows.mean(1, keepdim=True).expand_as(windows).reshape(-1, rows, columns, 2, 3, x.shape[-1])
    return padded + whole.transpose(2, 3).reshape(-1, rows * 2, columns * 3, x.shape[-1])


def test_sizes_that_grow_beyond_what_can_be_followed_are_fixed() -> None:
    def code(x: Any) -> Any:
        for _ in range(3):
            x = move_windows(x)
        return x

    model, image = Model(code), torch.linspace(-1.0, 1.0, 3 * 20 * 4, dtype=torch.float64).view(3, 5, 4, 4)
    found = trace_model(model, image)
    numbers = {place[2]: size for place, size in found.sizes.numbers}
    assert numbers == {1: 5, 2: 4, 3: 4}
    stages = split_model(found, {node.name: int(node.name > "one") for node in found.graph.nodes})
    for samples in (1, 2, 3):
        torch.testing.assert_close(run_stages(stages, {"x": image[:samples]}), model(image[:samples]))
    with pytest.raises(PipelineError, match=r"dimension 1 of the argument 'x' is 4, and was 5"):
        found.sizes.check({"x": image[:, :4]})
