"""The random number generators that a rank's modules draw from: the device's, and the processor's beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from everstep.pipeline.transport.devices import with_index


def generators_of(device: torch.device) -> list[Any]:
    """Return the default generators that code of a stage on this device can draw from, the device's own first."""
    if device.type != "cuda":
        return [torch.default_generator]
    torch.cuda.init()
    return [torch.cuda.default_generators[with_index(device).index], torch.default_generator]


class LinkedGenerators:
    """Several generators as one: they are seeded, saved and restored together."""

    def __init__(self, all_: Sequence[Any]) -> None:
        self._all = tuple(all_)

    def manual_seed(self, seed: int) -> None:
        """Begin a sequence in each of them."""
        for each in self._all:
            each.manual_seed(seed)

    def initial_seed(self) -> int:
        """Return the seed of the first, which is that of all unless somebody has seeded or restored one alone."""
        return int(self._all[0].initial_seed())

    def draw(self) -> int:
        """Draw one number from each of them, and return the processor's, which is the last."""
        numbers = [torch.empty((), dtype=torch.int64, device=each.device).random_(generator=each) for each in self._all]
        return int(numbers[-1])

    def get_state(self) -> tuple[Any, ...]:
        """Return where each of them stands."""
        return tuple([each.get_state() for each in self._all])

    def set_state(self, state: Sequence[Any]) -> None:
        """Go back to where they stood."""
        for each, own in zip(self._all, state, strict=True):
            each.set_state(own)

    def stands_at(self, state: Sequence[Any]) -> bool:
        """Return whether none has drawn, or was seeded, since `get_state` gave this."""
        return all(torch.equal(each.get_state(), own) for each, own in zip(self._all, state, strict=True))
