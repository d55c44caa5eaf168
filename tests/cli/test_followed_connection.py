"""The connection on which a log is followed: whoever only reads is not told when nobody keeps it any more."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from kubernetes.config import kube_config

from everstep.cli.cluster import ClusterClient

KEEP_ALIVE_TIMER = "02"  # https://docs.kernel.org/networking/proc_net_tcp.html


class SilentServer(BaseHTTPRequestHandler):
    """An API server that sends one line of a log, and nothing after it."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        line = b"2026-01-01T00:00:00Z one\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.flush()
        self.server.over.wait(30)  # type: ignore[attr-defined]

    def log_message(self, format: str, *args: object) -> None:
        return None


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), SilentServer)
    over = server.over = threading.Event()  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "me", "user": {}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    # The client reads the variable KUBECONFIG once, when it is imported.
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
    yield server.server_port
    over.set()
    server.shutdown()
    server.server_close()


def find_timer(server_port: int) -> tuple[str, float]:
    """The timer of the connection to this port, and the seconds until it is due."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[2].rpartition(":")[2], 16) == server_port and fields[3] == "01":
            kind, _, when = fields[5].partition(":")
            return kind, int(when, 16) / 100
    raise AssertionError("there is no connection")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_silent_connection_is_asked_whether_it_still_stands(port: int) -> None:
    lines = ClusterClient(None, "default").log("j-0", follow=True)
    assert next(lines).endswith("one")
    kind, due = find_timer(port)
    assert kind == KEEP_ALIVE_TIMER
    assert due <= 60  # load balancers forget a silent connection after some minutes
