"""Check that each rank whose state is to be saved for all is there: see FromRank."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.state.kinds import FromRank
from everstep.coordination.group import RankGroup


def check_source_ranks(objects: Mapping[str, object], group: RankGroup) -> None:
    """Check that each FromRank names a rank that has the object. Collective.

    Nobody would save the plain values of an object whose rank is not there, and no comparison of ranks would see it.

    Args:
        objects: What this rank gave.
        group: All ranks.

    Raises:
        CheckpointError: On all ranks, where an object of any of them comes from a rank that does not have it.
    """
    sources = {name: each.rank for name, each in objects.items() if isinstance(each, FromRank)}
    for rank, named in enumerate(given := group.gather(sources)):
        for name, source in named.items():
            shown = f"{name}: FromRank(…, rank={source}) of rank {rank}"
            if source >= len(given):
                allowed = f"0 to {len(given) - 1}" if len(given) > 1 else "0"
                count = f"{len(given)} ranks" if len(given) > 1 else "1 rank"
                raise CheckpointError(
                    f"{shown} names a rank that is not there, since this run has {count}, and no rank would save it: "
                    f"name a rank of {allowed}"
                )
            if given[source].get(name) != source:
                theirs = (
                    f"gives FromRank(…, rank={given[source][name]})" if name in given[source] else "does not give it so"
                )
                raise CheckpointError(
                    f"{shown} takes what rank {source} gives as the same, but rank {source} {theirs}, and "
                    "possibly no rank would save it: give the object on all ranks with the same rank, or under "
                    "different names as it is"
                )
