"""An API server that is none: it answers the operator's requests out of memory, and runs pods as a cluster would.

For the profile of the operator (`benchmarks.operator_profile`), which is to take seconds and no cluster. Pods are as
large as real ones, with the fields that an API server adds; each has four events: created, bound, running, ready.
Nothing is validated, and the only watches, lists and writes are those that the operator makes.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from typing import Any

from aiohttp import web

Object = dict[str, Any]

NAMESPACE = "profile"
NODES = 100
TICK_SECONDS = 0.01
KUBELET_SECONDS = 0.05  # from one state of a pod to the next
_CLUSTER_KINDS = frozenset({"nodes", "trainingpools"})
_CREATED = {"terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File"}


def make_job(name: str, pods: int) -> Object:
    """Return a TrainingJob as a user applies it."""
    return {
        "apiVersion": "everstep.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "numNodes": pods,
            "image": "registry.example/team/trainer:1.0",
            "command": ["python", "train.py", "--config", "large.yaml"],
            "resources": {"limits": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "8"}},
        },
    }


def make_node(number: int) -> Object:
    room = {"cpu": "960", "memory": "4000Gi", "pods": "1000", "nvidia.com/gpu": "800"}
    return {
        "metadata": {"name": f"node-{number}", "labels": {"kubernetes.io/hostname": f"node-{number}"}},
        "status": {
            "allocatable": room,
            "capacity": room,
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": _format_now()}],
        },
    }


class GeneratedCluster:
    """Objects by kind, their events, and pods that are bound at `rate` a second and run soon after."""

    def __init__(self, rate: float, pods: int) -> None:
        self.rate = rate
        self.pods = pods  # that there are to be
        self.objects: defaultdict[str, dict[tuple[str, str], Object]] = defaultdict(dict)
        self.waiting: asyncio.Queue[Object] = asyncio.Queue()  # pods for the scheduler
        self.ready = 0  # pods
        self.all_ready = asyncio.Event()
        self.requests = 0
        self._versions = itertools.count(100)
        self._newest = 100
        self._history: defaultdict[str, list[tuple[int, bytes]]] = defaultdict(list)
        self._news: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        for number in range(NODES):
            self.store("nodes", make_node(number))

    # --- objects

    def store(self, plural: str, body: Object) -> Object:
        """Store a new object, or a new state of one, and tell of it."""
        meta = body["metadata"]
        key = str(meta.get("namespace") or ""), str(meta["name"])
        kind = "MODIFIED" if key in self.objects[plural] else "ADDED"
        meta.setdefault("uid", f"00000000-0000-0000-0000-{next(self._versions):012d}")
        meta.setdefault("creationTimestamp", _format_now())
        self._newest = next(self._versions)
        meta["resourceVersion"] = str(self._newest)
        self.objects[plural][key] = body
        told = json.dumps({"type": kind, "object": body}, separators=(",", ":")).encode()
        self._history[plural].append((self._newest, told + b"\n"))
        self._news[plural].set()
        return body

    def create_pod(self, body: Object) -> Object:
        """Store a pod with what an API server adds to it."""
        pod = copy.deepcopy(body)
        for container in pod["spec"]["containers"]:
            container |= {**_CREATED, "imagePullPolicy": "IfNotPresent"}
        manager = {"manager": "everstep-operator", "operation": "Update", "apiVersion": "v1", "time": _format_now()}
        fields = {"fieldsType": "FieldsV1", "fieldsV1": dict(_list_fields(body))}
        pod["metadata"]["managedFields"] = [{**manager, **fields}]
        pod["status"] = {"phase": "Pending", "qosClass": "Guaranteed"}
        self.store("pods", pod)
        self.waiting.put_nowait(pod)
        return pod

    async def run_scheduler(self) -> None:
        """Bind pods, at most `rate` a second; their kubelets do the rest."""
        node, owed = itertools.cycle(range(NODES)), 0.0
        async with asyncio.TaskGroup() as kubelets:
            while True:
                await asyncio.sleep(TICK_SECONDS)
                owed = min(owed + self.rate * TICK_SECONDS, self.rate)
                while owed >= 1 and not self.waiting.empty():
                    owed -= 1
                    kubelets.create_task(self._run_pod(self.waiting.get_nowait(), f"node-{next(node)}"))

    async def _run_pod(self, pod: Object, node: str) -> None:
        now = _format_now()

        def condition(name: str, status: str = "True") -> Object:
            return {"type": name, "status": status, "lastProbeTime": None, "lastTransitionTime": now}

        def change(**status: Any) -> Object:
            return {**pod, "metadata": dict(pod["metadata"]), "status": {**pod["status"], **status}}

        pod = change(conditions=[condition("PodScheduled")])
        pod["spec"] = {**pod["spec"], "nodeName": node}
        self.store("pods", pod)
        await asyncio.sleep(KUBELET_SECONDS)
        of_kubelet = {"manager": "kubelet", "operation": "Update", "apiVersion": "v1", "time": now}
        name = pod["spec"]["containers"][0]["name"]
        container = {
            "name": name, "image": "trainer", "imageID": "", "restartCount": 0, "ready": False, "started": True,
            "containerID": "containerd://0123456789abcdef", "state": {"running": {"startedAt": now}},
        }  # fmt: skip
        up = [condition("PodScheduled"), condition("Initialized")]
        address = "127.0.0.1"  # where no leader answers
        pod = change(
            phase="Running", conditions=[*up, condition("Ready", "False"), condition("ContainersReady", "False")],
            containerStatuses=[container], hostIP="10.0.0.1", podIP=address, podIPs=[{"ip": address}], startTime=now,
        )  # fmt: skip
        fields = {"fieldsType": "FieldsV1", "fieldsV1": {"f:status": dict(_list_fields(pod["status"]))}}
        pod["metadata"]["managedFields"] = [*pod["metadata"]["managedFields"], {**of_kubelet, **fields}]
        self.store("pods", pod)
        await asyncio.sleep(KUBELET_SECONDS)
        pod = change(
            conditions=[*up, condition("Ready"), condition("ContainersReady")],
            containerStatuses=[{**container, "ready": True}],
        )
        self.store("pods", pod)
        self.ready += 1
        if self.ready == self.pods:
            self.all_ready.set()

    # --- requests

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request of the operator."""
        self.requests += 1
        parts = request.path.strip("/").split("/")
        if len(parts) <= (2 if parts[0] == "api" else 3):
            return web.json_response(_describe_api(request.path))
        rest = parts[2:] if parts[0] == "api" else parts[3:]
        namespace = ""
        if rest and rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        if not rest:
            return web.json_response(_describe_api(request.path))
        plural, name = rest[0], rest[1] if len(rest) > 1 else ""
        if request.method == "POST":
            return self._create(plural, namespace, await request.json(), dry="dryRun" in request.query)
        if "watch" in request.query:
            return await self._watch(request, plural)
        if not name:
            return self._list(plural)
        found = self.objects[plural].get((namespace if plural not in _CLUSTER_KINDS else "", name))
        if found is None:
            return web.json_response({"kind": "Status", "code": 404, "reason": "NotFound"}, status=404)
        if request.method == "PATCH":
            body = json.loads(await request.read())
            if request.content_type == "application/merge-patch+json":
                changed = apply_merge_patch({**found, "metadata": dict(found["metadata"])}, body)
            else:  # a status that is applied
                changed = {**found, "metadata": dict(found["metadata"]), "status": body["status"]}
            found = self.store(plural, changed)
        if "as=PartialObjectMetadata;" in request.headers.get("Accept", ""):
            found = {"metadata": found["metadata"]}
        return web.json_response(found)

    def _create(self, plural: str, namespace: str, body: Object, *, dry: bool) -> web.Response:
        body["metadata"]["namespace"] = namespace
        if dry:
            return web.json_response(body, status=201)
        made = self.create_pod(body) if plural == "pods" else self.store(plural, body)
        return web.json_response(made, status=201)

    def _list(self, plural: str) -> web.Response:
        items = list(self.objects[plural].values())
        return web.json_response({"metadata": {"resourceVersion": str(self._newest)}, "items": items})

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        seen, history = int(request.query.get("resourceVersion") or 0), self._history[plural]
        at = 0
        while True:
            news = [told for version, told in history[at:] if version > seen]
            at = len(history)
            if news:
                await response.write(b"".join(news))
                continue
            self._news[plural].clear()
            await self._news[plural].wait()


def _list_fields(body: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of an object as its managedFields have them."""
    for name, value in body.items():
        if isinstance(value, dict):
            yield f"f:{name}", dict(_list_fields(value))
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            entries = ((json.dumps({"name": each.get("name", "")}), each) for each in value)
            yield f"f:{name}", {f"k:{key}": {".": {}, **dict(_list_fields(each))} for key, each in entries}
        else:
            yield f"f:{name}", {}


def _format_now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _describe_api(path: str) -> Object:
    """Return what a client that discovers kinds is told."""

    def resources(group_version: str, *kinds: tuple[str, str, bool]) -> Object:
        rows = [
            {"name": n, "kind": k, "singularName": k.lower(), "namespaced": ns, "verbs": ["list", "watch"]}
            for n, k, ns in kinds
        ]
        return {"kind": "APIResourceList", "groupVersion": group_version, "resources": rows}

    def group(name: str, version: str) -> Object:
        one = {"groupVersion": f"{name}/{version}", "version": version}
        return {"name": name, "versions": [one], "preferredVersion": one}

    core = (("pods", "Pod", True), ("nodes", "Node", False), ("namespaces", "Namespace", False))
    ours = (("trainingjobs", "TrainingJob", True), ("trainingpools", "TrainingPool", False))
    answers: dict[str, Object] = {
        "/api": {"versions": ["v1"]},
        "/apis": {"groups": [group("everstep.dev", "v1alpha1")]},
        "/api/v1": resources("v1", *core),
        "/apis/everstep.dev/v1alpha1": resources("everstep.dev/v1alpha1", *ours),
    }
    return answers.get(path, {})


async def _serve(jobs: int, pods: int, rate: float, control: Connection) -> None:
    cluster = GeneratedCluster(rate, jobs * pods)
    app = web.Application(client_max_size=2**24)
    app.router.add_route("*", "/{any:.*}", cluster.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    control.send(site._server.sockets[0].getsockname()[1])  # type: ignore[attr-defined]
    scheduler = asyncio.create_task(cluster.run_scheduler())
    await asyncio.to_thread(control.recv)  # the operator has listed nothing yet, and the clock is started
    before = cluster.requests
    for number in range(jobs):
        job = make_job(f"job-{number}", pods)
        job["metadata"] |= {"generation": 1}
        cluster.store("trainingjobs", job)
    await cluster.all_ready.wait()
    control.send(cluster.requests - before)
    await asyncio.to_thread(control.recv)
    scheduler.cancel()


def serve_cluster(jobs: int, pods: int, rate: float, control: Connection) -> None:
    """Run in a process of its own, so that none of its processor time is taken for the operator's.

    Sends its port; waits for a word; creates the jobs; sends the count of requests once all pods are ready; and ends
    with the next word.
    """
    asyncio.run(_serve(jobs, pods, rate, control))


def apply_merge_patch(found: Any, change: Any) -> Any:
    """Return what a JSON merge patch (RFC 7386) makes of an object."""
    if not isinstance(change, dict):
        return change
    made = dict(found) if isinstance(found, dict) else {}
    for name, value in change.items():
        if value is None:
            made.pop(name, None)
        else:
            made[name] = apply_merge_patch(made.get(name), value)
    return made
