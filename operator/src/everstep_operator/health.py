"""Two small servers: health for the kubelet, metrics for Prometheus.

Both answer anybody who reaches them, on ports of their own, and say nothing about anyone: health is one word and the
reason for it, metrics have no job, pod or node names. So they have no login; the chart's NetworkPolicy says who reaches
them, and `metrics_port: -1` leaves the second out. What acts (the agents' port) is another matter: it is signed.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from everstep_operator import metrics

HealthCheck = Callable[[], str | None]  # what is wrong, or None


@dataclass
class HealthServers:
    """`alive` and `ready` say what is wrong, or None; `measure` refreshes gauges before each scrape."""

    alive: HealthCheck
    ready: HealthCheck
    measure: Callable[[], None]
    _runners: tuple[web.AppRunner, ...] = ()
    health_port: int = 0
    metrics_port: int = 0

    async def start(self, bind: str, health_port: int, metrics_port: int) -> None:
        """Listen; port 0 takes a free one and stores it. `metrics_port` -1: no metrics."""
        health = web.Application()
        health.add_routes(
            [web.get("/healthz", _make_handler(self.alive)), web.get("/readyz", _make_handler(self.ready))]
        )
        self.health_port = await self._serve(health, bind, health_port)
        if metrics_port >= 0:
            app = web.Application()
            app.add_routes([web.get("/metrics", self._metrics)])
            self.metrics_port = await self._serve(app, bind, metrics_port)

    async def stop(self) -> None:
        for runner in self._runners:
            await runner.cleanup()

    async def _serve(self, app: web.Application, bind: str, port: int) -> int:
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        self._runners += (runner,)
        site = web.SockSite(runner, _open_listener(bind, port))
        await site.start()
        return int(runner.addresses[0][1])

    async def _metrics(self, _: web.Request) -> web.Response:
        self.measure()
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _open_listener(bind: str, port: int) -> socket.socket:
    """Open a socket on an address; on all of the pod's if it is empty, which may be of IPv4, IPv6 or both."""
    if not bind:
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except (OSError, ValueError):
            bind = "0.0.0.0"  # noqa: S104 - a kernel without IPv6; a port that is taken fails here too
    return socket.create_server((bind, port), family=socket.AF_INET6 if ":" in bind else socket.AF_INET)


def _make_handler(check: HealthCheck) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        wrong = check()
        return web.Response(text=wrong or "ok", status=500 if wrong else 200)

    return answer


def set_phase_gauges(phases: Counter[str], known: tuple[str, ...]) -> None:
    """Set one gauge per phase; a phase nobody is in is 0, not absent."""
    for phase in known:
        metrics.jobs.labels(phase).set(phases.get(phase, 0))
