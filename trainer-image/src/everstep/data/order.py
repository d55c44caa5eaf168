"""A shuffle that needs no memory: where each position of an epoch leads to is computed, not stored.

A Feistel network is a permutation of 2^(2h) numbers whatever its rounds compute; walking on until a number is below the
size makes it one of any size (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002). So a run that resumes in
the middle of an epoch of a billion samples starts at once.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.uint64]]

_ROUNDS = 8  # small sizes need more than the four that suffice in theory


def shuffle_positions(positions: Numbers, size: int, seed: int, epoch: int) -> Numbers:
    """Return the sample at each position (below `size`) of an epoch; a permutation for each (seed, epoch).

    What it is never changes: runs resume with later versions.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    found = _run_feistel_network(positions, half, seed, epoch)
    while (outside := found >= size).any():
        found[outside] = _run_feistel_network(found[outside], half, seed, epoch)
    return found


def _run_feistel_network(numbers: Numbers, half: np.uint64, seed: int, epoch: int) -> Numbers:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = numbers >> half, numbers & mask
    for key in _derive_keys(seed, epoch):
        left, right = right, left ^ (_mix_bits(right + key) & mask)
    return (left << half) | right


@lru_cache(maxsize=4)
def _derive_keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    data = hashlib.shake_128(f"everstep/{seed}/{epoch}".encode()).digest(8 * _ROUNDS)
    return tuple(np.frombuffer(data, "<u8"))


def _mix_bits(numbers: Numbers) -> Numbers:
    """Apply the finalizer of SplitMix64 (Steele, Lea and Flood, 2014), modulo 2^64."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
