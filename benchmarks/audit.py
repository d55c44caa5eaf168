"""Reads back from the API server's audit log who asked it for what."""

from __future__ import annotations

import json
import os
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
        self._log = path.open("rb")  # for as long as this object lives: the file may be renamed
        self._start = self._log.seek(0, os.SEEK_END)

    def _read_lines(self) -> list[bytes]:
        self._log.seek(self._start)
        lines = self._log.readlines()
        if not os.path.samestat(os.fstat(self._log.fileno()), self._path.stat()):
            # The API server has begun another one, since it was full. Read from where the old one had been, it would
            # tell of nothing.
            lines += self._path.read_bytes().splitlines(keepends=True)
        return lines

    def requests(self) -> Iterator[Request]:
        """Yield all requests since then."""
        for line in self._read_lines():
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
