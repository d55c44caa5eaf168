"""Many pods that run nothing: made in three ways on pretended nodes, watched until they run, taken away."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

from e2e.harness import JOBS, Cluster, Object, training_job, wait

T = TypeVar("T")
PARALLEL = 50
PATIENCE, SLOWEST = 300.0, 20.0  # seconds for some pods to run or to go, and pods for each of which there is more time
NOT_FOUND = 404
TOLERATION = {"key": "kwok.x-k8s.io/node", "operator": "Exists"}
ONLY_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
LABELS = {"pod-security.kubernetes.io/enforce": "privileged"}
_numbers = itertools.count()
Create = Callable[[Cluster, str, int, int], None]


class PodWatch:
    """Counts the pods of a namespace that the watch has shown Running, from just before the first is created.

    Args:
        cluster: The cluster.
        namespace: The namespace that is watched.
        selector: Labels of the pods that count; by default all do.
    """

    def __init__(self, cluster: Cluster, namespace: str, selector: str = "") -> None:
        self._cluster, self._path, self._selector = cluster, f"/api/v1/namespaces/{namespace}/pods", selector
        self.running: set[str] = set()
        self._reached = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        # A watch may end at any time, also because the server takes its reader for too slow: the next one goes on where
        # it ended, or, when that is too long ago, begins with all that is there.
        seen = ""
        while not self._stop.is_set():
            # Filtered by the server, and without spec and status: what this costs is taken from what is measured.
            running = {"watch": "true", "fieldSelector": "status.phase=Running", "timeoutSeconds": "60"}
            running |= {"labelSelector": self._selector} if self._selector else {}
            for line in self._cluster.stream(self._path, ONLY_METADATA, **running, resourceVersion=seen):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    seen = ""
                    break
                metadata = event["object"]["metadata"]
                seen = metadata["resourceVersion"]
                if event["type"] != "DELETED":
                    with self._reached:
                        self.running.add(metadata["name"])
                        self._reached.notify_all()
                if self._stop.is_set():
                    return

    def wait(self, count: int, timeout: float = PATIENCE) -> None:
        if not self.sees(count, timeout):
            raise AssertionError(f"only {len(self.running)} of {count} pods Running after {timeout:.0f} s")

    def sees(self, count: int, timeout: float) -> bool:
        """Wait, and return whether so many run in time."""
        with self._reached:
            return self._reached.wait_for(lambda: len(self.running) >= count, timeout)

    def end(self) -> None:
        self._stop.set()


def ours(cluster: Cluster, namespace: str, jobs: int, pods: int) -> None:
    spec = {"tolerations": [TOLERATION], "nodeSelector": {"type": "kwok"}}
    bodies = [
        training_job(f"scale-{number}", ["sleep", "600"], numNodes=pods, podTemplate={"spec": spec})
        for number in range(jobs)
    ]
    post(cluster, JOBS.format(namespace=namespace), bodies)


def bare(cluster: Cluster, namespace: str, jobs: int, pods: int) -> None:
    names = [f"bare-{job}-{pod}" for job in range(jobs) for pod in range(pods)]
    bodies = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": _pod_spec()} for name in names]
    post(cluster, f"/api/v1/namespaces/{namespace}/pods", bodies)


def indexed(cluster: Cluster, namespace: str, jobs: int, pods: int) -> None:
    services: list[Object] = []
    bodies: list[Object] = []
    for number in range(jobs):
        name = f"indexed-{number}"
        spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"bench": name}}
        services.append({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec})
        template = {"metadata": {"labels": {"bench": name}}, "spec": _pod_spec() | {"subdomain": name}}
        job = {"completions": pods, "parallelism": pods, "completionMode": "Indexed", "template": template}
        bodies.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": job})
    post(cluster, f"/api/v1/namespaces/{namespace}/services", services)
    post(cluster, f"/apis/batch/v1/namespaces/{namespace}/jobs", bodies)


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


def in_parallel(work: Callable[[T], object], items: Iterable[T]) -> None:
    """Fifty requests at a time."""
    with ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(work, items))


def post(cluster: Cluster, path: str, bodies: Iterable[Object]) -> None:
    in_parallel(lambda body: cluster.request("POST", path, body), bodies)


@contextmanager
def started(cluster: Cluster, create: Create, jobs: int, pods: int) -> Iterator[tuple[str, float]]:
    """Everything Running: the namespace and the seconds it took; gone afterwards, with all that it held."""
    patience = PATIENCE + jobs * pods / SLOWEST
    with cluster.namespace(f"scale{next(_numbers)}", **LABELS) as name:
        watch = PodWatch(cluster, name)
        try:
            began = time.monotonic()
            create(cluster, name, jobs, pods)
            watch.wait(jobs * pods, patience)
            yield name, time.monotonic() - began
        finally:
            watch.end()
            clear(cluster, name, patience=patience)
    # What removes thousands of events and endpoints would be a part of the next measurement.
    wait(lambda: cluster.get(f"/api/v1/namespaces/{name}") is None, patience, f"namespace {name} gone", every=0.5)


def clear(cluster: Cluster, namespace: str, owners: Iterable[str] = (), patience: float = PATIENCE) -> None:
    """Whole collections at once: a deletion for each pod would take as long as what is measured.

    Services go first: each pod that goes would have a list of a thousand addresses written again. Jobs are suspended
    before their pods go and deleted after that. The garbage collector asks for each pod of a deleted job by itself, 20
    in a second: for a thousand it would still be at it in the next measurement.

    Args:
        cluster: The cluster.
        namespace: The namespace that is cleared.
        owners: Paths of the kinds that other controllers make Jobs and pods from, the highest first. They go before
            all others.
        patience: The seconds that the pods may take to go.
    """
    core = f"/api/v1/namespaces/{namespace}"
    for owner in owners:
        _unless_gone(cluster, "DELETE", owner.format(namespace=namespace), {"propagationPolicy": "Background"})
    kinds = [path.format(namespace=namespace) for path in (JOBS, "/apis/batch/v1/namespaces/{namespace}/jobs")]
    paths = [f"{kind}/{job['metadata']['name']}" for kind in kinds for job in cluster.items(kind)]
    in_parallel(lambda path: _unless_gone(cluster, "PATCH", path, {"spec": {"suspend": True}}), paths)
    services = [f"{core}/services/{service['metadata']['name']}" for service in cluster.items(f"{core}/services")]
    in_parallel(lambda path: _unless_gone(cluster, "DELETE", path), services)

    def none() -> bool:
        with suppress(HTTPError):  # five thousand take longer than one request may: the next one goes on
            cluster.request("DELETE", f"{core}/pods", {"gracePeriodSeconds": 0})
        return not cluster.items(f"{core}/pods", limit="1")

    wait(none, patience, f"pods of {namespace} gone", every=0.2)
    for kind in kinds:
        cluster.request("DELETE", kind, {"propagationPolicy": "Background"})


def _unless_gone(cluster: Cluster, method: str, path: str, body: Object | None = None) -> None:
    """Change an object, which a garbage collector may take away meanwhile."""
    try:
        cluster.request(method, path, body)
    except ApiException as error:
        if error.status != NOT_FOUND:
            raise


def timed(cluster: Cluster, create: Create, jobs: int, pods: int) -> float:
    with started(cluster, create, jobs, pods) as (_, seconds):
        return seconds
