"""Keep the part of a model that is in one stage: its original modules and parameters under their original names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Self

import torch
from torch import nn

from everstep.pipeline.frontend.foreign_weights import read_foreign


class Skeleton(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Stands for a module of which a stage has only a part; it holds that part, and is not called."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.training = original.training
        self._load_state_dict_pre_hooks = (
            original._load_state_dict_pre_hooks
        )  # as those that rename what older ones had
        # What the module for which it stands has, in its order, from which the first name of a shared weight follows.
        self._order: tuple[str, ...] = (
            original._order
            if isinstance(original, Skeleton)
            else tuple(name for held in _list_held(original) for name in held)
        )
        # Only where it is needed, since it keeps the other parts alive; in a tuple, as it is no module of this one.
        self._with_own_train: tuple[nn.Module, ...] = ()
        if isinstance(original, Skeleton):
            self._with_own_train = original._with_own_train
        elif type(original).train is not nn.Module.train:
            self._with_own_train = (original,)

    def train(self, mode: bool = True) -> Self:
        """Set the mode as the module for which it stands does, which may keep some of what is in it in another."""
        if not self._with_own_train:
            super().train(mode)
            return self
        (original,) = self._with_own_train
        with read_foreign(original):  # it may merge adapters, also those of other stages
            original.train(mode)
        for name, each in self.named_modules():
            if isinstance(each, Skeleton):
                each.training = original.get_submodule(name).training
        for each in self.modules():
            for child in each.children():
                if isinstance(child, Drawing):
                    child.training = each.training
        return self


class Drawing(nn.Module):  # type: ignore[misc]
    """An operation of the model's own code that draws random numbers: a module, to have a sequence of its own."""

    def forward(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


class Original:
    """A model with all names of its modules and tensors, of which stages get their parts; it does not change
    meanwhile."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tensors: dict[str, int] = {}
        self._names_of_tensors: dict[int, list[str]] = defaultdict(list)
        both = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        for name, tensor in chain(*both):
            self._tensors[name] = id(tensor)
            self._names_of_tensors[id(tensor)].append(name)
        self._names: dict[nn.Module, list[str]] = defaultdict(list)
        for name, module in model.named_modules(remove_duplicate=False):
            self._names[module].append(name)

    def make_skeleton(self, modules: Iterable[str], owners: Iterable[str], weights: Iterable[str]) -> nn.Module:
        """`modules` whole; of the `owners`, a skeleton each; the `weights` by their first names, also elsewhere.

        Everything is registered in the order of the model, and a shared weight or module under all of its names, so
        that it has the same first name, and the same names in a state dictionary, in every stage. Random numbers follow
        from it.
        """
        whole = set(modules)
        if "" in whole:
            return self._model
        whole |= self._find_other_names(whole)
        chosen = {self._tensors[name] for name in weights if name in self._tensors}
        wanted = {name for tensor in chosen for name in self._names_of_tensors[tensor]}
        parents = {path for name in (*whole, *owners, *wanted) for path in _list_parents(name)} | set(owners)
        root = Skeleton(self._model)
        _fill_skeleton(root, self._model, "", whole, parents - {""}, wanted)
        return root

    def _find_other_names(self, whole: set[str]) -> set[str]:
        """Return the other names of these modules, and of the modules in them."""
        held = {part for name in whole for part in self._model.get_submodule(name).modules()}
        return {name for module in held for name in self._names[module] if len(self._names[module]) > 1}


def _fill_skeleton(
    made: nn.Module,
    original: nn.Module,
    path: str,
    whole: set[str],
    parents: set[str],
    weights: set[str],
) -> None:
    for name, parameter in original._parameters.items():
        if parameter is not None and _join_path(path, name) in weights:
            made.register_parameter(name, parameter)
    for name, buffer in original._buffers.items():
        if buffer is not None and _join_path(path, name) in weights:
            made.register_buffer(name, buffer, persistent=name not in original._non_persistent_buffers_set)
    for name, child in original._modules.items():
        below = _join_path(path, name)
        if child is None:
            continue
        if below in whole:
            made.add_module(name, child)
        elif below in parents:
            part = Skeleton(child)
            made.add_module(name, part)
            _fill_skeleton(part, child, below, whole, parents, weights)


def join_skeletons(parts: Sequence[nn.Module]) -> nn.Module:
    """Join the skeletons of several stages: return one module with all that is in them, under the same names, in the
    order of the model."""
    if len(parts) == 1:
        return parts[0]
    made = Skeleton(parts[0])
    for part in parts:
        _join_into(made, part)
    for each in made.modules():
        if isinstance(each, Skeleton):
            _sort_as_original(each)
    return made


def _join_into(made: nn.Module, part: nn.Module) -> None:
    for name, parameter in part._parameters.items():
        if name not in made._parameters:
            made.register_parameter(name, parameter)
    for name, buffer in part._buffers.items():
        if name not in made._buffers:
            made.register_buffer(name, buffer, persistent=name not in part._non_persistent_buffers_set)
    for name, child in part._modules.items():
        before = made._modules.get(name)
        if child is None or (before is not None and not isinstance(before, Skeleton)):
            continue  # the original module is there, with all that is in it
        if isinstance(child, Skeleton):
            own = Skeleton(child)  # never a stage's, which keeps what it has
            for each in (before, child):
                if each is not None:
                    _join_into(own, each)
            made.add_module(name, own)
        else:
            made._modules[name] = child


def name_modules(parts: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Return the modules of several stages by their names in the model.

    Where one stage has a module, and another a skeleton of it for a weight in it, it is the module: only that is
    called.
    """
    found: dict[str, nn.Module] = {}
    for part in parts:
        for name, module in part.named_modules():
            if name not in found or not isinstance(module, Skeleton):
                found[name] = module
    return found


def _sort_as_original(made: Skeleton) -> None:
    """Bring what stages have brought one after the other into the order that it has in the model: else a shared weight
    could have another first name on this process, and the optimizer and checkpoints would not find it."""
    place = {name: at for at, name in enumerate(made._order)}
    for held in _list_held(made):
        for name in sorted(held, key=lambda each: place.get(each, len(place))):
            held[name] = held.pop(name)


def _list_held(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module._modules


def follow_modes(parts: Sequence[nn.Module], whole: nn.Module) -> None:
    """Give the skeletons in `parts` the modes of those in `whole`, their `join_skeletons`; modules are in both."""
    for part in parts if len(parts) > 1 else ():
        for name, each in part.named_modules():
            if isinstance(each, Skeleton):
                each.training = whole.get_submodule(name).training


def weight_holder(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Return the dictionary that holds a weight, and its name there, so that a replacement there holds for every
    user."""
    path, _, last = name.rpartition(".")
    holder = module.get_submodule(path)
    return (holder._parameters if last in holder._parameters else holder._buffers), last


def replace_tensor(module: nn.Module, old: torch.Tensor, new: torch.Tensor) -> None:
    """Put `new` wherever in `module` the tensor `old` is."""
    for each in module.modules():
        both: tuple[dict[str, Any], ...] = (each._parameters, each._buffers)
        for held in both:
            for name, tensor in held.items():
                if tensor is old:
                    held[name] = new


def _list_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))]


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
