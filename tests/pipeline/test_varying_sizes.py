"""Values whose sizes depend on data go from process to process, and nobody has to name them."""

from __future__ import annotations

import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline import LayoutOptions, PlanOptions, pipeline  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend import trace_model  # noqa: E402
from everstep.pipeline.frontend.check import run_stages  # noqa: E402
from everstep.pipeline.frontend.split import split_model  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.pipeline.small_nets import Block  # noqa: E402

pytestmark = pytest.mark.torch

WORDS, WIDTH = 6, 4


class Select(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    def forward(self, x: Any, mask: Any) -> Any:
        return x[mask]


class Spread(nn.Module):  # type: ignore[misc]
    def forward(self, words: Any, mask: Any) -> Any:
        found = words.new_zeros(*mask.shape, words.shape[-1])
        found[mask] = words
        return found


class Packed(nn.Module):  # type: ignore[misc]
    """Gives what is as long as the longest text of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Any, lengths: Any) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]


class WithoutPadding(nn.Module):  # type: ignore[misc]
    """Computes with the words that count, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.select, self.spread = nn.Linear(WIDTH, WIDTH), Select(), Spread()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Any, lengths: Any) -> Any:
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        words = self.select(self.first(x), mask)
        for layer in self.layers:
            words = words + layer(words).tanh()
        return self.spread(words, mask).sum(1)


class Recurrent(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first, self.packed = nn.Linear(WIDTH, WIDTH), Packed()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Any, lengths: Any) -> Any:
        y = self.packed(self.first(x), lengths)
        for layer in self.layers:
            y = y + layer(y).tanh()
        mask = torch.arange(y.shape[1]) < lengths[:, None]
        return (y * mask[..., None]).sum(1)


MODELS: dict[str, Any] = {"words": WithoutPadding, "texts": Recurrent}


def _squares(output: Any, targets: Any) -> Any:
    return (output - targets).square().sum(), len(targets)


def _batch(step: int, replica: int) -> tuple[dict[str, Any], Any]:
    """All batches have the same shapes, but other lengths."""
    draws = torch.Generator().manual_seed(10 * step + replica)
    lengths = torch.randint(1, WORDS, (6,), generator=draws)
    x, targets = (torch.randn(6, *shape, WIDTH, generator=draws, dtype=torch.float64) for shape in ((WORDS,), ()))
    return {"x": x, "lengths": lengths}, targets


def _build(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().double()


def _train(rank: int, name: str, schedule: str, replicas: int) -> dict[str, Any]:
    model, (example, targets) = _build(name), _batch(0, 0)
    layout, plan = LayoutOptions(data_parallel=replicas), PlanOptions(costs="counted")
    with pipeline(
        model, example, _squares, targets=targets, microbatches=3, schedule=schedule, layout=layout, plan=plan
    ) as run:
        optimizer = torch.optim.SGD(run.groups(), lr=0.01)
        for step in range(4):
            run.step(*_batch(step, run.replica))
            optimizer.step()
        run.evaluate(*_batch(5, run.replica))
        return {name: each.detach().numpy() for name, each in run.named_parameters()}


@pytest.mark.parametrize(
    ("name", "schedule", "ranks_of_each", "replicas"),
    [("words", "1f1b", 2, 1), ("texts", "zb-h1", 3, 1), ("texts", "simple", 2, 2)],
)
def test_lengths_that_only_data_say_may_be_others_in_each_batch(
    name: str, schedule: str, ranks_of_each: int, replicas: int
) -> None:
    found: dict[str, Any] = {}
    for part in ranks.run(ranks_of_each * replicas, _train, name, schedule, replicas):
        found |= part
    model = _build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        batches = [_batch(step, replica) for replica in range(replicas)]
        losses = [_squares(model(**inputs), targets) for inputs, targets in batches]
        (sum(total for total, _ in losses) / sum(count for _, count in losses)).backward()
        optimizer.step()
    for key, each in model.named_parameters():
        assert torch.allclose(torch.from_numpy(found[key]), each, rtol=1e-10, atol=1e-10), key


def test_a_model_with_several_recurrent_layers_takes_any_length() -> None:
    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.LSTM(5, 5, batch_first=True), nn.GRU(5, 5, batch_first=True)
            self.between, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
            self.double()  # as on GPUs: for float32, the CPU has an LSTM that takes no length for a number

        def forward(self, x: Any) -> Any:
            return self.last(self.two(self.between(self.one(x)[0]))[0])

    model = Model()
    found = trace_model(model, torch.ones(3, 7, 5, dtype=torch.float64))
    assert [place for place, _ in found.sizes.numbers] == [("x", (), 2)]
    x = torch.linspace(-1.0, 1.0, 90, dtype=torch.float64).view(2, 9, 5)
    torch.testing.assert_close(run_stages(split_model(found, {"between": 1, "two": 1, "last": 2}), {"x": x}), model(x))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_code_computes_with_the_length_before_and_behind_a_recurrent_layer(kind: Any) -> None:
    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(11, 5), nn.Embedding(20, 5)
            self.rnn = kind(5, 4, num_layers=2, bidirectional=True, batch_first=True)
            self.mid, self.last = nn.Linear(8, 5), nn.Linear(5, 5)

        def forward(self, x: Any) -> Any:
            given = self.words(x) + self.places(torch.arange(x.shape[1]))
            y, state = self.rnn(given)
            y.mul_(2)
            y = self.mid(y) + (state[0] if isinstance(state, tuple) else state)[-1].mean()
            scores = y @ given.transpose(1, 2) / y.shape[1]
            return self.last(scores.tril().softmax(-1) @ y + self.places.weight[: y.shape[1]])

    model = Model().double()
    found = trace_model(model, torch.ones(3, 7, dtype=torch.long))
    assert not found.sizes.numbers
    for samples, length in ((2, 9), (1, 4), (4, 1)):
        x = torch.arange(samples * length).view(samples, length) % 11
        stages = split_model(found, {"mid": 1, "last": 2})
        torch.testing.assert_close(run_stages(stages, {"x": x}), model(x))


def test_a_recurrent_layer_is_not_traced_step_by_step_where_the_length_is_a_number() -> None:
    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rnn, self.last = nn.Linear(3, 5), nn.GRU(5, 4, batch_first=True), nn.Linear(4, 5)

        def forward(self, x: Any) -> Any:
            places = torch.linspace(0, 1, int(x.shape[1]), dtype=x.dtype)
            y, _ = self.rnn(self.first(x) + places[:, None])
            return self.last(y) / y.shape[1]

    model, x = Model().double(), torch.randn(3, 800, 3, dtype=torch.float64)
    begin = time.process_time()
    found = trace_model(model, x)
    assert time.process_time() - begin < 10  # 1 s; step by step, more than 60 s
    assert [place for place, _ in found.sizes.numbers] == [("x", (), 1), ("x", (), 2)]
    torch.testing.assert_close(run_stages(split_model(found, {"rnn": 1, "last": 2}), {"x": x}), model(x))


@pytest.mark.parametrize("height", [1, 2])
def test_a_length_behind_a_recurrent_layer_that_follows_from_a_size_is_no_number(height: int) -> None:
    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.shrink = nn.Sequential(nn.Conv2d(1, 5, 3, padding=1), nn.MaxPool2d((4 // height, 2)))
            self.rnn, self.last = nn.GRU(5 * height, 5), nn.Linear(5, 5)

        def forward(self, x: Any) -> Any:
            y, _ = self.rnn(self.shrink(x).flatten(1, 2).permute(2, 0, 1))  # the height is among the features
            return self.last(y.sum(0) / y.shape[0])

    model = Model().double()
    found = trace_model(model, torch.ones(3, 1, 4, 16, dtype=torch.float64))
    x = torch.linspace(-1.0, 1.0, 160, dtype=torch.float64).view(2, 1, 4, 20)
    torch.testing.assert_close(run_stages(split_model(found, {"rnn": 1, "last": 2}), {"x": x}), model(x))


@pytest.mark.parametrize(
    "make",
    [
        lambda n, like: torch.linspace(0, 1, n, dtype=like.dtype),
        lambda n, like: torch.hann_window(2 * n - 1, dtype=like.dtype)[:n],
        lambda n, like: nn.functional.one_hot(torch.arange(n), n).sum(0).to(like.dtype),
        lambda n, like: torch.fft.rfftfreq(2 * n - 2, dtype=like.dtype),
        lambda n, like: torch.arange(0, n, 0.5, dtype=like.dtype).view(-1, 2)[:, 0],
        lambda n, like: torch.triu_indices(n, n)[0, :n].to(like.dtype),
    ],
    ids=["linspace", "window", "one_hot", "half", "float step", "pairs"],
)
def test_a_size_that_follows_from_another_is_that_of_the_batch_where_an_operation_takes_it_for_a_number(
    make: Any,
) -> None:
    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.shrink = nn.Sequential(nn.Conv2d(1, 5, 3, padding=1), nn.MaxPool2d((4, 2)))
            self.mid, self.last = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: Any) -> Any:
            y = self.shrink(x).squeeze(2).permute(0, 2, 1)
            places = make(y.shape[1], y)
            return self.last((self.mid(y) * places[None, :, None]).sum(1) / places.shape[0])

    model = Model().double()
    found = trace_model(model, torch.ones(3, 1, 4, 16, dtype=torch.float64))
    x = torch.linspace(-1.0, 1.0, 160, dtype=torch.float64).view(2, 1, 4, 20)
    torch.testing.assert_close(run_stages(split_model(found, {"mid": 1, "last": 2}), {"x": x}), model(x))


def test_code_computes_with_the_length_behind_pooling_over_it() -> None:
    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.mid, self.last = nn.Conv1d(2, 5, 3), nn.Linear(5, 5), nn.Linear(5, 3)
            self.pool = nn.MaxPool1d(3, 2, 1)

        def forward(self, x: Any) -> Any:
            y = torch.max_pool1d(self.pool(self.first(x)), 2, ceil_mode=True).transpose(1, 2)
            places = torch.arange(y.shape[1], dtype=y.dtype) / y.shape[1]
            return self.last(self.mid(y) * places[:, None])

    model = Model().double()
    found = trace_model(model, torch.randn(4, 2, 24, dtype=torch.float64))
    for length in (24, 29, 17):
        x = torch.randn(3, 2, length, dtype=torch.float64)
        found.sizes.check({"x": x})
        torch.testing.assert_close(run_stages(split_model(found, {"mid": 1, "last": 2}), {"x": x}), model(x))


class Moving(nn.Module):  # type: ignore[misc]
    """A spatial transformer, behind a layer that makes images smaller by `stride`."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.first, self.mid, self.last = nn.Conv2d(1, 3, 3, stride, 1), nn.Conv2d(3, 4, 3, 2, 1), nn.Linear(4, 3)
        self.places = nn.Linear(3, 6)

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        grid = nn.functional.affine_grid(self.places(y.mean((2, 3))).view(-1, 2, 3), y.size(), align_corners=False)
        y = nn.functional.grid_sample(y, grid, align_corners=False)
        return self.last(self.mid(y).flatten(2).sum(-1) / (y.shape[2] * y.shape[3]))


@pytest.mark.parametrize("stride", [1, 2])
def test_a_size_that_torch_computes_from_a_number_is_that_of_the_batch_too(stride: int) -> None:
    model = Moving(stride).double()
    found = trace_model(model, torch.randn(4, 1, 12, 16, dtype=torch.float64))
    x = torch.randn(3, 1, 16, 20, dtype=torch.float64)
    found.sizes.check({"x": x})
    torch.testing.assert_close(run_stages(split_model(found, {"mid": 1, "last": 2}), {"x": x}), model(x))


def test_what_learns_and_has_the_size_of_an_argument_that_an_operation_takes_for_a_number_is_of_that_number() -> None:
    class Sounds(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.mid, self.last = nn.Linear(5, 5), nn.Linear(12, 12)

        def forward(self, x: Any) -> Any:
            window = torch.hann_window(8, dtype=x.dtype)
            parts = torch.stft(x, 8, 4, window=window, return_complex=True)
            mask = self.mid(parts.abs().transpose(1, 2)).transpose(1, 2)
            return self.last(torch.istft(parts * mask, 8, 4, window=window, length=x.shape[1]))

    model, x = Sounds().double(), torch.randn(3, 12, dtype=torch.float64)
    found = trace_model(model, x)
    torch.testing.assert_close(run_stages(split_model(found, {"mid": 1, "last": 2}), {"x": x}), model(x))
    with pytest.raises(PipelineError, match="takes this size for a number"):
        found.sizes.check({"x": torch.randn(3, 16, dtype=torch.float64)})


def _place(y: Any) -> Any:
    rows, columns = (torch.linspace(-1, 1, size, dtype=y.dtype) for size in y.shape[2:])
    return y + torch.stack(torch.meshgrid(rows, columns, indexing="ij")).sum(0)


@pytest.mark.parametrize(
    "compute",
    [
        lambda y: _place(y).mean((2, 3)),
        lambda y: nn.functional.avg_pool2d(y, y.size()[2:]).view(y.size(0), -1),
        lambda y: nn.functional.max_pool2d(y, kernel_size=y.shape[2:], stride=1).squeeze(-1).squeeze(-1),
        lambda y: nn.functional.max_pool1d(y.flatten(2), y.shape[2] * y.shape[3]).squeeze(2),
        lambda y: nn.functional.avg_pool1d(y.mean(3), 2, stride=y.shape[2] // 2).mean(2),
        lambda y: nn.functional.lp_pool2d(y, 2, (y.shape[2], 2)).mean((2, 3)),
        lambda y: nn.functional.max_pool2d(y, 2, padding=y.shape[2] % 2).mean((2, 3)),
        lambda y: (z := nn.functional.max_pool2d(y, 1, 3, ceil_mode=True)).sum((2, 3)) / z.shape[2] / z.shape[3],
        lambda y: (z := nn.functional.avg_pool1d(y.mean(3), y.shape[2] // 3, ceil_mode=True)).sum(2) / z.shape[2],
        lambda y: (z := nn.functional.max_pool2d(y, y.shape[2] // 2, 2)).sum((2, 3)) / z.shape[2],
        lambda y: (y.sum(3) @ nn.functional.one_hot(torch.arange(y.shape[2]), y.shape[2]).to(y.dtype)).mean(2),
        lambda y: y.mean(3)[:, :, torch.tril_indices(y.shape[2], y.shape[2], -1)[0]].mean(2),
    ],
    ids=[
        "linspace",
        "avg",
        "max",
        "max1d",
        "stride",
        "lp",
        "padding",
        "ceil",
        "ceil of windows",
        "half",
        "one_hot",
        "tril",
    ],
)
@pytest.mark.parametrize("stride", [1, 2], ids=["argument's", "behind a convolution"])
def test_an_operation_takes_a_size_for_a_number_and_images_may_have_any(compute: Any, stride: int) -> None:
    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(2, 6, 3, stride, 1), nn.Linear(6, 3)

        def forward(self, x: Any) -> Any:
            return self.last(compute(self.first(x).abs() + 1))

    model = Model().double()
    found = trace_model(model, torch.randn(4, 2, 12, 16, dtype=torch.float64))
    for height, width in (12, 16), (25, 18), (10, 11):
        x = torch.randn(3, 2, height, width, dtype=torch.float64)
        found.sizes.check({"x": x})
        torch.testing.assert_close(run_stages(split_model(found, {"last": 1}), {"x": x}), model(x))


@pytest.mark.parametrize("by_number", [True, False])
def test_a_loop_over_the_steps_behind_a_pooling_is_not_traced_once_more_for_each_of_them(by_number: bool) -> None:
    calls = []

    class Steps(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
        def __init__(self) -> None:
            super().__init__()
            self.pool, self.cell = nn.AvgPool1d(4), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            calls.append(x.shape)
            parts, state = self.pool(x).permute(2, 0, 1), torch.zeros_like(x[:, :, 0])
            for part in (parts[at] for at in range(parts.shape[0])) if by_number else parts.unbind(0):
                state = torch.tanh(self.cell(part + state))
            return state

    trace_model(Steps(), torch.randn(3, WIDTH, 12))
    few = len(calls)
    found = trace_model(Steps(), torch.randn(3, WIDTH, 24))
    assert len(calls) == 2 * few
    x = torch.randn(3, WIDTH, 27)  # has as many steps
    found.sizes.check({"x": x})
    torch.testing.assert_close(run_stages(split_model(found, {"cell": 1}), {"x": x}), found.model(x))
    with pytest.raises(PipelineError, match="size"):
        found.sizes.check({"x": torch.randn(3, WIDTH, 20)})


def test_a_condition_that_no_size_can_have_ends_no_trace() -> None:
    class Patches(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(6, 5)

        def forward(self, x: Any) -> Any:
            return self.last(nn.functional.unfold(self.first(x), (3, 1)).transpose(1, 2))

    model = Patches().double()
    found = trace_model(model, torch.randn(3, 1, 12, 5, dtype=torch.float64))
    x = torch.randn(2, 1, 9, 7, dtype=torch.float64)
    torch.testing.assert_close(run_stages(split_model(found, {"last": 1}), {"x": x}), model(x))


def test_what_depends_on_data_is_known_and_what_does_not_is_not() -> None:
    def look(function: Any, *given: Any) -> bool:
        class Model(nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.between, self.last = Block(function), nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Any, *more: Any) -> Any:
                return self.last(self.between(x, *more) * 2)

        found = trace_model(Model(), (torch.randn(3, WORDS, WIDTH), *given)).varying
        assert found.isdisjoint({"x"})
        return bool(found)

    lengths = torch.tensor([3, 2, 6])
    assert look(lambda x: x.tanh()) is False
    assert look(lambda x: x if x.sum() > -1e9 else -x) is False
    assert look(lambda x: (x if x.sum() > -1e9 else -x).repeat_interleave(2, 1)) is False
    assert look(lambda x: x[x.sum(-1) > 0]) is True
    assert look(lambda x, lengths: x[:, : int(lengths.max())], lengths) is True
    assert look(lambda x, lengths: x * float(lengths.max()), lengths) is False
    # Only one number of words is right, so nothing is known.
    assert look(lambda x, lengths: x.reshape(-1, WIDTH).split(lengths.tolist())[0], torch.tensor([18, 18, 18])) is True


def test_a_mask_of_the_places_in_a_text_that_a_module_has_cut_depends_on_data_too() -> None:
    class Cutting(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.cut, self.layer = Block(lambda x, lengths: x[:, : int(lengths.max())]), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any, lengths: Any) -> Any:
            y = self.cut(x, lengths)
            mask = torch.arange(y.shape[1]) < lengths[:, None]
            return (self.layer(y) * mask[..., None]).sum(1)

    traced = trace_model(Cutting(), (torch.randn(3, WORDS, WIDTH), torch.tensor([3, 2, 6])))
    assert {"cut", ":lt", "layer"} <= traced.varying
