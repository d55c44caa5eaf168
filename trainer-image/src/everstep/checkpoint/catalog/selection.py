"""Select which checkpoint is meant, which of its names are wanted, and what they are called here. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import SupportsIndex, TypeVar

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.descriptions import KIND, is_description, object_of
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.format.manifest import Manifest
from everstep.checkpoint.format.start_mark import NO_STATE

Leaf = TypeVar("Leaf")
Rename = Mapping[str, str | None] | Callable[[str], str | None]
Only = str | Sequence[str]

_SHOWN = 12
# Beside an optimizer's `state`, what a checkpoint says of each parameter, by the same names.
_PARAM_GROUPS = ".param_groups."
_OF_PARAMS = (
    "param_groups", "places", "layout", "kept", "box", "stateless", "built", "aliases", "order", "param_names",
    "positions", "tensors", "axes",
)  # fmt: skip


class NoSuchStep(CheckpointError):
    """Raised when no checkpoint of the wanted step was committed; `steps` are those that there are, in order."""

    def __init__(self, where: str, step: int, steps: Iterable[int]) -> None:
        self.steps = sorted(set(steps))
        listed = ", ".join(map(str, self.steps[-_SHOWN:])) or "none at all"
        more = f"{len(self.steps) - _SHOWN} more and " if len(self.steps) > _SHOWN else ""
        super().__init__(
            f"there is no checkpoint of step {step} in {where}; there are {more}{listed}: give one of these as step=, "
            "or no step for the newest"
        )


def select_keys(keys: Collection[Key], step: int | Key | None, where: str) -> list[Key]:
    """Return the keys to try, the best first: greatest attempt first. A whole number of any type is a step.

    Args:
        keys: All that was committed.
        step: A step, of which every attempt's counts; a key, for exactly that one; None for all.
        where: The store, for messages.

    Raises:
        NoSuchStep: None of them is of this step.
        TypeError: `step` is none of these: neither "3" nor 3.0 nor True is taken for a number of steps.
    """
    check_wanted(step)
    found = [key for key in keys if is_meant(key, step)]
    if step is not None and not found:
        raise NoSuchStep(where, step.step if isinstance(step, Key) else step, (key.step for key in keys))
    return sorted(found, reverse=True)


def check_wanted(step: object) -> None:
    """Refuse what says of no checkpoint which one is meant.

    Raises:
        TypeError: It is no step, no key and not None: neither "3" nor 3.0 nor True is taken for a number of steps.
    """
    if isinstance(step, bool) or not (step is None or isinstance(step, Key | SupportsIndex)):
        raise TypeError(
            f"step is {step!r}, a {type(step).__name__}: give the number of a step as an integer, or the key of a "
            "checkpoint, as best() returns"
        )


def is_meant(key: Key, step: int | Key | None) -> bool:
    """Tell whether a checkpoint is one that a step, a key or nothing stands for."""
    return step is None or key == step or key.step == step


def is_wanted(name: str, only: Only | None) -> bool:
    """Tell whether a name is one of `only`.

    These are globs of whole names (`*` matches dots too), or names that all wanted ones lie below. None wants all.
    """
    if only is None:
        return True
    patterns = [only] if isinstance(only, str) else only
    return any(fnmatchcase(name, pattern) or name.startswith(f"{pattern}.") for pattern in patterns)


def rename_leaves(leaves: Mapping[str, Leaf], rename: Rename | None) -> dict[str, Leaf]:
    """Return the leaves by their new names.

    Args:
        leaves: By full names, as `model.layers.0.weight`.
        rename: Prefixes and what takes their place, of which the longest that fits counts; or a function. None in
            place of a prefix or a name leaves out what is called so.

    Raises:
        CheckpointError: Two names become one.
    """
    return {new: leaves[name] for name, new in _new_names(leaves, rename).items()}


def _new_names(given: Iterable[str], rename: Rename | None) -> dict[str, str]:
    """New names by the old ones; what describes an object goes with its leaves."""
    if rename is None:
        return {name: name for name in given}
    given = list(given)
    # A prefix may end with the dot that is behind the name of a part.
    by_name = rename if callable(rename) else _make_renaming(rename, given)
    by_part = rename if callable(rename) else _of_parts(by_name)
    found: dict[str, str] = {}
    origin: dict[str, str] = {}
    objects: dict[str, str] = {}
    descriptions = []
    for name in given:
        if name in NO_STATE:  # of the checkpoint itself: no object has them, and a function need not know of them
            found[name] = name
            continue
        if is_description(name):
            descriptions.append(name)
            continue
        new = by_name(name)
        if new is None:
            continue
        if not isinstance(new, str):
            raise CheckpointError(
                f"rename= gives {name} the name {new!r}, a {type(new).__name__}: return a text, or None to leave it out"
            )
        if new in origin:
            raise CheckpointError(f"rename= gives {origin[new]} and {name} the same name {new}: give each its own")
        found[name], origin[new] = new, name
        objects.setdefault(object_of(name), object_of(new))
    for name in descriptions:
        described = _renamed_description(name, by_part, objects.get(object_of(name)))
        if described is not None and described not in origin:
            found[name], origin[described] = described, name
    return found


def _make_renaming(prefixes: Mapping[str, str | None], given: Sequence[str]) -> Callable[[str], str | None]:
    """Return the function that a mapping stands for: what an optimizer has of a parameter goes with the parameter."""
    every = dict(prefixes)
    params: dict[str, set[str]] = {}  # by their optimizer
    for name in given:
        optimizer, found, param = name.partition(_PARAM_GROUPS)
        if found:
            params.setdefault(optimizer, set()).add(param)
    for old, new in prefixes.items():
        parent, dot, rest = old.partition(".state.")
        if not dot or parent not in params or (new is not None and ".state." not in new):
            continue
        for kind in _OF_PARAMS:
            every.setdefault(f"{parent}.{kind}.{rest}", new and new.replace(".state.", f".{kind}.", 1))
    moved = _find_moved_params(prefixes, given, params)

    def rename(name: str) -> str | None:
        optimizer = next((each for each in moved if name.startswith(f"{each}.")), None)
        if optimizer is None:
            return _with_prefix(name, every)
        kind, _, rest = name.removeprefix(f"{optimizer}.").partition(".")
        start, pieces = f"{optimizer}.{kind}.", rest.split(".")
        if kind not in ("state", *_OF_PARAMS) or any(len(old) > len(start) and name.startswith(old) for old in every):
            return _with_prefix(name, every)  # as it is given for this very parameter
        for end in range(len(pieces), 0, -1):
            if (param := ".".join(pieces[:end])) in moved[optimizer]:
                new = moved[optimizer][param]
                return None if new is None else _with_prefix(start + ".".join([new, *pieces[end:]]), every)
        return _with_prefix(name, every)

    return rename


def _of_parts(rename: Callable[[str], str | None]) -> Callable[[str], str | None]:
    """Return the renaming of what leaves lie below."""

    def rename_part(name: str) -> str | None:
        new = rename(f"{name}.")
        return None if new is None else new.removesuffix(".")

    return rename_part


def _find_moved_params(
    prefixes: Mapping[str, str | None], given: Sequence[str], params: Mapping[str, Collection[str]]
) -> dict[str, dict[str, str | None]]:
    """Return new names of parameters by the old ones, by optimizer: those of the one module that has such a parameter,
    or of all that have it where these agree. None for one that is left out of all."""
    tops = sorted({name.partition(".")[0] for name in given} - params.keys())
    names = set(given)
    found: dict[str, dict[str, str | None]] = {}
    for optimizer, every in params.items():
        for param in every:
            full = [param] if param in names else [f"{top}.{param}" for top in tops if f"{top}.{param}" in names]
            new = {_with_prefix(name, prefixes) for name in full}
            moved = {each if param in names else each.partition(".")[2] for each in new if each is not None}
            if new == {None}:
                found.setdefault(optimizer, {})[param] = None
            elif len(moved) == 1 and None not in new and moved != {param}:
                found.setdefault(optimizer, {})[param] = moved.pop()
    return found


def _renamed_description(name: str, rename: Callable[[str], str | None], new_object: str | None) -> str | None:
    """Return the new name of what describes an object, or a part of one; None where it is left out."""
    described = name.removesuffix(f".{KIND}")
    if new_object is None or described == object_of(name):
        return None if new_object is None else f"{new_object}.{KIND}"
    new = rename(described)
    return None if new is None else f"{new}.{KIND}"


def rename_manifest(manifest: Manifest, rename: Rename | None) -> Manifest:
    """Return the same checkpoint with its tensors and values under their new names. CheckpointError as above."""
    if rename is None:
        return manifest
    # All at once: an array is a tensor and a value of one name, and two others must not become that.
    new = _new_names(dict.fromkeys([*manifest.tensors, *manifest.values]), rename)
    tensors = {new[name]: each for name, each in manifest.tensors.items() if name in new}
    values = {new[name]: each for name, each in manifest.values.items() if name in new}
    return replace(manifest, tensors=dict(sorted(tensors.items())), values=dict(sorted(values.items())))


def _with_prefix(name: str, prefixes: Mapping[str, str | None]) -> str | None:
    found = max((each for each in prefixes if name.startswith(each)), key=len, default=None)
    if found is None:
        return name
    new = prefixes[found]
    return None if new is None else new + name.removeprefix(found)
