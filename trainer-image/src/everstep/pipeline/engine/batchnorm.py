"""Running statistics of batch normalisation as over the whole mini-batch (deferred, as in torchgpipe).

Each micro-batch is normalised by its own statistics. A layer runs on copies of its buffers, from which mean and
variance over all micro-batches and replicas are put together, and its own are updated once a step. With a momentum of 1
it writes just the statistics of the micro-batch; one with a forward of its own, which may compute from what is in them,
keeps its momentum, and what it has written is taken apart again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.batch_statistics import STATISTICS, are_statistics_put_together, has_own_forward

_REASON = "a pipeline puts the statistics of batch normalisation together itself: compile without fullgraph=True"


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
        # Of each layer and which call of it in a micro-batch: elements of a channel, 0 if statistics were written once
        # in each call, sums of elements, sums of their squares.
        self._sums: dict[tuple[nn.Module, int], Any] = {}
        self._own: dict[nn.Module, tuple[dict[str, Any], float | None]] = {}
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
        packed = torch.cat([self._sums[key] if key in self._sums else _do_nothing(key[0]) for key in keys])
        self._sums.clear()
        reduce(packed)
        parts = packed.split([2 + 2 * layer.num_features for layer, _ in keys])
        counts = [part[:2].tolist() for part in parts]
        for (layer, _), (_, odd) in zip(keys, counts, strict=True):
            if odd:
                raise PipelineError(
                    f"{layer} has a forward of its own, which did not update its statistics once in each call, as it "
                    "did before: it has frozen them, or takes parts of a batch. A pipeline puts together what is kept "
                    "as torch's own forward keeps it; to freeze the layer, call eval() of it"
                )
        for (layer, _), part, (count, _) in zip(keys, parts, counts, strict=True):
            if count:
                mean, square = (part[2:] / count).chunk(2)
                _update_running_statistics(layer, mean, (square - mean**2) * (count / (count - 1)))

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
        if _find_input(args, kwargs).numel() == layer.num_features:
            raise PipelineError(
                f"{layer} is in training, and got one value for each channel: a batch, or a replica's part of it, had "
                "one sample, or PlanOptions(check=False) let it be cut so. Give each replica two samples at least, as "
                "by drop_last=True in a loader, and each micro-batch"
            )
        own = {name: layer._buffers[name] for name in STATISTICS}
        self._own[layer] = own, layer.momentum
        for name, buffer in own.items():
            layer._buffers[name] = buffer.clone()
        if not has_own_forward(layer):
            layer.momentum = 1.0

    def _leave(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if layer not in self._own:
            return
        own, _ = self._own[layer]
        mean, variance = (_find_statistic(layer, name, own) for name in STATISTICS[:2])
        # Another forward than torch's may do something else by now: its counter says so, once somebody waits for it.
        added = layer.num_batches_tracked - own["num_batches_tracked"]
        odd = (added.to(mean).reshape(1) - 1).square()
        self._give_back(layer)
        if not self._counting:
            return
        key = layer, self._calls[layer]
        self._calls[layer] += 1
        self._most[layer] = max(self._most[layer], self._calls[layer])
        # Not of the output: a forward that is not torch's may return something smaller, as after pooling.
        count = _find_input(args, kwargs).numel() // layer.num_features
        new = torch.cat([mean.new_tensor([count]), odd, mean * count, variance * (count - 1) + mean**2 * count])
        self._sums[key] = self._sums[key] + new if key in self._sums else new

    def _give_back(self, layer: Any) -> None:
        own, layer.momentum = self._own.pop(layer)
        layer._buffers.update(own)


def _find_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return next(each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))


def _find_statistic(layer: Any, name: str, own: dict[str, Any]) -> Any:
    """Return the mean or the variance of a micro-batch, from what a layer has made of its own buffer by its momentum:
    own + factor · (statistic - own)."""
    after, before = layer._buffers[name].double(), own[name].double()
    factor = layer.momentum
    if factor is None:
        factor = 1.0 / (own["num_batches_tracked"].double() + 1)
    if isinstance(factor, torch.Tensor) or factor not in (0, 1):
        return before + (after - before) / factor
    return after


def _do_nothing(layer: Any) -> Any:
    return torch.zeros(2 + 2 * layer.num_features, dtype=torch.float64, device=layer.running_mean.device)


def _update_running_statistics(layer: Any, mean: Any, variance: Any) -> None:
    layer.num_batches_tracked += 1
    factor = layer.momentum if layer.momentum is not None else 1.0 / float(layer.num_batches_tracked)
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), factor)
    layer.running_var.lerp_(variance.to(layer.running_var.dtype), factor)
