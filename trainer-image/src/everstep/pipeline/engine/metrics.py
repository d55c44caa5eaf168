"""Metrics that a loss gives beside its sum, as means over all micro-batches and replicas.

Replicas may give others, as one that has no sample of a class. A digest of their names, which comes with the loss,
shows whether they do; only then they tell each other their names.
"""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from everstep.pipeline.transport.base import Transport

_BITS = 20  # so that sums of squares are exact, or replicas that give the same tell their names once more


def digest_names(names: Iterable[Any]) -> float:
    """Return a number that depends on the names; 0 without names, and only then."""
    text = repr(sorted(names))
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    return 0.0 if text == "[]" else 1.0 + digest % (2**_BITS - 1)


def average_metrics(
    metrics: Mapping[Any, Any], count: float, digests: tuple[float, float], transport: Transport, data: Any
) -> dict[Any, float]:
    """Return the means of the metrics of all replicas, the same on each. Collective, of the ranks of one stage.

    Args:
        metrics: This replica's sums.
        count: What they are divided by.
        digests: The sum over all replicas of the digests of their names, and of the squares of these.
        transport: The transport between the replicas.
        data: The process group of the replicas of this rank.
    """
    total, squares = digests
    if not total:
        return {}
    names = sorted(metrics)
    if transport.replicas * squares != total**2:
        names = sorted({name for each in _gather_names(names, transport, data) for name in each})
    sums = torch.zeros(len(names), dtype=torch.float64, device=transport.device)
    for place, name in enumerate(names):
        sums[place] = metrics.get(name, 0.0)
    if transport.replicas > 1:
        transport.all_reduce(sums, data).wait()
    return {name: value / count if count else math.nan for name, value in zip(names, sums.tolist(), strict=True)}


def _gather_names(names: list[Any], transport: Transport, data: Any) -> list[list[Any]]:
    own = torch.frombuffer(bytearray(pickle.dumps(names)), dtype=torch.uint8).to(transport.device)
    lengths = torch.zeros(transport.replicas, dtype=torch.int64, device=transport.device)
    lengths[transport.replica] = len(own)
    transport.all_reduce(lengths, data).wait()
    rows = torch.zeros(transport.replicas, int(lengths.max()), dtype=torch.int32, device=transport.device)
    rows[transport.replica, : len(own)] = own
    transport.all_reduce(rows, data).wait()
    return [pickle.loads(bytes(row.tolist())) for row in rows]  # noqa: S301 - from a rank of this job
