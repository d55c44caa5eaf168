"""Loaders over a Sampler's batches that resume exactly."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from everstep.checkpoint.state.kinds import PerRank
from everstep.data.sampler import Sampler


def loader(data: Dataset, sampler: Sampler, **options: Any) -> DataLoader:
    """torch's DataLoader over the sampler's batches; make it before or after restore(), iterate after it.

    It has a random generator of its own. Without one, a DataLoader that begins draws a number from the generator that
    dropout uses too: a run that was resumed, and so began once more, would not go on bit for bit.
    """
    own = torch.Generator().manual_seed((sampler.seed or 0) % 2**63)
    return DataLoader(data, batch_sampler=sampler, **{"generator": own, **options})


def stateful(loader: Any) -> PerRank:
    """A torchdata StatefulDataLoader, to be given to `restore(loader=…)`: each rank's workers and datasets go on.

    With a Sampler as its batch_sampler, given to restore() too, another number of ranks keeps the order of samples:
    then only what the datasets in the workers remember is left behind, and the result of restore() says so.
    """
    return PerRank(loader)
