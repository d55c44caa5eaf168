"""Reads back from the API server's audit log who asked it for what."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WRITES = ("create", "update", "patch", "delete", "deletecollection")
# Heartbeats and access reviews go on whether or not anything is measured.
BACKGROUND = ("leases", "nodes", "subjectaccessreviews", "tokenreviews", "selfsubjectaccessreviews")


@dataclass(frozen=True)
class Request:
    user: str
    verb: str
    resource: str
    subresource: str
    namespace: str


class AuditLog:
    """The log from the moment of construction on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = path.stat().st_size

    def requests(self) -> Iterator[Request]:
        with self._path.open("rb") as log:
            log.seek(self._start)
            for line in log:
                if not line.endswith(b"\n"):
                    return  # being written: it has ended after what is asked about
                event = json.loads(line)
                target = event.get("objectRef", {})
                yield Request(
                    event["user"]["username"],
                    event["verb"],
                    target.get("resource", ""),
                    target.get("subresource", ""),
                    target.get("namespace", ""),
                )

    def of_operator(self) -> list[Request]:
        """Return the operator's requests, without its Lease and its watches."""
        return [
            request
            for request in self.requests()
            if request.user.endswith(":everstep") and request.verb != "watch" and request.resource not in BACKGROUND
        ]

    def writes(self, namespaces: set[str]) -> int:
        """Return all writes in these namespaces, whoever made them, events included."""
        return sum(
            request.verb in WRITES and request.namespace in namespaces and request.resource not in BACKGROUND
            for request in self.requests()
        )
