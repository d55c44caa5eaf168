"""Define what every kind of object offers: its leaves for a save, its targets for a restore, and a way to load them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.descriptions import is_description
from everstep.checkpoint.format.manifest import Manifest, StoredTensor
from everstep.checkpoint.format.values import InPart, unpack_value
from everstep.checkpoint.state import names
from everstep.checkpoint.state.bulk import from_tensor
from everstep.checkpoint.state.casting import NO_CASTS, Casts
from everstep.checkpoint.state.memory import WHOLE, get_local_tensor, overlaps_itself, why_not_saved, why_not_written
from everstep.checkpoint.state.module_states import build_module_state
from everstep.checkpoint.state.structure import KIND, MODULE, build_structure
from everstep.checkpoint.state.ties import find_kept_names

__all__ = ["WHOLE", "ObjectKind", "PerRank", "Saved", "StateMismatch", "Stateful", "Stepped", "get_local_tensor"]

Leaf = TypeVar("Leaf")

# The end of messages that reject a state, and its warning: a run may be started again after any failure.
ANEW = "name it in track() to begin with a new one, in one start alone: each start that does so begins with a new one"


class StateMismatch(CheckpointError):
    """The checkpoint is good, but not of these objects; nothing was touched. Each problem names what does not fit."""

    def __init__(self, problems: list[str]) -> None:
        shown = problems[:8] + ([f"and {len(problems) - 8} more"] if len(problems) > 8 else [])
        super().__init__("the checkpoint does not fit the objects that were given: " + "; ".join(shown))
        self.problems = problems


class Absent(str):
    """A problem of a restore that strict=False reports instead: `name` is here, and not in the checkpoint."""

    name: str

    @classmethod
    def of_name(cls, name: str) -> Absent:
        """Return the problem for a tensor or a parameter."""
        problem = cls(f"{name} is not in the checkpoint")
        problem.name = name
        return problem

    @classmethod
    def of_object(cls, prefix: str) -> Absent:
        """Return the problem for a whole object."""
        problem = cls(f"nothing in the checkpoint is called {prefix}")
        problem.name = prefix
        return problem


class PerRank:
    """Wraps an object whose state is each rank's own, as a data loader's: saved under the rank, restored to that rank.

    At another number of ranks nobody can say whose state it should be: the object is left as it is, and the result of
    the restore names it.
    """

    def __init__(self, inner: object) -> None:
        self.inner = inner


class FromRank:
    """Wraps an object that ranks hold with different content, of which one rank's is saved and restored to all.

    For what nobody keeps equal and one rank stands for: an average of the weights with its own running statistics, or
    a model with BatchNorm whose gradients are summed by hand. What is sharded (DTensor) is saved from all ranks.

    Args:
        inner: The object; all ranks give theirs.
        rank: Whose state it is.
    """

    def __init__(self, inner: object, rank: int = 0) -> None:
        if rank < 0:
            raise ValueError(f"FromRank takes the number of a rank, 0 or more, not {rank}")
        self.inner = inner
        self.rank = rank


def unwrap_marked(each: object) -> object:
    """Return the object itself, without what says whose state is saved."""
    return each.inner if isinstance(each, PerRank | FromRank) else each


@runtime_checkable
class Stepped(Protocol):
    """An object whose state follows from the number of trained steps, as a sampler's does."""

    def state_at(self, step: int) -> Any: ...


@runtime_checkable
class Stateful(Protocol):
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


@dataclass(frozen=True)
class Saved:
    """The part of a checkpoint that lies below `prefix`.

    Names are relative to it, "" is the object itself. Values are packed.
    """

    prefix: str
    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, object]
    allow_pickle: bool = False
    casts: Casts = NO_CASTS
    everything: Saved | None = None  # the whole of the checkpoint, where this is a part of it

    @classmethod
    def of(cls, manifest: Manifest, *, allow_pickle: bool = False, casts: Casts = NO_CASTS) -> Saved:
        return cls("", manifest.tensors, manifest.values, allow_pickle, casts)

    def below(self, name: str) -> Saved:
        """Return the part of it below a name."""
        return Saved(
            names.join_segments(self.prefix, name),
            _select_below(self.tensors, name),
            _select_below(self.values, name),
            self.allow_pickle,
            self.casts,
            self.everything or self,
        )

    def at(self, full: str) -> Saved:
        """Return the part of the checkpoint below a full name, as that under which one rank saves what is its own."""
        return (self.everything or self).below(full)

    def without(self, full: frozenset[str]) -> Saved:
        """Return the same without what has one of these full names, or lies below it."""

        def stays(name: str) -> bool:
            whole = self.full(name)
            return whole not in full and full.isdisjoint(names.iterate_parents(whole))

        return replace(
            self,
            tensors={name: each for name, each in self.tensors.items() if stays(name)},
            values={name: each for name, each in self.values.items() if stays(name)},
        )

    def full(self, name: str) -> str:
        return names.join_segments(self.prefix, name)

    def value(self, name: str) -> Any:
        """Return the value of this name, unpacked. UnsupportedValue when it cannot be."""
        return unpack_value(self.values[name], self.full(name), allow_pickle=self.allow_pickle)

    def value_or(self, name: str, default: Any) -> Any:
        """Return the same, or the default where there is none."""
        return self.value(name) if name in self.values else default

    def nested(self, tensors: Mapping[str, torch.Tensor], description: Mapping[str, Any] | None = None) -> Any:
        """Return the nested state: values from here, and `tensors` by their full names; of a module its flat one.

        `description`: of how it is built, where another object's says that.
        """
        if self.is_module and description is None:
            return self._build_module_state(tensors)
        leaves: dict[str, Any] = {name: self.value(name) for name in self.values if not is_description(name)}
        for name in self.tensors:
            leaves[name] = with_bytes(leaves.get(name), tensors[self.full(name)])
        return build_structure(leaves, self.description if description is None else description)

    def _build_module_state(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        values = {name: self.value(name) for name in self.values}
        described = {name: each for name, each in values.items() if is_description(name)}
        leaves = {name: each for name, each in values.items() if name not in described}
        kept = find_kept_names(described, self.tensors)
        for name in self.tensors:
            leaves[name] = with_bytes(leaves.get(name), tensors[self.full(kept.get(name, name))])
        return build_module_state(leaves, described)

    @property
    def is_module(self) -> bool:
        """Tell whether this is what a module was, or what was imported from a dictionary of tensors by their names."""
        return (self.description or {}).get("is") == MODULE

    @cached_property  # it has the order of all keys of a table, which may be many
    def description(self) -> dict[str, Any] | None:
        """Return what the object is and how its state is built; None in an older checkpoint or for an object's part."""
        found: dict[str, Any] | None = self.value_or(KIND, None)
        return found

    def __bool__(self) -> bool:
        return bool(self.tensors or self.values)


def _select_below(leaves: Mapping[str, Leaf], name: str) -> dict[str, Leaf]:
    start = f"{name}."
    return {
        each.removeprefix(start) if each != name else "": leaf
        for each, leaf in leaves.items()
        if each == name or each.startswith(start)
    }


class ObjectKind(Protocol):
    """An object that was given by name, seen as one of the kinds that a checkpoint knows."""

    prefix: str
    exclusive: bool  # what the checkpoint has below the prefix must be wanted by some rank

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Yield full names with tensors (detached, sharing the object's storage) and plain values."""
        ...

    def targets(self, saved: Saved, problems: list[str]) -> dict[str, torch.Tensor]:
        """Return the tensors that the checkpoint's bytes are to be copied into, by full name; change no object.

        A tensor on the meta device is nobody's yet (see `make_fresh_tensor`): load() is given another, in main memory.

        Args:
            saved: What lies below the object's prefix.
            problems: What does not fit is added to it.
        """
        ...

    def load(self, saved: Saved, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take in the values, and the targets that are filled by now."""
        ...


def with_bytes(value: Any, tensor: torch.Tensor) -> Any:
    """Return what a tensor of a checkpoint is, where there is also a value of its name or None: the bytes of an array,
    or nothing any more, because the array was saved as the value (see Flat.fitted)."""
    if isinstance(value, InPart):
        return from_tensor(tensor, value)
    return tensor if value is None else value


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def detach_leaf(leaf: Any) -> Any:
    """Return a tensor without its history; anything else as it is."""
    return leaf.detach() if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe_misfit(saved: StoredTensor, tensor: torch.Tensor, casts: Casts = NO_CASTS) -> str | None:
    """Return why the saved tensor cannot be copied into this one, bit for bit unless it may be cast; None if it can."""
    if why := why_not_saved(tensor) or why_not_written(tensor):
        return why
    if saved.shape != tuple(tensor.shape):
        return f"has shape {list(saved.shape)} in the checkpoint, {list(tensor.shape)} here"
    if saved.dtype != dtype_name(tensor.dtype) and not casts.allows(getattr(torch, saved.dtype), tensor.dtype):
        can_cast = Casts(cast=True).allows(getattr(torch, saved.dtype), tensor.dtype)
        advice = " (cast=True casts it)" if can_cast else ""
        return f"is {saved.dtype} in the checkpoint, {dtype_name(tensor.dtype)} here{advice}"
    return None


def filled_later(tensor: torch.Tensor) -> torch.Tensor:
    """Return the target for a tensor of ours: itself, or another where its elements share memory.

    See fill_overlapping.
    """
    return torch.empty_like(tensor, memory_format=torch.contiguous_format) if overlaps_itself(tensor) else tensor


def make_fresh_tensor(saved: StoredTensor) -> torch.Tensor:
    """Stands for a new tensor in main memory, for the whole of a saved one.

    It has no memory yet, because it may get that into which its bytes are read: nothing is copied then.
    """
    return torch.empty(saved.shape, dtype=getattr(torch, saved.dtype), device="meta")


def have_other_bytes(saved: Saved, one: str, other: str) -> bool:
    """Tell whether two saved tensors differ, by the sums of their chunks; False where they are not cut alike."""
    cuts, sums = zip(*(_cuts_and_sums(saved.tensors[name]) for name in (one, other)), strict=True)
    return bool(cuts[0] == cuts[1] and sums[0] != sums[1])


def _cuts_and_sums(tensor: StoredTensor) -> tuple[list[object], list[list[str]]]:
    shards = sorted(tensor.shards, key=lambda shard: shard.offsets)
    cuts: list[object] = [(shard.offsets, shard.sizes) for shard in shards]
    return cuts, [[chunk.sum for chunk in shard.chunks] for shard in shards]
