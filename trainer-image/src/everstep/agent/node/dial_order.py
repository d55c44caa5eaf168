"""Tells a dial that its leader has given up from the one that it has made since: the first may arrive last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.agent.wire.http_server import HttpError


class DialOrder:
    """The newest dial of the newest leader process."""

    def __init__(self) -> None:
        self._leader, self._number = "", 0

    def take(self, body: Mapping[str, Any]) -> None:
        """Note a leader's dial. Leaders of older versions do not number theirs.

        Raises:
            HttpError: The leader has dialled again since. A link for this one would close the one that stands, and the
                leader would take the node for lost.
        """
        leader, number = body.get("leader"), body.get("dial")
        if not isinstance(leader, str) or not isinstance(number, int):
            return
        if leader == self._leader and number < self._number:
            raise HttpError(409, "this leader has dialled again since")
        self._leader, self._number = leader, number
