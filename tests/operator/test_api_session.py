"""Sessions to the API server: by the proxy of the environment if there is one, with a token that is asked for anew."""

from __future__ import annotations

import os
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import ClientConnectorCertificateError, web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import Configuration

from e2e.cluster.certificates import Authority
from everstep_operator.cluster.api_session import find_proxy, open_api_session

FAR = "http://api.example:6443"


@pytest_asyncio.fixture
async def proxy(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[web.Request]]:
    """Requests that a proxy has had, which the environment names."""
    seen: list[web.Request] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(request)
        return web.json_response({})

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handle)
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with TestServer(application) as server:
        monkeypatch.setenv("http_proxy", f"http://{server.host}:{server.port}")
        yield seen


async def test_requests_go_through_the_proxy_of_the_environment(proxy: list[web.Request]) -> None:
    async with open_api_session(Configuration(host=FAR)) as session, session.get(f"{FAR}/version") as answer:
        assert answer.status == 200
    assert [request.headers["Host"] for request in proxy] == ["api.example:6443"]


async def test_a_proxy_may_be_written_without_a_scheme(
    proxy: list[web.Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", os.environ["http_proxy"].removeprefix("http://"))
    async with open_api_session(Configuration(host=FAR)) as session, session.get(f"{FAR}/version") as answer:
        assert answer.status == 200


async def test_a_proxy_is_passed_by_where_the_environment_says_so(
    proxy: list[web.Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_proxy(FAR) is not None
    monkeypatch.setenv("no_proxy", ".example,10.0.0.1")
    assert find_proxy(FAR) is None
    assert find_proxy("http://10.0.0.1:443") is None
    assert find_proxy("http://10.0.0.2:443") is not None


async def test_a_network_in_no_proxy_is_passed_by(proxy: list[web.Request], monkeypatch: pytest.MonkeyPatch) -> None:
    """As clusters write the addresses of their services; the API server of a pod is one of these."""
    monkeypatch.setenv("no_proxy", "localhost,10.96.0.0/12, fd00::/8,x/y")
    assert find_proxy("http://10.96.0.1:443") is None
    assert find_proxy("http://[fd00::1]:443") is None
    assert find_proxy("http://10.1.0.1:443") is not None
    assert find_proxy(FAR) is not None


async def test_each_request_has_the_token_of_its_time(proxy: list[web.Request]) -> None:
    configuration = Configuration(host=FAR)
    async with open_api_session(configuration) as session:
        for token in ("first", "second"):
            configuration.api_key = {"BearerToken": f"Bearer {token}"}
            async with session.get(f"{FAR}/version"):
                pass
    assert [request.headers["Authorization"] for request in proxy] == ["Bearer first", "Bearer second"]


@asynccontextmanager
async def serve(authority: Authority, name: str) -> AsyncIterator[TestServer]:
    """Serve with a certificate of an authority for a name."""
    pair = authority.issue("server", "/CN=api", [name])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)

    async def handle(_: web.Request) -> web.Response:
        return web.json_response({})

    application = web.Application()
    application.router.add_get("/version", handle)
    server = TestServer(application, scheme="https")
    await server.start_server(ssl=context)
    yield server
    await server.close()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    return make_authority(tmp_path / "first")


def make_authority(folder: Path) -> Authority:
    folder.mkdir()
    made = Authority(folder)
    made.create()
    return made


async def test_the_name_in_the_certificate_may_be_another_than_the_address(authority: Authority) -> None:
    async with serve(authority, "DNS:api.internal") as server:
        configuration = Configuration(host=str(server.make_url("")), ssl_ca_cert=str(authority.own.certificate))
        async with open_api_session(configuration) as session:
            with pytest.raises(ClientConnectorCertificateError):
                await session.get(server.make_url("/version"))
            configuration.tls_server_name = "api.internal"
            async with session.get(server.make_url("/version")) as answer:
                assert answer.status == 200


async def test_an_authority_that_is_replaced_in_its_file_is_believed_without_a_restart(
    authority: Authority, tmp_path: Path
) -> None:
    second = make_authority(tmp_path / "second")
    file = tmp_path / "ca.crt"
    shutil.copy(authority.own.certificate, file)
    configuration = Configuration(ssl_ca_cert=str(file))
    async with open_api_session(configuration) as session:
        async with serve(authority, "IP:127.0.0.1") as server, session.get(server.make_url("/version")) as answer:
            assert answer.status == 200
        async with serve(second, "IP:127.0.0.1") as server:
            with pytest.raises(ClientConnectorCertificateError):
                await session.get(server.make_url("/version"))
            shutil.copy(second.own.certificate, file)
            async with session.get(server.make_url("/version")) as answer:
                assert answer.status == 200
