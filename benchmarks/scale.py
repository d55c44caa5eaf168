"""Thousands of pods on pretended nodes: how fast they run, and what that asks of the API server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.audit import AuditLog
from benchmarks.measure import REPEATS, Row, alternate
from benchmarks.pretended import Create, bare, in_parallel, indexed, ours, started, timed
from benchmarks.processor import read_processor_seconds
from benchmarks.weight import idle, measure_memory, operator_process, settle
from e2e.cluster import backend, kwok
from e2e.cluster.controlplane_flags import ClientLimits
from e2e.harness import Cluster, Object

NODES = 100
RAISED = ClientLimits(1000, 2000)
MOST_WRITES = 4.7
WARM_UP = 10  # pods of each of two jobs
SECONDS = 240.0  # for one row of starts: a round takes a minute or more, most of it for taking away what was started


@dataclass(frozen=True)
class Shape:
    """Jobs, pods of each, and what the operator may take for each pod: requests, milliseconds of a processor."""

    jobs: int
    pods: int
    requests: float
    milliseconds: float

    @property
    def all_pods(self) -> int:
        return self.jobs * self.pods


SHAPES = {"1x1000": Shape(1, 1000, 2.3, 2.0), "100x10": Shape(100, 10, 3.5, 2.5)}
# Jobs and pods of each, and rounds: until ten thousand pods run and are gone again, five minutes and more go by.
LARGEST = {"1x2000": (1, 2000, REPEATS), "10x1000": (10, 1000, 1)}
MEMORY = {"operator-rss-5000": (10, 500, 150), "operator-rss-10000": (10, 1000, 300)}  # jobs, pods of each, MiB
VS_BARE = "scale-raised-vs-bare-1x1000"
NAMES = (
    "requests-per-pod-1x1000",
    "requests-per-pod-100x10",
    "writes-per-pod-1x1000",
    "operator-cpu-1x1000",
    "operator-cpu-100x10",
    "scale-1x1000",
    "scale-100x10",
    "scale-raised-1x1000",
    "scale-raised-100x10",
    VS_BARE,
    *(f"scale-{name}" for name in LARGEST),
    *MEMORY,
    "operator-idle",
)


def scale(cluster: Cluster, row: Row, jobs: int, pods: int, floor: Create, repeats: int = REPEATS) -> Row:
    for create in (ours, floor):  # connections and caches; a round of the real size would warm nothing more
        timed(cluster, create, 2, WARM_UP)
    return alternate(
        row,
        lambda: timed(cluster, ours, jobs, pods),
        lambda: timed(cluster, floor, jobs, pods),
        repeats,
        warm_up=False,
        seconds=SECONDS,
    )


def requests(cluster: Cluster, shape: Shape, rows_of: dict[str, Row]) -> None:
    """One whole life: created, Running, succeeded, deleted; the requests that it took of the operator, per pod, and
    until all run all writes and the operator's processor time."""
    log = AuditLog(backend.local_cluster().control.audit_log)
    process = operator_process(cluster)
    before = read_processor_seconds(process)
    with started(cluster, ours, shape.jobs, shape.pods) as (namespace, _):
        found = {"writes-per-pod": float(log.writes({namespace}))}
        settle(process, 20)  # the last events and the statuses that follow from them
        found["operator-cpu"] = 1000 * (read_processor_seconds(process) - before)
        finish(cluster, namespace)
        for number in range(shape.jobs):
            cluster.wait_phase(namespace, f"scale-{number}", "Succeeded", timeout=300)
    found["requests-per-pod"] = len(log.of_operator())
    for name, value in found.items():
        rows_of[name].samples.setdefault("ours", []).append(value / shape.all_pods)


def finish(cluster: Cluster, namespace: str) -> None:
    """End every container with 0, as the kubelet of a real node would report it."""
    word = json.dumps({"result": "succeeded", "epoch": 1, "generation": 1, "exitCode": 0})
    over = {"terminated": {"exitCode": 0, "reason": "Completed", "message": word}}
    path = f"/api/v1/namespaces/{namespace}/pods"

    def end(pod: Object) -> None:
        container = pod["spec"]["containers"][0]
        status = {"name": container["name"], "image": container["image"], "imageID": "", "restartCount": 0}
        body = {"status": {"phase": "Succeeded", "containerStatuses": [status | {"ready": False, "state": over}]}}
        cluster.request("PATCH", f"{path}/{pod['metadata']['name']}/status", body)

    in_parallel(end, cluster.items(path))


def rows(cluster: Cluster, wanted: set[str], repeats: int = REPEATS) -> Iterator[Row]:
    """Every row on 100 pretended nodes; the control plane's limits are put back afterwards."""
    local = backend.local_cluster()
    kwok.up(local, NODES)
    try:
        for name, shape in SHAPES.items():
            rows_of = {
                "requests-per-pod": Row(f"requests-per-pod-{name}", "requests", shape.requests, absolute=True),
                "writes-per-pod": Row(f"writes-per-pod-{name}", "writes", MOST_WRITES, absolute=True),
                "operator-cpu": Row(f"operator-cpu-{name}", "ms", shape.milliseconds, absolute=True),
            }
            asked = [row for row in rows_of.values() if row.name in wanted]
            if asked:
                for _ in range(repeats):
                    requests(cluster, shape, rows_of)
                yield from asked
        for name, shape in SHAPES.items():
            if f"scale-{name}" in wanted:
                yield scale(cluster, Row(f"scale-{name}", "s", 1.1), shape.jobs, shape.pods, bare)
        for name, (jobs, pods, rounds) in LARGEST.items():
            if f"scale-{name}" in wanted:
                yield scale(cluster, Row(f"scale-{name}", "s", 1.15), jobs, pods, bare, rounds)
        raised = [name for name in SHAPES if f"scale-raised-{name}" in wanted]
        if raised or wanted & {VS_BARE, *MEMORY}:
            local.restart_controllers(RAISED)
            try:
                for name in raised:
                    row, shape = Row(f"scale-raised-{name}", "s", 1.0, strict=True), SHAPES[name]
                    yield scale(cluster, row, shape.jobs, shape.pods, indexed)
                if VS_BARE in wanted:
                    yield scale(cluster, Row(VS_BARE, "s", 1.5), 1, 1000, bare)
                for name, (jobs, pods, most) in MEMORY.items():
                    if name in wanted:  # about a steady state: here it is reached a minute sooner
                        yield measure_memory(cluster, Row(name, "MiB", most, absolute=True), jobs, pods)
            finally:
                local.restart_controllers()
        if "operator-idle" in wanted:
            yield idle(cluster)
    finally:
        kwok.down(local)
