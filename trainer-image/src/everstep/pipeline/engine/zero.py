"""Optimizer state spread over the replicas (ZeRO stage 1, arXiv 1910.02054).

Each parameter of a rank has one replica that keeps its optimizer state and steps it; then all get its new value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from everstep.pipeline.engine.engine import Engine
from everstep.pipeline.engine.reduction import buckets
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.transport.base import Work

_AT_ONCE = 2  # buckets that are on their way: with all of them the parameters would be there twice


class ShardedOptimizer:
    """`make(parameters)` builds the optimizer of this replica's share, parameters by their names in the whole model.

    All replicas construct it together, and step it together after each `Engine.step`. It suits optimizers that treat
    each parameter by itself (SGD, Adam and its kin); one that looks at all of them would see its share only.
    `optimizer` is what a checkpoint saves and restores, and what a scheduler takes.
    """

    def __init__(self, engine: Engine, make: Callable[[Mapping[str, Any]], torch.optim.Optimizer]) -> None:
        self._engine, self._transport = engine, engine.transport
        self.owner = shares({name: p.numel() for name, p in _once(engine).items()}, self._transport.replicas)
        every = _once(engine) or {"none": torch.zeros((), requires_grad=True)}
        mine = {n: p for n, p in every.items() if self.owner.get(n) == self._transport.replica}
        # torch makes no optimizer of nothing, but keeps one from which all was taken: it has the groups of the others.
        self.optimizer = make(mine or dict(list(every.items())[:1]))
        for group in () if mine else self.optimizer.param_groups:
            group["params"] = []

    def step(self) -> None:
        """One step on this replica's share, whose new values go to all replicas. Errors as those of `Engine.step`, and
        PipelineError if a parameter learns that did not when this was made."""
        if unknown := sorted(_once(self._engine).keys() - self.owner.keys()):
            raise PipelineError(
                f"parameter {unknown[0]!r} was unfrozen after the ShardedOptimizer was made, and no replica steps it: "
                "make it while all that shall ever learn requires gradients, and freeze them after it"
            )
        self.optimizer.step()
        if self._transport.replicas > 1:
            with self._engine.aborting():
                self._share()

    def _share(self) -> None:
        names = {parameter: name for name, parameter in _once(self._engine).items()}
        under_way: deque[tuple[list[Any], Any, Work]] = deque()
        for bucket in buckets(list(names), self._engine.options.bucket):
            # As a sum of one and zeros: exact, and all that a transport has to know.
            parts = [
                p.detach().reshape(-1) if self.owner[names[p]] == self._transport.replica else p.new_zeros(p.numel())
                for p in bucket
            ]
            buffer = torch.cat(parts)
            under_way.append((bucket, buffer, self._transport.all_reduce(buffer, self._engine.data)))
            if len(under_way) == _AT_ONCE:
                _take(*under_way.popleft())
        for each in under_way:
            _take(*each)


def _take(bucket: Sequence[Any], buffer: Any, work: Work) -> None:
    work.wait()
    for parameter, part in zip(bucket, buffer.split([p.numel() for p in bucket]), strict=True):
        parameter.detach().copy_(part.view(parameter.shape))


def shares(sizes: Mapping[str, int], replicas: int) -> dict[str, int]:
    """Which replica keeps what, so that each keeps about as much: the largest first, to who has least."""
    kept = [0] * replicas
    found = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        replica = kept.index(min(kept))
        kept[replica] += sizes[name]
        found[name] = replica
    return found


def _once(engine: Engine) -> dict[str, Any]:
    """The parameters of this rank, each under its first name."""
    seen: dict[Any, str] = {}
    for name, parameter in engine.parameters.named.items():
        seen.setdefault(parameter, name)
    return {name: parameter for parameter, name in seen.items() if parameter.requires_grad}
