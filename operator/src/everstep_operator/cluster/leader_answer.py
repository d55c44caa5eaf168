"""Parses a leader's answer once it is known that parsing it is cheap.

Text is parsed at the speed of memory, but each list, object and string costs an allocation: 1 MiB of `[],[],…` keeps
the event loop for as long as a hundred honest answers, and with it the Lease. So lists, objects, strings and commas are
counted first, which needs no allocation for each of them, and compared with what an honest leader of so many nodes can
send: 64 entries of the history of generations, 32 devices, and for each node its number and why it is unclean.
"""

from __future__ import annotations

import json
from typing import Any

MAX_BYTES = 1 << 20
# The history in a script other than Latin, of which JSON spells each letter with six bytes: 64 messages of 1,024
# letters are 384 KiB, and the eight log tails of 20 lines of 400 are 375 KiB.
BASE_BYTES, BYTES_OF_A_NODE = 896 << 10, 1280
BASE_TOKENS, TOKENS_OF_A_NODE = 6_000, 24
BYTES_OF_A_TOKEN = 32  # outside of strings: numbers, and the spaces of an encoder that makes some
MAX_DEPTH = 6  # state, history, entry, log tail; and two for what comes later


class ImplausibleAnswer(Exception):
    """An answer that no leader of so many nodes sends."""


def max_bytes(num_nodes: int) -> int:
    """Return the size in bytes that the answer of an honest leader of `num_nodes` nodes does not exceed."""
    return min(MAX_BYTES, BASE_BYTES + BYTES_OF_A_NODE * num_nodes)


def parse_answer(data: bytes, num_nodes: int) -> Any:
    """Return the JSON value that `data` spells.

    Args:
        data: Body of the answer.
        num_nodes: Number of nodes of the job.

    Raises:
        ImplausibleAnswer: If it is larger, has more parts, or is nested deeper than an honest answer; then nothing of
            it was parsed. Or if it is not JSON.
    """
    if len(data) > max_bytes(num_nodes):
        raise ImplausibleAnswer(
            f"{len(data)} bytes; a leader of {num_nodes} nodes sends at most {max_bytes(num_nodes)}"
        )
    most = BASE_TOKENS + TOKENS_OF_A_NODE * num_nodes
    # Without escaped quotes, every second part between quotes is a string. No string is copied once there are too many.
    parts = data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"', 2 * most + 1)
    outside = b"".join(parts[::2])
    tokens = len(parts) // 2 + sum(map(outside.count, (b",", b"[", b"{")))
    if tokens > most or len(outside) > BYTES_OF_A_TOKEN * most:
        raise ImplausibleAnswer(f"more than {most} values, the most that a leader of {num_nodes} nodes sends")
    if _is_deeper(outside, MAX_DEPTH):
        raise ImplausibleAnswer(f"values nested more than {MAX_DEPTH} deep, or brackets that do not match")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ImplausibleAnswer(f"not JSON: {error}") from error


_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def _is_deeper(outside: bytes, depth: int) -> bool:
    """Tell whether brackets are left once the innermost pairs are removed `depth` times."""
    left = outside.translate(None, _ALL_BUT_BRACKETS)
    for _ in range(depth):
        # Side by side, `[]` and `{}` are of the same depth, and neither removal makes a new pair of the other kind:
        # what is left between is marked, and the marks go at the end of the turn.
        left = left.replace(b"[]", b".").replace(b"{}", b".").replace(b".", b"")
    return bool(left)
