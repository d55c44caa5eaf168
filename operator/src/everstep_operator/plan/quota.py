"""Reads how many pods of a set a ResourceQuota could admit at most, from the API server's words when it rejects one.

Nothing else tells: the operator reads no quotas, and whose the rest of one is nobody knows. The limit alone is enough
to know that a set can never be complete. Admission plugins and webhooks with other words tell nothing.
"""

from __future__ import annotations

import re
from decimal import Decimal

from everstep_operator.plan.node_capacity import read_quantity

# A limit of Services or Secrets is none of pods, whatever its number.
_EXCEEDED = re.compile(
    r'pods(?: "[^"]*")? is forbidden: exceeded quota: [^,]+, requested: (\S+), used: \S+, limited: (\S+)'
)


def admitted_at_most(message: str) -> int | None:
    """Return how many pods like the rejected one the quota could hold if it held nothing else.

    Args:
        message: The API server's, or one that contains it.

    Returns:
        The number of pods, or None where the message does not tell.
    """
    found = _EXCEEDED.search(message)
    if found is None:
        return None
    requested, limited = map(_parse_amounts, found.groups())
    counts = [int(limited[name] / amount) for name, amount in requested.items() if amount > 0 and name in limited]
    return min(counts, default=None)


def _parse_amounts(text: str) -> dict[str, Decimal]:
    """Parse "pods=1,requests.cpu=2"."""
    pairs = (item.partition("=") for item in text.split(","))
    return {name: amount for name, _, value in pairs if (amount := read_quantity(value)) is not None}
