"""Optimizers: state by the names of their parameters, so that it follows them to any other number of ranks or stages.

Not through torch's `get_optimizer_state_dict`: it takes a step with an optimizer that has no state yet. That step
counts in Adam's bias correction: a run that looked for a checkpoint and found none would differ from one that did not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Generic, Protocol

import torch
from torch.distributed.tensor import DTensor

from everstep.checkpoint.casting import Casts
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format import Tensor
from everstep.checkpoint.state import names
from everstep.checkpoint.state.bulk import is_leaf
from everstep.checkpoint.state.kinds import (
    WHOLE,
    Absent,
    Saved,
    detached,
    filled_later,
    fresh,
    is_tensor,
    misfit,
    with_bytes,
)
from everstep.checkpoint.values import pack

_STATE = "state"
_GROUPS = "param_groups"  # of each parameter: which options it has
_KIND = "kind"  # names of the optimizer's class and of those that it is derived from
_OPTIONS = "options"  # by their own digest, so that ranks with other parameters never disagree

# torch keeps this one in main memory unless the optimizer is capturable, and load_state_dict moves it then.
_STEP = "step"
_NO_OPTION = ("params", "param_names")

# How this process computes a step, not which: an optimizer keeps its own.
_HOW = ("foreach", "fused", "capturable", "differentiable")

_WRAPPED = ("optim", "optimizer", "_optimizer", "base_optimizer")  # where wrappers hold the optimizer that they wrap


class OptimizerObject:
    """An optimizer; `known` are the names of the parameters of all modules that were given with it, by identity."""

    exclusive = True

    def __init__(self, prefix: str, optimizer: torch.optim.Optimizer, known: Mapping[int, str]) -> None:
        self.prefix = prefix
        self._optimizer = optimizer
        self.params: list[torch.Tensor] = [each for group in optimizer.param_groups for each in group["params"]]
        # A parameter of no module is known by its place.
        self._names = [known.get(id(each), f"#{i}") for i, each in enumerate(self.params)]
        if len(set(self._names)) != len(self._names):
            raise CheckpointError(f"{prefix}: two of its parameters have the same name; give each model its own name")

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def leaves(self) -> Iterator[tuple[str, Any]]:
        state = self._optimizer.state_dict()
        yield names.join(self.prefix, _KIND), kind_of(self._optimizer)
        for place, own in state["state"].items():
            if type(place) is not int:
                raise CheckpointError(f"{self.prefix}: holds state under {place!r}, which is no parameter")
            yield from self._leaves(names.join(_STATE, self._names[place]), own)
        for group in state["param_groups"]:
            options = _options(group)
            digest = _digest(options)
            yield names.join(self.prefix, _OPTIONS, digest), options
            for place in group["params"]:
                yield names.join(self.prefix, _GROUPS, self._names[place]), digest
        for key, value in state.items():
            if key not in ("state", "param_groups"):
                yield from self._leaves(names.join("more", names.segment(key)), value)

    def coming(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A stand-in for each tensor of state that the first step will make."""
        known = {id(each): name for each, name in zip(self.params, self._names, strict=True)}
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad and not self._optimizer.state.get(param):
                    for number in range(_per_parameter(group)):
                        name = names.join(_STATE, known[id(param)], "coming", str(number))
                        yield names.join(self.prefix, name), param.detach()

    def _leaves(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        return ((each, detached(leaf)) for each, leaf in names.walk(value, is_leaf, names.join(self.prefix, name)))

    def targets(self, saved: Saved, problems: list[str]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        held = self._optimizer.state_dict()["state"]
        for place, (tensors, _) in enumerate(self._of_params(saved)):
            live = dict(names.walk(held.get(place, {}), is_leaf))
            for name, tensor in tensors.items():
                full = saved.full(names.join(_STATE, self._names[place], name))
                made = self._target(self.params[place], name, tensor, live.get(name), saved.casts)
                if isinstance(made, str):
                    problems.append(f"{full} {made}")
                else:
                    found[full] = made
        for name, tensor in saved.below("more").tensors.items():
            found[saved.full(names.join("more", name))] = fresh(tensor)
        self._check_kind(saved, problems)
        self._check_options(saved, problems)
        return found

    def _target(self, param: torch.Tensor, name: str, saved: Tensor, live: Any, casts: Casts) -> torch.Tensor | str:
        if is_tensor(live):
            return misfit(saved, live, casts) or filled_later(live)
        if name == _STEP or saved.shape != tuple(param.shape):
            if isinstance(param, DTensor) and saved.shape not in ((), (1,)):
                return (
                    "is not of its parameter's shape, and this optimizer has taken no step that would show its shards"
                )
            return fresh(saved)
        if type(param) in WHOLE and param.is_cpu and param.is_contiguous():
            return fresh(saved)
        return torch.empty_like(param, dtype=getattr(torch, saved.dtype), requires_grad=False)

    def _check_kind(self, saved: Saved, problems: list[str]) -> None:
        if _KIND not in saved.values:  # of an earlier version
            return
        theirs, ours = saved.value(_KIND), kind_of(self._optimizer)
        if not is_of_kind(ours, theirs):
            problems.append(
                f"{self.prefix} is a {theirs[0]} in the checkpoint, a {ours[0]} here, whose state is another: "
                "make the same optimizer, or leave it out of restore() and name it in track() to begin with a new one"
            )

    def _check_options(self, saved: Saved, problems: list[str]) -> None:
        for group in self._optimizer.param_groups:
            places = self._places(group)
            digests = {saved.values.get(names.join(_GROUPS, self._names[place])) for place in places}
            problems += [
                Absent.of_name(saved.full(names.join(_GROUPS, self._names[place])))
                for place in places
                if names.join(_GROUPS, self._names[place]) not in saved.values
            ]
            if len(digests - {None}) > 1:
                problems.append(f"{self.prefix} has parameters in one group that had different options when saved")

    def load(self, saved: Saved, tensors: Mapping[str, torch.Tensor]) -> None:
        state: dict[int, Any] = {}
        for place, (of_param, values) in enumerate(self._of_params(saved)):
            leaves: dict[str, Any] = {name: saved.value(full) for name, full in values.items()}
            for name in of_param:
                tensor = tensors[saved.full(names.join(_STATE, self._names[place], name))]
                leaves[name] = with_bytes(leaves.get(name), tensor)
            if leaves:
                state[place] = names.nest(leaves)
        whole: dict[str, Any] = saved.below("more").nested(tensors) if saved.below("more") else {}
        groups = [self._group(group, saved) for group in self._optimizer.param_groups]
        self._optimizer.load_state_dict({**whole, "state": state, "param_groups": groups})
        # It has made copies of all options; a captured graph, or the script, reads these where they were.
        for group, loaded in zip(self._optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in loaded.items() if is_tensor(value)})
        self._undo_casts(state)

    def _group(self, group: dict[str, Any], saved: Saved) -> dict[str, Any]:
        places = self._places(group)
        loaded = {key: value for key, value in group.items() if key != "params"}
        digests = (saved.values.get(names.join(_GROUPS, self._names[place])) for place in places)
        digest = next((each for each in digests if each is not None), None)
        if digest is not None:
            for key, value in saved.value(names.join(_OPTIONS, str(digest))).items():
                if key in _HOW and key in loaded:
                    continue
                loaded[key] = _with_option(loaded.get(key), value)
        return {**loaded, "params": places}

    def _undo_casts(self, state: dict[int, Any]) -> None:
        """load_state_dict casts state to its parameter's dtype: 32 bits beside a parameter of 16 would lose half."""
        for place, own in state.items():
            live = self._optimizer.state.get(self.params[place], {})
            for key, value in own.items():
                if key != _STEP and is_tensor(value) and value.dtype != live[key].dtype:
                    live[key] = value

    def _places(self, group: dict[str, Any]) -> list[int]:
        where = {id(each): i for i, each in enumerate(self.params)}
        return [where[id(each)] for each in group["params"]]

    def _of_params(self, saved: Saved) -> list[tuple[dict[str, Tensor], dict[str, str]]]:
        """For each parameter its saved tensors, and the names of its saved values, by their names below it."""
        places = {name: i for i, name in enumerate(self._names)}
        found: list[tuple[dict[str, Tensor], dict[str, str]]] = [({}, {}) for _ in self._names]
        for kind, leaves in enumerate((saved.tensors, saved.values)):
            for full, leaf in leaves.items():
                owner = full.removeprefix(f"{_STATE}.")
                if owner == full:
                    continue
                below = ""
                while owner not in places and owner:
                    owner, _, last = owner.rpartition(".")
                    below = names.join(last, below)
                if owner and kind == 0 and isinstance(leaf, Tensor):
                    found[places[owner]][0][below] = leaf
                elif owner:
                    found[places[owner]][1][below] = full
        return found


def kind_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of an optimizer's class and of those that it is derived from; of what is within, where it wraps another."""
    inner: Any = optimizer
    seen = {id(inner)}
    while (within := _within(inner)) is not None and id(within) not in seen:
        inner = within
        seen.add(id(inner))
    common = (*torch.optim.Optimizer.__mro__, Protocol, Generic)
    return [f"{each.__module__}.{each.__qualname__}" for each in type(inner).__mro__ if each not in common]


def is_of_kind(one: list[str], other: list[str]) -> bool:
    """Whether one of two classes is derived from the other, or is the other."""
    return any(_same(one[0], each) for each in other) or any(_same(other[0], each) for each in one)


def _same(one: str, other: str) -> bool:
    if one == other:
        return True
    # A script is __main__ where it is run, and a module where it is imported.
    modules, qualified = zip(*(name.rpartition(".")[::2] for name in (one, other)), strict=True)
    return qualified[0] == qualified[1] and not {"__main__", "__mp_main__"}.isdisjoint(modules)


def _within(optimizer: Any) -> torch.optim.Optimizer | None:
    held = vars(optimizer)
    return next((held[key] for key in _WRAPPED if isinstance(held.get(key), torch.optim.Optimizer)), None)


def _per_parameter(group: Mapping[str, Any]) -> int:
    """How many tensors of a parameter's size an optimizer of torch keeps for it; none where its options are others."""
    averages = 2 if "betas" in group or "rho" in group else int("alpha" in group and "centered" in group)
    more = ("amsgrad", "momentum", "centered")
    return averages + sum(bool(group.get(each)) for each in more)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _option(key, value) for key, value in group.items() if key not in _NO_OPTION}


def _option(key: str, value: Any) -> Any:
    if not is_tensor(value):
        return value
    if value.numel() != 1:
        raise CheckpointError(f"the option {key} of an optimizer is a tensor of {value.numel()} elements")
    return ("tensor", value.dtype, value.item())


def _with_option(live: Any, saved: Any) -> Any:
    if not (isinstance(saved, tuple) and len(saved) == 3 and saved[0] == "tensor"):
        return saved
    if is_tensor(live) and live.dtype == saved[1]:
        # In place, because a captured graph reads it there.
        return live.fill_(saved[2])
    return torch.tensor(saved[2], dtype=saved[1])


def _digest(options: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(pack(options), sort_keys=True).encode()).hexdigest()[:16]
