"""Parameters that are sent together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Kind = tuple[Any, ...]  # the dtype in which something of a parameter is sent, and what else must be alike


def make_buckets(
    parameters: Sequence[Any], size: int, kind: Callable[[Any], Kind] = lambda parameter: (parameter.dtype,)
) -> Iterator[list[Any]]:
    """Parameters of one kind, at most `size` bytes together unless one alone is larger; none that do not learn."""
    open_: dict[Kind, tuple[list[Any], int]] = {}
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        of_kind = kind(parameter)
        bucket, used = open_.get(of_kind, ([], 0))
        own = parameter.numel() * of_kind[0].itemsize
        if bucket and used + own > size:
            yield bucket
            bucket, used = [], 0
        bucket.append(parameter)
        open_[of_kind] = bucket, used + own
    for bucket, _ in open_.values():
        yield bucket


def by_keeper(parameters: Sequence[Any], keeper: Mapping[Any, int], replicas: int) -> list[list[Any]]:
    """Return those of each replica, in their order."""
    return [[parameter for parameter in parameters if keeper[parameter] == replica] for replica in range(replicas)]
