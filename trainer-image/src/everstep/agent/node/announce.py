"""A new agent's first word: where it is, said to the leader.

The leader dials, and learns addresses from the operator, which has them from the kubelets, a second late: at the start
of a job all of them, of which the slowest counts. A leader that ran before is known by its address, another by its
name, which needs the report of one kubelet. This second is all there is to win: without any answer here the table comes
anyway, so nothing that goes wrong is an error.
"""

from __future__ import annotations

import asyncio
import random

from everstep.agent.system.agent_log import log_line
from everstep.agent.system.host_names import addresses_of
from everstep.agent.wire.http_client import REQUEST_TIMEOUT_SECONDS, AgentRequest, RequestRejected, send_request_once

from .node_agent import NodeAgent

PATIENCE_SECONDS = 30.0  # seconds; long before, the operator knows the address
SHORTEST, LONGEST = 0.05, 2.0  # seconds between two tries
RATE = 200  # tries in a second, of all agents together, at the start: each may be ten questions to the name server
LATER = 0.1  # of the time that has gone by: nobody who waits adds more than a tenth to it


async def announce_agent(leader: str, token: bytes, node: NodeAgent) -> None:
    """POST /v1/announce to `leader` ("host:port") until it has dialled, has rejected the announcement, or
    PATIENCE_SECONDS are over."""
    config, clock = node.config, asyncio.get_running_loop().time
    word = {"epoch": config.epoch, "index": config.index, "uid": config.pod_uid, "address": node.address}
    began = clock()
    while not node.linked and clock() < began + PATIENCE_SECONDS:
        try:
            address = (await asyncio.wait_for(addresses_of(leader), began + PATIENCE_SECONDS - clock()))[0]
            answer = await send_request_once(address, token, AgentRequest.post("/v1/announce", word))
        except (OSError, ValueError, asyncio.TimeoutError, RequestRejected):
            wait = min(LONGEST, max(SHORTEST, config.num_nodes / RATE) + LATER * (clock() - began))
        else:
            if answer.status != 200:  # another epoch: the leader of ours has the table, or will have it
                log_line(f"the leader at {leader} wants no announcement: {answer.field('error')}")
                return
            wait = REQUEST_TIMEOUT_SECONDS  # so long a dial may take; to say it again would begin it again
        await asyncio.sleep(wait * random.uniform(0.75, 1.25))  # noqa: S311 - spreads load, hides nothing
