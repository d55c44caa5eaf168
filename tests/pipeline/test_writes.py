"""Weights and buffers that a forward writes would be written for each micro-batch: that is refused, but for statistics
that the engine puts together."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline import pipeline  # noqa: E402
from everstep.pipeline.engine.batchnorm import RunningStatistics  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend.batch_statistics import are_statistics_put_together  # noqa: E402
from everstep.pipeline.frontend.check import compare_gradients, run_stages  # noqa: E402
from everstep.pipeline.frontend.split import split_model  # noqa: E402
from everstep.pipeline.frontend.trace import trace_model  # noqa: E402
from everstep.pipeline.frontend.writes import find_writes, refuse_reads_of_statistics, refuse_writes  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.pipeline.grouping import group_options  # noqa: E402
from tests.pipeline.models import squares  # noqa: E402

pytestmark = pytest.mark.torch

X = torch.linspace(-1.0, 1.0, 6 * 4 * 4).view(6, 4, 4)


class Writing(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """A layer that does something to its own weights or buffers before it uses them."""

    mean: Any

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            if self.how == "clips":
                self.layer.weight.clamp_(-0.1, 0.1)
            elif self.how == "writes data":
                self.layer.weight.data.mul_(0.9)
            elif self.how == "averages weights":
                self.mean.lerp_(self.layer.weight[0], 0.1)
            elif self.how == "averages":
                self.mean.lerp_(x.mean((0, 1)), 0.1)
            elif self.how == "replaces a buffer":
                self.mean = 0.9 * self.mean + 0.1 * x.mean((0, 1))
        if self.how == "replaces a parameter":
            self.scale = nn.Parameter(self.scale * 0.9, requires_grad=False)
        return self.layer(x - self.mean) * self.scale


class FrozenByItself(nn.BatchNorm1d):  # type: ignore[misc]
    """Normalises by what it has, in training too."""

    def forward(self, x: Any) -> Any:
        return nn.functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
        )


class OfParts(nn.BatchNorm1d):  # type: ignore[misc]
    """Takes the statistics of parts of a batch."""

    def forward(self, x: Any) -> Any:
        return torch.cat([super(OfParts, self).forward(each) for each in x.chunk(2)])


class Renormalising(nn.BatchNorm1d):  # type: ignore[misc]
    """Normalises by what it has once it has seen many batches, as batch renormalisation does."""

    def forward(self, x: Any) -> Any:
        made = super().forward(x)
        return made if self.num_batches_tracked < 5000 else made + self.running_mean


class CountingToo(nn.BatchNorm1d):  # type: ignore[misc]
    """Writes a buffer of its own besides."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.seen += 1
        return super().forward(x)


class Freezable(nn.BatchNorm1d):  # type: ignore[misc]
    """As torch's, until it is told to keep what it has; or to take parts of a batch."""

    way = "torch's"

    def forward(self, x: Any) -> Any:
        if self.way == "frozen":
            return FrozenByItself.forward(self, x)
        if self.way == "by its own":
            return x - self.running_mean + 0 * nn.BatchNorm1d.forward(self, x)
        if self.way == "by its new":
            return 0 * nn.BatchNorm1d.forward(self, x) + x - self.running_mean
        return torch.cat([nn.BatchNorm1d.forward(self, each) for each in x.chunk(1 if self.way == "torch's" else 2)])


class InFloat32(nn.BatchNorm1d):  # type: ignore[misc]
    """Casts what it is given, as is done for low precision."""

    def forward(self, x: Any) -> Any:
        return super().forward(x.float()).to(x.dtype)


class InFloat32ByHand(nn.BatchNorm1d):  # type: ignore[misc]
    """The same without torch's function, and with another variance if it is told so."""

    unbiased = True

    def forward(self, x: Any) -> Any:
        wide = x.float()
        if self.training:
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(wide.mean(0), self.momentum)
            self.running_var.lerp_(wide.var(0, unbiased=self.unbiased), self.momentum)
        mean, variance = (wide.mean(0), wide.var(0, unbiased=False)) if self.training else self.buffers()
        return ((wide - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias).to(x.dtype)


def test_statistics_of_layers_that_cast_to_float32_are_put_together() -> None:
    wrong = InFloat32ByHand(4)
    wrong.unbiased = False
    kinds = [InFloat32(4), InFloat32(4).bfloat16(), InFloat32ByHand(4), wrong]
    assert list(map(are_statistics_put_together, kinds)) == [True, True, True, False]


@pytest.mark.parametrize(("momentum", "factor"), [(0.1, 0.1), (0.0, 0.0), (None, 0.25)])
def test_a_layer_that_begins_to_compute_from_its_statistics_has_those_of_the_step_before(
    momentum: float | None, factor: float
) -> None:
    """With what it adds to them itself: each micro-batch does as if it were the first of the step."""
    layer, x = Freezable(4), X.flatten(0, 1)
    layer.running_mean.fill_(0.5)
    layer.num_batches_tracked.fill_(3)
    layer.momentum = momentum
    statistics = RunningStatistics([layer])
    for layer.way, part in zip(("by its own", "by its new"), x.chunk(2), strict=True):
        statistics.begin(count=True)
        taken = 0.5 if layer.way == "by its own" else 0.5 * (1 - factor) + factor * part.mean(0)
        torch.testing.assert_close(layer(part), part - taken)
        statistics.end()
    statistics.commit(lambda each: None)
    torch.testing.assert_close(layer.running_mean, 0.5 * (1 - factor) + factor * x.mean(0))
    torch.testing.assert_close(layer.running_var, (1 - factor) + factor * x.var(0))
    assert layer.num_batches_tracked == 4


@pytest.mark.parametrize("layer", [FrozenByItself(4), OfParts(4), Renormalising(4), CountingToo(4)])
def test_statistics_of_layers_that_do_not_do_as_torch_s_are_not_put_together(layer: nn.Module) -> None:
    assert are_statistics_put_together(nn.BatchNorm1d(4))
    assert are_statistics_put_together(Freezable(4))
    drawn = torch.get_rng_state()
    assert not are_statistics_put_together(layer)
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("way", ["frozen", "of parts"])
def test_a_layer_that_does_no_more_as_torch_s_is_named_before_its_statistics_are_written(way: str) -> None:
    layer, x = Freezable(4), X.flatten(0, 1)
    statistics = RunningStatistics([layer])

    def train() -> None:
        statistics.begin(count=True)
        layer(x=x)
        statistics.end()
        statistics.commit(lambda each: None)

    train()
    layer.way = way
    with pytest.raises(PipelineError, match=r"Freezable[^@]* did not update its statistics once in each call"):
        train()
    torch.testing.assert_close(layer.running_mean, 0.1 * x.mean(0))
    assert layer.num_batches_tracked == 1
    layer.eval()
    train()
    assert layer.num_batches_tracked == 1


def test_a_layer_that_tracks_no_more_keeps_its_statistics() -> None:
    layer = nn.BatchNorm1d(4)
    statistics = RunningStatistics([layer])
    layer.track_running_stats = False
    statistics.begin(count=True)
    layer(X.flatten(0, 1))
    statistics.end()
    statistics.commit(lambda each: None)
    assert layer.num_batches_tracked == 0
    assert not layer.running_mean.any()


def test_batch_normalisation_with_a_forward_of_its_own_has_its_buffers_and_is_refused_if_it_writes_them() -> None:
    frozen = FrozenByItself(4)
    frozen.running_mean.fill_(0.5)
    model = between(frozen)
    assert not find_writes(trace_model(model, X.flatten(0, 1)).record)
    expected = model(X.flatten(0, 1))
    statistics = RunningStatistics(model.modules())
    statistics.begin(count=True)
    assert torch.equal(model(X.flatten(0, 1)), expected)
    statistics.end()
    statistics.commit(lambda each: None)
    assert frozen.num_batches_tracked == 0
    with pytest.raises(
        PipelineError, match=r"forward writes the buffer '1.num_batches_tracked' of module '1' \(OfParts"
    ):
        refuse_writes(trace_model(between(OfParts(4)), X.flatten(0, 1)).record, 4)


def between(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), module, nn.Linear(4, 4))


CASES: dict[str, tuple[nn.Module, str]] = {
    "clips": (Writing("clips"), "parameter '1.layer.weight'"),
    "writes data": (Writing("writes data"), "parameter '1.layer.weight'"),
    "averages weights": (Writing("averages weights"), "buffer '1.mean'"),
    "averages": (Writing("averages"), "buffer '1.mean'"),
    "replaces a buffer": (Writing("replaces a buffer"), "buffer '1.mean'"),
    "replaces a parameter": (Writing("replaces a parameter"), "parameter '1.scale'"),
    "instance norm": (
        nn.InstanceNorm1d(4, track_running_stats=True),
        "buffer '1.running_mean'.*track_running_stats=False",
    ),
    "spectral norm": (
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        "buffer '1.parametrizations.weight.0._u'",
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_what_a_forward_writes_is_named_and_refused(case: str) -> None:
    module, what = CASES[case]
    model = between(module)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    record = trace_model(model, X).record
    with pytest.raises(PipelineError, match=rf"forward writes the {what}"):
        refuse_writes(record, 3)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


@pytest.mark.parametrize(
    "module",
    [
        nn.BatchNorm1d(4),
        nn.InstanceNorm1d(4),
        nn.InstanceNorm1d(4, track_running_stats=True).eval(),
        Writing("nothing"),
    ],
)
def test_what_is_put_together_or_only_read_is_no_write(module: nn.Module) -> None:
    assert not find_writes(trace_model(between(module), X).record)


class Reading(nn.Module):  # type: ignore[misc]
    """Adds the running mean of a layer to its result, as only that layer should read it in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Any) -> Any:
        return self.norm(x) + self.norm.running_mean


def test_running_statistics_that_forward_reads_in_training_beside_their_layer_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Reading(), nn.BatchNorm1d(4))
    rows = torch.linspace(-1.0, 1.0, 24).view(6, 4)
    with pytest.raises(PipelineError, match=r"reads the buffer '1\.norm\.running_mean' of module '1\.norm'"):
        refuse_reads_of_statistics(trace_model(model, rows).record)
    model[1].norm.eval()
    refuse_reads_of_statistics(trace_model(model, rows).record)
    model.eval()
    refuse_reads_of_statistics(trace_model(model, rows).record)


def _asked(rank: int) -> list[str]:
    told = []
    how: dict[str, Any] = {"stage_of": {"2": 1}, "heartbeat": None, "costs": "counted"}
    asked: list[dict[str, Any]] = [{"microbatches": 3}, {"microbatches": 1}, {"microbatches": 3, "check": False}]
    for more in asked:
        torch.manual_seed(0)
        try:
            with pipeline(between(Writing("averages")), X, squares, **group_options(**how, **more)) as run:
                run.step(X, X)
                told.append("trained")
        except PipelineError as error:
            told.append(str(error))
    return told


def test_it_is_refused_on_all_ranks_where_a_batch_is_cut_and_unless_a_script_wants_it() -> None:
    one, other = ranks.run(2, _asked)
    assert one == other
    assert "forward writes the buffer '1.mean' of module '1' (Writing)" in one[0]
    assert "3 times a batch" in one[0]
    assert one[1:] == ["trained", "trained"]


class Converting(nn.Module):  # type: ignore[misc]
    """Converts a layer before it calls it, as routers of experts do, which compute in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.layer, self.two = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        self.layer = self.layer.to(torch.float32)
        return self.two(self.layer(self.one(x)))


def test_a_conversion_that_changes_nothing_writes_nothing_and_the_layer_learns() -> None:
    model = Converting()
    traced = trace_model(model, {"x": X})
    refuse_writes(traced.record, 4)
    stages = split_model(traced, {"layer": 1, "two": 1})
    assert compare_gradients(model, stages, {"x": X}, lambda output: output.square().sum()) < 1e-6


class Tracking(nn.Module):  # type: ignore[misc]
    """Writes its mean for long texts, for large numbers, or when a script says so, in place or not."""

    mean: Any

    def __init__(self, when: str, *, is_in_place: bool) -> None:
        super().__init__()
        self.when, self.is_in_place, self.is_asked = when, is_in_place, False
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        wanted: dict[str, Any] = {
            "long": lambda: x.shape[1] > 6,
            "large": lambda: bool(x.detach().abs().max() > 9),
            "asked": lambda: self.is_asked,
        }
        if wanted[self.when]():
            mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
            if self.is_in_place:
                self.mean.copy_(mean)
            else:
                self.mean = mean
        return x - self.mean


@pytest.mark.parametrize("is_in_place", [False, True])
@pytest.mark.parametrize("when", ["long", "large", "asked"])
def test_a_buffer_that_is_written_later_only_is_refused_then(when: str, is_in_place: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), tracking := Tracking(when, is_in_place=is_in_place), nn.Linear(4, 4))
    stages = split_model(trace_model(model, torch.ones(2, 3, 4)), {"2": 1})
    for stage in stages:
        stage.refuse_late_writes()
    run_stages(stages, {"input": torch.ones(2, 5, 4)})
    tracking.is_asked = True
    with pytest.raises(PipelineError, match="module '1' has written its 'mean', and did not"):
        run_stages(stages, {"input": torch.full((2, 7, 4), 1e3)})


class Table(nn.Module):  # type: ignore[misc]
    """Keeps positions in a buffer that its first call makes, and makes anew for longer texts."""

    table: Any

    def __init__(self, *, is_there: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        if is_there:
            self.register_buffer("table", None, persistent=False)

    def forward(self, x: Any) -> Any:
        if getattr(self, "table", None) is None or len(self.table) < x.shape[1]:
            self.register_buffer("table", torch.arange(x.shape[1], dtype=x.dtype).sin(), persistent=False)
        return self.layer(x) + self.table[: x.shape[1], None]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_table_in_a_buffer_that_the_first_call_makes_is_accepted(is_there: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Table(is_there=is_there), nn.Linear(4, 4))
    stages = split_model(trace_model(model, torch.ones(2, 3, 4)), {"2": 1})
    for stage in stages:
        stage.refuse_late_writes()
    for length in (3, 5, 4, 7):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(run_stages(stages, {"input": x}), copy.deepcopy(model)(x))
