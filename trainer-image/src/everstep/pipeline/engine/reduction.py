"""Sums of gradients over replicas and over the owners of a shared parameter.

They begin where the schedule says so, and those over replicas earlier, where the last backward has completed a bucket.
A parameter that got no gradient on any of them has none afterwards either: each buffer ends with a flag for each
parameter that says whether there was one. A parameter with a keeper gets its sum on that replica alone: each sends its
gradient there, where they are added up in the order of the replicas, those of half the width in float32.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from everstep.pipeline.engine.buckets import by_keeper, make_buckets
from everstep.pipeline.engine.overlap import BucketQueue
from everstep.pipeline.engine.strides import lay_out_gradient
from everstep.pipeline.engine.wide import dtype_of_gradient
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.transport.base import Exchange, Transport, Work


@dataclass
class _Bucket:
    """Gradients on their way, as a sum in `buffer`, or to their keepers: then `parameters` are this replica's."""

    parameters: list[Any]
    work: Work | Exchange
    buffer: Any = None
    tie: str = ""  # the name of a shared parameter
    before: Sequence[Any] = ()  # parameters of buckets that began before: it says of which more has come since

    def done(self) -> bool:
        """Tell whether waiting for the bucket is known to take no time."""
        return self.buffer is None and self.work.done()  # type: ignore[union-attr]

    def take(self) -> tuple[dict[Any, Any], list[Any]]:
        """Wait for the sums. Of each parameter, None if nobody has a gradient of it; and of what more has come."""
        given = self.work.wait()
        buffer = self.buffer if given is None else _sum_parts(given)
        numbers = [parameter.numel() for parameter in self.parameters]
        flags = buffer[sum(numbers) :].tolist()
        if self.tie:
            learning, owners = flags[-2:]
            if learning not in (0.0, owners):
                raise PipelineError(
                    f"shared parameter {self.tie!r} is frozen on some of the ranks that own it, and not on "
                    "others: set its requires_grad alike on all"
                )
        parts = buffer[: sum(numbers)].split(numbers)
        sums = {
            parameter: lay_out_gradient(part.view(parameter.shape), parameter) if flag else None
            for parameter, part, flag in zip(self.parameters, parts, flags, strict=False)
        }
        late = flags[len(numbers) : len(numbers) + len(self.before)]
        return sums, [parameter for parameter, flag in zip(self.before, late, strict=True) if flag]


class Reduction:
    """The reduction of the gradients of one rank.

    Args:
        transport: The transport between the replicas.
        data: The process group of the replicas of this rank.
        own: For each stage, the parameters that no other stage has, in the order of their use.
        shared: The parameters that several stages have, by name.
        groups: For each shared parameter, the group over which it is summed; None where that is this process alone.
        bucket: The size of a bucket in bytes.

    Attributes:
        keepers: For each parameter whose sum only one replica has, that replica; all replicas have the other sums.
    """

    def __init__(
        self,
        transport: Transport,
        data: Any,
        own: Mapping[int, Sequence[Any]],
        shared: Mapping[str, Any],
        groups: Mapping[str, Any],
        bucket: int,
    ) -> None:
        self._transport, self._data, self._own, self._shared, self._groups = transport, data, own, shared, groups
        self._bytes = bucket
        self.keepers: Mapping[Any, int] = {}
        self._queues: dict[int, BucketQueue] = {}  # of stages whose reduction may have begun
        self._under_way: deque[_Bucket] = deque()
        self._sums: dict[Any, Any] = {}
        self._late: list[Any] = []

    def listen(self, stage: int, nodes: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        """Begin to sum the gradients of a stage over the replicas while its last backward, inside, computes them.

        Args:
            stage: Whose last backward it is.
            nodes: Those of the graph at which it begins.
        """
        if self._transport.replicas == 1:
            return contextlib.nullcontext()
        self._queues[stage] = self._queue(stage)
        return self._queues[stage].listen(nodes)

    def reduce(self, stage: int) -> None:
        """Start to sum the gradients of a stage over the replicas, those that are not under way yet."""
        if self._transport.replicas > 1:
            (self._queues.pop(stage, None) or self._queue(stage)).start_rest()

    def tie(self, name: str) -> None:
        """Start to sum the gradients of a shared parameter over its owners and their replicas."""
        if self._groups[name] is not None:
            self._sum([self._shared[name]], self._groups[name], tie=name)

    def finish(self) -> None:
        """Wait, and give the parameters their sums."""
        sums, late = self._finished()
        for bucket in self._buckets(late):
            self._start(bucket)
        for parameter, more in self._finished()[0].items():
            sums[parameter] = more if sums[parameter] is None else sums[parameter] + more
        here = self._transport.replica
        for parameter, total in sums.items():
            parameter.grad = total if self.keepers.get(parameter, here) == here else None

    def _queue(self, stage: int) -> BucketQueue:
        # The last layers first, as their gradients are there first.
        return BucketQueue(self._buckets(list(reversed(self._own[stage]))), self._start)

    def _buckets(self, parameters: Sequence[Any]) -> list[list[Any]]:
        return list(make_buckets(parameters, self._bytes, lambda each: (dtype_of_gradient(each), each in self.keepers)))

    def _start(self, parameters: list[Any], before: Sequence[Any] = ()) -> None:
        if parameters[0] not in self.keepers:
            self._sum(parameters, self._data, before)
            return
        shares = by_keeper(parameters, self.keepers, self._transport.replicas)
        given = [_pack_gradients(share, before, like=parameters[0]) for share in shares]
        _drop_gradients(parameters)
        own = self._transport.replica
        sizes = [given[own].numel()] * len(shares)
        self._under_way.append(_Bucket(shares[own], self._transport.exchange(given, sizes, self._data), before=before))
        # What has come needs as much memory as what was sent: for no more buckets than are on their way.
        while self._under_way and self._under_way[0].done():
            self._take()

    def _sum(self, parameters: list[Any], group: Any, before: Sequence[Any] = (), *, tie: str = "") -> None:
        # The owners of a shared parameter must agree on whether it learns.
        more = [float(parameters[0].requires_grad), 1.0] if tie else []
        buffer = _pack_gradients(parameters, before, more, like=parameters[0])
        _drop_gradients(parameters)
        self._under_way.append(_Bucket(parameters, self._transport.all_reduce(buffer, group), buffer, tie, before))

    def _take(self) -> None:
        sums, late = self._under_way.popleft().take()
        self._sums |= sums
        self._late += late

    def _finished(self) -> tuple[dict[Any, Any], list[Any]]:
        while self._under_way:
            self._take()
        found = self._sums, self._late
        self._sums, self._late = {}, []
        return found


def _pack_gradients(parameters: Sequence[Any], before: Sequence[Any], more: Sequence[float] = (), *, like: Any) -> Any:
    """The gradients in one buffer, with flags for those that are there."""
    dtype = dtype_of_gradient(like)
    parts = [torch.zeros_like(each, dtype=dtype) if each.grad is None else each.grad for each in parameters]
    flags = [float(parameter.grad is not None) for parameter in (*parameters, *before)]
    return torch.cat(
        [*(part.detach().reshape(-1) for part in parts), like.detach().new_tensor([*flags, *more], dtype=dtype)]
    )


def _drop_gradients(parameters: Sequence[Any]) -> None:
    """Forget gradients that are in a buffer: else all would be there twice while they are summed. What is there later
    has come since."""
    for parameter in parameters:
        parameter.grad = None


def _sum_parts(parts: Sequence[Any]) -> Any:
    first = parts[0]
    total = first.to(torch.float32 if first.element_size() < 4 else first.dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(first.dtype)
