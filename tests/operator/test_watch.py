"""The watch dies alone: what ends kopf by design (410, errors in the stream) costs a re-list, not the process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import Configuration
from structlog.testing import capture_logs

from everstep_operator.cluster.resources import JOBS, POOLS, ApiResource
from everstep_operator.cluster.watch import KopfWatch
from tests.integration.world import until

BY_PLURAL = {resource.plural: resource for resource in (JOBS, POOLS)}
Stream = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


def job(name: str, version: int, namespace: str = "ns") -> dict[str, Any]:
    meta = {"name": name, "namespace": namespace, "uid": name, "resourceVersion": str(version)}
    return {"apiVersion": JOBS.api_version, "kind": "TrainingJob", "metadata": meta, "spec": {}}


class ApiServer:
    """Discovery, lists and watches of our kinds, and nothing else: any other request is a failure."""

    def __init__(self) -> None:
        self.jobs = [job("listed", 5)]
        self.watches: asyncio.Queue[web.Response | Stream] = asyncio.Queue()
        self.lists = 0
        self.unexpected: list[str] = []
        self.forbidden: set[tuple[str, str]] = set()  # namespace, and verb: list or watch

    async def handle(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        plural = parts[-1]
        if request.method != "GET":
            self.unexpected.append(f"{request.method} {request.path}")
        if plural in BY_PLURAL:
            namespace = parts[-2] if "namespaces" in parts else ""
            if (namespace, "watch" if "watch" in request.query else "list") in self.forbidden:
                return web.json_response({"kind": "Status", "code": 403, "reason": "Forbidden"}, status=403)
            if "watch" in request.query:
                return await self._watch(request, plural)
            self.lists += plural == "trainingjobs"
            items = self.jobs if plural == "trainingjobs" else []
            if namespace:
                items = [each for each in items if each["metadata"]["namespace"] == namespace]
            return web.json_response({"metadata": {"resourceVersion": "9"}, "items": items})
        return web.json_response(self._discovery(request.path))

    def _discovery(self, path: str) -> Any:
        def resources(group_version: str, *names: tuple[str, str, bool]) -> Any:
            rows = [
                {"name": n, "kind": k, "singularName": k.lower(), "namespaced": ns, "verbs": ["list", "watch"]}
                for n, k, ns in names
            ]
            return {"kind": "APIResourceList", "groupVersion": group_version, "resources": rows}

        def group(name: str, version: str) -> Any:
            one = {"groupVersion": f"{name}/{version}", "version": version}
            return {"name": name, "versions": [one], "preferredVersion": one}

        crds = ("customresourcedefinitions", "CustomResourceDefinition", False)
        answers: dict[str, Any] = {
            "/api": {"versions": ["v1"]},
            "/apis": {"groups": [group("everstep.dev", "v1alpha1"), group("apiextensions.k8s.io", "v1")]},
            "/api/v1": resources(
                "v1", ("pods", "Pod", True), ("nodes", "Node", False), ("namespaces", "Namespace", False)
            ),
            "/apis/apiextensions.k8s.io/v1": resources("apiextensions.k8s.io/v1", crds),
            "/apis/everstep.dev/v1alpha1": resources(
                "everstep.dev/v1alpha1", ("trainingjobs", "TrainingJob", True), ("trainingpools", "TrainingPool", False)
            ),
        }
        if path not in answers:
            self.unexpected.append(path)
        return answers.get(path, {})

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        if plural != "trainingjobs":
            await asyncio.sleep(60)
        behaviour = await self.watches.get()
        if isinstance(behaviour, web.Response):
            return behaviour
        response = web.StreamResponse()
        await response.prepare(request)
        await behaviour(request, response)
        return response


def event(kind: str, body: Any) -> Stream:
    async def stream(_: web.Request, response: web.StreamResponse) -> None:
        await response.write(json.dumps({"type": kind, "object": body}).encode() + b"\n")
        await asyncio.sleep(0.2)

    return stream


async def endless(_: web.Request, response: web.StreamResponse) -> None:
    await asyncio.sleep(60)


GONE = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
BROKEN = {"kind": "Status", "code": 500, "reason": "InternalError", "message": "etcd"}


class Seen:
    def __init__(self, server: ApiServer, url: str, namespaces: tuple[str, ...] = ()) -> None:
        self.server, self.url = server, url
        self.events: asyncio.Queue[tuple[ApiResource, str | None, str]] = asyncio.Queue()
        self.begun = 0
        configuration = Configuration()
        configuration.host = url

        async def login() -> Configuration:
            return configuration

        async def ready() -> None:
            return None

        def receive(resource: ApiResource, kind: str | None, raw: Any) -> None:
            self.events.put_nowait((resource, kind, raw["metadata"]["name"]))

        def begins() -> None:
            self.begun += 1

        self.watch = KopfWatch(login, receive, namespaces=namespaces, ready=ready)
        self.task = asyncio.create_task(self.watch.run(begins))

    async def next(self) -> tuple[ApiResource, str | None, str]:
        return await asyncio.wait_for(self.events.get(), 20)


@contextlib.asynccontextmanager
async def watching(server: ApiServer, *namespaces: str) -> AsyncIterator[Seen]:
    app = web.Application()
    app.router.add_route("*", "/{any:.*}", server.handle)
    running = TestServer(app)
    await running.start_server()
    made = Seen(server, str(running.make_url("")).rstrip("/"), namespaces)
    yield made
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)
    await running.close()
    assert server.unexpected == [], "kopf did more than list and watch our kinds"


@pytest_asyncio.fixture
async def seen() -> AsyncIterator[Seen]:
    async with watching(ApiServer()) as made:
        yield made


async def test_lists_then_watches(seen: Seen) -> None:
    assert await seen.next() == (JOBS, None, "listed")
    seen.server.watches.put_nowait(event("ADDED", job("new", 10)))
    assert await seen.next() == (JOBS, "ADDED", "new")
    seen.server.watches.put_nowait(event("DELETED", job("new", 11)))
    assert await seen.next() == (JOBS, "DELETED", "new")


@pytest.mark.parametrize(
    "trouble",
    [
        lambda: web.json_response(GONE, status=410),
        lambda: event("ERROR", BROKEN),
    ],
    ids=["410", "error in the stream"],
)
async def test_what_ends_kopf_starts_it_again_with_a_list(seen: Seen, trouble: Any) -> None:
    await seen.next()
    bystander = asyncio.create_task(asyncio.sleep(3600))  # a reconcile, a leader's poll
    seen.server.watches.put_nowait(trouble())
    seen.server.jobs.append(job("while-away", 20))
    names = {(await seen.next())[2] for _ in range(2)}
    assert names == {"listed", "while-away"}
    assert seen.begun == 2
    assert not bystander.done(), "kopf took somebody with it"
    bystander.cancel()


async def test_410_in_the_stream_lists_again_without_an_end(seen: Seen) -> None:
    await seen.next()
    seen.server.watches.put_nowait(event("ERROR", GONE))
    assert await seen.next() == (JOBS, None, "listed")
    assert seen.begun == 1


async def test_a_suspicious_watch_can_be_started_again(seen: Seen) -> None:
    await seen.next()
    seen.watch.restart()
    assert await seen.next() == (JOBS, None, "listed")
    assert seen.begun == 2


@pytest.mark.parametrize("verb", ["list", "watch"])
async def test_a_namespace_that_cannot_be_read_leaves_the_watch_and_keeps_the_others_in_it(verb: str) -> None:
    server = ApiServer()
    server.forbidden = {("gone", verb)}
    with capture_logs() as logs:
        async with watching(server, "gone", "ns") as seen:
            assert await seen.next() == (JOBS, None, "listed")
            await until_left_out(seen, "gone")
            server.watches.put_nowait(event("ADDED", job("new", 10)))
            while await seen.next() != (JOBS, "ADDED", "new"):
                pass
            begun = seen.begun
            server.watches.put_nowait(event("ADDED", job("newer", 11)))
            assert await seen.next() == (JOBS, "ADDED", "newer")
            assert seen.begun == begun, "it goes on, and is not begun again and again"
            server.forbidden.clear()
            server.jobs.append(job("back", 12, namespace="gone"))
            seen.watch.readmit({"gone"})
            names = {(await seen.next())[2] for _ in range(2)}
    assert names == {"listed", "back"}
    told = [entry for entry in logs if "cannot be watched" in entry["event"]]
    assert [entry["namespace"] for entry in told] == ["gone"]


async def until_left_out(seen: Seen, namespace: str) -> None:
    async def left_out() -> bool:
        return namespace in seen.watch.left_out

    await until(left_out, "the namespace leaves the watch")


async def test_a_namespace_that_was_left_out_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rights may come back without anybody telling."""
    monkeypatch.setattr("everstep_operator.cluster.watch.TRY_AGAIN_SECONDS", 0.5)
    server = ApiServer()
    server.forbidden = {("gone", "watch")}
    server.jobs = [job("there", 5, namespace="gone")]
    async with watching(server, "gone", "ns") as seen:
        await until_left_out(seen, "gone")
        server.forbidden.clear()

        async def back() -> bool:
            return not seen.watch.left_out

        await until(back, "it is watched again")


async def test_where_nothing_can_be_read_all_namespaces_stay_in_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep_operator.cluster.watch.TRY_AGAIN_SECONDS", 0.5)
    server = ApiServer()
    server.forbidden = {("one", "list"), ("two", "list")}
    async with watching(server, "one", "two") as seen:

        async def tried() -> bool:
            return seen.begun > 3

        await until(tried, "some attempts")
        server.forbidden.clear()
        server.jobs = [job(f"in-{name}", 5, namespace=name) for name in ("one", "two")]
        names: set[str] = set()
        while names != {"in-one", "in-two"}:
            names.add((await seen.next())[2])


async def test_a_watch_that_is_cancelled_before_its_thread_has_begun_does_not_begin(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread would go on watching, and an operator that is told to stop would wait for it for ever."""
    monkeypatch.setattr("everstep_operator.cluster.watch.GRACE_SECONDS", 0.0)
    born, go_on, over = threading.Event(), threading.Event(), threading.Event()

    class Late(KopfWatch):
        def _run_loop(self, main: asyncio.AbstractEventLoop) -> None:
            born.set()
            go_on.wait()
            try:
                super()._run_loop(main)
            finally:
                over.set()

    async def login() -> Configuration:
        configuration = Configuration()
        configuration.host = seen.url
        return configuration

    async def ready() -> None:
        return None

    watch = Late(login, lambda *_: None, ready=ready)
    task = asyncio.create_task(watch.run(lambda: None))
    await asyncio.to_thread(born.wait)
    task.cancel()
    await asyncio.wait((task,))
    go_on.set()
    try:
        assert await asyncio.to_thread(over.wait, 10), "the thread goes on"
    finally:
        watch.restart()


class FakeLoop:
    """A loop whose time is set by hand, and in which nothing is ever called."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def call_at(self, at: float, call: object) -> None:
        pass


def test_refusals_that_lie_weeks_apart_do_not_keep_a_namespace_out_ever_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep_operator.cluster.watch._forbidden_namespace", lambda error: "a")

    async def nothing() -> Any:
        return None

    watch, loop = KopfWatch(nothing, lambda *_: None, namespaces=("a", "b"), ready=nothing), FakeLoop()
    pauses = []
    for since_last_try in (0.0, 1.0, 1.0, 86400.0, 1.0):
        loop.now = watch._tried_at.get("a", loop.now) + since_last_try
        watch.left_out.clear()
        assert watch._leave_out(loop, Exception())  # type: ignore[arg-type]
        pauses.append(watch.left_out["a"] - loop.now)
    assert pauses == [30.0, 60.0, 120.0, 30.0, 60.0]
