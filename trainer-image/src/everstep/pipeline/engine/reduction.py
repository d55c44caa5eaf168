"""Sums of gradients over replicas and over the owners of a shared parameter, started where the schedule says so.

A parameter that got no gradient on any of them has none afterwards either: each buffer ends with a mark for each
parameter that says who had one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.transport.base import Transport, Work


@dataclass
class _Bucket:
    parameters: list[Any]
    buffer: Any
    work: Work
    tie: str = ""  # the name of a shared parameter


class Reduction:
    """Of one rank. `own`: the parameters of each stage that no other stage has; `shared`: those that several have, by
    name; `groups`: of those, what they are summed over, None where that is this process alone."""

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
        self._under_way: list[_Bucket] = []

    def reduce(self, stage: int) -> None:
        """Starts to sum the gradients of a stage over the replicas."""
        if self._transport.replicas > 1:
            # The last layers first, as their gradients were there first.
            for bucket in buckets(list(reversed(self._own[stage])), self._bytes):
                self._start(bucket, self._data)

    def tie(self, name: str) -> None:
        """Starts to sum the gradients of a shared parameter over its owners and their replicas."""
        if self._groups[name] is not None:
            self._start([self._shared[name]], self._groups[name], name)

    def finish(self) -> None:
        """Waits, and gives the parameters their sums."""
        for bucket in self._under_way:
            bucket.work.wait()
            if bucket.tie:
                learning, owners = bucket.buffer[-2:].tolist()
                bucket.buffer = bucket.buffer[:-2]
                if learning not in (0.0, owners):
                    raise PipelineError(
                        f"shared parameter {bucket.tie!r} is frozen on some of the ranks that own it, and not on "
                        "others: set its requires_grad alike on all"
                    )
            count = len(bucket.parameters)
            marks = bucket.buffer[-count:].tolist()
            parts = bucket.buffer[:-count].split([parameter.numel() for parameter in bucket.parameters])
            for parameter, part, mark in zip(bucket.parameters, parts, marks, strict=True):
                parameter.grad = part.view(parameter.shape) if mark else None
        self._under_way = []

    def _start(self, parameters: list[Any], group: Any, tie: str = "") -> None:
        parts = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
        marks = [float(parameter.grad is not None) for parameter in parameters]
        if tie:  # its owners must agree on whether it learns
            marks += [float(parameters[0].requires_grad), 1.0]
        buffer = torch.cat([*(part.reshape(-1) for part in parts), parts[0].new_tensor(marks)])
        # It is in the buffer now: else all gradients would be there twice while they are summed.
        for parameter in parameters:
            parameter.grad = None
        self._under_way.append(_Bucket(parameters, buffer, self._transport.all_reduce(buffer, group), tie))


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
