"""A job of real agents, one process per node as on a laptop."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from everstep import agent_zip
from everstep.cli.leader_client import LeaderClient

from .bench import JOB

VERSIONS = ["3.9", "3.10", "3.11", "3.12", "3.13", "3.14"]
SOURCE = Path(agent_zip.__file__).parent / "agent"
DEADLINE = 60.0
T = TypeVar("T")


@cache
def interpreter(version: str) -> str | None:
    """A Python of this minor version that runs, from PATH or pyenv."""
    candidates = [shutil.which(f"python{version}")]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates += sorted(map(str, pyenv.glob(f"{version}.*/bin/python{version}")))
    for path in filter(None, candidates):
        if subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Laptop:
    """Use as a context manager; leaves no process behind."""

    def __init__(
        self,
        base: Path,
        command: list[str],
        nodes: int = 2,
        procs: int = 1,
        python: str = sys.executable,
        environ: Mapping[str, str] | None = None,
        zipped: bool | bytes = False,
        **job: Any,
    ) -> None:
        """`environ`: what every agent, and so every rank, finds in its environment besides this process's own.

        `zipped`: the agents run this zipapp, or that of the sources, which a Python compiles anew in each process;
        else the same files in a folder.
        """
        self.base, self.nodes, self.python = base, nodes, python
        self.environ = {**os.environ, **(environ or {})}
        self.ports = [free_port() for _ in range(nodes)]
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        base.mkdir(parents=True, exist_ok=True)
        self._agent = base / ("agent.pyz" if zipped else "agent")
        if zipped:
            self._agent.write_bytes(zipped if isinstance(zipped, bytes) else agent_zip.build_zipapp())
        else:
            (self._agent / "everstep").mkdir(parents=True)
            (self._agent / "everstep" / "__init__.py").touch()
            (self._agent / "everstep" / "agent").symlink_to(SOURCE)
            (self._agent / "__main__.py").symlink_to(SOURCE / "__main__.py")
        self.token = secrets.token_bytes(32)
        (base / "token").write_bytes(self.token)
        fields = {"numNodes": nodes, "numProcPerNode": procs, "command": command, "service": "", **job}
        (base / "job.json").write_text(json.dumps({**JOB, **fields}))

    def __enter__(self) -> Laptop:
        for index in range(self.nodes):
            self.start(index)
        if self.nodes > 1:  # else it may be over by now
            self.introduce()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
                agent.send_signal(signal.SIGINT)
        for agent in self.agents.values():
            try:
                agent.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()
        if kind is not None:
            for index in range(self.nodes):
                print(f"--- agent {index}", self.log(index), sep="\n")

    def start(self, index: int, epoch: int = 1, leader: str = "") -> None:
        """`leader`: to which the agent announces itself, so that it needs no `introduce`."""
        argv = [self.python, "-I", "-S", str(self._agent), "run", "--local", str(self.base)]
        argv += ["--index", str(index), "--epoch", str(epoch), "--port", str(self.ports[index])]
        argv += ["--leader", leader] if leader else []
        with (self.base / f"log-{index}").open("ab") as log:
            self.agents[index] = subprocess.Popen(argv, stdout=log, stderr=log, env=self.environ)

    def kill(self, index: int) -> None:
        """As if the pod's machine were gone: no last word, and the pod's successor has another address."""
        self.agents[index].kill()
        self.agents[index].wait()
        self.ports[index] = free_port()

    def client(self) -> LeaderClient:
        def connect() -> LeaderClient | None:
            client = LeaderClient(f"127.0.0.1:{self.ports[0]}", self.token)
            try:
                client.state()
            except OSError:
                return None
            return client

        return until(connect, "the leader answers")

    def introduce(self, epoch: int = 1) -> None:
        self.client().peers(epoch, {i: f"127.0.0.1:{p}" for i, p in enumerate(self.ports)})

    def until(self, condition: Callable[[dict[str, Any]], bool], what: str = "") -> dict[str, Any]:
        client, after, end = self.client(), "", time.monotonic() + DEADLINE
        while True:
            state = client.state(after, wait=2)
            if condition(state):
                return state
            assert time.monotonic() < end, f"not within {DEADLINE:g} s: {what}: {state}"
            after = f"{state['incarnation']}:{state['version']}"

    def exit_codes(self) -> list[int]:
        """After the end. A leader that was polled waits for somebody to fetch the outcome."""
        return [self.agents[index].wait(DEADLINE) for index in range(self.nodes)]

    def word(self, index: int) -> dict[str, Any]:
        data: dict[str, Any] = json.loads((self.base / f"node-{index}" / "termination-log").read_bytes())
        return data

    def log(self, index: int) -> str:
        return (self.base / f"log-{index}").read_text(errors="replace")


def until(condition: Callable[[], T | None], what: str) -> T:
    end = time.monotonic() + DEADLINE
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"not within {DEADLINE:g} s: {what}"
        time.sleep(0.01)
