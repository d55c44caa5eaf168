"""The client against a server that misbehaves: what is repeated, what never is, and what the caller is told."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from email.utils import formatdate
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import Configuration

from everstep_operator.cluster import errors
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.resources import CONFIG_MAPS, JOBS, LEASES, PODS

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
POD: dict[str, Any] = {"metadata": {"name": "digits-0", "namespace": "ns"}, "spec": {"unknownInAnyVersion": {"a": 1}}}


class Server:
    """Answers with the scripted ones in turn; the last is repeated."""

    def __init__(self) -> None:
        self.script: list[Answer] = []
        self.seen: list[tuple[str, str, dict[str, str], Any]] = []
        self.headers: list[dict[str, str]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen.append((request.method, request.path, dict(request.query), json.loads(body) if body else None))
        self.headers.append(dict(request.headers))
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return await answer(request)


def status(code: int, reason: str = "", message: str = "", headers: dict[str, str] | None = None) -> Answer:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"kind": "Status", "reason": reason, "message": message}, status=code, headers=headers)

    return answer


def ok(body: Any = None) -> Answer:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(body or POD)

    return answer


async def reset(request: web.Request) -> web.StreamResponse:
    """The request was read (and, on a real server, maybe carried out); the answer never comes."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def hang(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(30)
    return web.Response()


async def half(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"metadata": {"na')
    assert request.transport is not None
    request.transport.abort()
    return response


@pytest.fixture
def server() -> Server:
    return Server()


@asynccontextmanager
async def connected(server: Server, timeout: float) -> AsyncIterator[Client]:
    app = web.Application()
    app.router.add_route("*", "/{any:.*}", server.handle)
    running = TestServer(app)
    await running.start_server()
    configuration = Configuration()
    configuration.host = str(running.make_url("")).rstrip("/")
    configuration.api_key = {"BearerToken": "Bearer abc"}
    client = Client(configuration, timeout=timeout, attempts=3)
    yield client
    await client.close()
    await running.close()


@pytest_asyncio.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    async with connected(server, timeout=60) as client:
        yield client


@pytest_asyncio.fixture
async def impatient(server: Server) -> AsyncIterator[Client]:
    """For a server that hangs."""
    async with connected(server, timeout=0.5) as client:
        yield client


async def test_a_server_that_rejects_requests_for_their_number_slows_the_operator_down(
    server: Server, client: Client
) -> None:
    times = []
    client.throttled = lambda: times.append("slower")
    server.script = [status(429, "TooManyRequests", headers={"Retry-After": "0"}), ok()]
    assert await client.get(PODS, "ns", "digits-0") == POD
    assert times == ["slower"]


@pytest.mark.parametrize("text", ["ü", "\u2028", "\ud800 half of a pair", "\x00"])
async def test_any_text_arrives(server: Server, client: Client, text: str) -> None:
    server.script = [ok()]
    await client.create(PODS, "ns", {"metadata": {"annotations": {"text": text}}})
    assert server.seen[0][3] == {"metadata": {"annotations": {"text": text}}}


async def test_a_body_arrives_as_it_was_written_with_the_token(server: Server, client: Client) -> None:
    server.script = [ok()]
    assert await client.create(PODS, "ns", POD) == POD
    method, path, query, body = server.seen[0]
    assert (method, path) == ("POST", "/api/v1/namespaces/ns/pods")
    assert body == POD
    assert query["fieldManager"] == "everstep-operator"
    assert server.headers[0]["Authorization"] == "Bearer abc"


@pytest.mark.parametrize("trouble", [status(500), status(503), status(504), status(429), reset, hang, half])
async def test_a_read_is_repeated(server: Server, impatient: Client, trouble: Answer) -> None:
    server.script = [trouble, ok()]
    assert (await impatient.get(PODS, "ns", "digits-0"))["metadata"]["name"] == "digits-0"
    # aiohttp itself repeats a read once on a connection that was reset
    assert len(server.seen) in (2, 3)


async def test_no_token_follows_a_redirect(server: Server, client: Client) -> None:
    server.script = [status(307, headers={"Location": "/elsewhere"}), ok()]
    with pytest.raises(errors.ApiError, match="307"):
        await client.get(PODS, "ns", "digits-0")
    assert len(server.seen) == 1


@pytest.mark.parametrize("trouble", [reset, hang, half])
async def test_a_create_whose_result_is_unknown_is_not_repeated(
    server: Server, impatient: Client, trouble: Answer
) -> None:
    server.script = [trouble, ok()]
    with pytest.raises(errors.Unreachable) as caught:
        await impatient.create(PODS, "ns", POD)
    assert caught.value.sent
    assert len(server.seen) == 1


async def test_a_create_is_repeated_when_it_was_certainly_not_processed(server: Server, client: Client) -> None:
    server.script = [status(429, headers={"Retry-After": "0"}), ok()]
    await client.create(PODS, "ns", POD)
    assert len(server.seen) == 2


async def test_a_create_after_a_server_error_is_the_callers_to_judge(server: Server, client: Client) -> None:
    server.script = [status(500), ok()]
    with pytest.raises(errors.ServerError):
        await client.create(PODS, "ns", POD)
    assert len(server.seen) == 1


async def test_a_dry_run_is_repeated(server: Server, impatient: Client) -> None:
    server.script = [hang, ok()]
    await impatient.create(PODS, "ns", POD, dry_run=True)
    assert server.seen[-1][2]["dryRun"] == "All"


async def test_a_refused_connection_was_not_sent() -> None:
    configuration = Configuration()
    configuration.host = "http://127.0.0.1:1"
    client = Client(configuration, timeout=0.5, attempts=2)
    with pytest.raises(errors.Unreachable) as caught:
        await client.create(PODS, "ns", POD)
    assert not caught.value.sent
    await client.close()


async def test_patience_ends(server: Server, client: Client) -> None:
    server.script = [status(503)]
    with pytest.raises(errors.ServerError):
        await client.get(PODS, "ns", "x")
    assert len(server.seen) == 3


async def test_retry_after_is_obeyed(server: Server, client: Client) -> None:
    server.script = [status(429, headers={"Retry-After": "1"}), ok()]
    started = asyncio.get_running_loop().time()
    await client.get(PODS, "ns", "x")
    assert asyncio.get_running_loop().time() - started >= 1


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (status(404, "NotFound"), errors.NotFound),
        (status(409, "AlreadyExists"), errors.AlreadyExists),
        (status(409, "Conflict"), errors.Conflict),
        (status(410, "Expired"), errors.Gone),
        (status(422, "Invalid"), errors.Invalid),
        (status(400, "BadRequest"), errors.Invalid),
        (status(413, "RequestEntityTooLarge", "Request entity too large: limit is 3145728"), errors.TooLarge),
        (status(413, "", "<html>nginx</html>"), errors.TooLarge),
        (status(500, "", "etcdserver: request is too large"), errors.TooLarge),
        (
            status(500, "", "rpc error: desc = trying to send message larger than max (2 vs. 1)"),
            errors.TooLarge,
        ),
        (status(403, "Forbidden", "pods is forbidden: violates PodSecurity"), errors.Forbidden),
        (status(403, "Forbidden", 'pods "x" is forbidden: exceeded quota: q'), errors.QuotaExceeded),
        (
            status(403, "Forbidden", 'pods "x" is forbidden: status unknown for quota: q, resources: pods'),
            errors.QuotaExceeded,
        ),
        (
            status(403, "Forbidden", 'pods is forbidden: User "x" cannot create resource "pods" in'),
            errors.NotAuthorized,
        ),
        (status(403, "Forbidden", "namespace ns is being terminated"), errors.Conflict),
        (status(401, "Unauthorized"), errors.Unauthorized),
    ],
)
async def test_a_refusal_is_typed_and_not_repeated(
    server: Server, client: Client, answer: Answer, expected: type[errors.ApiError]
) -> None:
    server.script = [answer]
    with pytest.raises(expected) as caught:
        await client.create(PODS, "ns", POD)
    assert type(caught.value) is expected
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (403, 'pods "digits-0" is forbidden: not yet ready to handle request'),
        (
            403,
            'pods "digits-0" is forbidden: unable to CREATE /v1, Resource=pods at this time because there was an error '
            "enforcing limit ranges",
        ),
        (403, 'pods "digits-0" is forbidden: Post "https://images.example.com/": dial tcp: connection refused'),
        (403, 'pods "digits-0" is forbidden: an error on the server ("") has prevented the request from succeeding'),
        (409, 'Operation cannot be fulfilled on resourcequotas "q": the object has been modified'),
    ],
)
async def test_admission_that_cannot_judge_yet_is_asked_again(
    server: Server, client: Client, code: int, said: str
) -> None:
    """An API server that has just started answers so, with the code of a verdict, and stores nothing."""
    answer = status(code, "Forbidden" if code == 403 else "Conflict", said)
    server.script = [answer, ok()]
    await client.create(PODS, "ns", POD)
    assert len(server.seen) == 2
    server.script = [answer] * 5
    with pytest.raises(errors.AdmissionNotReady):  # which is no verdict on the pod
        await client.create(PODS, "ns", POD)


@pytest.mark.parametrize("code", [400, 403, 404, 409, 422])
async def test_what_a_proxy_rejects_is_no_verdict_of_the_api_server(server: Server, client: Client, code: int) -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(status=code, text="<html>default backend</html>", content_type="text/html")

    server.script = [page]
    with pytest.raises(errors.ServerError, match="default backend"):
        await client.create(PODS, "ns", POD)


async def test_a_kind_that_the_api_server_does_not_serve_is_not_found(server: Server, client: Client) -> None:
    """It says so without a Status, as Go's own server does."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(status=404, text="404 page not found\n")

    server.script = [page]
    with pytest.raises(errors.NotFound):
        await client.get(PODS, "ns", "x")


async def test_a_proxys_page_is_a_server_error(server: Server, client: Client) -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<html>welcome</html>", content_type="text/html")

    server.script = [page]
    with pytest.raises(errors.ServerError):
        await client.get(PODS, "ns", "x")


@pytest.mark.parametrize("said", [{"status": "ok"}, {"items": None, "metadata": {}}])
async def test_what_is_no_list_does_not_tell_that_nothing_is_there(server: Server, client: Client, said: Any) -> None:
    """A proxy says so, or a server that is no API server. All jobs and pods would count as gone."""
    server.script = [ok(said)]
    with pytest.raises(errors.ServerError, match="not a list of pods"):
        async for _ in client.list(PODS):
            pass


async def test_a_delete_names_the_uid_and_finds_its_work_done(server: Server, client: Client) -> None:
    for answer in (ok(), status(404, "NotFound"), status(409, "Conflict")):
        server.script = [answer]
        await client.delete(PODS, "ns", "digits-0", uid="u1", grace=0)
    assert [body["preconditions"]["uid"] for *_, body in server.seen] == ["u1"] * 3
    assert server.seen[0][3]["gracePeriodSeconds"] == 0


async def test_status_is_applied_by_name_and_version(server: Server, impatient: Client) -> None:
    server.script = [hang, ok()]
    body = {"metadata": {"name": "digits", "namespace": "ns", "resourceVersion": "7"}, "status": {}}
    await impatient.apply_status(JOBS, "ns", body)
    method, path, query, sent = server.seen[-1]
    assert (method, path) == ("PATCH", "/apis/everstep.dev/v1alpha1/namespaces/ns/trainingjobs/digits/status")
    assert query == {"fieldManager": "everstep-operator", "force": "true"}
    assert sent["metadata"]["resourceVersion"] == "7"
    assert server.headers[-1]["Content-Type"] == "application/apply-patch+yaml"


async def test_a_list_is_read_page_by_page(server: Server, client: Client) -> None:
    first = {"metadata": {"resourceVersion": "5", "continue": "more"}, "items": [{"n": 1}, {"n": 2}]}
    server.script = [ok(first), ok({"metadata": {"resourceVersion": "5"}, "items": [{"n": 3}]})]
    pages = [page async for page in client.list(PODS, labels="a=b", page=2)]
    assert [item["n"] for page in pages for item in page.items] == [1, 2, 3]
    assert pages[0].version == 5
    assert server.seen[0][2] == {"limit": "2", "labelSelector": "a=b"}
    assert server.seen[1][2]["continue"] == "more"


async def test_of_what_may_be_large_only_metadata_are_listed(server: Server, client: Client) -> None:
    server.script = [ok({"metadata": {"resourceVersion": "5"}, "items": [{"metadata": {"name": "a"}}]})]
    for metadata_only in (True, False):
        async for page in client.list(CONFIG_MAPS, "ns", metadata_only=metadata_only):
            assert page.items == [{"metadata": {"name": "a"}}]
    assert ["PartialObjectMetadataList" in headers["Accept"] for headers in server.headers] == [True, False]


async def test_an_expired_token_is_renewed_once(server: Server, client: Client) -> None:
    async def again() -> Configuration:
        fresh = Configuration()
        fresh.api_key = {"BearerToken": "Bearer fresh"}
        return fresh

    client._relogin = again
    server.script = [status(401), ok()]
    await client.create(PODS, "ns", POD)
    assert server.headers[-1]["Authorization"] == "Bearer fresh"
    server.script = [status(401)]
    with pytest.raises(errors.Unauthorized):
        await client.get(PODS, "ns", "x")


async def test_fifty_creates_run_in_parallel(server: Server, client: Client) -> None:
    all_there = asyncio.Barrier(50)

    async def with_the_others(_: web.Request) -> web.Response:
        await all_there.wait()
        return web.json_response(POD)

    server.script = [with_the_others]
    await asyncio.gather(*(client.create(PODS, "ns", POD) for _ in range(50)))


async def test_the_time_is_that_of_the_answers(server: Server, client: Client) -> None:
    tomorrow = time.time() + 86400
    server.script = [status(404, headers={"Date": formatdate(tomorrow, usegmt=True)})]
    with pytest.raises(errors.NotFound):
        await client.get(PODS, "ns", "digits-0")
    assert -2 < client.clock.now() - tomorrow < 60


async def test_who_may_have_lost_the_lease_reads_and_renews_and_writes_nothing_else(
    server: Server, client: Client
) -> None:
    class TakenOver(Exception):
        pass

    def check() -> None:
        raise TakenOver

    client.may_write = check
    server.script = [ok()]
    await client.get(PODS, "ns", "digits-0")
    await client.replace(LEASES, "ns", {"metadata": {"name": "x"}})
    seen = len(server.seen)
    with pytest.raises(TakenOver):
        await client.create(PODS, "ns", POD)
    with pytest.raises(TakenOver):
        await client.delete(PODS, "ns", "digits-0", uid="u")
    with pytest.raises(TakenOver):
        await client.apply_status(JOBS, "ns", {"metadata": {"name": "x"}})
    assert len(server.seen) == seen


@pytest.mark.parametrize("code", [401, 404, 409, 410, 418, 500])
async def test_a_denial_is_one_whatever_code_the_webhook_chose(server: Server, client: Client, code: int) -> None:
    said = 'admission webhook "images.example.com" denied the request: unsigned'
    server.script = [status(code, "AlreadyExists" if code == 409 else "", said)]
    with pytest.raises(errors.Forbidden, match="unsigned"):
        await client.create(PODS, "ns", POD)
    assert len(server.seen) == 1


async def test_a_webhook_that_asks_to_try_later_gives_no_verdict(server: Server, client: Client) -> None:
    """429 is no word on the pods: nobody's template is at fault, and the job's users are told whom it waits for."""
    said = 'admission webhook "budget.example.com" denied the request: too many pods at once'
    server.script = [status(429, "TooManyRequests", said)]
    with pytest.raises(errors.WebhookUnavailable, match="too many pods at once"):
        await client.create(PODS, "ns", POD)
    assert len(server.seen) == 1
