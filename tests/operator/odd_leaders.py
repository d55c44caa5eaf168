"""Servers in the place of a leader, which forge or flood."""

from __future__ import annotations

import asyncio
import contextlib

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


async def serve_endless_leader(answer: bytes) -> tuple[asyncio.Server, int]:
    """Start a server that says `answer` again and again, however long somebody reads it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            while b"/v1/challenge" in await reader.readuntil(b"\r\n\r\n"):
                body = b'{"nonce": "%s"}' % auth.new_nonce().encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            while True:
                writer.write(answer)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, int(server.sockets[0].getsockname()[1])
