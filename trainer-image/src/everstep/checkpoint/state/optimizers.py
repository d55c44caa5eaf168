"""Optimizers: state by the names of their parameters, so that it follows them to any other number of ranks or stages.

Not through torch's `get_optimizer_state_dict`: it takes a step with an optimizer that has no state yet. That step
counts in Adam's bias correction: a run that looked for a checkpoint and found none would differ from one that did not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.manifest import StoredTensor
from everstep.checkpoint.state import names, shards
from everstep.checkpoint.state.aliases import find_aliases, name_path, share_objects
from everstep.checkpoint.state.axes import AXES, find_axes, make_fresh
from everstep.checkpoint.state.bulk import is_leaf
from everstep.checkpoint.state.casting import Casts
from everstep.checkpoint.state.classes import is_of_kind, kind_of
from everstep.checkpoint.state.kinds import (
    ANEW,
    WHOLE,
    Absent,
    Saved,
    describe_misfit,
    detach_leaf,
    filled_later,
    is_tensor,
    make_fresh_tensor,
    with_bytes,
)
from everstep.checkpoint.state.loaded import is_dtensor
from everstep.checkpoint.state.loaded_states import STEP, leave_out_others, undo_casts
from everstep.checkpoint.state.memory import get_local_tensor
from everstep.checkpoint.state.nesting import check_nesting
from everstep.checkpoint.state.other_states import join_state, split_state
from everstep.checkpoint.state.param_contents import (
    KEPT,
    LAYOUT,
    STATE,
    STATELESS,
    ParamContent,
    find_param_contents,
)
from everstep.checkpoint.state.param_holders import describe_holders, find_moved_params, is_place, name_place
from everstep.checkpoint.state.param_options import (
    PLACES,
    digest_options,
    find_options_of_places,
    holds_tensor,
    name_params,
    pack_options,
    unpack_option,
)
from everstep.checkpoint.state.param_states import (
    Lookup,
    describe_aliases,
    describe_order,
    describe_states,
    read_aliases,
    read_structure,
    sort_states,
)
from everstep.checkpoint.state.structure import KIND, OPTIMIZER, build_structure, describe_structure

_GROUPS = "param_groups"  # of each parameter: which options it has
_BOX = "box"  # of each parameter beside which a rank has state of its own: which elements the rank has
_KIND = "kind"  # names of the optimizer's class and of those that it is derived from
_OPTIONS = "options"  # by their own digest, so that ranks with other parameters never disagree


# How this process computes a step, not which: an optimizer keeps its own.
_HOW = ("foreach", "fused", "capturable", "differentiable")


class OptimizerObject:
    """An optimizer; `known` are the names of the parameters of all modules that were given with it, by identity.

    `own`: the prefix of what this rank has for itself beside shards. Where it is the prefix of the object itself (see
    PerRank), that is all of it, what is sharded too.
    """

    exclusive = True

    def __init__(self, prefix: str, optimizer: torch.optim.Optimizer, known: Mapping[int, str], own: str) -> None:
        self.prefix = prefix
        self._own = own
        self._is_own = own == prefix
        self._as_shards: set[str] = set()  # names of state that is given to the optimizer as plain tensors
        self._optimizer = optimizer
        self.params: list[torch.Tensor] = [each for group in optimizer.param_groups for each in group["params"]]
        self._place_of = {id(each): i for i, each in enumerate(self.params)}  # once: each parameter may have a group
        # A parameter of no module is known by its place.
        self._names = [known.get(id(each), name_place(i)) for i, each in enumerate(self.params)]
        self._held: dict[str, list[str]] = {}  # see param_holders.py
        if len(set(self._names)) != len(self._names):
            raise CheckpointError(f"{prefix}: two of its parameters have the same name; give each model its own name")

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    @property
    def has_places(self) -> bool:
        """Tell whether it knows a parameter by its place."""
        return any(map(is_place, self._names))

    def hold(self, holders: Mapping[int, list[str]]) -> None:
        """Take in what parameters of no module are called in other objects: full names by identity."""
        for name, param in zip(self._names, self.params, strict=True):
            if is_place(name) and id(param) in holders:
                self._held[name] = holders[id(param)]

    def name_groups(self) -> list[list[str]]:
        """Return the names of the parameters of each group, in the order of the groups."""
        return [[self._names[place] for place in self._places(group)] for group in self._optimizer.param_groups]

    def leaves(self) -> Iterator[tuple[str, Any]]:
        state = self._optimizer.state_dict()
        states, more = split_state(state)
        check_nesting(more, self.prefix)
        for number, group in enumerate(state["param_groups"]):
            check_nesting(group, names.join_segments(self.prefix, _GROUPS, f"[{number}]"))
        yield names.join_segments(self.prefix, KIND), describe_structure(OPTIMIZER, more, is_leaf)
        yield names.join_segments(self.prefix, _KIND), kind_of(self._optimizer)
        yield from self._leaves_of_params(states)
        told: set[str] = set()  # groups may have the same options
        of_all = self._name_all_of_groups()
        for number, group in enumerate(state["param_groups"]):
            options = pack_options(group)
            digest = digest_options(options)
            if digest not in told:
                told.add(digest)
                yield names.join_segments(self.prefix, _OPTIONS, digest), options
            for place in group["params"]:
                yield names.join_segments(self.prefix, _GROUPS, self._names[place]), digest
                # In the name, because ranks that share a parameter may have other groups beside it.
                where = f"{number}-{len(state['param_groups'])}"
                yield names.join_segments(self.prefix, PLACES, self._names[place], where), True
            known = [self._names[place] for place in group["params"]] if "param_names" in group else of_all[number]
            for name, said in name_params(known, number, group.get("param_names")):
                yield names.join_segments(self.prefix, name), said
        for name, said in describe_holders(self._held):
            yield names.join_segments(self.prefix, name), said
        for key, value in more.items():
            yield from self._leaves(names.join_segments("more", names.escape_segment(key)), value)

    def coming(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a stand-in for each tensor of state that the first step will make."""
        known = {id(each): name for each, name in zip(self.params, self._names, strict=True)}
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad and not self._optimizer.state.get(param):
                    for number in range(_per_parameter(group)):
                        name = names.join_segments(STATE, known[id(param)], "coming", str(number))
                        leaf = param.detach()
                        yield names.join_segments(self.prefix, name), get_local_tensor(leaf) if self._is_own else leaf

    def _leaves(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        return (
            (each, detach_leaf(leaf))
            for each, leaf in names.walk_leaves(value, is_leaf, names.join_segments(self.prefix, name))
        )

    def _leaves_of_params(self, states: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
        every: list[tuple[int, str, Any]] = []
        for place, own in states.items():
            check_nesting(own, names.join_segments(self.prefix, STATE, self._names[place]))
            every += [(place, below, detach_leaf(leaf)) for below, leaf in names.walk_leaves(own, is_leaf)]
        layouts: dict[int, dict[str, Any]] = defaultdict(dict)
        keeping: set[int] = set()  # parameters beside which this rank has state of its own
        for place, below, leaf in every:
            param, prefix = self.params[place], self.prefix
            if is_dtensor(param) and is_tensor(leaf):
                said = self._describe_leaf(place, below, leaf)
                if said is not None:
                    layouts[place][below] = said
                if self._is_own:
                    leaf = get_local_tensor(leaf)
                elif not is_dtensor(leaf) and leaf.dim() > 0 and below != STEP:
                    yield names.join_segments(prefix, KEPT, self._names[place], below), True
                    prefix = self._own
                    keeping.add(place)
            yield names.join_segments(prefix, STATE, self._names[place], below), leaf
        yield from self._layouts(layouts, keeping, {place for place, _, _ in every})
        for place, said in find_axes(self.params, every).items():
            prefix = self._own if place in keeping else self.prefix
            yield names.join_segments(prefix, AXES, self._names[place], KIND), said
        yield from self._structures({self._names[place]: own for place, own in states.items()}, keeping)

    def _describe_leaf(self, place: int, below: str, leaf: torch.Tensor) -> dict[str, Any] | None:
        try:
            return shards.describe_leaf(self.params[place], leaf, is_own=self._is_own)
        except CheckpointError as error:
            raise CheckpointError(
                f"{names.join_segments(self.prefix, STATE, self._names[place], below)} {error}"
            ) from error

    def _structures(self, states: Mapping[str, Any], keeping: Collection[int]) -> Iterator[tuple[str, Any]]:
        """Yield values that say how states are built, and what they share."""
        own_ones = {self._names[place] for place in keeping}
        said: set[str] = set()
        for param, name, value in describe_states(states):
            full = names.join_segments(self._own if param in own_ones else self.prefix, name)
            if full not in said:
                said.add(full)
                yield full, value
        for name, value in (*describe_order(states, self._names), *describe_aliases(self.prefix, states)):
            yield names.join_segments(self.prefix, name), value
            # Another rank may have no state for some of these parameters, and say it in words that meet with none here.
            if not self._is_own and any(map(is_dtensor, self.params)):
                yield names.join_segments(self._own, name), value

    def _layouts(
        self, layouts: Mapping[int, dict[str, Any]], keeping: Collection[int], held: Collection[int]
    ) -> Iterator[tuple[str, Any]]:
        """Yield values by which a fresh process knows how the state lies."""
        for place, layout in layouts.items():
            yield names.join_segments(self.prefix, LAYOUT, self._names[place]), layout
        for place, param in enumerate(self.params):
            if place in held:
                if (self._is_own and is_dtensor(param)) or place in keeping:
                    yield names.join_segments(self._own, _BOX, self._names[place]), shards.describe_box(param)
            elif is_dtensor(param) and not get_local_tensor(param).numel():
                yield names.join_segments(self.prefix, STATELESS, self._names[place]), True

    def targets(self, saved: Saved, problems: list[str]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        held, _ = split_state(self._optimizer.state_dict())
        own = saved.at(self._own)
        joined = self._find_joined(saved, held)
        for place, state in enumerate(self._of_params(saved)):
            live = {below: leaf for below, leaf in names.walk_leaves(held.get(place, {}), is_leaf) if is_tensor(leaf)}
            why = self._why_elsewhere(state, own, place)
            if why is not None:
                problems.append(why)
            for full, (below, tensor) in state.tensors.items():
                is_own = self._is_own or full.startswith(f"{self._own}.")
                made = self._target(place, below, tensor, live.get(below), saved.casts, state, is_own=is_own)
                if isinstance(made, str):
                    problems.append(f"{full} {made}")
                elif below in live and f"{self._key(place, below)}.".startswith(joined):
                    found[full] = torch.empty_like(made, requires_grad=False)
                else:
                    found[full] = made
        for name, tensor in saved.below("more").tensors.items():
            found[saved.full(names.join_segments("more", name))] = make_fresh_tensor(tensor)
        self._check_kind(saved, problems)
        self._check_options(saved, problems)
        given = [group.get("param_names") for group in self._optimizer.param_groups]
        problems += find_moved_params(saved, self._held, zip(self.name_groups(), given, strict=True))
        return found

    def _lookups(self, saved: Saved) -> list[Lookup]:
        """Return ways to look a value up: this rank's own come first."""
        each = [saved.at(self._own), saved] if not self._is_own else [saved]
        return [lambda name, part=part: part.value_or(name, None) for part in each]  # type: ignore[misc]

    def _find_joined(self, saved: Saved, held: Mapping[int, Any]) -> tuple[str, ...]:
        """Beginnings of names of what shares memory here with something before it: two saved tensors would be read
        into one. Of an older checkpoint, which does not say what was one tensor, all are."""
        states = {self._names[place]: own for place, own in held.items()}
        lookups = self._lookups(saved)
        if all(read_structure(name, lookups) is None for name in states):
            return ()
        aliases = find_aliases(states)
        later = [path for paths in aliases.groups for path in paths[1:]] + [other for _, other in aliases.overlaps]
        return tuple(f"{names.join_segments(path[0], name_path(states[path[0]], path[1:]))}." for path in later)

    def _why_elsewhere(self, state: ParamContent, own: Saved, place: int) -> str | None:
        """Return why what this rank kept for itself beside a parameter does not belong beside it here, or None."""
        box = own.value_or(names.join_segments(_BOX, self._names[place]), None)
        is_of_shard = self._is_own and state.tensors and (box is not None or is_dtensor(self.params[place]))
        if state.is_left or not (state.kept or is_of_shard):
            return None
        why = shards.why_elsewhere(self.params[place], box)
        shown = names.join_segments(self.prefix, STATE, self._names[place], state.kept or "")
        return None if why is None else f"{shown} {why}"

    def _target(
        self,
        place: int,
        below: str,
        saved: StoredTensor,
        live: torch.Tensor | None,
        casts: Casts,
        state: ParamContent,
        *,
        is_own: bool,
    ) -> torch.Tensor | str:
        param, said = self.params[place], state.layout.get(below)
        if live is not None:
            if is_own:
                live = get_local_tensor(live)
            elif self._is_shard(param, saved, live.shape, below) and not is_dtensor(live):
                self._as_shards.add(self._key(place, below))
                live = shards.as_shard(param, live)
            return describe_misfit(saved, live, casts) or filled_later(live)
        dtype = _find_dtype(param, saved, casts)
        if self._is_own and is_dtensor(param) and isinstance(said, dict):
            return shards.why_not_laid_out(param, saved.shape, said) or make_fresh(saved, dtype)
        if below == STEP:
            return make_fresh_tensor(saved)
        if below in state.axes and (is_own or not is_dtensor(param)):
            return make_fresh(saved, dtype, state.axes[below])
        if is_own and is_dtensor(param):
            return make_fresh(saved, dtype)
        if is_dtensor(param) and isinstance(said, dict):
            return shards.make_leaf(param, saved.shape, dtype, said)
        if saved.shape != tuple(param.shape):
            is_unknown = is_dtensor(param) and saved.shape not in ((), (1,))
            return shards.unknown_layout() if is_unknown else make_fresh(saved, dtype)
        if type(param) in WHOLE and param.is_cpu and param.is_contiguous():
            return make_fresh(saved, dtype)
        return torch.empty_like(param, dtype=dtype, requires_grad=False)

    def _is_shard(self, param: torch.Tensor, saved: StoredTensor, shape: torch.Size, below: str) -> bool:
        """Tell whether a plain tensor beside a sharded parameter takes this rank's shard of a saved one."""
        return (
            below != STEP
            and len(shape) > 0
            and saved.shape == tuple(param.shape)
            and shape == get_local_tensor(param).shape
        )

    def _key(self, place: int, below: str) -> str:
        return names.join_segments(self._names[place], below)

    def _check_kind(self, saved: Saved, problems: list[str]) -> None:
        if _KIND not in saved.values:  # of an earlier version
            return
        theirs, ours = saved.value(_KIND), kind_of(self._optimizer)
        if not is_of_kind(ours, theirs):
            problems.append(
                f"{self.prefix} is a {theirs[0]} in the checkpoint, a {ours[0]} here, whose state is another: "
                f"make the same optimizer, or leave it out of restore() and {ANEW}"
            )

    def _check_options(self, saved: Saved, problems: list[str]) -> None:
        for group in self._optimizer.param_groups:
            places = self._places(group)
            digests = {saved.values.get(names.join_segments(_GROUPS, self._names[place])) for place in places}
            problems += [
                Absent.of_name(saved.full(names.join_segments(_GROUPS, self._names[place])))
                for place in places
                if names.join_segments(_GROUPS, self._names[place]) not in saved.values
            ]
            if len(digests - {None}) > 1:
                problems.append(f"{self.prefix} has parameters in one group that had different options when saved")

    def load(self, saved: Saved, tensors: Mapping[str, torch.Tensor]) -> None:
        state: dict[int, Any] = {}
        lookups = self._lookups(saved)
        for place, found in enumerate(self._of_params(saved)):
            leaves = {below: holder.value(name) for below, (holder, name) in found.values.items()}
            for full, (below, _) in found.tensors.items():
                leaves[below] = with_bytes(leaves.get(below), self._taken(place, below, tensors[full], found.layout))
            if leaves:
                state[place] = build_structure(leaves, read_structure(self._names[place], lookups))
        by_name = {self._names[place]: own for place, own in state.items()}
        share_objects(by_name, read_aliases(by_name, lookups))
        places = {self._names[place]: place for place in state}
        state = {places[name]: by_name[name] for name in sort_states(by_name, lookups)}
        state |= self._states_of_others(saved)
        whole: dict[str, Any] = saved.below("more").nested(tensors, saved.description) if saved.below("more") else {}
        filled: dict[int, Any] = {}
        of_all, of_places = self._name_all_of_groups(), find_options_of_places(saved.values)
        groups = [
            self._group(group, of_all[number], of_places.get(f"{number}-{len(of_all)}"), saved, filled)
            for number, group in enumerate(self._optimizer.param_groups)
        ]
        known = {place: leave_out_others(own) for place, own in state.items()}
        self._optimizer.load_state_dict({**join_state(known, whole), "param_groups": groups})
        # It has made copies of all options; a captured graph, or the script, reads these where they were.
        for group, loaded in zip(self._optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in loaded.items() if holds_tensor(value)})
        self._undo_casts(state)

    def _states_of_others(self, saved: Saved) -> dict[int, Any]:
        """Return the states of parameters that are here and not in the checkpoint: load_state_dict would drop them."""
        absent = {i for i, name in enumerate(self._names) if names.join_segments(_GROUPS, name) not in saved.values}
        held = self._optimizer.state_dict()["state"] if absent else {}
        return {place: held[place] for place in held if place in absent}

    def _name_all_of_groups(self) -> list[list[str]]:
        """Return the names of the parameters whose options each group takes, also of those that other ranks hold."""
        return self.name_groups()

    def _group(
        self, group: dict[str, Any], of_group: Collection[str], at_place: Any, saved: Saved, filled: dict[int, Any]
    ) -> dict[str, Any]:
        places = self._places(group)
        loaded = {key: value for key, value in group.items() if key != "params"}
        digests = (saved.values.get(names.join_segments(_GROUPS, name)) for name in of_group)
        digest = next((each for each in digests if each is not None), None if of_group else at_place)
        if digest is not None:
            for key, value in saved.value(names.join_segments(_OPTIONS, str(digest))).items():
                if key in _HOW and key in loaded:
                    continue
                loaded[key] = unpack_option(value, loaded.get(key), filled)
        return {**loaded, "params": places}

    def _taken(self, place: int, below: str, tensor: torch.Tensor, layout: Mapping[str, Any]) -> torch.Tensor:
        """Return the tensor that the optimizer is to have, from the one that was filled."""
        param, said = self.params[place], layout.get(below)
        if self._key(place, below) in self._as_shards:
            return get_local_tensor(tensor)
        if self._is_own and is_dtensor(param) and isinstance(said, dict):
            return shards.lay_out(param, tensor, said)
        return tensor

    def _undo_casts(self, state: dict[int, Any]) -> None:
        """load_state_dict casts state to its parameter's dtype: 32 bits beside a parameter of 16 would lose half. And
        it may have made several tensors of one."""
        taken: dict[int, Any] = {}
        for place, own in state.items():
            live = self._optimizer.state.get(self.params[place])
            if live is not None:
                live.update({key: undo_casts(live[key], own[key], taken, key) for key in own if key in live})

    def _places(self, group: dict[str, Any]) -> list[int]:
        return [self._place_of[id(each)] for each in group["params"]]

    def _of_params(self, saved: Saved) -> list[ParamContent]:
        own = None if self._is_own else saved.at(self._own)
        return find_param_contents(saved, own, dict(zip(self._names, self.params, strict=True)))


def _find_dtype(param: torch.Tensor, saved: StoredTensor, casts: Casts) -> torch.dtype:
    """Return the type of a state that the optimizer does not have yet: the saved one, but for a cast.

    With `cast=True` it is that of the parameter, as the optimizer itself would make it in its first step.
    """
    dtype: torch.dtype = getattr(torch, saved.dtype)
    if casts.cast is not True:
        return casts.result(dtype)
    is_cast = len(saved.shape) > 0 and dtype.is_floating_point and casts.allows(dtype, param.dtype)
    return param.dtype if is_cast else dtype


def _per_parameter(group: Mapping[str, Any]) -> int:
    """Return how many tensors of a parameter's size an optimizer of torch keeps for it; 0 for unknown options."""
    averages = 2 if "betas" in group or "rho" in group else int("alpha" in group and "centered" in group)
    more = ("amsgrad", "momentum", "centered")
    return averages + sum(bool(group.get(each)) for each in more)
