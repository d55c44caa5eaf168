"""A replacement's first word: where it is, said to the leader that ran before it.

The leader dials, and learns addresses from the operator, which has them from the kubelets, a second late. This second
is all there is to win: without any answer here the table comes anyway, so nothing that goes wrong is an error.
"""

from __future__ import annotations

import asyncio
import random

from .caller import SECONDS, Refused, post
from .node import Node
from .report import say

PATIENCE = 30.0  # seconds; long before, the operator knows the address
PAUSES = (0.1, 2.0)


async def announce(leader: str, token: bytes, node: Node) -> None:
    """POST /v1/announce to `leader` ("ip:port") until it has dialled, has refused, or PATIENCE is over."""
    config, clock = node.config, asyncio.get_running_loop().time
    word = {"epoch": config.epoch, "index": config.index, "uid": config.pod_uid, "address": node.address}
    pause, most = PAUSES
    end = clock() + PATIENCE
    while not node.linked and clock() < end:
        try:
            answer = await post(leader, token, "/v1/announce", word)
        except (OSError, ValueError, asyncio.TimeoutError, Refused):
            wait, pause = pause, min(2 * pause, most)
        else:
            if answer.status != 200:  # another epoch: the leader of ours has the table, or will have it
                say(f"the leader at {leader} wants no announcement: {answer.field('error')}")
                return
            wait = SECONDS  # so long a dial may take; to say it again would begin it again
        await asyncio.sleep(wait * random.uniform(0.75, 1.25))  # noqa: S311 - spreads load, hides nothing
