"""Tensors of a module that are tied: one tensor, which a checkpoint has under each of its names.

Beside each of these names the checkpoint says that they are one. What load() returns shares it then, as a state_dict()
does, and a file of another library holds it once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from everstep.checkpoint.format.descriptions import KIND
from everstep.checkpoint.state import names

TIED = "tied"  # in the description of a tensor: the first of its names when it was saved, and which of them this is


def describe_ties(groups: Iterable[Sequence[str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and the descriptions that a checkpoint has there.

    Args:
        groups: Full names of one tensor each, in the order of the module's state_dict().
    """
    for group in groups:
        for place, name in enumerate(group):
            yield names.join_segments(name, KIND), {TIED: [group[0], place]}


def find_kept_names(descriptions: Mapping[str, Any], held: Collection[str]) -> dict[str, str]:
    """Return the name that stands for each of the held names which is tied to it: the first of them that is held.

    Args:
        descriptions: By full names, renamed or as they were saved.
        held: Full names of tensors.
    """
    groups: dict[str, list[tuple[int, str]]] = {}
    for described, each in descriptions.items():
        name = described.removesuffix(f".{KIND}")
        if isinstance(each, Mapping) and TIED in each and name in held:
            label, place = each[TIED]
            groups.setdefault(label, []).append((place, name))
    return {name: min(group)[1] for group in groups.values() for _, name in group if name != min(group)[1]}
