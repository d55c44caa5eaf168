"""Fixtures of the tests in this folder: the operator's process, a hand-made kubelet, a leader that speaks 001."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.request import urlopen

from aiohttp import web

from e2e.cluster.ports import free_ports
from e2e.harness import PATIENCE
from everstep.agent.wire import auth
from everstep_operator.cluster import errors
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.resources import JOBS, NODES, PODS, ApiResource

T = TypeVar("T")
OWN_NAMESPACE = "everstep-system"
NAMESPACES = ApiResource("", "v1", "namespaces", "Namespace", namespaced=False)
SERVICE_ACCOUNTS = ApiResource("", "v1", "serviceaccounts", "ServiceAccount")


@dataclass
class OperatorProcess:
    """The real `everstep-operator`, which tests may kill."""

    kubeconfig: Path
    folder: Path
    agent_port: int
    process: subprocess.Popen[bytes] | None = None
    flags: dict[str, str] = field(default_factory=dict)
    starts: int = 0

    @property
    def log(self) -> Path:
        return self.folder / "operator.log"

    def start(self, **environment: str) -> None:
        self.health_port, self.metrics_port = free_ports(2)
        flags = {
            "kubeconfig": str(self.kubeconfig),
            "pod-uid": "operator-pod",
            "pod-namespace": OWN_NAMESPACE,
            "key-folder": str(self.folder / "key"),
            "bind": "127.0.0.1",
            "health-port": str(self.health_port),
            "metrics-port": str(self.metrics_port),
            "agent-port": str(self.agent_port),
            **self.flags,
        }
        command = [sys.executable, "-m", "everstep_operator", *(f"--{name}={v}" for name, v in flags.items())]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})
        self.starts += 1

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def fetch(self, path: str, port: int | None = None) -> str:
        with urlopen(f"http://127.0.0.1:{port or self.health_port}{path}", timeout=5) as answer:
            return str(answer.read().decode())

    def wait_ready(self, seconds: float = 60) -> None:
        deadline = time.monotonic() + PATIENCE * seconds
        while True:
            assert self.running(), self.log.read_text()[-3000:]
            try:
                self.fetch("/readyz")
                return
            except OSError:
                assert time.monotonic() < deadline, self.log.read_text()[-3000:]
                time.sleep(0.05)


async def until(check: Callable[[], Awaitable[T]], what: str, seconds: float = 30) -> T:
    """The first true result of `check`, at most `seconds` later on an idle machine; exceptions of its assertions are
    reported when time is up."""
    seconds *= PATIENCE
    deadline = asyncio.get_running_loop().time() + seconds
    last: object = None
    while True:
        try:
            last = await check()
            if last:
                return last
        except AssertionError as error:
            last = error
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"not within {seconds} s: {what} (last: {last})")
        await asyncio.sleep(0.05)


@dataclass
class World:
    """One namespace, as its user and its kubelet see it."""

    client: Client  # as an administrator
    namespace: str
    agent_port: int
    network: int  # pods of this test get addresses 127.<network>.<…>.<index>

    async def submit(self, name: str, **spec: Any) -> dict[str, Any]:
        body = {
            "apiVersion": "everstep.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {"image": "everstep/trainer:test", "command": ["python", "train.py"], **spec},
        }
        return await self.client.create(JOBS, self.namespace, body)

    async def job(self, name: str) -> dict[str, Any]:
        return await self.client.get(JOBS, self.namespace, name)

    async def change(self, name: str, **spec: Any) -> None:
        await self._patch(JOBS.path(self.namespace, name), {"spec": spec})

    async def all(self, resource: ApiResource) -> list[dict[str, Any]]:
        return [item async for page in self.client.list(resource, self.namespace) for item in page.items]

    async def pods(self, job: str) -> list[dict[str, Any]]:
        """By their names: their labels anybody may change."""
        found = {pod["metadata"]["name"].rpartition("-"): pod for pod in await self.all(PODS)}
        mine = {int(index): pod for (name, _, index), pod in found.items() if name == job and index.isdecimal()}
        return [mine[index] for index in sorted(mine)]

    async def until_pods(self, job: str, count: int, seconds: float = 30) -> list[dict[str, Any]]:
        async def check() -> list[dict[str, Any]]:
            pods = await self.pods(job)
            live = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
            assert len(live) == count, [pod["metadata"]["name"] for pod in pods]
            return live

        return await until(check, f"{count} pods of {job}", seconds)

    async def until_phase(self, name: str, *phases: str, seconds: float = 30) -> dict[str, Any]:
        async def check() -> dict[str, Any]:
            status: dict[str, Any] = (await self.job(name)).get("status") or {}
            assert status.get("phase") in phases, status
            return status

        return await until(check, f"{name} is {'/'.join(phases)}", seconds)

    # --- the kubelet

    def address(self, pod: Mapping[str, Any]) -> str:
        return f"127.{self.network}.1.{int(pod['metadata']['name'].rpartition('-')[2]) + 1}"

    async def join(self, node: str) -> None:
        """There is such a node now, if there was none."""
        with contextlib.suppress(errors.AlreadyExists):
            await self.client.create(NODES, None, {"metadata": {"name": node}, "status": _node_status("True")})

    async def beat(self, node: str, *, ready: str = "True") -> None:
        """The node's kubelet reports, with something new of no interest."""
        await self._patch(NODES.path(None, node) + "/status", {"status": _node_status(ready)})

    async def taint(self, node: str, *keys: str) -> None:
        """Somebody announces by these taints what becomes of the node; without any, that nothing does."""
        taints = [{"key": key, "effect": "NoSchedule"} for key in keys]
        await self._patch(NODES.path(None, node), {"spec": {"taints": taints}})

    async def leave(self, node: str) -> None:
        """The Node object is removed."""
        await self.client.delete(NODES, None, node, uid=None)

    async def bind(self, pod: Mapping[str, Any], node: str = "n1") -> None:
        await self.join(node)
        name = pod["metadata"]["name"]
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name, "namespace": self.namespace},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        await self.client._send(
            "create", "x", "POST", f"{PODS.path(self.namespace, name)}/binding", (), body, "application/json"
        )

    async def find_no_node(self, pod: Mapping[str, Any]) -> None:
        """The scheduler has tried the pod, in vain."""
        word = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node has room"}
        await self._status(pod, conditions=[word])

    async def run(self, pod: Mapping[str, Any], node: str = "n1") -> None:
        """Bound, image pulled, container started."""
        if not pod["spec"].get("nodeName"):
            await self.bind(pod, node)
        now = _now()
        state = {"name": "trainer", "ready": True, "restartCount": 0, "image": "i", "imageID": "i", "started": True}
        state["state"] = {"running": {"startedAt": now}}
        await self._status(pod, phase="Running", podIP=self.address(pod), startTime=now, containerStatuses=[state])

    async def end(self, pod: Mapping[str, Any], code: int = 0, word: Mapping[str, Any] | None = None) -> None:
        """The container ended, and the agent left its last word."""
        now = _now()
        message = json.dumps(word) if word is not None else ""
        over = {"exitCode": code, "reason": "Completed" if code == 0 else "Error", "message": message}
        state = {"name": "trainer", "ready": False, "restartCount": 0, "image": "i", "imageID": "i"}
        state["state"] = {"terminated": {**over, "startedAt": now, "finishedAt": now}}
        await self._status(pod, phase="Succeeded" if code == 0 else "Failed", containerStatuses=[state])

    async def remove(self, pod: Mapping[str, Any]) -> None:
        """The pod is gone, at once."""
        meta = pod["metadata"]
        await self.client.delete(PODS, self.namespace, meta["name"], uid=meta["uid"], grace=0)

    async def finish_deletions(self, job: str) -> None:
        """Remove the pods that are being deleted, as a kubelet does."""
        for pod in await self.pods(job):
            if "deletionTimestamp" in pod["metadata"]:
                await self.remove(pod)

    async def _status(self, pod: Mapping[str, Any], **status: Any) -> None:
        await self._patch(PODS.path(self.namespace, pod["metadata"]["name"]) + "/status", {"status": status})

    async def _patch(self, path: str, body: Any) -> None:
        await self.client._send("patch", "x", "PATCH", path, (), body, "application/merge-patch+json")


def _node_status(ready: str) -> dict[str, Any]:
    condition = {"type": "Ready", "status": ready, "reason": "Said", "lastHeartbeatTime": _now()}
    return {"conditions": [condition], "nodeInfo": {"bootID": os.urandom(4).hex()}}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class FakeLeader:
    """Speaks the leader's side of docs/design/001-training-job.md, really authenticated, and says what it is told."""

    def __init__(self, token: bytes, address: str, port: int, epoch: int) -> None:
        self.token, self.address, self.port = token, address, port
        self.state: dict[str, Any] = {
            "protocol": 1, "incarnation": os.urandom(8).hex(), "version": 1, "epoch": epoch, "generation": 1,
            "phase": "forming", "nodes": 1, "joined": 0, "missing": [], "unclean": [], "ranksStartedAt": None,
            "progress": None, "generationHistory": [], "outcome": None,
        }  # fmt: skip
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []
        self.loses: set[str] = set()  # paths of commands: the next one of each is heard, and its answer lost
        self._nonces = auth.NonceStore()
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    async def start(self) -> FakeLeader:
        app = web.Application()
        app.router.add_get("/v1/challenge", self._challenge)
        app.router.add_route("*", "/v1/{what}", self._signed)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.address, self.port, reuse_address=True).start()
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def say(self, **changes: Any) -> None:
        async with self._changed:
            self.state.update(changes, version=self.state["version"] + 1)
            self._changed.notify_all()

    def asked(self, what: str) -> list[tuple[str, str, dict[str, str], Any]]:
        return [request for request in self.requests if request[1] == f"/v1/{what}"]

    async def _challenge(self, _: web.Request) -> web.Response:
        return web.json_response({"nonce": self._nonces.issue(time.monotonic())})

    async def _signed(self, request: web.Request) -> web.Response:
        body = await request.read()
        nonce, client = request.headers[auth.NONCE_HEADER], request.headers[auth.CLIENT_HEADER]
        expected = auth.request_mac(self.token, request.method, request.raw_path, nonce, client, body)
        if not self._nonces.take(nonce, time.monotonic()) or not auth.macs_equal(
            expected, request.headers[auth.MAC_HEADER]
        ):
            return web.Response(status=401)
        query = dict(request.query)
        self.requests.append((request.method, request.path, query, json.loads(body) if body else None))
        if request.path in self.loses and request.transport is not None:
            self.loses.discard(request.path)
            request.transport.abort()
        answer = await self._state(query) if request.match_info["what"] == "state" else {}
        data = json.dumps(answer).encode()
        headers = {
            auth.MAC_HEADER: auth.response_mac(self.token, 200, client, data),
            auth.NEXT_NONCE_HEADER: self._nonces.issue(time.monotonic()),
        }
        return web.Response(body=data, headers=headers)

    async def _state(self, query: Mapping[str, str]) -> dict[str, Any]:
        def news() -> bool:
            return query["after"] != f"{self.state['incarnation']}:{self.state['version']}"

        async with self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait_for(news), float(query["wait"]))
            return dict(self.state)
