"""Everything that is neither a module nor an optimizer: objects with a state_dict, tensors, plain nested values."""

from __future__ import annotations

import copy
import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.descriptions import is_description
from everstep.checkpoint.state import names
from everstep.checkpoint.state.aliases import find_aliases, list_objects, name_path, share_objects
from everstep.checkpoint.state.bulk import is_leaf
from everstep.checkpoint.state.classes import describe_stateful, why_other_class
from everstep.checkpoint.state.kinds import (
    Saved,
    Stateful,
    Stepped,
    describe_misfit,
    detach_leaf,
    filled_later,
    have_other_bytes,
    is_tensor,
    make_fresh_tensor,
)
from everstep.checkpoint.state.loaded import is_instance
from everstep.checkpoint.state.loader_samplers import find_epochs, is_loader, set_epochs
from everstep.checkpoint.state.loaders import (
    begin_anew,
    begin_loader,
    check_position,
    is_loader_of_torchdata,
    read_state,
    why_other_workers,
)
from everstep.checkpoint.state.memory import fill_overlapping, overlaps_itself, why_not_written
from everstep.checkpoint.state.nesting import check_nesting
from everstep.checkpoint.state.structure import KIND, OPTIMIZER, STATEFUL, VALUE, describe_structure

_log = logging.getLogger("everstep.checkpoint")

_EPOCHS = "epochs"  # of a loader's samplers
_SCALER = ("torch.amp.grad_scaler", "GradScaler")
_PLAIN = (dict, OrderedDict, defaultdict, Counter, list, tuple, set, bytearray, deque)  # have nothing beside content


class StatefulObject:
    """An object with state_dict and load_state_dict: a scheduler, a scaler, a sampler.

    A gradient scaler that was disabled when it was saved has no state: one that is enabled now stays as the script made
    it, and `kept` names it.

    Attributes:
        taken: After load(), the state that the object was given, in containers of its own; None where none was.
    """

    exclusive = False  # its state may have other names in the next step, so what is saved decides

    def __init__(self, prefix: str, inner: Stateful, step: int | None) -> None:
        self.prefix = prefix
        self._inner = inner
        self._step = step
        self._live: Any = {}
        self.kept: list[str] = []
        self.taken: Any = None

    @property
    def inner(self) -> Stateful:
        return self._inner

    def leaves(self) -> Iterator[tuple[str, Any]]:
        if is_loader(self._inner):
            check_position(self._inner, self.prefix)
        if self._step is not None and isinstance(self._inner, Stepped):
            state = self._inner.state_at(self._step)
        else:
            state = read_state(self._inner, is_saved=self._step is not None)
        check_nesting(state, self.prefix)
        yield from _iterate_leaves(self.prefix, state)
        more = {"class": describe_stateful(self._inner)}
        if is_loader(self._inner):
            more[_EPOCHS] = find_epochs(self._inner)
        yield names.join_segments(self.prefix, KIND), describe_structure(STATEFUL, state, is_leaf, **more)

    def targets(self, saved: Saved, problems: list[str]) -> dict[str, torch.Tensor]:
        _check_is_no_optimizer(saved, problems)
        # Of another class it would be taken without a word: a scheduler updates its __dict__.
        theirs = (saved.description or {}).get("class", {})
        if why := why_other_class(self.prefix, describe_stateful(self._inner), theirs):
            problems.append(why)
        elif why := why_other_workers(self._inner, self.prefix, saved):
            problems.append(why)
            return {}
        self._live = read_state(self._inner) if saved.tensors else {}
        if isinstance(self._live, Mapping) and "" in saved.tensors:
            problems.append(
                f"{self.prefix} is a tensor in the checkpoint, and a {type(self._inner).__name__} here, whose state is "
                "a dictionary: give a tensor, or another name"
            )
            return {}
        self._check_shares_keys(saved, problems)
        return _make_targets(saved, self._live, problems)

    def _check_shares_keys(self, saved: Saved, problems: list[str]) -> None:
        """See that what a scheduler or a scaler gets has any key of its state: a scheduler takes whatever it is given,
        and goes on as a new one."""
        if not describe_stateful(self._inner):
            return
        # Without what is a state in one piece: an empty one, as that of a scaler that was disabled.
        given = {name.partition(".")[0] for name in (*saved.tensors, *saved.values) if not is_description(name)} - {""}
        ours = {names.escape_segment(key) for key in read_state(self._inner) if isinstance(key, str)}
        if given and ours and given.isdisjoint(ours):
            problems.append(
                f"{self.prefix} is a {type(self._inner).__name__} here, and has no key of its state in the checkpoint "
                f"({', '.join(sorted(given)[:3])} …): give the object that was saved under this name, or another name"
            )

    def load(self, saved: Saved, tensors: Mapping[str, torch.Tensor]) -> None:
        live, self._live = self._live, {}
        # Makes containers anew.
        state = with_types_of(live, _nest_as(live, saved, tensors), is_ordered=_says_order(saved))
        if is_instance(self._inner, *_SCALER) and not state:
            self.kept = [self.prefix] if self._inner.state_dict() else []
            return
        if is_loader_of_torchdata(self._inner) and not state:  # it had not begun
            set_epochs(self._inner, (saved.description or {}).get(_EPOCHS, {}))
            begin_anew(self._inner)
            return
        state = share_objects(state, (saved.description or {}).get("aliases", ()))
        self.taken = with_types_of(state, state, is_ordered=True)  # an object may pop keys of what it is given
        self._inner.load_state_dict(state)
        if is_loader(self._inner):
            set_epochs(self._inner, (saved.description or {}).get(_EPOCHS, {}))
            begin_loader(self._inner, self.prefix)


class StateValue:
    """A tensor, or a nested value: a dictionary and a list get their content back in place.

    A key of the dictionary that the checkpoint does not have keeps its value, as a default that a newer version of the
    script gives it: `kept` names them. What lies deeper is data, and comes back as it was saved.
    """

    exclusive = False

    def __init__(self, prefix: str, value: Any) -> None:
        self.prefix = prefix
        self.value = value
        self.kept: list[str] = []

    @property
    def takes_in(self) -> bool:
        """Tell whether the value can get another content, as a restore gives it, and stay the object that it is."""
        is_array = is_instance(self.value, "numpy", "ndarray") and self.value.flags.writeable
        return is_array or isinstance(self.value, torch.Tensor | MutableMapping | list | tuple | set | bytearray)

    def leaves(self) -> Iterator[tuple[str, Any]]:
        # Of a mapping that is no dictionary the content is saved: the script's own object gets it back.
        plain = isinstance(self.value, Mapping) and not isinstance(self.value, dict)
        state = dict(self.value) if plain else self.value
        check_nesting(state, self.prefix)
        yield from _iterate_leaves(self.prefix, state)
        yield names.join_segments(self.prefix, KIND), describe_structure(VALUE, state, is_leaf)

    def named_leaves(self) -> Iterator[tuple[str, Any]]:
        """Yield full names and the leaves as the script holds them."""
        plain = isinstance(self.value, Mapping) and not isinstance(self.value, dict)
        return names.walk_leaves(dict(self.value) if plain else self.value, is_leaf, self.prefix)

    def targets(self, saved: Saved, problems: list[str]) -> dict[str, torch.Tensor]:
        _check_is_no_optimizer(saved, problems)
        self._check_tied(saved, problems)
        if is_tensor(self.value) and "" not in saved.tensors:
            problems.append(f"{self.prefix} is no tensor in the checkpoint")
            return {}
        if not is_tensor(self.value):
            problems += [
                f"{saved.full(name)} {why}"
                for name, leaf in _name_leaves(saved, self.value)
                if is_tensor(leaf) and name in saved.tensors and (why := why_not_written(leaf))
            ]
        return _make_targets(saved, self.value, problems, whole=is_tensor(self.value))

    def _check_tied(self, saved: Saved, problems: list[str]) -> None:
        """See that no two saved tensors would be read into what is one here."""
        for first, *others in find_aliases(self.value).groups:
            known = _name_path(saved, self.value, first)
            for name in (_name_path(saved, self.value, path) for path in others):
                if {known, name} <= saved.tensors.keys() and have_other_bytes(saved, known, name):
                    problems.append(
                        f"{saved.full(known)} and {saved.full(name)} are one tensor here and have different values in "
                        "the checkpoint: give each its own before restore()"
                    )

    def load(self, saved: Saved, tensors: Mapping[str, torch.Tensor]) -> None:
        loaded = _nest_as(self.value, saved, tensors)
        before = list_objects(self.value)
        is_ordered, replaced = _says_order(saved), set[str]()
        if isinstance(self.value, MutableMapping) and isinstance(loaded, Mapping):
            kept = [key for key in self.value if key not in loaded]
            self.kept = [names.join_segments(self.prefix, f"{key}") for key in kept]
            for key, value in loaded.items():
                self.value[key] = (
                    _put_into(self.value[key], value, is_ordered, replaced) if key in self.value else value
                )
            if is_ordered and isinstance(self.value, dict):
                for key in (*loaded, *kept):
                    self.value[key] = self.value.pop(key)
            _take_attributes(self.value, loaded)
        elif is_tensor(self.value) and overlaps_itself(self.value):
            fill_overlapping(self.value, loaded, self.prefix)
        else:
            taken = _put_into(self.value, loaded, is_ordered, replaced)
            if taken is not self.value:
                shown = type(self.value).__name__
                raise CheckpointError(
                    f"{self.prefix}: the {shown} that was given cannot take in what was saved, which has another size "
                    f"or kind ({type(loaded).__name__}); give it in a dictionary, as state={{{self.prefix!r}: …}}"
                )
        if replaced:
            _log.warning(
                "%s holds another %s than before restore(): read it from there, as what held the earlier one, such as "
                "a variable, still does",
                self.prefix,
                " and another ".join(sorted(replaced)),
            )
        # What the script holds stays, since others may hold it too; what is new is shared as it was.
        self.value = share_objects(self.value, (saved.description or {}).get("aliases", ()), keep=before)


def with_types_of(live: Any, loaded: Any, *, is_ordered: bool) -> Any:
    """Return the loaded value, with dictionaries of the kinds of those in `live` at the same places.

    Names in a checkpoint say that something is a dictionary, not of which kind.

    Args:
        live: What the script holds.
        loaded: What was saved.
        is_ordered: Whether its dictionaries are in the order in which they were saved; an older checkpoint does not
            say it, and then the order of those in `live` counts.
    """
    if isinstance(live, dict) and isinstance(loaded, dict):
        # What was saved in one piece has its own order and kind.
        has_order = is_ordered or type(loaded) is not dict
        order = loaded if has_order else {**{key: 0 for key in live if key in loaded}, **loaded}
        content = {key: with_types_of(live.get(key), loaded[key], is_ordered=is_ordered) for key in order}
        new = copy.copy(live if type(loaded) is dict or type(loaded) is type(live) in _PLAIN else loaded)
        new.clear()
        new.update(content)
        return new
    if type(live) is type(loaded) is list and len(live) == len(loaded):
        return [with_types_of(*pair, is_ordered=is_ordered) for pair in zip(live, loaded, strict=True)]
    return loaded


def _put_into(live: Any, loaded: Any, is_ordered: bool, replaced: set[str]) -> Any:
    """Give what the script holds the loaded content: others, as an optimizer, may hold the same tensor or list.

    See _put_content().
    """
    taken = _put_content(live, loaded, is_ordered, replaced)
    if taken is live:
        _take_attributes(live, loaded)
    return taken


def _take_attributes(live: Any, loaded: Any) -> None:
    """Give a container of a class of its own what it has beside its content, as a buffer that counts what it got.

    Attributes that are the keys of a dictionary are its content.
    """
    if type(live) is not type(loaded) or type(live) in _PLAIN or not isinstance(live, _PLAIN):
        return
    if not hasattr(live, "__dict__") or (isinstance(loaded, dict) and vars(loaded).keys() <= loaded.keys()):
        return
    vars(live).clear()
    vars(live).update(vars(loaded))


def _put_content(live: Any, loaded: Any, is_ordered: bool, replaced: set[str]) -> Any:
    """Put the loaded content into what the script holds.

    Args:
        live: What the script holds.
        loaded: What was saved.
        is_ordered: See with_types_of().
        replaced: Classes of objects that could not take their content, and that others may still hold, are added.

    Returns:
        What the script holds, where it can take the content; else the loaded value.
    """
    if is_tensor(live) and is_tensor(loaded):
        return _fill_tensor(live, loaded)
    if isinstance(live, MutableMapping) and isinstance(loaded, Mapping):
        typed = with_types_of(live, loaded, is_ordered=is_ordered)
        content = {
            key: _put_into(live[key], each, is_ordered, replaced) if key in live else each
            for key, each in typed.items()
        }
        live.clear()
        live.update(content)
        return live
    if isinstance(live, list | tuple) and isinstance(loaded, list | tuple) and len(live) == len(loaded):
        typed = with_types_of(live, loaded, is_ordered=is_ordered)
        elements = [_put_into(*pair, is_ordered, replaced) for pair in zip(live, typed, strict=True)]
        if isinstance(live, list):
            live[:] = elements
        elif any(one is not other for one, other in zip(live, elements, strict=True)):
            return type(loaded)(elements) if type(loaded) in (list, tuple) else loaded
        return live
    if isinstance(live, list) and isinstance(loaded, list):
        live[:] = with_types_of(live, loaded, is_ordered=is_ordered)
        return live
    if isinstance(live, bytearray) and isinstance(loaded, bytearray):
        live[:] = loaded
        return live
    if isinstance(live, set) and isinstance(loaded, set):
        live.clear()
        live |= loaded
        return live
    if isinstance(live, deque) and isinstance(loaded, deque):
        live.clear()
        live.extend(loaded)
        return live
    taken = _fill_array(live, loaded)
    if taken is not live and _may_be_held(live) and isinstance(loaded, type(live)):
        replaced.add(f"{type(live).__module__}.{type(live).__qualname__}")
    return taken


def _may_be_held(live: object) -> bool:
    """Tell whether an object is more than its value, as a generator of random numbers: what has a hash of its own is
    its value, and a script that holds an array or a tensor of another size has to look for the new one anyway."""
    is_sized = is_tensor(live) or is_instance(live, "numpy", "ndarray")
    return not is_sized and type(live).__hash__ in (None, object.__hash__)


def _fill_tensor(live: torch.Tensor, loaded: torch.Tensor) -> torch.Tensor:
    """Copy into a tensor of the script, so that it stays the parameter that an optimizer holds; else the loaded one."""
    if live is loaded or live.is_meta or (live.shape, live.dtype) != (loaded.shape, loaded.dtype):
        return loaded
    with torch.no_grad():
        if overlaps_itself(live):
            fill_overlapping(live, loaded, "a tensor in a dictionary or list")
        else:
            live.copy_(loaded)
    return live


def _fill_array(live: Any, loaded: Any) -> Any:
    """Return the same for arrays of NumPy, which this module does not import."""
    # A scalar of NumPy has flags too, and that of a record says that it can be written.
    fits = is_instance(live, "numpy", "ndarray") and type(live) is type(loaded) and type(live).__module__ == "numpy"
    if fits and live.flags.writeable and (live.shape, live.dtype) == (loaded.shape, loaded.dtype):
        live[...] = loaded
        return live
    return loaded


def _iterate_leaves(prefix: str, state: Any) -> Iterator[tuple[str, Any]]:
    for name, leaf in names.walk_leaves(state, is_leaf, prefix):
        yield name, detach_leaf(leaf)


def _says_order(saved: Saved) -> bool:
    """Tell whether dictionaries are in the order that they had: a module's state has the order of whoever loads it."""
    return saved.description is not None and not saved.is_module


def _is_flat(saved: Saved, live: Any) -> bool:
    """Tell whether a state is a module's, by the names of its tensors, and not nested here.

    An import takes any dictionary of tensors for a module's: nothing in a file says whether a script will give a
    module, or a dictionary of averaged weights.
    """
    if not (saved.is_module and isinstance(live, Mapping)):
        return False
    return not any("." in name and name in saved.tensors for name, _ in names.walk_leaves(live, is_leaf))


def _nest_as(live: Any, saved: Saved, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the nested state that was saved; that of a module in the order, and as the kind, of what is there now."""
    if not _is_flat(saved, live):
        return saved.nested(tensors, {} if saved.is_module else None)
    loaded = saved.nested(tensors)
    ordered = [*(key for key in live if key in loaded), *(key for key in loaded if key not in live)]
    for key in ordered:
        loaded.move_to_end(key)
    return loaded if isinstance(live, OrderedDict) else dict(loaded)


def _name_leaves(saved: Saved, state: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a state with the names that the checkpoint has for them."""
    if _is_flat(saved, state):
        return ((names.of_module(key), leaf) for key, leaf in state.items() if isinstance(key, str))
    return names.walk_leaves(state, is_leaf)


def _name_path(saved: Saved, state: Any, path: tuple[Any, ...]) -> str:
    if len(path) == 1 and isinstance(path[0], str) and _is_flat(saved, state):
        return names.of_module(path[0])
    return name_path(state, path)


def _check_is_no_optimizer(saved: Saved, problems: list[str]) -> None:
    if (saved.description or {}).get("is") == OPTIMIZER:
        problems.append(
            f"{saved.prefix} is an optimizer in the checkpoint, whose state belongs to names of parameters, and is "
            "none here: give the optimizer itself, or another name"
        )


def _make_targets(saved: Saved, state: Any, problems: list[str], *, whole: bool = False) -> dict[str, torch.Tensor]:
    """Tensors like those that the object holds now, sharded as they are; new ones for names that it does not hold.

    `whole`: the object is a tensor, so the bytes go into it and must fit.
    """
    held = {name: leaf for name, leaf in _name_leaves(saved, state) if is_tensor(leaf)}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in saved.tensors.items():
        mine = held.get(name)
        if mine is None:
            found[saved.full(name)] = make_fresh_tensor(tensor)
        elif whole:
            if why := describe_misfit(tensor, mine, saved.casts):
                problems.append(f"{saved.full(name)} {why}")
            found[saved.full(name)] = filled_later(mine.detach())
        elif describe_misfit(tensor, mine, saved.casts):
            # An object may hold tensors that grow; but what is sharded can only come back as it was.
            if hasattr(mine, "placements"):
                problems.append(f"{saved.full(name)} {describe_misfit(tensor, mine)}")
            new = make_fresh_tensor(tensor)
            found[saved.full(name)] = new if mine.is_cpu else torch.empty_like(new, device=mine.device)
        else:
            found[saved.full(name)] = torch.empty_like(mine)
    return found
