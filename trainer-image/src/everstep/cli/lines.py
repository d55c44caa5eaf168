"""Log lines of a job: `[rank 3] text`, as the agent tags them, with the pod's timestamp before it when asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from heapq import merge
from typing import Any

from everstep.cli.errors import CliError

_TAG = re.compile(r"^\[rank (\d+)\] ?")
_STAMP = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) ")

# Readable on dark and on light backgrounds; ranks that are neighbours differ.
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta", "bright_green")


@dataclass(frozen=True, slots=True)
class LogLine:
    """A log line. `rank` is None for what the agent itself says; `stamp` is the time in UTC, which sorts as text; it is
    empty when unknown."""

    pod: str
    text: str
    rank: int | None = None
    stamp: str = ""


def parse_line(raw: str, pod: str, *, stamped: bool) -> LogLine:
    """Parse a log line.

    Args:
        raw: The line as the pod wrote it.
        pod: Name of the pod.
        stamped: Whether it begins with the time at which the container runtime took it (`timestamps=true`).
    """
    text, stamp = raw.rstrip("\r\n"), ""
    if stamped and (found := _STAMP.match(text)):
        # Fractions are printed without their trailing zeros, and would not sort as text.
        stamp = f"{_to_utc(found[1], found[3])}.{(found[2] or ''):0<9}"
        text = text[found.end() :]
    rank = None
    if tag := _TAG.match(text):
        text, rank = text[tag.end() :], int(tag[1])
    # Of a progress bar that rewrites its line, only the last state.
    return LogLine(pod, text.rpartition("\r")[2], rank, stamp)


def _to_utc(seconds: str, zone: str) -> str:
    """Return a time of the day in UTC: container runtimes write that of their node's own zone."""
    if zone in ("Z", "+00:00"):
        return seconds
    return datetime.fromisoformat(f"{seconds}{zone}").astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")


def is_wanted(line: LogLine, rank: int | None) -> bool:
    return rank is None or line.rank == rank


def rank_filter(job: dict[str, Any], rank: int | None) -> int | None:
    """Return the rank to filter by. A job of one rank is not tagged: asking for its rank 0 is asking for everything.

    Raises:
        CliError: If the job has fewer ranks.
    """
    spec = job.get("spec", {})
    nodes, each = spec.get("numNodes", 1), spec.get("numProcPerNode")  # None: as many as a pod has GPUs
    if rank is not None and each is not None and rank >= nodes * each:
        name = job.get("metadata", {}).get("name", "the job")
        raise CliError(f"{name} has no rank {rank}: its ranks are 0 to {nodes * each - 1}")
    limits = spec.get("resources", {}).get("limits", {})
    has_gpus = any(resource.endswith("gpu") and str(amount) not in ("0", "1") for resource, amount in limits.items())
    is_single = nodes == 1 and (each == 1 or (each is None and not has_gpus))
    return None if is_single and rank == 0 else rank


def merge_lines(pods: Iterable[Iterable[LogLine]]) -> Iterator[LogLine]:
    """Yield several pods' lines in the order of time; each pod's own order is kept, even where its clock stepped
    back."""
    return (line for _, line in merge(*(_monotonic_stamps(lines) for lines in pods), key=lambda pair: pair[0]))


def _monotonic_stamps(lines: Iterable[LogLine]) -> Iterator[tuple[str, LogLine]]:
    latest = ""
    for line in lines:
        latest = max(latest, line.stamp)
        yield latest, line


def rank_colour(rank: int) -> str:
    return COLOURS[rank % len(COLOURS)]


def line_label(line: LogLine) -> str:
    return f"rank {line.rank}" if line.rank is not None else line.pod
