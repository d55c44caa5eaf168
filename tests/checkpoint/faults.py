"""A proxy before an S3 server that spoils chosen requests in the ways in which networks and servers do."""

from __future__ import annotations

import http.client
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast


class Fault(Enum):
    """A fault of the server: a request has this result instead of a plain answer."""

    ERROR = "500, not executed"
    SLOW_DOWN = "503 SlowDown, not executed"
    SILENCE = "no answer, not executed"
    LATE = "no answer, executed"
    RESET = "connection reset, not executed"
    LOST = "connection reset, executed"
    CUT = "a piece of the answer (half of it, if `keep` says nothing else), executed"


@dataclass(frozen=True)
class Request:
    method: str
    path: str


Chooser = Callable[[int, Request], Fault | None]

_REFUSALS = {Fault.ERROR: (500, "InternalError"), Fault.SLOW_DOWN: (503, "SlowDown")}


@dataclass
class FaultProxy:
    """`choose(n, request)` says what befalls the n-th request (from 1); all that came are in `requests`.

    `refuse` says with which status and code a server rejects a kind of request for good.
    """

    port: int
    requests: list[Request] = field(default_factory=list)
    keep: Callable[[bytes], int] = lambda answer: len(answer) // 2
    choose: Chooser = lambda _number, _request: None
    refuse: Callable[[Request], tuple[int, str] | None] = lambda _request: None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def begin(self, choose: Chooser = lambda _number, _request: None) -> None:
        """Counts from 1 again."""
        with self._lock:
            self.requests, self.choose = [], choose

    def fault_of(self, request: Request) -> Fault | None:
        with self._lock:
            self.requests.append(request)
            return self.choose(len(self.requests), request)


def nth(number: int, fault: Fault) -> Chooser:
    """One request is spoiled."""
    return lambda count, _request: fault if count == number else None


def from_nth(number: int, fault: Fault) -> Chooser:
    """A store that is gone from some request on."""
    return lambda count, _request: fault if count >= number else None


@contextmanager
def fault_proxy(upstream_port: int) -> Iterator[FaultProxy]:
    """Between the block's clients and the server at `upstream_port` of this machine."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.upstream_port = upstream_port
    server.proxy = FaultProxy(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server.proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client may keep its connection for good
    proxy: FaultProxy
    upstream_port: int


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do(self) -> None:
        server = cast(_Server, self.server)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path)
        fault = server.proxy.fault_of(request)
        if (refusal := server.proxy.refuse(request)) is not None:
            return self._refuse(*refusal)
        if fault is Fault.RESET:
            return self._reset()
        if fault is Fault.SILENCE:
            return self._wait_for_the_client()
        if fault in _REFUSALS:
            return self._refuse(*_REFUSALS[fault])
        answer = self._forward(body, server.upstream_port)
        if fault is Fault.LOST:
            return self._reset()
        if fault is Fault.LATE:
            return self._wait_for_the_client()
        if fault is Fault.CUT:
            self.wfile.write(answer[: server.proxy.keep(answer)])
            self.close_connection = True
            return None
        self.wfile.write(answer)
        return None

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _forward(self, body: bytes, port: int) -> bytes:
        # Host stays what the client has signed.
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("expect", "connection")}
        upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            upstream.request(self.command, self.path, body, headers)
            answer = upstream.getresponse()
            content = answer.read()
        finally:
            upstream.close()
        hop = {"connection", "transfer-encoding", "keep-alive"}
        lines = [f"{name}: {value}" for name, value in answer.getheaders() if name.lower() not in hop]
        if answer.getheader("Content-Length") is None and self.command != "HEAD":
            lines.append(f"Content-Length: {len(content)}")
        head = "\r\n".join([f"HTTP/1.1 {answer.status} {answer.reason}", *lines, "", ""])
        return head.encode("latin-1") + content

    def _refuse(self, status: int, code: str) -> None:
        content = b"" if self.command == "HEAD" else f"<Error><Code>{code}</Code><Message>m</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _reset(self) -> None:
        # RST, not FIN: closed at once, without lingering and past the server's own polite shutdown.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())
        self.close_connection = True

    def _wait_for_the_client(self) -> None:
        with suppress(OSError):
            self.connection.recv(1)
        self.close_connection = True
