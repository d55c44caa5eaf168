"""Let a model that was cut before be cut again: what other processes have trained meanwhile comes from there.

A process trains the weights of its own stages, and its copies of all others stay what they were. Where the next cut
gives it others, these are not the copies here. So it is with the modes of modules, and with what is frozen, which a
script may set where they are only. Nor has each process the tables that modules have made for themselves where they
ran: all forget those that others have not.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from everstep.pipeline.describe import name_attribute, name_buffer
from everstep.pipeline.engine.engine import Engine
from everstep.pipeline.engine.stage import RunnableStage
from everstep.pipeline.frontend.attributes import Key
from everstep.pipeline.transport.control import Control

# Of each tensor of a model that was cut: the tensor that this process trains in its place, _ITSELF where it had data;
# None where another process does. A tensor that were its own value would never be freed.
_latest: Any = WeakIdKeyDictionary()
_ITSELF = object()
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_runs_here: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()  # of a model that was cut
_MOVED = "the model was cut again, and other processes train some of its weights now: give both the same stage_of="


@dataclass(frozen=True)
class _Before:
    """A module when its model was first cut: the names of its attributes and buffers, and the values of those in whose
    place there may be a table later: nothing, a container with nothing in it, and a number that goes with a table."""

    names: frozenset[str]
    values: Mapping[str, Any]


_before: weakref.WeakKeyDictionary[nn.Module, _Before] = weakref.WeakKeyDictionary()


def remember_tables(model: nn.Module, left: Collection[Key]) -> None:
    """Remember what holds no tables yet in a model that was cut, before its first step.

    Args:
        model: The model.
        left: The attributes in which a forward leaves something else: their numbers are not the script's.
    """
    for path, module in model.named_modules():
        held = {**vars(module), **module._buffers}
        values = {
            name: each
            for name, each in held.items()
            if each is None
            or (type(each) in (dict, list) and not each)
            or (type(each) in (bool, int, float) and (path, name) in left)
        }
        _before.setdefault(module, _Before(frozenset(held), values))


def forget_tables(model: nn.Module, differing: Collection[str]) -> None:
    """Forget the tables that modules of a model have made in their stages since it was first cut.

    Args:
        model: The model.
        differing: The attributes and buffers of which ranks have others, in the words of `describe_model`.
    """
    for path, module in model.named_modules():
        before = _before.get(module, _Before(frozenset(vars(module)) | frozenset(module._buffers), {}))
        for held, describe in ((vars(module), name_attribute), (module._buffers, name_buffer)):
            for name in [name for name in held if describe(name, path) in differing]:
                if name in before.values:
                    value = before.values[name]
                    held[name] = type(value)() if isinstance(value, dict | list) else value
                elif name not in before.names:
                    del held[name]


def carry_flags(model: nn.Module, control: Control) -> None:
    """Give the modules and parameters of a model that was cut before the modes, and what is frozen, that they have on
    the processes whose stages have them: `run.eval()` reaches those of its own process only. Collective.

    Args:
        model: The model.
        control: The group of all processes.
    """
    parameters = dict(model.named_parameters())
    modes = {path: module.training for path, module in model.named_modules() if _runs_here.get(module)}
    learning = {name: each.requires_grad for name, each in parameters.items() if _latest.get(each) is _ITSELF}
    every = control.gather((modes, learning))
    modes = {path: mode for held, _ in reversed(every) for path, mode in held.items()}
    learning = {name: learns for _, held in reversed(every) for name, learns in held.items()}
    for path, module in model.named_modules():
        if path in modes and not _runs_here.get(module, True):
            module.training = modes[path]
    for name, each in parameters.items():
        if name in learning and _latest.get(each, _ITSELF) is None:
            each.requires_grad_(learning[name])


class Recut:
    """The tensors of a model that is about to be cut, as they are before that, by their first names."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors, self._modules = _find_tensors(model), list(model.modules())

    def remember(self, stages: Mapping[int, RunnableStage], engine: Engine) -> None:
        """Remember which of the model's tensors and modules this process has in its stages, and what trains them."""
        own, running = _find_own(stages), {each for stage in stages.values() for each in stage.module.modules()}
        _runs_here.update((module, module in running) for module in self._modules)
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
