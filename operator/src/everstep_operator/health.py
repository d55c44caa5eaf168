"""Two small servers: health for the kubelet, metrics for Prometheus.

Both answer anybody who reaches them, on ports of their own, and say nothing about anyone: health is one word and the
reason for it, metrics have no job, pod or node names. So they have no login; the chart's NetworkPolicy says who reaches
them, and `metrics_port: -1` leaves the second out. What acts (the agents' port) is another matter: it is signed.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from everstep_operator import metrics
from everstep_operator.public_server import PublicAnswer, PublicServer

RENDER_SECONDS = 1.0  # metrics take ten milliseconds of the event loop: whoever asks more often gets the same again

HealthCheck = Callable[[], str | None]  # what is wrong, or None


@dataclass
class HealthServers:
    """`alive` and `ready` say what is wrong, or None; `measure` refreshes gauges before metrics are rendered."""

    alive: HealthCheck
    ready: HealthCheck
    measure: Callable[[], None]
    _servers: tuple[PublicServer, ...] = ()
    health_port: int = 0
    metrics_port: int = 0
    _rendered: tuple[float, bytes] = (float("-inf"), b"")  # when (monotonic seconds), and what

    async def start(self, bind: str, health_port: int, metrics_port: int) -> None:
        """Listen; port 0 takes a free one and stores it. `metrics_port` -1: no metrics."""
        health = PublicServer({"/healthz": _make_route(self.alive), "/readyz": _make_route(self.ready)})
        self.health_port = await self._serve(health, bind, health_port)
        if metrics_port >= 0:
            self.metrics_port = await self._serve(PublicServer({"/metrics": self._metrics}), bind, metrics_port)

    async def stop(self) -> None:
        for server in self._servers:
            await server.stop()

    async def _serve(self, server: PublicServer, bind: str, port: int) -> int:
        self._servers += (server,)
        return await server.start(_open_listener(bind, port))

    def _metrics(self) -> PublicAnswer:
        at, text = self._rendered
        if time.monotonic() >= at + RENDER_SECONDS:
            self.measure()
            text = generate_latest(metrics.registry)
            self._rendered = time.monotonic(), text
        return PublicAnswer(200, text, CONTENT_TYPE_LATEST)


def _open_listener(bind: str, port: int) -> socket.socket:
    """Open a socket on an address; on all of the pod's if it is empty, which may be of IPv4, IPv6 or both."""
    if not bind:
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except (OSError, ValueError):
            bind = "0.0.0.0"  # noqa: S104 - a kernel without IPv6; a port that is taken fails here too
    return socket.create_server((bind, port), family=socket.AF_INET6 if ":" in bind else socket.AF_INET)


def _make_route(check: HealthCheck) -> Callable[[], PublicAnswer]:
    def answer() -> PublicAnswer:
        wrong = check()
        return PublicAnswer(500 if wrong else 200, (wrong or "ok").encode())

    return answer


def set_phase_gauges(phases: Counter[str], known: tuple[str, ...]) -> None:
    """Set one gauge per phase; a phase nobody is in is 0, not absent."""
    for phase in known:
        metrics.jobs.labels(phase).set(phases.get(phase, 0))
