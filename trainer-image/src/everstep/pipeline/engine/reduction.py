"""Sums of gradients over replicas and over the owners of a shared parameter.

They begin where the schedule says so, and those over replicas earlier, where the last backward has completed a bucket.
A parameter that got no gradient on any of them has none afterwards either: each buffer ends with a flag for each
parameter that says whether there was one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from everstep.pipeline.engine.overlap import BucketQueue
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.transport.base import Transport, Work


@dataclass
class _Bucket:
    parameters: list[Any]
    buffer: Any
    work: Work
    tie: str = ""  # the name of a shared parameter
    before: Sequence[Any] = ()  # parameters of buckets that began before: it says of which more has come since

    def take(self) -> tuple[dict[Any, Any], list[Any]]:
        """Wait for the sums. Of each parameter, None if nobody has a gradient of it; and of what more has come."""
        self.work.wait()
        flags = self.buffer[self._numbers :].tolist()
        if self.tie:
            learning, owners = flags[-2:]
            if learning not in (0.0, owners):
                raise PipelineError(
                    f"shared parameter {self.tie!r} is frozen on some of the ranks that own it, and not on "
                    "others: set its requires_grad alike on all"
                )
        parts = self.buffer[: self._numbers].split([parameter.numel() for parameter in self.parameters])
        sums = {
            parameter: part.view(parameter.shape) if flag else None
            for parameter, part, flag in zip(self.parameters, parts, flags, strict=False)
        }
        late = flags[len(self.parameters) : len(self.parameters) + len(self.before)]
        return sums, [parameter for parameter, flag in zip(self.before, late, strict=True) if flag]

    @property
    def _numbers(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)


class Reduction:
    """Of one rank. `own`: the parameters of each stage that no other stage has, in the order of their use; `shared`:
    those that several have, by name; `groups`: of those, what they are summed over, None where that is this process
    alone."""

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
        self._queues: dict[int, BucketQueue] = {}  # of stages whose reduction may have begun
        self._under_way: list[_Bucket] = []

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
        """Starts to sum the gradients of a stage over the replicas, those that are not under way yet."""
        if self._transport.replicas > 1:
            (self._queues.pop(stage, None) or self._queue(stage)).start_rest()

    def tie(self, name: str) -> None:
        """Starts to sum the gradients of a shared parameter over its owners and their replicas."""
        if self._groups[name] is not None:
            self._start([self._shared[name]], self._groups[name], tie=name)

    def finish(self) -> None:
        """Waits, and gives the parameters their sums."""
        sums, late = self._take()
        for bucket in buckets(late, self._bytes):
            self._start(bucket, self._data)
        for parameter, more in self._take()[0].items():
            sums[parameter] = more if sums[parameter] is None else sums[parameter] + more
        for parameter, total in sums.items():
            parameter.grad = total

    def _queue(self, stage: int) -> BucketQueue:
        # The last layers first, as their gradients are there first.
        of_stage = list(buckets(list(reversed(self._own[stage])), self._bytes))
        return BucketQueue(of_stage, lambda bucket, before: self._start(bucket, self._data, before))

    def _take(self) -> tuple[dict[Any, Any], list[Any]]:
        sums, late = dict[Any, Any](), list[Any]()
        for bucket in self._under_way:
            own, more = bucket.take()
            sums |= own
            late += more
        self._under_way = []
        return sums, late

    def _start(self, parameters: list[Any], group: Any, before: Sequence[Any] = (), *, tie: str = "") -> None:
        parts = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
        flags = [float(parameter.grad is not None) for parameter in (*parameters, *before)]
        if tie:  # its owners must agree on whether it learns
            flags += [float(parameters[0].requires_grad), 1.0]
        buffer = torch.cat([*(part.reshape(-1) for part in parts), parts[0].new_tensor(flags)])
        # It is in the buffer now: else all gradients would be there twice while they are summed. What is there later
        # has come since.
        for parameter in parameters:
            parameter.grad = None
        work = self._transport.all_reduce(buffer, group)
        self._under_way.append(_Bucket(parameters, buffer, work, tie, before))


def buckets(parameters: Sequence[Any], size: int) -> Iterator[list[Any]]:
    """Parameters of one dtype, at most `size` bytes together unless one alone is larger."""
    open_: dict[Any, tuple[list[Any], int]] = {}
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        bucket, used = open_.get(parameter.dtype, ([], 0))
        own = parameter.numel() * parameter.element_size()
        if bucket and used + own > size:
            yield bucket
            bucket, used = [], 0
        bucket.append(parameter)
        open_[parameter.dtype] = bucket, used + own
    for bucket, _ in open_.values():
        yield bucket
