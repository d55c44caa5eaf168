"""A client of a leader that blocks: what the operator says to a leader, for `everstep run` and for tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from everstep.agent.wire.http_client import AgentRequest, RequestRejected, send_request_once

MAX_STATE_BYTES = 8 * 1024 * 1024


class LeaderClient:
    """The requests to one leader, each on a connection of its own. Not for a thread that runs an event loop.

    Every method raises `RequestRejected` when the leader rejects the request or its answer is not authentic, and
    OSError when it cannot be reached or does not answer in time.
    """

    def __init__(self, address: str, token: bytes, timeout: float = 10.0) -> None:
        """Make a client of the leader at `address` ("ip:port"); `timeout` in seconds is for everything but a long
        poll's own wait."""
        self._address = address
        self._token = token
        self._timeout = timeout

    def state(
        self, after: str = "", wait: float = 0.0, charged: str = "", allowance: int | None = None
    ) -> dict[str, Any]:
        """Return the leader's state, once it is no longer `after`.

        Args:
            after: The state known already, "incarnation:version"; empty for none.
            wait: Seconds after which the state is returned in any case.
            charged: The newest generation that was charged, "epoch.generation".
            allowance: Application restarts left after `charged`; None grants nothing.
        """
        query: dict[str, Any] = {"after": after, "wait": wait, "charged": charged}
        if allowance is not None:
            query["allowance"] = allowance
        return self._send("GET", f"/v1/state?{urlencode(query)}", b"", wait)

    def peers(self, epoch: int, addresses: Mapping[int, str]) -> None:
        self._post("/v1/peers", {"epoch": epoch, "addresses": {str(i): a for i, a in addresses.items()}})

    def checkpoint(self, epoch: int, name: str, deadline: float | None = None) -> None:
        """Have all ranks save at their next step boundary.

        Args:
            epoch: That of the leader.
            name: Id of the request: the same one again changes nothing.
            deadline: Seconds left for it; None: no hurry.
        """
        self._post("/v1/checkpoint", {"epoch": epoch, "id": name, "deadline": deadline})

    def stop(self, reason: str) -> None:
        self._post("/v1/stop", {"reason": reason})

    def _post(self, target: str, data: Any) -> None:
        self._send("POST", target, json.dumps(data).encode())

    def _send(self, method: str, target: str, body: bytes, wait: float = 0.0) -> dict[str, Any]:
        request = AgentRequest(
            method, target, body, timeout_seconds=self._timeout + wait, max_answer_bytes=MAX_STATE_BYTES
        )
        answer = asyncio.run(send_request_once(self._address, self._token, request))
        if answer.status != 200:
            raise RequestRejected(answer.status, str(answer.field("error")))
        result: dict[str, Any] = json.loads(answer.body)
        return result
