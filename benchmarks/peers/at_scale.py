"""Rows on pretended nodes: how soon all pods run, with the client limits that are shipped and with raised ones."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from benchmarks.peers.comparison import LONGEST_S, Comparison, Sample, measure_all
from benchmarks.peers.contenders import CONTENDERS, LABEL, PATHS, Contender, RankRequest
from benchmarks.peers.install import Installation
from benchmarks.pretended import LABELS, TOLERATION, PodWatch, clear, post
from benchmarks.scale import NODES, RAISED
from e2e.cluster import backend, kwok
from e2e.cluster.controlplane_flags import ClientLimits
from e2e.harness import Cluster, wait

REPEATS = 1
WARM_UP = (2, 10)  # jobs, and pods of each: connections, caches, and controllers that have just been started again
PLACEMENT = {"tolerations": [TOLERATION], "nodeSelector": {"type": "kwok"}}
OWNERS = tuple(PATHS[kind] for kind in ("TrainJob", "JobSet", "MPIJob"))
NAMES = ("scale-1x1000", "scale-100x10", "scale-raised-1x1000", "scale-raised-100x10")
_NAME = re.compile(r"scale(-raised)?-(\d+)x(\d+)")
_numbers = itertools.count()


@dataclass(frozen=True)
class ScaleRow:
    """The row that a name stands for: so many jobs of so many pods, with raised client limits or the shipped ones."""

    name: str
    jobs: int
    pods: int
    is_raised: bool

    @property
    def all_pods(self) -> int:
        return self.jobs * self.pods


def parse_name(name: str) -> ScaleRow | None:
    """Return the row that a name such as `scale-raised-10x100` stands for; None when it stands for none."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    row = ScaleRow(name, int(found[2]), int(found[3]), found[1] is not None)
    return row if row.all_pods else None


def make_requests(row: ScaleRow) -> list[RankRequest]:
    """Return a request for each job of a row."""
    return [RankRequest(f"scale-{n}", row.pods, {}, PLACEMENT, PLACEMENT) for n in range(row.jobs)]


def create(cluster: Cluster, namespace: str, contender: Contender, requests: Iterable[RankRequest]) -> None:
    """Create all jobs, fifty requests at a time; kind after kind, as one client would."""
    made = [contender.objects(request) for request in requests]
    for bodies in zip(*made, strict=True):
        post(cluster, PATHS[bodies[0]["kind"]].format(namespace=namespace), bodies)


def start(cluster: Cluster, row: ScaleRow, contender: Contender) -> Sample:
    """Return the seconds from the first request until all pods of ranks run, at most `LONGEST_S`; everything is gone
    afterwards."""
    with cluster.namespace(f"peers{next(_numbers)}", **LABELS) as namespace:
        watch = PodWatch(cluster, namespace, LABEL)
        try:
            began = time.monotonic()
            create(cluster, namespace, contender, make_requests(row))
            is_reached = watch.sees(row.all_pods, began + LONGEST_S - time.monotonic())
            seconds = time.monotonic() - began
        finally:
            watch.end()
            clear(cluster, namespace, OWNERS)
    # What removes thousands of objects would be a part of the next measurement.
    wait(lambda: cluster.get(f"/api/v1/namespaces/{namespace}") is None, 300, f"{namespace} gone", every=0.5)
    return Sample(seconds) if is_reached else Sample(LONGEST_S, f"{len(watch.running)} of {row.all_pods} pods")


@contextmanager
def client_limits(peers: Installation, limits: ClientLimits | None) -> Iterator[None]:
    """Give the control plane and the peers these client limits for the time of the block, then their own."""
    if limits is None:
        yield
        return
    local = backend.local_cluster()
    try:
        local.restart_controllers(limits)
        peers.apply(limits)
        yield
    finally:
        local.restart_controllers()
        peers.apply()


def rows(peers: Installation, wanted: Iterable[ScaleRow], repeats: int = REPEATS) -> Iterator[Comparison]:
    """Measure the rows that are wanted on pretended nodes, those with raised limits last."""
    wanted = list(wanted)
    local = backend.local_cluster()
    kwok.up(local, NODES)
    try:
        for is_raised in (False, True):
            chosen = [row for row in wanted if row.is_raised == is_raised]
            if chosen:
                with client_limits(peers, RAISED if is_raised else None):
                    yield from _measure(peers.cluster, chosen, repeats)
    finally:
        kwok.down(local)


def _measure(cluster: Cluster, chosen: Iterable[ScaleRow], repeats: int) -> Iterator[Comparison]:
    for contender in CONTENDERS:
        start(cluster, ScaleRow("warm-up", *WARM_UP, is_raised=False), contender)
    for row in chosen:
        yield measure_all(Comparison(row.name, "s", 1.0), partial(start, cluster, row), repeats, warm_up=False)
