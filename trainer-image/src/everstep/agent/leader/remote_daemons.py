"""A launcher's daemons on other nodes (MPI), as the leader's node starts, hears and kills them."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from everstep.agent.node.supervisor_interface import SupervisorInterface

from .node_links import Links

UNREACHABLE = 255  # as ssh says


class RemoteDaemons:
    def __init__(self, links: Links) -> None:
        self._links = links
        self._running: dict[str, tuple[int, asyncio.Future[int]]] = {}

    async def spawn(self, index: int, daemon: str, argv: list[str], env: dict[str, str]) -> int:
        """Run a daemon on node `index` until it exits; return 255 when the node is out of reach. Cancelling kills
        it."""
        channel = self._links.get(index)
        if channel is None:
            return UNREACHABLE
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._running[daemon] = (index, waiter)
        channel.send({"type": "spawn", "daemon": daemon, "argv": argv, "env": env})
        try:
            return await waiter
        finally:
            if self._running.pop(daemon, None) is not None:  # cancelled: the daemon still runs
                channel.send({"type": "kill", "daemon": daemon})

    def forward_output(self, index: int, message: dict[str, Any], processes: SupervisorInterface) -> None:
        if self._running.get(message["daemon"], (-1,))[0] == index:
            data = base64.b64decode(message["data"])
            processes.daemon_output(message["daemon"], str(message["stream"]), data)

    def handle_exit(self, index: int, message: dict[str, Any]) -> None:
        if self._running.get(message["daemon"], (-1,))[0] == index:
            self._finish(message["daemon"], int(message["exitCode"]))

    def handle_node_loss(self, index: int) -> None:
        """End the daemons of a node that is out of reach."""
        for daemon, (where, _) in list(self._running.items()):
            if where == index:
                self._finish(daemon, UNREACHABLE)

    def _finish(self, daemon: str, code: int) -> None:
        _, waiter = self._running.pop(daemon)
        if not waiter.done():
            waiter.set_result(code)
