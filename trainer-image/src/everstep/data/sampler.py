"""Choose which samples each rank trains on at each step: a function of the seed and the step, not of past events."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from everstep.data.draws import give_generator
from everstep.data.order import shuffle_positions

_log = logging.getLogger("everstep.data")


class Sampler:
    """Batches of indices for one rank: `DataLoader(data, batch_sampler=Sampler(len(data), global_batch=64))`.

    size: samples of the dataset. global_batch: samples of one step, of all ranks together; each rank gets an equal
    share. seed: of the order, a new one for every epoch; None: no shuffling. stop: the step before which the batches
    end; by default they never do. rank, world: by default those of this process.

    All batches of all ranks in order are one sequence, which is the same at any number of ranks, without gaps at the
    ends of epochs: no sample is repeated or left out. It begins at `step`, which a checkpoint restores, so that a
    loader that reads ahead loses nothing. One iteration is a whole run.
    """

    def __init__(
        self,
        size: int,
        *,
        global_batch: int,
        seed: int | None = 0,
        stop: int | None = None,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        own, all_ = _find_rank()
        self.rank = own if rank is None else rank
        self.world = all_ if world is None else world
        if size < 1 or global_batch < 1:
            raise ValueError(f"a sampler needs samples and a batch, not {size} and {global_batch}")
        if global_batch % self.world:
            raise ValueError(
                f"a global batch of {global_batch} cannot be shared equally by {self.world} ranks, and their mean "
                "gradient would weigh samples differently: change one of the two"
            )
        self.size = size
        self.global_batch = global_batch
        self.seed = seed
        self.stop = stop
        self.step = 0
        self._origin = (0, 0)  # at this step so many samples were trained; later ones follow from the batch
        self._given: int | None = None  # the step after the furthest one whose batch was given out
        self._has_warned = False

    def __iter__(self) -> Iterator[list[int]]:
        """Return the batches from `step` on. A DataLoader that asks draws from a generator of its own from here on."""
        give_generator(sys._getframe(1), self.seed or 0, self.rank, self.step)
        return _Batches(self, self.step)

    def __len__(self) -> int:
        """Batches from `step` to `stop`; TypeError when they never end."""
        if self.stop is None:
            raise TypeError("this sampler never ends: give it stop=")
        return max(0, self.stop - self.step)

    def batch(self, step: int) -> list[int]:
        """Return the indices of this rank's samples of a step."""
        share = self.global_batch // self.world
        first = self._samples(step) + self.rank * share
        positions = np.arange(first, first + share, dtype=np.uint64)
        epochs, places = np.divmod(positions, np.uint64(self.size))
        if self.seed is not None:
            for epoch in np.unique(epochs):
                mine = epochs == epoch
                places[mine] = shuffle_positions(places[mine], self.size, self.seed, int(epoch))
        return [int(place) for place in places]

    def epoch(self, step: int) -> int:
        """Return the epoch of the first sample of a step."""
        return self._samples(step) // self.size

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the state when `step` steps are trained, however far a loader has read ahead."""
        if self._given is not None and step > self._given and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%d steps are trained, and this sampler has given batches of %d: a restart would leave samples out, or "
                "find none. One iteration is a whole run, so iterate over it once, for all epochs, with a step for "
                "each batch; a sampler of an evaluation is not given to restore()",
                step,
                self._given,
            )
        return {"step": step, "samples": self._samples(step), "size": self.size, "seed": self.seed}

    def state_dict(self) -> dict[str, Any]:
        return self.state_at(self.step)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken, with another global batch too. ValueError for another order or dataset."""
        for what, mine in (("size", self.size), ("seed", self.seed)):
            if state[what] != mine:
                raise ValueError(
                    f"the sampler's {what} is {mine}, it was {state[what]} when saved: samples would be repeated and "
                    "left out; give it the same, or restore without the sampler to begin the data anew"
                )
        self.step = state["step"]
        self._origin = (state["step"], state["samples"])
        self._given = None

    def give(self, step: int) -> list[int]:
        """Return the batch of a step to whoever trains on it."""
        self._given = max(step + 1, self._given or 0)
        return self.batch(step)

    def _samples(self, step: int) -> int:
        known, samples = self._origin
        return samples + (step - known) * self.global_batch


class _Batches:
    """An iteration that knows where it is, for loaders that save it themselves (torchdata's StatefulDataLoader)."""

    def __init__(self, sampler: Sampler, step: int) -> None:
        self._sampler = sampler
        self._step = step

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        if self._sampler.stop is not None and self._step >= self._sampler.stop:
            raise StopIteration
        self._step += 1
        return self._sampler.give(self._step - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "global_batch": self._sampler.global_batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = state.get("global_batch", self._sampler.global_batch)  # earlier versions do not say it
        if saved != self._sampler.global_batch:
            # The loader counts batches: from those that it has read ahead, and those that it reads once more.
            raise ValueError(
                f"the loader was saved with a global batch of {saved}, and has one of {self._sampler.global_batch}: "
                "samples would be repeated or left out; restore the sampler without the loader, which goes on where "
                "the sampler is, or give it the same global batch"
            )
        self._step = state["step"]


def _find_rank() -> tuple[int, int]:
    # A process that has ranks has imported torch; one that has not need not wait for it.
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)
