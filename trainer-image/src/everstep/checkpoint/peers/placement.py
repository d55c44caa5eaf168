"""Choose which node keeps the copy of which: a pure function over nodes and their failure domains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def choose_copy_keepers(domains: Sequence[str]) -> tuple[int | None, ...]:
    """Return, for each node in their order, the node that keeps a copy of its slots; None for the only node of a run.

    `domains`: what each node fails together with (a rack, a zone, a machine), under any names. Every node keeps exactly
    one copy and none its own; as many copies as can be are in another domain than their node.

    Nodes in the order of their domains form a ring, and each one's keeper is as many places further as the largest
    domain has nodes: beyond its own domain, for all nodes unless one domain has more than half of them. With a domain
    for each node that is the next node. What domains are called does not count, so a node that is replaced within its
    domain, or by another machine where each is its own domain, changes nothing.
    """
    count = len(domains)
    if count < 2:
        return (None,) * count
    largest = max(Counter(domains).values())
    step = largest if largest < count else 1
    first = {domain: node for node, domain in reversed(list(enumerate(domains)))}
    ring = sorted(range(count), key=lambda node: (first[domains[node]], node))
    found: dict[int, int] = {node: ring[(place + step) % count] for place, node in enumerate(ring)}
    return tuple(found[node] for node in range(count))
