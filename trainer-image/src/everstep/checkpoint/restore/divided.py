"""Find what of the dictionaries of a script is other ranks' alone, as averages of the weights of a pipeline's stages.

Each rank of a pipeline keeps the average of its own part, under the names of the model. Would it be given those of all
parts, it would hold copies that do not follow the training, which the next save finds to differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, MutableMapping

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.state import names
from everstep.checkpoint.state.nesting import check_nesting
from everstep.checkpoint.state.plain import StateValue
from everstep.coordination.consensus import Consensus


def find_elsewhere(consensus: Consensus, objects: Mapping[str, object]) -> frozenset[str]:
    """Find the full names of what some ranks hold in dictionaries, and this rank does not. Collective.

    What no rank holds is not among them: a dictionary may be empty on all ranks until it is restored. What is below one
    of them, as in a history that is empty yet on the rank that keeps it, is that rank's too.

    Args:
        consensus: Of all ranks.
        objects: What is to be restored, by name.
    """
    own = {name for prefix, each in objects.items() for name in _iterate_names(prefix, each)}
    text = "\n".join(sorted(own)).encode("utf-8", "surrogatepass")  # a key may be the name of a file
    digest = hashlib.blake2b(text, digest_size=16).hexdigest()
    if consensus.agree(digest, lambda every: len(set(every)) == 1):
        return frozenset()
    some = consensus.agree(
        sorted(own), lambda every: sorted(set().union(*every) - set(every[0]).intersection(*every[1:]))
    )
    return frozenset(some) - own - {parent for name in own for parent in names.iterate_parents(name)}


def _iterate_names(prefix: str, each: object) -> Iterator[str]:
    # One that is marked says itself whose content is restored to whom.
    if not isinstance(each, MutableMapping):
        return
    start = names.escape_segment(prefix)
    try:
        check_nesting(each, start)
    except CheckpointError:
        return  # it is rejected by its name when it is bound
    yield from (name for name, _ in StateValue(start, each).named_leaves() if name != start)
    # As an import names what it takes for a module's state.
    yield from (names.join_segments(start, names.of_module(key)) for key in each if isinstance(key, str) and "." in key)
