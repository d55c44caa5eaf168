"""kopf as the source of events of TrainingJobs and TrainingPools: it logs in, lists, watches, re-lists. It is given
nothing else to do. What comes by the thousand, pods and nodes, has streams of its own (object_stream.py).

It runs in a thread with an event loop of its own, for a hard reason: it ends, by design, on some HTTP 410s and watch
errors, and when it ends it cancels *every* task of its loop that was born after it (`run_tasks`, "hung tasks"). In
one loop with the rest, a compacted resourceVersion would cut every reconcile and every leader's poll short. So it
dies alone and is started again at once; a process restart would cost a back-off and the whole cache.

kopf writes nothing: only `on.event` handlers (no finalizers, no annotations), posting off, peering off, no watch on
namespaces and CRDs (rights we do not ask for).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import aiohttp
import kopf
import structlog
from kubernetes.aio.client import Configuration

from everstep_operator import metrics
from everstep_operator.cluster.api_session import open_api_session
from everstep_operator.cluster.client import PAGE, WATCH_SECONDS
from everstep_operator.cluster.log_limit import LogRateLimiter
from everstep_operator.cluster.object_stream import EventHandler
from everstep_operator.cluster.resources import JOBS, POOLS, ApiResource

log = structlog.get_logger(__name__)

BACKOFF_MAX = 5.0
STEADY_SECONDS = 60.0
GRACE_SECONDS = 3.0
TRY_AGAIN_SECONDS, TRY_AGAIN_MAX = 30.0, 1800.0  # with a namespace that could not be watched: it costs a list of all


class KopfWatch:
    """Calls `receive(resource, type, object)` in the caller's loop for every event; type None = from a list."""

    def __init__(
        self,
        login: Callable[[], Awaitable[Configuration]],
        receive: EventHandler,
        *,
        namespaces: tuple[str, ...] = (),
        ready: Callable[[], Awaitable[None]],
    ) -> None:
        self._login = login
        self._receive = receive
        self._namespaces = namespaces
        self._ready = ready
        self._stop: Callable[[], None] | None = None
        self._over = False  # nobody wants a life that has not begun yet
        self._logs = LogRateLimiter()
        self._tries: Counter[str] = Counter()  # by namespace, how often in a row it could not be watched
        self._tried_at: dict[str, float] = {}  # … and when it was tried again after the last time
        self.left_out: dict[str, float] = {}  # namespaces that cannot be watched, and until when nobody tries again

    async def run(self, begins: Callable[[], None]) -> None:
        """Watch until cancelled. `begins` is called before each list of everything: what vanished before it is told
        by nobody."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            await self._ready()  # kopf does not wait for a CRD that comes later, and would watch nothing for ever
            started = loop.time()
            begins()
            try:
                await self._run_in_thread(loop)
                if (left_out := self._logs.left_out("ended")) is not None:
                    log.warning("the watch ended", times_before=left_out)
            except Exception as error:
                if self._leave_out(loop, error):
                    continue
                text = f"{type(error).__name__}: {error}"
                if (left_out := self._logs.left_out("failed")) is not None:
                    log.warning("the watch failed", error=text, times_before=left_out)
            failures = 0 if loop.time() - started > STEADY_SECONDS else failures + 1
            metrics.watch_restarts.inc()
            await asyncio.sleep(min(BACKOFF_MAX, 0.05 * 2.0 ** min(failures, 10)))

    def restart(self) -> None:
        """End the present watch: it is suspected to be deaf."""
        if self._stop is not None:
            self._stop()

    def readmit(self, namespaces: Iterable[str]) -> None:
        """Watch these namespaces again: they can be read again, as far as is known."""
        if back := self.left_out.keys() & set(namespaces):
            for namespace in back:
                del self.left_out[namespace]
                self._tries.pop(namespace, None)
            self.restart()

    def _leave_out(self, loop: asyncio.AbstractEventLoop, error: Exception) -> bool:
        """Leave a namespace out of the watch that has ended it: kopf ends with its first stream that is forbidden."""
        namespace = _forbidden_namespace(error)
        others = set(self._namespaces) - self.left_out.keys() - {namespace}
        if namespace not in self._namespaces:
            return False
        if not others:  # none can be watched: all of them are tried, with the back-off of any failure
            self.left_out.clear()
            return False
        if loop.time() > self._tried_at.get(namespace, 0.0) + STEADY_SECONDS:
            self._tries[namespace] = 0  # it was watched since: an API server that has just started may forbid anything
        pause = min(TRY_AGAIN_MAX, TRY_AGAIN_SECONDS * 2.0 ** min(self._tries[namespace], 10))
        self._tries[namespace] += 1
        until = self.left_out[namespace] = self._tried_at[namespace] = loop.time() + pause
        if (times := self._logs.left_out(namespace)) is not None:
            log.warning(
                "a namespace cannot be watched; going on with the others",
                namespace=namespace, error=str(error), again_in=pause, times_before=times,
            )  # fmt: skip

        def try_again() -> None:
            if self.left_out.get(namespace) == until:
                del self.left_out[namespace]
                self.restart()

        loop.call_at(until, try_again)
        return True

    async def _run_in_thread(self, main: asyncio.AbstractEventLoop) -> None:
        """Run kopf once in a thread; return or raise when it is over. When cancelled, it is over at once."""
        running = asyncio.create_task(asyncio.to_thread(self._run_loop, main))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            self._over = True  # before the thread has set `_stop`, there is nothing that `restart` could end
            self.restart()
            await asyncio.wait((running,), timeout=GRACE_SECONDS + 1)
            raise

    def _run_loop(self, main: asyncio.AbstractEventLoop) -> None:
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self._run_kopf(main))
        finally:
            # Not `asyncio.run`: it would wait for every task, and kopf's watchers can swallow their cancellation until
            # their stream says something, a minute or more. On a closed loop nobody takes another step.
            loop.set_exception_handler(lambda *_: None)
            loop.close()

    async def _run_kopf(self, main: asyncio.AbstractEventLoop) -> None:
        """Run kopf until its first task ends: `kopf.operator()` would go on to wait for all others."""
        mine = asyncio.get_running_loop()
        stop = asyncio.Event()
        self._stop = lambda: _call_in_loop(mine, stop.set)
        configuration = await self._login()
        if self._over:
            return
        session = open_api_session(configuration)
        try:
            tasks = await kopf.spawn_tasks(
                registry=self._registry(main, kopf.AiohttpSession(server=configuration.host, aiohttp_session=session)),
                settings=_make_settings(),
                standalone=True,
                clusterwide=not self._namespaces,
                namespaces=[namespace for namespace in self._namespaces if namespace not in self.left_out],
                stop_flag=stop,
            )
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stop = None
            await session.close()
            await _cancel_all()
        for task in done:
            task.result()

    def _registry(self, main: asyncio.AbstractEventLoop, session: kopf.AiohttpSession) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()  # private: the global one would add login handlers of every client it finds

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> kopf.AiohttpSession:
            return session

        for resource in (JOBS, POOLS):
            on_event: Any = kopf.on.event(
                resource.group, resource.version, resource.plural, id=resource.plural, registry=registry
            )
            on_event(self._handler(main, resource))
        return registry

    def _handler(self, main: asyncio.AbstractEventLoop, mine: ApiResource) -> Callable[..., Awaitable[None]]:
        async def handle(event: Any, **_: Any) -> None:
            _call_in_loop(main, self._receive, mine, event["type"], event["object"])

        return handle


def _forbidden_namespace(error: BaseException) -> str:
    """Return the namespace of the request that was forbidden, or nothing."""
    cause = error.__cause__
    if not isinstance(cause, aiohttp.ClientResponseError) or cause.status != 403:
        return ""
    _, _, rest = cause.request_info.url.path.partition("/namespaces/")
    return rest.partition("/")[0]


async def _cancel_all() -> None:
    """Cancel every task of this loop but the caller's, again and again: the first cancellation may be swallowed."""
    deadline = asyncio.get_running_loop().time() + GRACE_SECONDS
    while left := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=0.05)
        if asyncio.get_running_loop().time() > deadline:
            return


def _call_in_loop(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # that loop has ended
        loop.call_soon_threadsafe(call, *args)


def _make_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.process.ultimate_exiting_timeout = None  # it would kill this thread, and with it the process
    settings.watching.server_timeout = WATCH_SECONDS
    settings.watching.connect_timeout = 10
    # Large jobs in one list are much memory for a moment. That a compacted page (410) ends kopf is no loss here.
    settings.watching.chunk_size = PAGE
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = (0.2, 0.5, 1, 2)  # then it ends, and is started again with a list
    settings.queueing.idle_timeout = 1.0  # a worker per object lingers so long
    settings.persistence.diffbase_storage = _NoDiff()
    return settings


class _NoDiff(kopf.DiffBaseStorage):
    """kopf deep-copies each object to find out what has changed, for handlers that we do not have."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> Any:
        return None

    def store(self, **_: Any) -> None:
        return None
