"""Tell apart what a rank holds only because a restore has brought it: rank 0 saves that, until a rank changes it.

A checkpoint does not say which rank had kept something that others had not, as a history: all ranks get it. Those that
do not keep it would hold what it was then, and differ from the rank that does at each later save.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
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

_log = logging.getLogger("everstep.checkpoint")

_Marks = dict[str, tuple[object, ...]]  # of leaves by their names

# By the store, and by the identity of the object in which the leaves are: of this process's sessions.
_marks_of_stores: dict[str, dict[int, _Marks]] = {}
_KEPT = 64  # objects of a store; a script may restore into new ones as long as it runs, to evaluate them


class ReceivedLeaves:
    """The leaves of nested states that this rank did not hold before a restore, as long as it leaves them as they came.

    Rank 0 has received none in this sense: it saves what it holds. A later session of the process on the same store
    knows them too, where it is given the objects in which they are: a script that tries again has these. One that
    restores into objects of its own under the same names, as for an evaluation, has nothing to do with them.

    Args:
        group: All ranks.
        store: The URL of the store; empty where nothing is restored.
    """

    def __init__(self, group: RankGroup, store: str = "") -> None:
        self._group, self._allow_pickle = group, False
        self._known = _marks_of_stores.setdefault(store, {}) if store and group.rank else {}
        self._marks: _Marks = {}
        self._ids: dict[str, int] = {}  # of the objects, by their escaped names
        self._objects: dict[str, object] = {}
        self._own: set[str] = set()
        self._empty: dict[str, object] = {}
        self._warned: set[str] = set()
        self._named: set[str] = set()  # escaped names of objects of which a state was seen
        self._shards: set[str] = set()  # names of DTensors that were in it the first time

    def begin(self, objects: Mapping[str, object], held: Flat, *, allow_pickle: bool = False) -> None:
        """Note what this rank holds right before a restore.

        Args:
            objects: What is going to be restored, by name.
            held: Their state.
            allow_pickle: See flatten_objects().
        """
        for name, each in objects.items():
            self._recall(names.escape_segment(name), id(each))
        self._note_shards(held)
        held = self._leave_out(held)
        self._objects = {name: each for name, each in objects.items() if self._group.size > 1 and _is_nested(each)}
        self._allow_pickle = allow_pickle
        self._empty = {name: value for name, value in held.values.items() if is_empty(value)}
        self._own = held.tensors.keys() | (held.values.keys() - self._empty.keys())

    def find(self, taken: Mapping[str, object]) -> None:
        """Find them, right after the restore. Collective: what rank 0 does not hold now, nobody would save.

        Args:
            taken: The states that objects have been given, by escaped names. They are not asked for theirs: a loader
                within an object begins when it is, in the order of the epoch that its sampler has by then.
        """

        def look() -> tuple[Flat, _Marks]:
            after = self._flatten(taken)
            held = [name for name in {**after.tensors, **after.values} if not is_description(name)]
            marks = {name: mark for name in held if not self._is_own(after, name) and (mark := _mark_leaf(after, name))}
            return after, marks

        after, found = self._group.run_on_all_ranks(look)
        before = set(self._marks)
        self._forget({object_of(name) for name in after.values if is_description(name)})
        self._objects, self._own, self._empty = {}, set(), {}
        if self._group.any(bool(found)):
            of_first = set(self._group.broadcast([*after.tensors, *after.values]))
            if self._group.rank:
                # Of what came by an earlier restore and stays, since the checkpoint has it no more, rank 0 has removed
                # its own.
                self._marks |= {name: mark for name, mark in found.items() if name in of_first or name in before}
        self._remember()

    def forget(self) -> None:
        """Forget them: what this rank holds is its own, however it has come to hold it."""
        self._marks.clear()
        self._remember()

    def leave_out(self, flat: Flat) -> Flat:
        """Return the state without them, for a save.

        Args:
            flat: All that this rank holds now of some objects.
        """
        self._note_shards(flat)
        found = self._leave_out(flat)
        self._remember()
        return found

    def warn_of_losses(self, flat: Flat) -> None:
        """Say what a process that is started again will not have as it is here. Collective.

        Args:
            flat: What leave_out() returned for the save that is planned.
        """
        self._warn_of_shards(flat)
        self._warn_of_unsaved(flat)

    def _note_shards(self, flat: Flat) -> None:
        if self._named and not flat.shards:  # each save comes here
            return
        new = {object_of(name) for name in flat.values if is_description(name)} - self._named
        self._named |= new
        self._shards |= {name for name in flat.shards if object_of(name) in new}

    def _warn_of_shards(self, flat: Flat) -> None:
        """Name DTensors that a new process does not hold when it restores: only what it holds tells how they lie."""
        came = sorted(flat.shards - self._shards - self._warned)
        self._warned.update(came)
        if came and self._group.rank == 0:
            _log.warning(
                "%s%s is a DTensor that was not there when its object was given to restore() or track(): a run that is "
                "started again gets it as a plain tensor, whole on each rank. Put it there before, as zeros_like() of "
                "its parameter; give an optimizer or a module under a name of its own",
                came[0],
                f" and {len(came) - 1} more" if len(came) > 1 else "",
            )

    def _warn_of_unsaved(self, flat: Flat) -> None:
        """Say what this rank leaves to rank 0 and rank 0 holds no more. Collective.

        That rank 0 has dropped what is its own, and that each rank has dropped what others keep, look the same on two
        ranks. Where all others still hold the same, it is rank 0 that has dropped it.

        Args:
            flat: What leave_out() returned for the save that is planned.
        """
        if not self._group.any(bool(flat.left_out)):
            return
        lost = sorted(flat.left_out.difference(self._group.broadcast([*flat.tensors, *flat.values])))
        others = self._group.gather(xxhash.xxh3_64_intdigest("\n".join(lost).encode("utf-8", "surrogatepass")))[1:]
        dropped_by_first = len(others) > 1 and len(set(others)) == 1
        if lost and not dropped_by_first and not self._warned.issuperset(lost):
            self._warned.update(lost)
            _log.warning(
                "rank %d holds %s%s as a restore has brought it, and rank 0 holds it no more: it is not saved until "
                "rank %d changes it. What a rank keeps for itself belongs in everstep.PerRank()",
                self._group.rank,
                lost[0],
                f" and {len(lost) - 1} more" if len(lost) > 1 else "",
                self._group.rank,
            )

    def _recall(self, name: str, identity: int) -> None:
        if name not in self._ids:
            earlier = self._known.get(identity, {})
            self._marks |= {leaf: mark for leaf, mark in earlier.items() if object_of(leaf) == name}
        self._ids[name] = identity

    def _remember(self) -> None:
        marks: dict[str, _Marks] = defaultdict(dict)
        for leaf, mark in self._marks.items():
            marks[object_of(leaf)][leaf] = mark
        for name, identity in self._ids.items():
            self._known.pop(identity, None)
            if name in marks:
                self._known[identity] = marks[name]
        for identity in list(self._known)[:-_KEPT]:
            del self._known[identity]

    def _leave_out(self, flat: Flat) -> Flat:
        if not self._marks:
            return flat
        held = {name for name in flat.tensors.keys() | flat.values.keys() if not is_description(name)}
        same = {name for name, mark in self._marks.items() if name in held and _mark_leaf(flat, name) == mark}
        # So is the whole of a list of which it holds more: what others have of it may be shorter.
        stays = _list_with_parents(held - same)
        gone = {name for name in same if stays.isdisjoint(_iterate_lists(name))}
        # What was changed since is this rank's own from now on.
        self._forget({object_of(name) for name in flat.values if is_description(name)}, but=gone)
        if not gone:
            return flat
        return replace(
            flat,
            tensors={name: each for name, each in flat.tensors.items() if name not in gone},
            values={name: each for name, each in flat.values.items() if name not in gone},
            bulk={name: each for name, each in flat.bulk.items() if name not in gone},
            classes={name: each for name, each in flat.classes.items() if name not in gone},
            left_out=frozenset(gone),
        )

    def _forget(self, objects: Collection[str], but: Collection[str] = ()) -> None:
        for name in [name for name in self._marks if object_of(name) in objects and name not in but]:
            del self._marks[name]

    def _is_own(self, after: Flat, name: str) -> bool:
        """Tell whether this rank had held a leaf; what is empty as before is none that has come."""
        if name in self._empty and name not in after.tensors:
            return after.values[name] == self._empty[name]
        return name in self._own

    def _flatten(self, taken: Mapping[str, object]) -> Flat:
        objects: dict[str, object] = {}
        for name, each in self._objects.items():
            if not _is_stateful(each):
                objects[name] = each
            elif (state := taken.get(names.escape_segment(name))) is not None:
                objects[name] = _Taken(state)
        return flatten_objects(objects, rank=self._group.rank, allow_pickle=self._allow_pickle)


def _mark_leaf(flat: Flat, name: str) -> tuple[Any, ...]:
    """Return what is other once a leaf has changed; nothing for a shard, which each rank has for itself.

    That is what a tensor holds: torch does not see all that changes one, as by `.data`, an array or a kernel.
    """
    value, tensor = flat.values.get(name), flat.tensors.get(name)
    if tensor is None:
        return (value,)
    if is_dtensor(tensor):
        return ()
    content = view_bytes(tensor.resolve_conj().resolve_neg().contiguous()).cpu().numpy()
    return value, tensor.dtype, tensor.shape, xxhash.xxh3_64_intdigest(content.data)


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
