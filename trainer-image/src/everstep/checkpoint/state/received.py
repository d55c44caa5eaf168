"""Tell apart what a rank holds only because a restore has brought it: rank 0 saves that, until a rank changes it.

A checkpoint does not say which rank had kept something that others had not, as a history: all ranks get it. Those that
do not keep it would hold what it was then, and differ from the rank that does at each later save.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import xxhash
from torch import nn

from everstep.checkpoint.format.descriptions import is_description, object_of
from everstep.checkpoint.format.nested_names import is_empty
from everstep.checkpoint.state import names
from everstep.checkpoint.state.flat import Flat, flatten_objects
from everstep.checkpoint.state.kinds import FromRank, PerRank, Stateful
from everstep.checkpoint.state.loaded import is_dtensor
from everstep.checkpoint.state.loader_samplers import is_loader
from everstep.checkpoint.state.memory import view_bytes
from everstep.coordination.group import RankGroup

# Whose state is each rank's own or one rank's, and what a script makes with all that it holds, on each rank.
_OTHERS = (PerRank, FromRank, nn.Module, torch.optim.Optimizer)
_NOTHING = Flat({}, {})


class ReceivedLeaves:
    """The leaves of nested states that this rank did not hold before a restore, as long as it leaves them as they came.

    Rank 0 has received none in this sense: it saves what it holds.

    Args:
        objects: What is going to be restored, by name; none where nothing is.
        group: All ranks.
        held: All that this rank holds of them before, without what an earlier restore has brought.
        allow_pickle: See flatten_objects().
    """

    def __init__(
        self, objects: Mapping[str, object], group: RankGroup, held: Flat = _NOTHING, *, allow_pickle: bool = False
    ) -> None:
        self._objects = {name: each for name, each in objects.items() if group.size > 1 and _is_nested(each)}
        self._stateful = {names.escape_segment(name) for name, each in self._objects.items() if _is_stateful(each)}
        self._group, self._allow_pickle = group, allow_pickle
        self._own = held.tensors.keys() | {name for name, value in held.values.items() if not is_empty(value)}
        self._marks: dict[str, tuple[object, ...]] = {}
        self._tensors: dict[str, torch.Tensor] = {}  # kept, so that no other tensor gets their address

    def find(self, taken: Mapping[str, object]) -> None:
        """Find them, right after the restore. Collective: what rank 0 does not hold now, nobody would save.

        Args:
            taken: The states that objects have been given, by escaped names. They are not asked for theirs: a loader
                within an object begins when it is, in the order of the epoch that its sampler has by then.
        """

        def look() -> tuple[Flat, dict[str, tuple[object, ...]]]:
            after = self._flatten(taken)
            held = [name for name in {**after.tensors, **after.values} if not is_description(name)]
            marks = {name: mark for name in held if name not in self._own and (mark := self._mark_leaf(after, name))}
            return after, marks

        after, found = self._group.run_on_all_ranks(look)
        self._objects, self._own = {}, set()
        if self._group.any(bool(found)):
            of_first = set(self._group.broadcast([*after.tensors, *after.values]))
            if self._group.rank:
                self._marks = {name: mark for name, mark in found.items() if name in of_first}
                self._tensors = self._select_kept(after.tensors)

    def leave_out(self, flat: Flat) -> Flat:
        """Return the state without them.

        Args:
            flat: All that this rank holds now.
        """
        if not self._marks:
            return flat
        held = {name for name in flat.tensors.keys() | flat.values.keys() if not is_description(name)}
        # What was changed since is this rank's own from now on.
        self._marks = {
            name: mark for name, mark in self._marks.items() if name in held and self._mark_leaf(flat, name) == mark
        }
        stays = _list_with_parents(held - self._marks.keys())
        # So is the whole of a list of which it holds more: what others have of it may be shorter.
        self._marks = {name: mark for name, mark in self._marks.items() if stays.isdisjoint(_iterate_lists(name))}
        self._tensors = self._select_kept(self._tensors)
        if not (gone := self._marks.keys()):
            return flat
        return replace(
            flat,
            tensors={name: each for name, each in flat.tensors.items() if name not in gone},
            values={name: each for name, each in flat.values.items() if name not in gone},
            bulk={name: each for name, each in flat.bulk.items() if name not in gone},
            classes={name: each for name, each in flat.classes.items() if name not in gone},
            left_out=frozenset(gone),
        )

    def _flatten(self, taken: Mapping[str, object]) -> Flat:
        objects: dict[str, object] = {}
        for name, each in self._objects.items():
            if not _is_stateful(each):
                objects[name] = each
            elif (state := taken.get(names.escape_segment(name))) is not None:
                objects[name] = _Taken(state)
        return flatten_objects(objects, rank=self._group.rank, allow_pickle=self._allow_pickle)

    def _select_kept(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: each for name, each in tensors.items() if name in self._marks and not self._is_copied(name)}

    def _is_copied(self, name: str) -> bool:
        """Tell whether a leaf may be a copy, another one each time: an object makes its state when it is asked."""
        return object_of(name) in self._stateful

    def _mark_leaf(self, flat: Flat, name: str) -> tuple[Any, ...]:
        """Return what is other once a leaf has changed; nothing for a shard, which each rank has for itself."""
        value, tensor = flat.values.get(name), flat.tensors.get(name)
        if tensor is None:
            return (value,)
        if is_dtensor(tensor):
            return ()
        # The last are changed by code that torch does not see.
        if self._is_copied(name) or name in flat.bulk or tensor.is_inference():
            content = view_bytes(tensor.resolve_conj().resolve_neg().contiguous()).cpu().numpy()
            return value, tensor.dtype, tensor.shape, xxhash.xxh3_64_intdigest(content.data)
        return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor._version


class _Taken:
    """An object of which only the state is known: it is flattened, and nothing is loaded into it."""

    def __init__(self, state: object) -> None:
        self._state = state

    def state_dict(self) -> object:
        return self._state

    def load_state_dict(self, state: object) -> None:
        raise NotImplementedError


def _is_nested(each: object) -> bool:
    is_list_of_modules = isinstance(each, list | tuple) and any(isinstance(one, nn.Module) for one in each)
    return not (isinstance(each, _OTHERS) or is_loader(each) or is_list_of_modules)


def _is_stateful(each: object) -> bool:
    return isinstance(each, Stateful)


def _list_with_parents(leaves: Iterable[str]) -> set[str]:
    return {each for name in leaves for each in (name, *names.iterate_parents(name))}


def _iterate_lists(name: str) -> Iterator[str]:
    """Yield the names of the lists and tuples that a leaf lies in."""
    child = name
    for parent in names.iterate_parents(name):
        if child[len(parent) + 1] in "[(":
            yield parent
        child = parent
