"""Streams of events of the kinds of which there are many: pods and nodes.

One request for each kind and namespace, on the client's own connections, of which nothing is decoded that nobody reads.
A stream goes on from where the last one ended; where the API server no longer knows that, a list takes its place
(`compare_with_list`), which also finds what was deleted meanwhile. Each stream fails, and pauses, alone.

References: "Efficient detection of changes" in the API concepts of Kubernetes (bookmarks, 410 Gone).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from everstep_operator import metrics
from everstep_operator.cluster import errors
from everstep_operator.cluster.api_answer import decode_body
from everstep_operator.cluster.cache import ObjectCache, resource_version
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.comparison import POD_SELECTOR, compare_with_list
from everstep_operator.cluster.log_limit import LogRateLimiter
from everstep_operator.cluster.pod_projection import decode_pod_event
from everstep_operator.cluster.resources import PODS, ApiResource

log = structlog.get_logger(__name__)

BASE_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.05, 5.0
MAX_PAUSE_FORBIDDEN = 30.0  # of one namespace among others: its Role is gone, and may come back untold
STEADY_SECONDS = 10.0  # a stream that has lasted so long was no failure, however it ended
EVENTS_IN_A_ROW = 50  # some milliseconds of work: then others have a turn, the renewal of the Lease among them

RawObject = Mapping[str, Any]
EventHandler = Callable[[ApiResource, str | None, RawObject], None]


class StreamBroken(Exception):
    """The API server has ended a stream with an error. What was told before it counts, but where to go on is lost."""


@dataclass
class ObjectStream:
    """The stream of one kind of object in one namespace, or in all of them."""

    client: Client
    resource: ApiResource
    place: str | None
    store: ObjectCache[Any]
    receive: EventHandler
    max_pause: float = MAX_PAUSE_SECONDS
    version: int | None = None  # up to which everything was told; None: unknown, so a list has to come first
    _life: asyncio.Task[None] | None = None
    _lines: int = 0  # that the present stream has told
    _opened: tuple[float, int] | None = None  # when the present stream was asked for, and from which version
    _logs: LogRateLimiter = field(default_factory=LogRateLimiter)

    async def run(self) -> None:
        """Follow until cancelled."""
        failures = 0
        while True:
            self._lines, self._opened = 0, None
            self._life = asyncio.create_task(self._follow())
            try:
                await asyncio.wait((self._life,))
            finally:
                if not self._life.done():  # cancelled: its connection is closed before the client is
                    self._life.cancel()
                    await asyncio.wait((self._life,))
            error = None if self._life.cancelled() else self._life.exception()
            failures = 0 if self._was_good(error) else failures + 1
            if error is None and not self._lines:
                # Not even a bookmark. Nor does a server say a word to who asks for what comes after a version that it
                # has not reached, as after its data were restored from a backup.
                self.version = None
            if error is not None:
                self._note_failure(error)
            await asyncio.sleep(self._compute_pause(failures, error))

    def restart(self) -> None:
        """End the present stream, and list: it has missed something."""
        self.version = None
        if self._life is not None:
            self._life.cancel()

    async def _follow(self) -> None:
        """Follow one stream to its end. `version` tells the next one where to go on."""
        if self.version is None:
            self.version = await self._compare()
        self._opened = time.monotonic(), self.version
        count = 0
        async with contextlib.aclosing(self._open(self.version)) as lines:
            async for line in lines:
                self._take(line)
                count += 1
                if count % EVENTS_IN_A_ROW == 0:
                    await asyncio.sleep(0)

    def _was_good(self, error: BaseException | None) -> bool:
        """Return whether the present stream, which has ended, was no failure.

        A server ends streams whose reader is busy for a moment. But one that it ends at once, having told nothing new,
        would be asked for again and again; so would all objects where it takes its time for the list and then fails.
        """
        if self._opened is None:
            return False
        opened, version = self._opened
        has_moved = error is None and self.version not in (None, version)
        return has_moved or time.monotonic() - opened > STEADY_SECONDS

    async def _compare(self) -> int:
        found = await compare_with_list(self.client, self.resource, self.place, self.store)
        metrics.resync_repairs.labels(self.resource.plural, "ghost").inc(found.deleted)
        metrics.resync_repairs.labels(self.resource.plural, "missed").inc(found.missed)
        return found.version

    def _open(self, version: int) -> AsyncGenerator[bytes]:
        labels = POD_SELECTOR if self.resource == PODS else None
        return self.client.watch(self.resource, self.place, version=version, labels=labels)

    def _take(self, line: bytes) -> None:
        self._lines += 1
        event = decode_pod_event(line) if self.resource == PODS else decode_body(line)
        kind, raw = event["type"], event["object"]
        if kind == "ERROR":
            raise StreamBroken(f"{raw.get('code')} {raw.get('reason')}: {raw.get('message')}")
        try:
            if kind != "BOOKMARK":
                self.receive(self.resource, kind, raw)
        except Exception:  # one odd object must not end the stream, and with it all others
            log.exception("an object that cannot be read", kind=self.resource.kind, name=raw["metadata"].get("name"))
        self.version = resource_version(raw) or self.version

    def _note_failure(self, error: BaseException) -> None:
        """Decide where the next stream begins, and say that this one has failed.

        An error of the connection tells nothing of the version; nor does one of our rights, or of the server's load.
        Any other answer may be about the version itself: it was compacted away (410), or the server's data are older
        than it, since they were restored from a backup (504).
        """
        metrics.watch_restarts.inc()
        known = (errors.Unreachable, errors.TooManyRequests, errors.Unauthorized, errors.NotAuthorized)
        if not isinstance(error, known):
            self.version = None
        if (left_out := self._logs.left_out(type(error).__name__)) is not None:
            log.warning(
                "a watch has ended", stream=self.resource.plural, namespace=self.place, times_before=left_out,
                error=f"{type(error).__name__}: {error}",
            )  # fmt: skip

    def _compute_pause(self, failures: int, error: BaseException | None) -> float:
        """Return the seconds until the next stream.

        None after a steady one; growing, bounded and jittered after others, and at least what the server asks for.
        """
        asked = (error.retry_after or 0.0) if isinstance(error, errors.ApiError) else 0.0
        most = self.max_pause if isinstance(error, errors.NotAuthorized) else MAX_PAUSE_SECONDS
        own = min(most, BASE_PAUSE_SECONDS * 2.0 ** min(failures, 12)) * (0.5 + random.random() / 2)  # noqa: S311
        return max(own if failures else 0.0, min(asked, MAX_PAUSE_FORBIDDEN))


class StreamWatch:
    """The streams of several kinds, in all watched namespaces.

    Args:
        client: Sends the requests.
        stores: The cache of each kind to follow.
        receive: Called for each event with the kind of object, the type of the event, and the object.
        namespaces: The watched namespaces; none: all of them, in one stream.
    """

    def __init__(
        self,
        client: Client,
        stores: Mapping[ApiResource, ObjectCache[Any]],
        receive: EventHandler,
        namespaces: tuple[str, ...] = (),
    ) -> None:
        self.streams = [
            # Where there are others, one that is forbidden may be so for long; where it is the only one, an API server
            # has just started, or nothing can be done at all.
            ObjectStream(
                client, resource, place, store, receive,
                max_pause=MAX_PAUSE_FORBIDDEN if len(namespaces) > 1 and resource.namespaced else MAX_PAUSE_SECONDS,
            )
            for resource, store in stores.items()
            for place in ((namespaces or (None,)) if resource.namespaced else (None,))
        ]  # fmt: skip

    async def run(self, listed: Mapping[tuple[ApiResource, str | None], int]) -> None:
        """Follow all streams until cancelled.

        Args:
            listed: Versions of the lists from which the cache was filled, by kind and namespace: streams begin there.
        """
        async with asyncio.TaskGroup() as group:
            for stream in self.streams:
                stream.version = listed.get((stream.resource, stream.place))
                group.create_task(stream.run())

    def restart(self, resources: Collection[ApiResource]) -> None:
        """Begin the streams of these kinds again, with a list: they are suspected to be deaf."""
        for stream in self.streams:
            if stream.resource in resources:
                stream.restart()
