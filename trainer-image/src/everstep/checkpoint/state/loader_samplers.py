"""Save what a loader's samplers go by that is in no state of the loader: the epoch that `set_epoch()` gave, or chance.

A DistributedSampler shuffles by its epoch, and so do some datasets. A script sets that before it iterates, and a loader
that was restored has begun by then: in the order of the first epoch, unless the sampler has the epoch again before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from everstep.checkpoint.state.kinds import Stateful, unwrap_marked
from everstep.checkpoint.state.loaded import is_instance

_log = logging.getLogger("everstep.checkpoint")

_PATHS = ("dataset", "sampler", "batch_sampler", "batch_sampler.sampler", "batch_sampler.batch_sampler")
_RANDOM = ("RandomSampler", "SubsetRandomSampler", "WeightedRandomSampler")


def is_loader(value: object) -> bool:
    """Tell whether an object is a DataLoader, or one of torchdata's nodes: it begins when it is loaded, with what other
    objects hold by then."""
    return is_instance(value, "torch.utils.data", "DataLoader") or is_instance(value, "torchdata.nodes", "Loader")


def warn_of_random_samplers(objects: Mapping[str, object]) -> None:
    """Say which loaders have a sampler of torch that draws an order and keeps none of it.

    Args:
        objects: What is saved, by name.
    """
    for name, each in objects.items():
        if is_loader(loader := unwrap_marked(each)):
            parts = [part for part in list_parts(loader) if not isinstance(part, Stateful)]
            for kind in _RANDOM:
                if any(is_instance(part, "torch.utils.data", kind) for part in parts):
                    _log.warning(
                        "%s: its %s has no state: after a restart in the middle of an epoch, samples come twice and "
                        "others not at all; give the loader shuffle=True, an everstep.data.Sampler, or another sampler "
                        "that has state_dict() and load_state_dict()",
                        name,
                        kind,
                    )


def list_parts(loader: Any) -> list[object]:
    """Return the dataset and the samplers of a loader, each once."""
    return [part for _, part in _list_parts(loader)]


def find_epochs(loader: Any) -> dict[str, int]:
    """Return the epochs of the samplers and the dataset of a loader that have one, by where they are."""
    found = {path: getattr(each, "epoch", None) for path, each in _find_settable(loader)}
    return {path: epoch for path, epoch in found.items() if type(epoch) is int}


def takes_epoch(loader: Any) -> bool:
    """Tell whether a sampler or the dataset of a loader takes an epoch: its order is known only when it is iterated."""
    return any(True for _ in _find_settable(loader))


def set_epochs(loader: Any, epochs: Mapping[str, int]) -> None:
    """Give samplers and the dataset the epochs that find_epochs() has found."""
    for path, each in _find_settable(loader):
        if path in epochs:
            each.set_epoch(epochs[path])


def _find_settable(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield what of a loader takes an epoch, and where it is."""
    return ((path, each) for path, each in _list_parts(loader) if callable(getattr(each, "set_epoch", None)))


def _list_parts(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield the dataset and the samplers of a loader, each once, and where they are."""
    seen: set[int] = {id(None)}
    for path in _PATHS:
        found = loader
        for name in path.split("."):
            found = getattr(found, name, None)
        if id(found) not in seen:
            seen.add(id(found))
            yield path, found
