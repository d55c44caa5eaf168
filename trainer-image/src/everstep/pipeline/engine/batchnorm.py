"""Running statistics of batch normalisation as over the whole mini-batch (deferred, as in torchgpipe).

Each micro-batch is normalised by its own statistics. A layer runs on copies of its buffers, from which mean and
variance over all micro-batches and replicas are put together, and its own are updated once a step. With a momentum of 1
it writes just the statistics of the micro-batch; one with a forward of its own, which may compute from what is in them,
keeps its momentum, and what it has written is taken apart again.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.batch_statistics import STATISTICS, are_statistics_put_together, has_own_forward

_REASON = "a pipeline puts the statistics of batch normalisation together itself: compile without fullgraph=True"
_ROUNDING = 1e-4  # of means of large tensors in float32, relative


@dataclass(frozen=True)
class _Moments:
    """The statistics of what a layer was given in some micro-batches.

    Attributes:
        count: The number of elements of a channel.
        odd: Not 0 if statistics were not written once in each call, or are not those of all elements.
        mean: Of each channel.
        squares: Of each channel the sum of the squares of what differs from its mean.
    """

    count: int
    odd: Any
    mean: Any
    squares: Any

    @classmethod
    def make_empty(cls, layer: Any, odd: Any = None) -> _Moments:
        """Return those of nothing."""
        zeros = torch.zeros(layer.num_features, dtype=torch.float64, device=layer.running_mean.device)
        return cls(0, zeros.new_zeros(1) if odd is None else odd, zeros, zeros)

    def add(self, other: _Moments) -> _Moments:
        """Return those of both together."""
        count, apart = self.count + other.count, other.mean - self.mean
        share = other.count / max(count, 1)
        squares = self.squares + other.squares + apart.square() * (self.count * share)
        return _Moments(count, self.odd + other.odd, self.mean + apart * share, squares)

    def list_sums(self) -> Any:
        """Return a vector of the count, `odd` and the sums of the elements."""
        return torch.cat([self.mean.new_tensor([self.count]), self.odd, self.mean * self.count])

    def find_squares(self, mean: Any) -> Any:
        """Return the sums of the squares of what differs from this mean."""
        return self.squares + (self.mean - mean).square() * self.count


class _Own(NamedTuple):
    """The buffers and the momentum of a layer that is being called with copies; and the mean of all that it was given,
    if that is looked at, and how far rounding may bring that away, relative."""

    buffers: dict[str, Any]
    momentum: Any
    mean: Any
    rounding: float


class RunningStatistics:
    """The running statistics of all batch normalization layers of this rank in `modules`.

    Between `begin` and `end`, a layer behaves as the engine calls it; outside, it behaves as it does anywhere else.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._layers: list[Any] = [
            module
            for module in dict.fromkeys(modules)
            if are_statistics_put_together(module) and module.track_running_stats
        ]
        self._inside, self._counting = 0, False  # how often begun; a backward may hold a recomputation
        self._calls: Counter[nn.Module] = Counter()  # in this micro-batch
        self._most: Counter[nn.Module] = Counter()  # in any
        self._moments: dict[tuple[nn.Module, int], _Moments] = {}  # of each layer and which call of it
        self._own: dict[nn.Module, _Own] = {}  # of layers that are being called
        self._hooks: list[Any] = []
        for layer in self._layers:
            # Where a layer is compiled, what changes its buffers stays outside of the compiled code.
            enter, leave = (torch.compiler.disable(each, reason=_REASON) for each in (self._enter, self._leave))
            self._hooks.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
            self._hooks.append(layer.register_forward_hook(leave, with_kwargs=True))

    def begin(self, *, count: bool) -> None:
        """Begin the forward of a micro-batch in training; without `count` it is a recomputation."""
        self._inside, self._counting = self._inside + 1, count
        self._calls.clear()

    def end(self) -> None:
        """End the forward that `begin` began, also if it failed."""
        self._inside -= 1
        for layer in list(self._own):
            self._give_back(layer)

    def close(self) -> None:
        """Leave the layers as if this object had never been."""
        for hook in self._hooks:
            hook.remove()

    def commit(self, reduce: Callable[[Any], None], replica: int = 0, replicas: int = 1) -> None:
        """Update the buffers for all that was recorded.

        Args:
            reduce: Sums a tensor in place over the replicas.
            replica: The number of this replica.
            replicas: The number of replicas, which all call it.

        Raises:
            PipelineError: On all replicas, if a layer is in training on some of them only, or has not kept its
                statistics as torch's does.
        """
        most = self._count_calls(reduce, replica, replicas)
        keys = [(layer, call) for layer, count in most.items() for call in range(max(1, count))]
        if not keys:
            return
        # A replica without samples has recorded nothing, or less than others; it gives zeros.
        every = [self._moments[key] if key in self._moments else _Moments.make_empty(key[0]) for key in keys]
        self._moments.clear()
        packed = torch.cat([each.list_sums() for each in every])
        reduce(packed)
        parts = packed.split([2 + len(each.mean) for each in every])
        counts = [part[:2].tolist() for part in parts]
        for (layer, _), (_, odd) in zip(keys, counts, strict=True):
            if odd:
                raise PipelineError(
                    f"{layer} has a forward of its own, which did not update its statistics once in each call with all "
                    "that it was given, as it did before: it has frozen them, takes parts of a batch, or leaves some "
                    "of it out, as by a mask. A pipeline puts together what is kept as torch's own forward keeps it; "
                    "to freeze the layer, call eval() of it"
                )
        # Squares are of what differs from the mean of all: of numbers that are large and alike, those of the numbers
        # themselves would leave nothing but rounding, and may be negative.
        means = [part[2:] / max(count, 1) for part, (count, _) in zip(parts, counts, strict=True)]
        squares = torch.cat([each.find_squares(mean) for each, mean in zip(every, means, strict=True)])
        reduce(squares)
        variances = squares.split([len(mean) for mean in means])
        for (layer, _), mean, square, (count, _) in zip(keys, means, variances, counts, strict=True):
            if count:
                _update_running_statistics(layer, mean, square / (count - 1))

    def _count_calls(self, reduce: Callable[[Any], None], replica: int, replicas: int) -> dict[Any, int]:
        """Return the layers that are in training, and the most calls of each in a micro-batch of any replica: they may
        be as many as a batch has words."""
        mine = [self._most[layer] if layer.training else -1 for layer in self._layers]
        rows = [mine]
        if mine and replicas > 1:
            every = torch.zeros(replicas, len(mine), dtype=torch.float64, device=self._layers[0].running_mean.device)
            every[replica] = every.new_tensor(mine)
            reduce(every)
            rows = every.tolist()
        found: dict[Any, int] = {}
        for layer, counts in zip(self._layers, zip(*rows, strict=True), strict=True):
            if min(counts) < 0 <= max(counts):
                raise PipelineError(
                    f"{layer} is in training on some replicas and not on others, and has other statistics on each: set "
                    "the modes of modules alike on all processes"
                )
            if counts[0] >= 0:
                found[layer] = int(max(counts))
        return found

    def _enter(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._inside or not layer.training or not layer.track_running_stats:
            return
        given = _find_input(layer, args, kwargs)
        if given.numel() == layer.num_features:
            raise PipelineError(
                f"{layer} is in training, and got one value for each channel: a batch, or a replica's part of it, had "
                "one sample, or PlanOptions(check=False) let it be cut so. Give each replica two samples at least, as "
                "by drop_last=True in a loader, and each micro-batch"
            )
        if layer in self._own:  # an activation checkpoint ended its call, as all that it needed was there
            self._give_back(layer)
        own = {name: layer._buffers[name] for name in STATISTICS}
        # Now, as it may change what it is given in place.
        is_looked_at = self._counting and given.numel() > 0 and has_own_forward(layer)
        mean = _find_mean(layer, given) if is_looked_at else None
        # A layer may take its mean in the type of what it is given, as within autocast.
        rounding = max(_ROUNDING, 2 * torch.finfo(given.dtype).eps if given.is_floating_point() else 0.0)
        self._own[layer] = _Own(own, layer.momentum, mean, rounding)
        for name, buffer in own.items():
            layer._buffers[name] = buffer.clone()
        if not has_own_forward(layer):
            layer.momentum = 1.0

    def _leave(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if layer not in self._own:
            return
        kept = self._own[layer]
        own = kept.buffers
        mean, variance = (_find_statistic(layer, name, own) for name in STATISTICS[:2])
        # Another forward than torch's may do something else by now: its counter says so, or the mean of all that it was
        # given, once somebody waits for it.
        added = layer.num_batches_tracked - own["num_batches_tracked"]
        odd = (added.to(mean).reshape(1) - 1).square()
        if kept.mean is not None:
            odd = odd + _is_of_others(layer, kept, mean, variance)
        self._give_back(layer)
        if not self._counting:
            return
        key = layer, self._calls[layer]
        self._calls[layer] += 1
        self._most[layer] = max(self._most[layer], self._calls[layer])
        # Not of the output: a forward that is not torch's may return something smaller, as after pooling.
        count = _find_input(layer, args, kwargs).numel() // layer.num_features
        # Of nothing, as of an expert without words, torch's layer has what it had before.
        new = _Moments(count, odd, mean, variance * (count - 1)) if count else _Moments.make_empty(layer, odd)
        self._moments[key] = self._moments[key].add(new) if key in self._moments else new

    def _give_back(self, layer: Any) -> None:
        kept = self._own.pop(layer)
        layer.momentum = kept.momentum
        layer._buffers.update(kept.buffers)


def _find_input(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a layer normalises: its first argument, in whatever order arguments are given by name."""
    if not args:
        first = next(iter(inspect.signature(layer.forward).parameters), "")
        args = (kwargs.get(first),)
    return next(each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))


def _find_statistic(layer: Any, name: str, own: dict[str, Any]) -> Any:
    """Return the mean or the variance of a micro-batch, from what a layer has made of its own buffer by its momentum:
    own + factor · (statistic - own)."""
    after, before = layer._buffers[name].double(), own[name].double()
    factor = _find_factor(layer, own)
    if isinstance(factor, torch.Tensor) or factor not in (0, 1):
        return before + (after - before) / factor
    return after


def _find_factor(layer: Any, own: dict[str, Any]) -> Any:
    return 1.0 / (own["num_batches_tracked"].double() + 1) if layer.momentum is None else layer.momentum


def _find_mean(layer: Any, given: Any) -> Any:
    """Return the sum of the means of all channels of what a layer is given, wherever its channels are."""
    wide = given.detach().sum(dtype=given.dtype if given.dtype == torch.float64 else torch.float32)
    return wide.double() * (layer.num_features / given.numel())


def _is_of_others(layer: Any, kept: _Own, mean: Any, variance: Any) -> Any:
    """Return a vector of 1 if a mean is not that of all that a layer was given, else of 0: how many elements a layer
    takes that leaves some out, as by a mask, is not known."""
    factor = _find_factor(layer, kept.buffers)
    before, after = (each.double().abs().sum() for each in (kept.buffers["running_mean"], layer.running_mean))
    kind = torch.finfo(layer.running_mean.dtype)
    rounding = kind.eps * (before + after + kind.tiny * layer.num_features)
    scale = kept.rounding * (mean.abs() + variance.abs().sqrt()).sum()
    # Times the factor: a momentum of 0 tells nothing of a mean, and changes nothing.
    return ((kept.mean - mean.sum()).abs() * factor > rounding + scale * factor).to(mean).reshape(1)


def _update_running_statistics(layer: Any, mean: Any, variance: Any) -> None:
    layer.num_batches_tracked += 1
    factor = layer.momentum if layer.momentum is not None else 1.0 / float(layer.num_batches_tracked)
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), factor)
    layer.running_var.lerp_(variance.to(layer.running_var.dtype), factor)
