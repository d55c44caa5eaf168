"""Tell apart what a rank holds only because a restore has brought it: rank 0 saves that, until a rank changes it.

A checkpoint does not say which rank had kept something that others had not, as a history: all ranks get it. Those that
do not keep it would hold what it was then, and differ from the rank that does at each later save.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import xxhash
from torch import nn

from everstep.checkpoint.format.descriptions import is_description
from everstep.checkpoint.format.nested_names import is_empty
from everstep.checkpoint.state import names
from everstep.checkpoint.state.flat import Flat, flatten_objects
from everstep.checkpoint.state.kinds import FromRank, PerRank
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
        allow_pickle: See flatten_objects().
    """

    def __init__(self, objects: Mapping[str, object], group: RankGroup, allow_pickle: bool = False) -> None:
        self._objects = {name: each for name, each in objects.items() if group.size > 1 and _is_nested(each)}
        self._group, self._allow_pickle = group, allow_pickle
        self._before = self._flatten()
        self._marks: dict[str, tuple[object, ...]] = {}
        self._tensors: dict[str, torch.Tensor] = {}  # kept, so that no other tensor gets their address
        self._empty: dict[str, object] = {}  # packed, of what this rank held with nothing in it

    def find(self) -> None:
        """Find them, right after the restore. Collective: what rank 0 does not hold now, nobody would save."""
        before, self._before = self._before, _NOTHING
        after = self._group.run_on_all_ranks(self._flatten)
        self._objects = {}
        self._empty = {name: value for name, value in before.values.items() if is_empty(value)}
        own = before.tensors.keys() | (before.values.keys() - self._empty.keys())
        held = [name for name in {**after.tensors, **after.values} if not is_description(name)]
        found = {name: mark for name in held if name not in own and (mark := _mark_leaf(after, name))}
        if self._group.any(bool(found)):
            of_first = set(self._group.broadcast(held))
            if self._group.rank:
                self._marks = {name: mark for name, mark in found.items() if name in of_first}
                self._tensors = {name: each for name, each in after.tensors.items() if name in self._marks}

    def leave_out(self, flat: Flat) -> Flat:
        """Return the state without them: where this rank held something empty, with that in their place.

        Args:
            flat: All that this rank holds now.
        """
        held = flat.tensors.keys() | flat.values.keys()
        # What was changed since is this rank's own from now on.
        self._marks = {
            name: mark for name, mark in self._marks.items() if name in held and _mark_leaf(flat, name) == mark
        }
        self._tensors = {name: each for name, each in self._tensors.items() if name in self._marks}
        if not (gone := self._marks.keys()):
            return flat
        rest = {each for name in held - gone for each in (name, *names.iterate_parents(name))}
        around = {each for name in gone for each in (name, *names.iterate_parents(name))}
        again = {name: value for name, value in self._empty.items() if name in around - rest}
        return replace(
            flat,
            tensors={name: each for name, each in flat.tensors.items() if name not in gone},
            values={name: each for name, each in flat.values.items() if name not in gone} | again,
            bulk={name: each for name, each in flat.bulk.items() if name not in gone},
            classes={name: each for name, each in flat.classes.items() if name not in gone},
            left_out=frozenset(gone),
        )

    def _flatten(self) -> Flat:
        if not self._objects:
            return _NOTHING
        return flatten_objects(self._objects, rank=self._group.rank, allow_pickle=self._allow_pickle)


def _is_nested(each: object) -> bool:
    is_list_of_modules = isinstance(each, list | tuple) and any(isinstance(one, nn.Module) for one in each)
    return not (isinstance(each, _OTHERS) or is_loader(each) or is_list_of_modules)


def _mark_leaf(flat: Flat, name: str) -> tuple[Any, ...]:
    """Return what is other once a leaf has changed; nothing for a shard, which each rank has for itself."""
    value, tensor = flat.values.get(name), flat.tensors.get(name)
    if tensor is None:
        return (value,)
    if is_dtensor(tensor):
        return ()
    if name in flat.bulk or tensor.is_inference():  # changed by code that torch does not see
        return value, xxhash.xxh3_64_intdigest(view_bytes(tensor.contiguous()).cpu().numpy().data)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor._version
