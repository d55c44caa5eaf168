"""The streams of pods and nodes: nothing is missed, whatever ends them, and none keeps another one from going on."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import Configuration

from everstep_operator.cluster import errors
from everstep_operator.cluster.cache import ClusterCache, object_key, resource_version
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.comparison import POD_SELECTOR
from everstep_operator.cluster.object_stream import MAX_PAUSE_SECONDS, ObjectStream, StreamWatch
from everstep_operator.cluster.resources import NODES, PODS, ApiResource
from tests.integration.world import until
from tests.operator.test_cache import pod

Stream = Callable[[web.StreamResponse], Awaitable[None]]
FORBIDDEN = {"kind": "Status", "reason": "Forbidden", "message": 'User "x" cannot watch resource "pods"'}


class ApiServer:
    """Lists what is `there`, and plays the scripted streams in turn; after the last one, streams never end."""

    def __init__(self) -> None:
        self.there: dict[str, list[Any]] = {"pods": [], "nodes": []}
        self.version = 9
        self.streams: asyncio.Queue[Stream | web.Response] = asyncio.Queue()
        self.asked: list[dict[str, str]] = []  # the queries of watches
        self.lists = 0
        self.forbidden: set[str] = set()  # namespaces
        self.tokens: list[str] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        namespace = parts[3] if parts[2] == "namespaces" else ""
        if namespace in self.forbidden:
            return web.json_response(FORBIDDEN, status=403)
        if "watch" not in request.query:
            self.lists += 1
            items = [each for each in self.there[parts[-1]] if not namespace or object_key(each)[0] == namespace]
            return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": items})
        self.asked.append({**request.query, "namespace": namespace, "plural": parts[-1]})
        self.tokens.append(request.headers.get("Authorization", ""))
        played = await self.streams.get() if parts[-1] == "pods" else endless
        if isinstance(played, web.Response):
            return played
        response = web.StreamResponse()
        await response.prepare(request)
        await played(response)
        return response


def line(kind: str, body: Any) -> bytes:
    return json.dumps({"type": kind, "object": body}).encode() + b"\n"


def told(*chunks: bytes, ends: bool = True) -> Stream:
    async def stream(response: web.StreamResponse) -> None:
        for chunk in chunks:
            await response.write(chunk)
        if not ends:
            await endless(response)

    return stream


async def endless(response: web.StreamResponse) -> None:
    await asyncio.sleep(60)


def error(code: int, reason: str) -> Any:
    return {"kind": "Status", "code": code, "reason": reason, "message": "told"}


class Site:
    """A server, a client, the real cache, and streams that fill it."""

    def __init__(self, server: ApiServer, client: Client) -> None:
        self.server, self.client = server, client
        self.cache = ClusterCache(touched=lambda _: None, pool_changed=lambda _: None)
        self.kinds: list[str | None] = []

    def receive(self, resource: ApiResource, kind: str | None, raw: Any) -> None:
        self.kinds.append(kind)
        store: Any = {PODS: self.cache.pods, NODES: self.cache.nodes}[resource]
        if kind == "DELETED":
            store.remove(object_key(raw), raw["metadata"]["uid"], resource_version(raw))
        else:
            store.put(raw)

    @contextlib.asynccontextmanager
    async def following(self, *namespaces: str, begins: int | None = None) -> AsyncIterator[StreamWatch]:
        watch = StreamWatch(self.client, {PODS: self.cache.pods, NODES: self.cache.nodes}, self.receive, namespaces)
        listed = {(PODS, place): begins for place in namespaces or (None,) if begins is not None}
        task = asyncio.create_task(watch.run(listed))
        try:
            yield watch
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def names(self) -> set[str]:
        return {key[1] for key in self.cache.pods}

    async def until_names(self, *names: str) -> None:
        async def agrees() -> bool:
            return self.names() == set(names)

        await until(agrees, f"the cache has {names}")

    async def until_asked(self, count: int) -> dict[str, str]:
        """Wait for so many watches of pods, and return the query of the last one."""

        async def enough() -> bool:
            return len(self.asked) >= count

        await until(enough, f"{count} watches of pods")
        return self.asked[count - 1]

    @property
    def asked(self) -> list[dict[str, str]]:
        return [query for query in self.server.asked if query["plural"] == "pods"]


@pytest_asyncio.fixture
async def site() -> AsyncIterator[Site]:
    server = ApiServer()
    app = web.Application()
    app.router.add_route("*", "/{any:.*}", server.handle)
    running = TestServer(app)
    await running.start_server()
    configuration = Configuration()
    configuration.host = str(running.make_url("")).rstrip("/")

    async def log_in() -> Configuration:
        fresh = Configuration()
        fresh.api_key = {"BearerToken": "Bearer fresh"}
        return fresh

    client = Client(configuration, relogin=log_in)
    yield Site(server, client)
    await client.close()
    await running.close()


async def test_a_stream_goes_on_from_a_list_without_another_one(site: Site) -> None:
    site.server.streams.put_nowait(
        told(line("ADDED", pod("digits-0", "digits", version=10)), line("ADDED", pod("digits-1", "digits", version=11)))
    )
    async with site.following(begins=9):
        await site.until_names("digits-0", "digits-1")
        site.server.streams.put_nowait(told(line("DELETED", pod("digits-0", "digits", version=12)), ends=False))
        await site.until_names("digits-1")
    first, second = site.asked[:2]
    assert (first["resourceVersion"], second["resourceVersion"]) == ("9", "11")
    assert first["labelSelector"] == POD_SELECTOR, "the server filters pods"
    assert first["allowWatchBookmarks"] == "true"
    assert ("watch", "", "pods") in site.client.used
    assert [query["plural"] for query in site.server.asked].count("nodes") == 1


async def test_without_a_list_of_its_kind_a_stream_begins_with_one(site: Site) -> None:
    site.server.there["pods"] = [pod("digits-0", "digits", version=5)]
    async with site.following():
        await site.until_names("digits-0")
        assert (await site.until_asked(1))["resourceVersion"] == "9"


async def test_events_are_whole_however_they_are_cut_on_their_way(site: Site) -> None:
    text = b"".join(line("ADDED", pod(f"digits-{n}", "digits", version=10 + n)) for n in range(3))
    site.server.streams.put_nowait(told(text[:30], text[30:500], text[500:], ends=False))
    async with site.following(begins=9):
        await site.until_names("digits-0", "digits-1", "digits-2")


async def test_an_event_that_is_cut_off_is_told_by_the_next_stream(site: Site) -> None:
    first, second = (line("ADDED", pod(f"digits-{n}", "digits", version=10 + n)) for n in range(2))
    site.server.streams.put_nowait(told(first + second[:40]))
    async with site.following(begins=9):
        await site.until_names("digits-0")
        assert (await site.until_asked(2))["resourceVersion"] == "10"
        site.server.streams.put_nowait(told(second, ends=False))
        await site.until_names("digits-0", "digits-1")


async def test_a_bookmark_moves_the_place_where_the_next_stream_begins(site: Site) -> None:
    site.server.streams.put_nowait(told(line("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "77"}})))
    async with site.following(begins=9):
        assert (await site.until_asked(2))["resourceVersion"] == "77"
    assert site.kinds == [], "a bookmark is no event"
    assert site.server.lists == 1, "of nodes"


@pytest.mark.parametrize(
    "trouble",
    [
        lambda: web.json_response(error(410, "Expired"), status=410),
        lambda: told(line("ERROR", error(410, "Expired"))),
        lambda: told(line("ERROR", error(500, "InternalError"))),
        lambda: web.json_response(error(504, "Timeout"), status=504),
        lambda: told(b"no JSON\n"),
    ],
    ids=["410", "410 in the stream", "500 in the stream", "a version from before a restored backup", "no JSON"],
)
async def test_where_the_server_cannot_go_on_a_list_finds_what_was_missed(site: Site, trouble: Any) -> None:
    for number in range(2):
        site.cache.pods.put(pod(f"digits-{number}", "digits", version=5, uid=f"u{number}"))
    site.server.there["pods"] = [pod(f"digits-{n}", "digits", version=8, uid=f"u{n}") for n in (1, 2)]
    site.server.streams.put_nowait(trouble())
    async with site.following(begins=6):
        await site.until_names("digits-1", "digits-2")
        assert (await site.until_asked(2))["resourceVersion"] == "9"


@pytest.mark.parametrize(
    "trouble", [web.json_response(error(429, "TooManyRequests"), status=429), FORBIDDEN], ids=["429", "403"]
)
async def test_what_tells_nothing_of_the_version_costs_no_list(site: Site, trouble: Any) -> None:
    answer = trouble if isinstance(trouble, web.Response) else web.json_response(trouble, status=403)
    site.server.streams.put_nowait(answer)
    async with site.following(begins=9):
        assert (await site.until_asked(2))["resourceVersion"] == "9"
    assert site.server.lists == 1, "of nodes"


async def test_a_silent_stream_is_taken_for_deaf(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server sends bookmarks. Nothing at all comes over a connection that was cut, and to who asks a server whose
    data were restored from a backup for what follows a version that it has not reached."""
    monkeypatch.setattr("everstep_operator.cluster.client.SILENCE_SECONDS", 0.2)
    site.server.streams.put_nowait(endless)
    async with site.following(begins=1000):
        await site.until_asked(1)
        site.server.there["pods"] = [pod("digits-0", "digits", version=8)]
        await site.until_names("digits-0")
        assert (await site.until_asked(2))["resourceVersion"] == "9"
        site.server.streams.put_nowait(told(line("ADDED", pod("digits-1", "digits", version=10)), ends=False))
        await site.until_names("digits-0", "digits-1")


async def test_a_suspicious_stream_begins_again_with_a_list(site: Site) -> None:
    site.server.streams.put_nowait(endless)
    async with site.following(begins=9) as watch:
        await site.until_asked(1)
        site.server.there["pods"] = [pod("digits-0", "digits", version=5)]
        watch.restart({NODES})
        watch.restart({PODS})
        await site.until_names("digits-0")


async def test_an_odd_object_does_not_end_the_stream(site: Site) -> None:
    odd = {**pod("digits-0", "digits", version=10), "status": {"conditions": [7]}}
    site.server.streams.put_nowait(
        told(line("ADDED", odd), line("ADDED", pod("digits-1", "digits", version=11)), ends=False)
    )
    async with site.following(begins=9):
        await site.until_names("digits-1")
    assert len(site.asked) == 1


async def test_a_token_that_has_run_out_is_renewed(site: Site) -> None:
    site.server.streams.put_nowait(web.json_response(error(401, "Unauthorized"), status=401))
    site.server.streams.put_nowait(told(line("ADDED", pod("digits-0", "digits", version=10)), ends=False))
    async with site.following(begins=9):
        await site.until_names("digits-0")
    assert "Bearer fresh" in site.server.tokens


async def test_a_namespace_that_cannot_be_watched_stops_no_other_and_comes_back(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep_operator.cluster.object_stream.MAX_PAUSE_FORBIDDEN", 0.2)
    site.server.forbidden = {"gone"}
    site.server.streams.put_nowait(told(line("ADDED", pod("digits-0", "digits", version=10)), ends=False))
    async with site.following("gone", "ns", begins=9):
        await site.until_names("digits-0")
        site.server.streams.put_nowait(
            told(line("ADDED", pod("back-0", "back", version=11, namespace="gone")), ends=False)
        )
        site.server.forbidden.clear()
        await site.until_names("digits-0", "back-0")


async def test_a_stream_that_is_ended_while_it_tells_goes_on_at_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server ends the stream of a reader that is busy for a moment, many times while a thousand pods start."""
    monkeypatch.setattr("everstep_operator.cluster.object_stream.BASE_PAUSE_SECONDS", 3600.0)
    for number in range(20):
        site.server.streams.put_nowait(told(line("ADDED", pod(f"digits-{number}", "digits", version=10 + number))))
    async with site.following(begins=9):
        await site.until_names(*(f"digits-{number}" for number in range(20)))
    assert site.server.lists == 1, "of nodes"


BOOKMARK = line("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "9"}})


@pytest.mark.parametrize(
    ("trouble", "lists"),
    [
        (lambda: told(BOOKMARK), 0),
        (lambda: web.json_response(error(429, "TooManyRequests"), status=429, headers={"Retry-After": "0"}), 0),
        (lambda: web.json_response(error(503, "Unavailable"), status=503, headers={"Retry-After": "0"}), 0),
        (lambda: web.json_response(error(503, "Unavailable"), status=503), 1),
    ],
    ids=["nothing new", "429 that asks for no pause", "503 that asks for no pause", "a list that took long, then 503"],
)
async def test_no_server_is_asked_again_and_again_without_a_pause(
    site: Site, monkeypatch: pytest.MonkeyPatch, trouble: Any, lists: int
) -> None:
    monkeypatch.setattr("everstep_operator.cluster.object_stream.STEADY_SECONDS", 0.2)
    pauses: list[float] = []
    stream = ObjectStream(site.client, PODS, None, site.cache.pods, site.receive, version=None if lists else 9)
    compute = stream._compute_pause

    def note_pause(failures: int, error: BaseException | None) -> float:
        pauses.append(compute(failures, error))
        return pauses[-1]

    monkeypatch.setattr(stream, "_compute_pause", note_pause)
    if lists:  # each takes as long as a steady stream
        compare = stream._compare

        async def compare_slowly() -> int:
            await asyncio.sleep(0.25)
            return await compare()

        monkeypatch.setattr(stream, "_compare", compare_slowly)
    site.server.streams.put_nowait(trouble())
    task = asyncio.create_task(stream.run())
    try:
        await site.until_asked(2)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert pauses[0] > 0


def test_pauses_grow_and_are_bounded(site: Site) -> None:
    stream = ObjectStream(site.client, PODS, None, site.cache.pods, site.receive)
    assert stream._compute_pause(0, None) == 0.0
    assert stream._compute_pause(1, None) < stream._compute_pause(4, None) < stream._compute_pause(60, None)
    assert stream._compute_pause(60, None) <= MAX_PAUSE_SECONDS
    busy = errors.TooManyRequests(429, "TooManyRequests", "", retry_after=7.0)
    assert stream._compute_pause(1, busy) == stream._compute_pause(0, busy) == 7.0
    hurried = errors.TooManyRequests(429, "TooManyRequests", "", retry_after=0.0)
    assert stream._compute_pause(1, hurried) > 0.0
