"""Measures the time from `apply` until all ranks have met."""

from __future__ import annotations

import itertools
import time

from benchmarks.arms import Arm, Bare, Everstep, Indexed, Mounted, Site
from benchmarks.measure import Row, alternate

_numbers = itertools.count()
WORLD = 4
REPEATS = 18  # a kubelet tries a mount again after a second, more or less: single starts differ by as much as that


def next_tag(prefix: str) -> str:
    return f"{prefix}-{next(_numbers)}"


def start(site: Site, arm: Arm, world: int = WORLD) -> float:
    """Return the seconds from just before the first request until the last rank has passed its first barrier."""
    tag = next_tag("start")
    began = time.monotonic()
    arm.create(site, tag, world)
    try:
        return site.ear.listen(tag, world) - began
    finally:
        site.ear.dismiss(tag)
        arm.delete(site, tag)


def startup_4(site: Site) -> Row:
    row = Row("startup-4", "s", 1.25)
    return alternate(row, lambda: start(site, Everstep()), lambda: start(site, Bare()), REPEATS)


def startup_vs_mounted_4(site: Site) -> Row:
    row = Row("startup-vs-mounted-4", "s", 1.0)
    return alternate(row, lambda: start(site, Everstep()), lambda: start(site, Mounted()), REPEATS)


def startup_vs_indexed_4(site: Site) -> Row:
    row = Row("startup-vs-indexed-4", "s", 1.1)
    return alternate(row, lambda: start(site, Everstep()), lambda: start(site, Indexed()), REPEATS)


def startup_vs_token_4(site: Site) -> Row:
    row = Row("startup-vs-token-4", "s", 1.1)
    return alternate(row, lambda: start(site, Everstep()), lambda: start(site, Indexed(token=True)), REPEATS)
