"""The log of a job out of the logs of its pods, while pods come and go."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from queue import Empty, Queue
from typing import Any, Protocol

from everstep.cli.cluster import (
    FINISHED_PHASES,
    OUTAGE_SECONDS,
    ApiObject,
    ClusterUnavailableError,
    LogsNotReadyError,
    Outage,
)
from everstep.cli.lines import LogLine, is_wanted, merge_lines, parse_line

_LOOK_EVERY = 1.0  # seconds between looks for new pods


class LogSource(Protocol):
    """A source of logs: what is needed of a cluster."""

    def job(self, name: str) -> ApiObject | None: ...

    def pods(self, job: str) -> list[ApiObject]: ...

    def log(self, pod: str, *, follow: bool, since: str = "") -> Iterator[str]: ...


def read_past_lines(source: LogSource, job: str, rank: int | None) -> Iterator[LogLine]:
    """Yield what the pods that exist now have written so far, in the order of time."""

    def lines_of(pod: ApiObject) -> Iterator[LogLine]:
        name = pod["metadata"]["name"]
        try:
            for raw in source.log(name, follow=False):
                yield parse_line(raw, name, stamped=True)
        except LogsNotReadyError:
            return
        except ClusterUnavailableError as error:
            yield _explain_unreadable(name, error)

    return (line for line in merge_lines([lines_of(pod) for pod in source.pods(job)]) if is_wanted(line, rank))


def follow_lines(
    source: LogSource,
    job: str,
    rank: int | None,
    look_every: float = _LOOK_EVERY,
    outage_seconds: float = OUTAGE_SECONDS,
) -> Iterator[LogLine]:
    """Yield lines as they come, from every pod that the job has meanwhile, until the job has finished or is deleted.

    Args:
        source: The cluster.
        job: Name of the job.
        rank: The only rank to yield lines of; None: all.
        look_every: Seconds between two looks for new pods.
        outage_seconds: How long the API server may be unavailable.

    Raises:
        CliError: The API server rejects a request, or is unavailable for longer.
    """
    outage = Outage(outage_seconds)
    lines: Queue[LogLine] = Queue(maxsize=10_000)
    readers: dict[str, _Reader] = {}  # by pod UID: a replacement has the same name
    stop = threading.Event()
    try:
        while True:
            try:
                # The job first: pods made between the two reads are found in the next round.
                found = source.job(job)
                pods = source.pods(job)
            except ClusterUnavailableError as error:
                outage.endure(error)
                yield from (line for line in _drain_queue(lines, look_every) if is_wanted(line, rank))
                continue
            outage.end()
            for pod in pods:
                if (uid := pod["metadata"]["uid"]) not in readers:
                    readers[uid] = _Reader(source, pod["metadata"]["name"], lines, stop, Outage(outage_seconds))
            over = found is None or found.get("status", {}).get("phase") in FINISHED_PHASES
            going = {pod["metadata"]["uid"] for pod in pods if not over and not _has_ended(pod)}
            for uid, reader in readers.items():
                if uid not in going:
                    reader.finish()
            idle = over and not any(reader.is_alive() for reader in readers.values())
            yield from (line for line in _drain_queue(lines, 0 if idle else look_every) if is_wanted(line, rank))
            if failed := next((reader.error for reader in readers.values() if reader.error), None):
                raise failed
            if idle:
                return
    finally:
        stop.set()


def list_failure_lines(failure: dict[str, Any]) -> list[LogLine]:
    rank = failure.get("rank")
    where = str(failure.get("node") or "job")
    return [LogLine(where, str(text), rank) for text in failure.get("logTail") or []]


def _drain_queue(lines: Queue[LogLine], seconds: float) -> Iterator[LogLine]:
    deadline = time.monotonic() + seconds
    while True:
        try:
            yield lines.get(timeout=max(0.0, deadline - time.monotonic())) if seconds else lines.get_nowait()
        except Empty:
            return


def _explain_unreadable(pod: str, error: ClusterUnavailableError) -> LogLine:
    return LogLine(pod, f"everstep: the log of {pod} cannot be read: {error}")


def _has_ended(pod: ApiObject) -> bool:
    return pod.get("status", {}).get("phase") in FINISHED_PHASES


class _Reader(threading.Thread):
    """A thread that reads one pod's log to its end, through broken connections and a container that has not started
    yet."""

    def __init__(
        self, source: LogSource, pod: str, lines: Queue[LogLine], stop: threading.Event, outage: Outage
    ) -> None:
        super().__init__(name=f"log of {pod}", daemon=True)
        self.error: Exception | None = None
        self._source, self._pod, self._lines, self._stop_all = source, pod, lines, stop
        self._outage: Outage | None = outage  # None: it was told that this log cannot be read
        self._finish = threading.Event()
        self._last = ""  # newest time seen, and how many lines carried it
        self._last_count = 0
        self.start()

    def finish(self) -> None:
        """Note that no more is to come: what is there is still read, to its end."""
        self._finish.set()

    def run(self) -> None:
        while not self._stop_all.is_set():
            final = self._finish.is_set()
            try:
                self._read()
            except LogsNotReadyError:
                pass
            except ClusterUnavailableError as error:
                final = final and self._has_waited(error)
                self._stop_all.wait(0.5)
            except Exception as error:
                self.error = error
                return
            if final:
                return
            self._finish.wait(0.5)

    def _has_waited(self, error: ClusterUnavailableError) -> bool:
        """Tell whether the log could not be read for so long that only its own node can be at fault, and say so
        once: the other logs go on."""
        if self._outage is not None:
            try:
                self._outage.endure(error)
            except ClusterUnavailableError:
                self._outage = None
                self._lines.put(_explain_unreadable(self._pod, error))
        return self._outage is None

    def _read(self) -> None:
        # `sinceTime` includes its own second: skip what was shown already.
        resume, skip = self._last, self._last_count
        since = f"{resume}Z" if resume else ""
        for raw in self._source.log(self._pod, follow=not self._finish.is_set(), since=since):
            line = parse_line(raw, self._pod, stamped=True)
            if resume and line.stamp < resume:
                continue
            if resume and line.stamp == resume and skip:
                skip -= 1
                continue
            self._last_count = self._last_count + 1 if line.stamp == self._last else 1
            self._last = line.stamp
            self._lines.put(line)
            if self._outage is not None:
                self._outage.end()
            if self._stop_all.is_set():
                return
