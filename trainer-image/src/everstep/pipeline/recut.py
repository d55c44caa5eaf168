"""Let a model that was cut before be cut again: what other processes have trained meanwhile comes from there.

A process trains the weights of its own stages, and its copies of all others stay what they were. Where the next cut
gives it others, these are not the copies here.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from everstep.pipeline.engine.engine import Engine
from everstep.pipeline.engine.stage import RunnableStage
from everstep.pipeline.transport.control import Control

# Of each tensor of a model that was cut: the tensor that this process trains in its place, _ITSELF where it had data;
# None where another process does. A tensor that were its own value would never be freed.
_latest: Any = WeakIdKeyDictionary()
_ITSELF = object()
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_MOVED = "the model was cut again, and other processes train some of its weights now: give both the same stage_of="


class Recut:
    """The tensors of a model that is about to be cut, as they are before that, by their first names."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = _find_tensors(model)

    def remember(self, stages: Mapping[int, RunnableStage], engine: Engine) -> None:
        """Remember which of the model's tensors this process has in its stages, and what trains them."""
        own = _find_own(stages)
        for name, tensor in self._tensors.items():
            trained = own.get(name)
            _latest[tensor] = _ITSELF if trained is tensor else trained
        for tensor in own.values():
            _latest[tensor] = _ITSELF
        _engines.add(engine)

    def carry_weights(self, stages: Mapping[int, RunnableStage], control: Control) -> None:
        """Give each process what its stages have of a model that was cut before, from the processes that trained it.

        Engines of cuts before this one end where something has to be carried, since it would be theirs no more.
        Collective.

        Args:
            stages: Those of this process, with their tensors.
            control: The group of all processes.
        """
        known = {name: _find_latest(tensor) for name, tensor in self._tensors.items() if tensor in _latest}
        if not control.any(bool(known)):
            return
        own = _find_own(stages)
        held = {name: tensor for name, tensor in known.items() if tensor is not None}
        wanted = {name for name, tensor in own.items() if name in known and held.get(name) is not tensor}
        every = control.gather((set(held), wanted))
        for name in sorted(set().union(*(names for _, names in every))):
            source = next((rank for rank, (names, _) in enumerate(every) if name in names), None)
            if source is None:
                continue  # nobody has another
            here = held.get(name, self._tensors[name])
            data = control.broadcast_tensor(here if name in held else torch.empty_like(here, device="cpu"), source)
            if name in wanted:
                with torch.no_grad():
                    own[name].copy_(data)
        if any(names for _, names in every):
            mine = {id(tensor) for tensor in (*self._tensors.values(), *held.values())}
            for engine in list(_engines):
                if not mine.isdisjoint(map(id, engine.parameters.own)):
                    engine.close(_MOVED)


def _find_latest(tensor: Any) -> Any:
    found = _latest[tensor]
    return tensor if found is _ITSELF else found


def _find_own(stages: Mapping[int, RunnableStage]) -> dict[str, Any]:
    return {name: each for stage in stages.values() for name, each in _find_tensors(stage.module).items()}


def _find_tensors(module: nn.Module) -> dict[str, Any]:
    return {**dict(module.named_buffers()), **dict(module.named_parameters())}
