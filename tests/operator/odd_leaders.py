"""Servers in the place of a leader, which forge or flood."""

from __future__ import annotations

from aiohttp import web

from e2e.cluster.ports import free_ports
from everstep.agent.wire import auth


async def serve_leader(key: bytes, *, forged: bool = False, answer: bytes = b"{}") -> tuple[web.AppRunner, int]:
    """Start a server that has the port but not the token, or has it and floods."""

    async def challenge(_: web.Request) -> web.Response:
        return web.json_response({"nonce": auth.new_nonce()})

    async def state(request: web.Request) -> web.Response:
        token = b"forged" if forged else key
        mac = auth.response_mac(token, 200, request.headers[auth.CLIENT_HEADER], answer)
        return web.Response(body=answer, headers={auth.MAC_HEADER: mac})

    app = web.Application()
    app.router.add_get("/v1/challenge", challenge)
    app.router.add_get("/v1/state", state)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    port = free_ports(1)[0]
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner, port
