"""Measures the operator's memory with many pods, and its processor time with nothing to do."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.measure import REPEATS, Row
from benchmarks.pretended import in_parallel, ours, post, started
from benchmarks.processor import read_processor_seconds
from e2e import deploy
from e2e.harness import JOBS, Cluster, Object, phase, training_job, wait


def operator_process(cluster: Cluster) -> psutil.Process:
    pod = wait(lambda: deploy.operator_pod(cluster), 60, "a running operator")
    container = pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
    pids = [int(e.name) for e in Path("/proc").iterdir() if e.name.isdigit() and _in(e, container)]
    return max((psutil.Process(pid) for pid in pids), key=lambda process: process.memory_info().rss)


def _in(entry: Path, container: str) -> bool:
    try:
        return container in (entry / "cgroup").read_text()
    except OSError:
        return False


def measure_memory(cluster: Cluster, row: Row, jobs: int, pods: int) -> Row:
    """Resident memory of the operator while all these pods run, and it has nothing to do."""
    with started(cluster, ours, jobs, pods):
        process = operator_process(cluster)
        settle(process, 20)
        for _ in range(REPEATS):
            row.samples.setdefault("ours", []).append(process.memory_info().rss / 2**20)
            time.sleep(5)
    return row


def idle(cluster: Cluster, jobs: int = 1000) -> Row:
    """Finished jobs must cost nothing: share of one core over half a minute, five times."""
    row = Row("operator-idle", "% of a core", 1.0, absolute=True, strict=True)
    with cluster.namespace("idle") as namespace:
        path = JOBS.format(namespace=namespace)
        post(cluster, path, [training_job(f"done-{n}", ["true"], suspend=True) for n in range(jobs)])

        def suspended() -> bool:
            return all(phase(job) == "Suspended" for job in cluster.items(path))

        wait(suspended, 300, "all jobs looked at once", every=2)
        status = {"phase": "Succeeded", "conditions": [_condition("Complete"), _condition("Ready")]}
        names = [job["metadata"]["name"] for job in cluster.items(path)]
        in_parallel(lambda name: cluster.request("PATCH", f"{path}/{name}/status", {"status": status}), names)
        process = operator_process(cluster)
        settle(process, 5)
        row.samples["ours"] = [_share(process, 30) for _ in range(REPEATS)]
    return row


def settle(process: psutil.Process, share: float) -> None:
    """Wait until the operator has seen all that there is. If it never gets quiet, the samples will say so."""
    with suppress(AssertionError):
        wait(lambda: _share(process, 2) < share, 60, "the operator to have seen everything", every=0)


def _share(process: psutil.Process, seconds: float) -> float:
    """Per cent of one core that the process uses in that time."""
    before, began = read_processor_seconds(process), time.monotonic()
    time.sleep(seconds)
    used = read_processor_seconds(process) - before
    return 100 * used / (time.monotonic() - began)


def _condition(kind: str) -> Object:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"type": kind, "status": "True", "reason": "Completed", "message": "", "lastTransitionTime": at}
