"""A thousand pods on pretended nodes: how fast they run, what that asks of the API server, what the operator weighs."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from urllib3.exceptions import HTTPError

from benchmarks.audit import AuditLog
from benchmarks.measure import REPEATS, Row, alternate
from e2e import deploy
from e2e.cluster import backend, kwok
from e2e.cluster.controlplane_flags import ClientLimits
from e2e.harness import JOBS, Cluster, Object, phase, training_job, wait

NODES = 100
RAISED = ClientLimits(1000, 2000)
PARALLEL = 5 * (os.cpu_count() or 1)  # the connections that the client keeps; more would be new ones each time
SHAPES = {"1x1000": (1, 1000, 2.3), "100x10": (100, 10, 3.5)}  # jobs, pods of each, the operator's requests per pod
MOST_WRITES = 4.7
NAMES = (
    "requests-per-pod-1x1000",
    "requests-per-pod-100x10",
    "writes-per-pod-1x1000",
    "scale-1x1000",
    "scale-100x10",
    "scale-raised-1x1000",
    "scale-raised-100x10",
    "operator-rss-5000",
    "operator-idle",
)
TOLERATION = {"key": "kwok.x-k8s.io/node", "operator": "Exists"}
_numbers = itertools.count()
Create = Callable[[Cluster, str, int, int], None]


class PodWatch:
    """Counts the pods of a namespace that the watch has shown Running, from just before the first is created."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster, self._path = cluster, f"/api/v1/namespaces/{namespace}/pods"
        self.running: set[str] = set()
        self._reached = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        # A watch may end at any time, also because the server takes its reader for too slow: the next one begins with
        # all that is there.
        while not self._stop.is_set():
            for line in self._cluster.stream(self._path, watch="true", timeoutSeconds="60"):
                pod = json.loads(line)["object"]
                if pod.get("status", {}).get("phase") == "Running":
                    with self._reached:
                        self.running.add(pod["metadata"]["name"])
                        self._reached.notify_all()
                if self._stop.is_set():
                    return

    def wait(self, count: int, timeout: float = 300) -> None:
        with self._reached:
            if not self._reached.wait_for(lambda: len(self.running) >= count, timeout):
                raise AssertionError(f"only {len(self.running)} of {count} pods Running after {timeout:.0f} s")

    def end(self) -> None:
        self._stop.set()


def ours(cluster: Cluster, namespace: str, jobs: int, pods: int) -> None:
    spec = {"tolerations": [TOLERATION], "nodeSelector": {"type": "kwok"}}
    bodies = [
        training_job(f"scale-{number}", ["sleep", "600"], numNodes=pods, podTemplate={"spec": spec})
        for number in range(jobs)
    ]
    _post(cluster, JOBS.format(namespace=namespace), bodies)


def bare(cluster: Cluster, namespace: str, jobs: int, pods: int) -> None:
    names = [f"bare-{job}-{pod}" for job in range(jobs) for pod in range(pods)]
    bodies = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": _pod_spec()} for name in names]
    _post(cluster, f"/api/v1/namespaces/{namespace}/pods", bodies)


def indexed(cluster: Cluster, namespace: str, jobs: int, pods: int) -> None:
    bodies: list[Object] = []
    for number in range(jobs):
        name = f"indexed-{number}"
        spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"bench": name}}
        body = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}
        cluster.request("POST", f"/api/v1/namespaces/{namespace}/services", body)
        template = {"metadata": {"labels": {"bench": name}}, "spec": _pod_spec() | {"subdomain": name}}
        job = {"completions": pods, "parallelism": pods, "completionMode": "Indexed", "template": template}
        bodies.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": job})
    _post(cluster, f"/apis/batch/v1/namespaces/{namespace}/jobs", bodies)


def _pod_spec() -> Object:
    container = {"name": "c", "image": "docker.io/everstep/byo:test", "command": ["sleep", "600"]}
    container["resources"] = {"requests": {"cpu": "10m", "memory": "32Mi"}}  # type: ignore[assignment]
    return {
        "containers": [container],
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "tolerations": [TOLERATION],
        "nodeSelector": {"type": "kwok"},
    }


def _post(cluster: Cluster, path: str, bodies: list[Object]) -> None:
    with ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(lambda body: cluster.request("POST", path, body), bodies))


@contextmanager
def started(cluster: Cluster, create: Create, jobs: int, pods: int) -> Iterator[tuple[str, float]]:
    """Everything Running: the namespace and the seconds it took; gone afterwards."""
    with cluster.namespace(f"scale{next(_numbers)}", **{"pod-security.kubernetes.io/enforce": "privileged"}) as name:
        watch = PodWatch(cluster, name)
        try:
            began = time.monotonic()
            create(cluster, name, jobs, pods)
            watch.wait(jobs * pods)
            yield name, time.monotonic() - began
        finally:
            watch.end()
            _clear(cluster, name)


def _clear(cluster: Cluster, namespace: str) -> None:
    """Whole collections at once: a deletion for each pod would take as long as what is measured."""
    for path in (JOBS, "/apis/batch/v1/namespaces/{namespace}/jobs"):
        cluster.request("DELETE", path.format(namespace=namespace), {"propagationPolicy": "Background"})
    pods = f"/api/v1/namespaces/{namespace}/pods"

    def none() -> bool:
        with suppress(HTTPError):  # five thousand take longer than one request may: the next one goes on
            cluster.request("DELETE", pods, {"gracePeriodSeconds": 0})
        return not cluster.items(pods, limit="1")

    wait(none, 300, f"pods of {namespace} gone", every=1)


def timed(cluster: Cluster, create: Create, jobs: int, pods: int) -> float:
    with started(cluster, create, jobs, pods) as (_, seconds):
        return seconds


def scale(cluster: Cluster, name: str, jobs: int, pods: int, floor: Create, target: float, strict: bool) -> Row:
    row = Row(name, "s", target, strict=strict)
    return alternate(row, lambda: timed(cluster, ours, jobs, pods), lambda: timed(cluster, floor, jobs, pods))


def requests(cluster: Cluster, jobs: int, pods: int, requests_row: Row, writes_row: Row) -> None:
    """One whole life: created, Running, succeeded, deleted; the requests that it took of the operator, per pod."""
    log = AuditLog(backend.local_cluster().control.audit_log)
    with started(cluster, ours, jobs, pods) as (namespace, _):
        writes_row.samples.setdefault("ours", []).append(log.writes({namespace}) / (jobs * pods))
        finish(cluster, namespace)
        for number in range(jobs):
            cluster.wait_phase(namespace, f"scale-{number}", "Succeeded", timeout=300)
    per_pod = len(log.of_operator()) / (jobs * pods)
    requests_row.samples.setdefault("ours", []).append(per_pod)


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

    with ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(end, cluster.items(path)))


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


def rss_5000(cluster: Cluster) -> Row:
    row = Row("operator-rss-5000", "MiB", 250, absolute=True)
    with started(cluster, ours, 10, 500):
        process = operator_process(cluster)
        for _ in range(REPEATS):
            row.samples.setdefault("ours", []).append(process.memory_info().rss / 2**20)
            time.sleep(5)
    return row


def idle(cluster: Cluster, jobs: int = 1000) -> Row:
    """Finished jobs must cost nothing: share of one core over half a minute, five times."""
    row = Row("operator-idle", "% of a core", 1.0, absolute=True, strict=True)
    with cluster.namespace("idle") as namespace:
        path = JOBS.format(namespace=namespace)
        _post(cluster, path, [training_job(f"done-{n}", ["true"], suspend=True) for n in range(jobs)])

        def settle() -> bool:
            return all(phase(job) == "Suspended" for job in cluster.items(path))

        wait(settle, 300, "all jobs looked at once", every=2)
        status = {"phase": "Succeeded", "conditions": [_condition("Complete"), _condition("Ready")]}
        for job in cluster.items(path):
            cluster.request("PATCH", f"{path}/{job['metadata']['name']}/status", {"status": status})
        process = operator_process(cluster)
        with suppress(AssertionError):  # if it never gets quiet, the samples will say so
            wait(lambda: _share(process, 2) < 5, 60, "the operator to have seen them all", every=0)
        row.samples["ours"] = [_share(process, 30) for _ in range(REPEATS)]
    return row


def _share(process: psutil.Process, seconds: float) -> float:
    """Per cent of one core that the process uses in that time."""
    before, began = process.cpu_times(), time.monotonic()
    time.sleep(seconds)
    after = process.cpu_times()
    used = after.user + after.system - before.user - before.system
    return 100 * used / (time.monotonic() - began)


def _condition(kind: str) -> Object:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"type": kind, "status": "True", "reason": "Completed", "message": "", "lastTransitionTime": at}


def rows(cluster: Cluster, wanted: set[str], repeats: int = REPEATS) -> Iterator[Row]:
    """Everything of this file, on 100 pretended nodes; control-plane limits are put back afterwards."""
    local = backend.local_cluster()
    kwok.up(local, NODES)
    try:
        for name, (jobs, pods, most) in SHAPES.items():
            per_pod = Row(f"requests-per-pod-{name}", "requests", most, absolute=True)
            writes = Row(f"writes-per-pod-{name}", "writes", MOST_WRITES, absolute=True)
            asked = [row for row in (per_pod, writes) if row.name in wanted]
            if asked:
                for _ in range(repeats):
                    requests(cluster, jobs, pods, per_pod, writes)
                yield from asked
        for name, (jobs, pods, _) in SHAPES.items():
            if f"scale-{name}" in wanted:
                yield scale(cluster, f"scale-{name}", jobs, pods, bare, 1.1, strict=False)
        raised = [name for name in SHAPES if f"scale-raised-{name}" in wanted]
        if raised:
            local.restart_controllers(RAISED)
            try:
                for name in raised:
                    jobs, pods, _ = SHAPES[name]
                    yield scale(cluster, f"scale-raised-{name}", jobs, pods, indexed, 1.0, strict=True)
            finally:
                local.restart_controllers()
        if "operator-rss-5000" in wanted:
            yield rss_5000(cluster)
        if "operator-idle" in wanted:
            yield idle(cluster)
    finally:
        kwok.down(local)
