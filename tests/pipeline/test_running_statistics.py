"""Running statistics are those of all numbers that a layer was given, whatever these are, or the layer is named."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from everstep.pipeline.engine.batchnorm import RunningStatistics  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend.batch_statistics import are_statistics_put_together  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

FEATURES = 4


def train(layer: Any, parts: Any, reduce: Any = lambda each: None, replica: int = 0, replicas: int = 1) -> None:
    """One step of a layer on these micro-batches, each with what else it is given."""
    statistics = RunningStatistics([layer])
    try:
        for part in parts:
            statistics.begin(count=True)
            layer(*part)
            statistics.end()
        statistics.commit(reduce, replica, replicas)
    finally:
        statistics.close()


def numbers(samples: int = 24, *, mean: float = 0.0, spread: float = 1.0) -> Any:
    drawn = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return drawn * spread + mean


# ---- large numbers ----


LARGE = [(1.7e9, 0.0), (1.7e9, 1e-3), (1e6, 1e-2)]


@pytest.mark.parametrize(("mean", "spread"), LARGE)
def test_variances_of_numbers_that_are_large_and_alike_are_those_of_one_process(mean: float, spread: float) -> None:
    layer, alone = nn.BatchNorm1d(FEATURES).double(), nn.BatchNorm1d(FEATURES).double()
    x = numbers(24, mean=mean, spread=spread)
    for _ in range(3):
        train(layer, [(part,) for part in x.split(5)])
        alone(x)
    torch.testing.assert_close(layer.running_mean, alone.running_mean, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(layer.running_var, alone.running_var, rtol=1e-6, atol=1e-12)


def test_a_constant_column_of_float32_has_no_variance() -> None:
    layer = nn.BatchNorm1d(FEATURES, momentum=1.0)
    train(layer, [(part,) for part in torch.full((24, FEATURES), 1.7e9).split(5)])
    assert layer.running_var.tolist() == [0.0] * FEATURES


def _of_replicas(rank: int) -> tuple[Any, Any]:
    layer, x = nn.BatchNorm1d(FEATURES).double(), numbers(24, mean=1e9, spread=1e-2)
    mine = x[:10] if rank else x[10:]
    train(layer, [(part,) for part in mine.split(4)], dist.all_reduce, rank, 2)
    return layer.running_mean.tolist(), layer.running_var.tolist()


def test_variances_of_large_numbers_are_put_together_over_replicas() -> None:
    alone = nn.BatchNorm1d(FEATURES).double()
    alone(numbers(24, mean=1e9, spread=1e-2))
    for mean, variance in ranks.run(2, _of_replicas):
        assert mean == pytest.approx(alone.running_mean.tolist(), rel=1e-12)
        assert variance == pytest.approx(alone.running_var.tolist(), rel=1e-6)


# ---- layers that leave out some of what they are given ----


class Masked(nn.BatchNorm1d):  # type: ignore[misc]  # torch is not where types are checked
    """Normalises the words that a mask names, and is torch's layer without one."""

    mask: Any = None

    def forward(self, x: Any, mask: Any = None) -> Any:
        mask = self.mask if mask is None else mask
        if mask is None:
            return super().forward(x)
        made = torch.zeros_like(x)
        made[mask] = super().forward(x[mask])
        return made


class WithoutPadding(nn.BatchNorm1d):  # type: ignore[misc]
    """Leaves out the words that are all zeros."""

    def forward(self, x: Any) -> Any:
        made, mask = torch.zeros_like(x), (x != 0).any(1)
        made[mask] = super().forward(x[mask])
        return made


def test_a_layer_that_leaves_out_padding_is_not_put_together() -> None:
    assert are_statistics_put_together(Masked(FEATURES))
    assert not are_statistics_put_together(WithoutPadding(FEATURES))


@pytest.mark.parametrize("how", ["argument", "attribute"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_layer_that_leaves_out_what_a_mask_names_is_named_and_writes_nothing(
    how: str, dtype: Any, momentum: float | None
) -> None:
    layer, x = Masked(FEATURES, momentum=momentum).to(dtype), numbers(mean=1.0).to(dtype)
    train(layer, [(part,) for part in x.split(6)])
    before = {name: each.clone() for name, each in layer.named_buffers()}
    mask = torch.arange(6) < 3
    layer.mask = mask if how == "attribute" else None
    x = x * torch.linspace(1, 9, len(x), dtype=dtype)[:, None]
    with pytest.raises(PipelineError, match=r"leaves some of it out, as by a mask"):
        train(layer, [(part, mask) if how == "argument" else (part,) for part in x.split(6)])
    assert all(torch.equal(each, before[name]) for name, each in layer.named_buffers())


class InPlace(nn.BatchNorm1d):  # type: ignore[misc]
    """Changes what it is given, as to save memory."""

    def forward(self, x: Any) -> Any:
        return x.copy_(super().forward(x.clone()))


class InItsType(nn.BatchNorm1d):  # type: ignore[misc]
    """Computes in the type of what it is given."""

    def forward(self, x: Any) -> Any:
        mean, variance = x.mean(0), x.var(0)
        with torch.no_grad():
            self.num_batches_tracked += 1
            for buffer, each in ((self.running_mean, mean), (self.running_var, variance)):
                buffer.lerp_(each.to(buffer), self.momentum)
        return (x - mean) / (variance + self.eps).sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_that_takes_means_in_a_type_of_16_bits_is_not_named(dtype: Any) -> None:
    for mean, spread in ((0.0, 1.0), (50.0, 0.1), (3.0, 1.0)):
        for samples in (24, 5000):
            layer = InItsType(FEATURES)
            train(layer, [(part,) for part in numbers(samples, mean=mean, spread=spread).to(dtype).split(samples // 4)])
            assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("kind", [Masked, InPlace])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_that_leaves_out_nothing_is_not_named(kind: Any, dtype: Any) -> None:
    for momentum in (0.1, None, 1.0, 0.0, 1e-4):
        for mean, spread in ((0.0, 1.0), (50.0, 0.1), (0.0, 1e-6), (1e4, 1e3)):
            layer, x = kind(FEATURES, momentum=momentum).to(dtype), numbers(96, mean=mean, spread=spread).to(dtype)
            for _ in range(3):
                train(layer, [(part.clone(),) for part in x.split(17)])
            assert layer.num_batches_tracked == 3


class Selecting(nn.BatchNorm1d):  # type: ignore[misc]
    """As torch's, with a forward of its own."""

    def forward(self, x: Any) -> Any:
        return super().forward(x)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, Selecting])
@pytest.mark.parametrize("sizes", [(0, 8, 16), (8, 0, 16), (16, 8, 0), (0, 0, 24)])
def test_a_micro_batch_without_words_for_a_layer_adds_nothing(kind: Any, sizes: tuple[int, ...]) -> None:
    """As of experts of which some get no word, where the others have some."""
    layer, alone, x = kind(FEATURES).double(), nn.BatchNorm1d(FEATURES).double(), numbers(mean=2.0)
    for _ in range(2):
        train(layer, [(part,) for part in x.split(sizes)])
        alone(x)
    torch.testing.assert_close(layer.state_dict(), alone.state_dict(), rtol=1e-12, atol=1e-12)


class Gated(nn.BatchNorm1d):  # type: ignore[misc]
    """Takes another tensor besides, of which it keeps nothing."""

    def forward(self, input: Any, *, gate: Any = None) -> Any:
        made = super().forward(input)
        return made if gate is None else made * gate


def test_statistics_are_of_the_first_argument_in_whatever_order_arguments_are_given() -> None:
    layer, alone, x = Gated(FEATURES).double(), nn.BatchNorm1d(FEATURES).double(), numbers(mean=2.0)
    statistics = RunningStatistics([layer])
    for part in x.split(8):
        statistics.begin(count=True)
        layer(gate=part[:1].sigmoid(), input=part)
        statistics.end()
    statistics.commit(lambda each: None)
    alone(x)
    torch.testing.assert_close(layer.state_dict(), alone.state_dict(), rtol=1e-12, atol=1e-12)


# ---- channels at the end ----


class Words(nn.BatchNorm1d):  # type: ignore[misc]
    """Takes texts with their channels last."""

    def forward(self, x: Any) -> Any:
        samples, words, channels = x.shape
        return super().forward(x.reshape(-1, channels)).view(samples, words, channels)


class ByFeatures(nn.BatchNorm1d):  # type: ignore[misc]
    """Takes whatever ends with its channels, and would take others for such."""

    def forward(self, x: Any) -> Any:
        return super().forward(x.reshape(-1, self.num_features)).view_as(x)


class Pixels(nn.BatchNorm2d):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return super().forward(x.reshape(-1, self.num_features, 1, 1)).view_as(x)


class Transposed(nn.BatchNorm1d):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Images(nn.BatchNorm2d):  # type: ignore[misc]
    def forward(self, x: Any) -> Any:
        return super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class PartOfWords(nn.BatchNorm1d):  # type: ignore[misc]
    """Takes the first words only."""

    def forward(self, x: Any) -> Any:
        super().forward(x[:, :1].reshape(-1, x.shape[-1]))
        return x


@pytest.mark.parametrize("kind", [Words, ByFeatures, Pixels, Transposed, Images])
@pytest.mark.parametrize("features", [2, 3, 4, 300])
def test_statistics_of_layers_that_have_their_channels_last_are_put_together(kind: Any, features: int) -> None:
    layer = kind(features)
    assert are_statistics_put_together(layer)
    sizes = (3, 3) if issubclass(kind, nn.BatchNorm2d) else (3,)
    x = torch.randn(8, *sizes, features, generator=torch.Generator().manual_seed(1))
    alone = nn.BatchNorm1d(features)
    train(layer, [(part,) for part in x.split(3)])
    alone(x.flatten(0, -2))
    torch.testing.assert_close(layer.running_mean, alone.running_mean)
    torch.testing.assert_close(layer.running_var, alone.running_var)


class OfAnyNumber(nn.modules.batchnorm._BatchNorm):  # type: ignore[misc]
    """Takes any number of dimensions, and is none of torch's three classes."""

    def _check_input_dim(self, given: Any) -> None: ...

    def forward(self, x: Any) -> Any:
        return super().forward(x).relu()


def test_statistics_of_layers_of_none_of_torch_s_classes_are_put_together() -> None:
    assert are_statistics_put_together(OfAnyNumber(FEATURES))


class Activated(nn.BatchNorm1d):  # type: ignore[misc]
    """As timm's layers: the activation is a module in it."""

    def __init__(self) -> None:
        super().__init__(FEATURES)
        self.act = nn.ReLU()

    def forward(self, x: Any) -> Any:
        return self.act(super().forward(x))


class Kept:
    """Holds what a hook's object may hold, and cannot be copied."""

    def __init__(self) -> None:
        self.lock, self.shapes = threading.Lock(), list[Any]()

    def keep(self, module: Any, args: Any, result: Any) -> None:
        self.shapes.append(result.shape)


def test_a_hook_changes_nothing_of_how_a_layer_keeps_its_statistics() -> None:
    """A script may hook a layer or what is in it. That hook is neither called nor copied: it may hold the model."""
    layer, kept = Activated(), Kept()
    layer.register_forward_hook(kept.keep)
    layer.act.register_forward_hook(kept.keep)
    assert are_statistics_put_together(layer)
    assert not kept.shapes
    layer(numbers().float())
    assert len(kept.shapes) == 2


def test_statistics_of_a_part_of_the_words_are_not_put_together() -> None:
    assert not are_statistics_put_together(PartOfWords(FEATURES))


# ---- activation checkpoints ----


def test_a_layer_in_two_activation_checkpoints_keeps_its_buffers() -> None:
    """A checkpoint ends the call of a layer in which the last of what it needs was made."""
    layer, linear, x = nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, FEATURES), numbers().float().requires_grad_()
    own, statistics = layer.running_mean, RunningStatistics([layer])

    def block(given: Any) -> Any:
        return layer(linear(given))

    for step in range(2):
        statistics.begin(count=True)
        made = checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False)
        statistics.end()
        statistics.begin(count=False)
        made.square().sum().backward()
        statistics.end()
        statistics.commit(lambda each: None)
        assert layer.running_mean is own
        assert (layer.momentum, int(layer.num_batches_tracked)) == (0.1, 2 * step + 2)
    assert own.any()
