"""Parameters of no module, which an optimizer knows by their place: what they are called where they are saved.

In another order, tensors of one shape would get each other's averages and nobody would notice. So a checkpoint says of
each place which saved tensor its parameter is, and under which name the optimizer was given it, where it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from everstep.checkpoint.state import names
from everstep.checkpoint.state.kinds import ANEW, Saved
from everstep.checkpoint.state.param_options import PARAM_NAMES

# Of each parameter of no module: the saved tensor that it is, as `<parameter>.<full name>`, and true.
TENSORS = "tensors"


def name_place(place: int) -> str:
    """Return the name of a parameter of no module."""
    return f"#{place}"


def is_place(name: str) -> bool:
    """Tell whether a parameter is known by its place alone; no name of a module's parameter begins so."""
    return name.startswith("#")


def find_holders(leaves: Iterable[tuple[str, Any]]) -> dict[int, list[str]]:
    """Return the full names of tensors by identity.

    Args:
        leaves: Of values that are saved, by their full names.
    """
    found: dict[int, list[str]] = defaultdict(list)
    for name, leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found[id(leaf)].append(name)
    return dict(found)


def describe_holders(held: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, Any]]:
    """Yield names below an optimizer, and values, that say which saved tensors its parameters are.

    Args:
        held: By the name of a parameter of no module, the full names of the tensors that it is.
    """
    for param, every in held.items():
        for name in every:
            # In the name, because ranks may have other parameters each at the same place.
            yield names.join_segments(TENSORS, param, name), True


def find_moved_params(
    saved: Saved, held: Mapping[str, Sequence[str]], groups: Iterable[tuple[Sequence[str], Sequence[str] | None]]
) -> Iterator[str]:
    """Yield why the state of parameters of no module would come to other ones than it was saved of.

    Args:
        saved: What the checkpoint has of the optimizer.
        held: As given to describe_holders(), of this process.
        groups: The names of each group's parameters, and those that the optimizer was given for them.
    """
    tensors: dict[str, list[str]] = defaultdict(list)
    given: dict[str, str] = {}
    for name in saved.values:
        kind, _, rest = name.partition(".")
        param, _, below = rest.partition(".")
        if kind == TENSORS:
            tensors[param].append(below)
        elif kind == PARAM_NAMES and is_place(param):
            given[param] = str(saved.value(name))
    every = (saved.everything or saved).tensors
    for param, ours in held.items():
        # A tensor that rename= has given another name is none of which anything can be told.
        theirs = [each for each in tensors.get(param, ()) if each in every]
        if theirs and not set(theirs) & set(ours):
            yield _describe(saved, param, theirs[0], ours[0])
            return
    here = {
        param: name for params, own in groups for param, name in zip(params, own or (), strict=False) if is_place(param)
    }
    for param, name in here.items():
        if given.get(param, name) != name and given[param] in here.values():
            yield _describe(saved, param, given[param], name)
            return


def _describe(saved: Saved, param: str, was: str, now: str) -> str:
    return (
        f"{saved.prefix} knows parameters of no module by their order, and its parameter {param} was {was} when saved, "
        f"and is {now} here: give {saved.prefix} its parameters in the order in which they were saved, or leave it out "
        f"of restore() and {ANEW}"
    )
