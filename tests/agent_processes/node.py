"""A node under test: a driver process, its events and its logs."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import zipapp
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[2] / "trainer-image" / "src"
DEADLINE = float(os.environ.get("EVERSTEP_TEST_DEADLINE", "60"))  # seconds

Event = dict[str, Any]


def build_agent(folder: Path) -> Path:
    """A zipapp with the agent's two commands that MPI starts."""
    tree = folder / "tree"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(SOURCE / "everstep" / "agent", tree / "everstep" / "agent", ignore=ignore)
    (tree / "everstep" / "__init__.py").touch()
    (tree / "__main__.py").write_text(
        "import sys\n"
        "from everstep.agent.launch import rank_command, rsh_command\n"
        "sys.exit({'rank': rank_command.main, 'rsh': rsh_command.main}[sys.argv[1]](sys.argv[2:]))\n"
    )
    target = folder / "agent.pyz"
    zipapp.create_archive(tree, target)
    return target


class Node:
    """Use as an asynchronous context manager."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        *,
        index: int = 0,
        nodes: int = 1,
        procs: int = 1,
        distribution: str = "torch",
        options: Sequence[str] = (),
        python: str = sys.executable,
        pod: bool = False,
        shares_memory: bool = False,
        shares_input: bool = False,
        scratch: Path | None = None,
        environ: dict[str, str] | None = None,
        agent: Path = Path("/nonexistent"),
        prefix: Sequence[str] = (),
        stdout: int | None = None,
        clean_timeout: float = 30.0,
        gpu_timeout: float = 10.0,
        note_interval: float = 5.0,
        slow_memory: bool = False,
        slow_volume: bool = False,
        hung_failure_file: bool = False,
        hung_program: bool = False,
        sandbox: bool = False,
    ) -> None:
        self.events: list[Event] = []
        self.generation = 0
        self.folder = folder / f"node-{index}"
        self.shm = self.folder / "shm"
        self._index, self._nodes, self._procs = index, nodes, procs
        self._python, self._pod, self._prefix, self._stdout = python, pod, list(prefix), stdout
        self._changed = asyncio.Condition()
        self._environ = {**os.environ, **(environ or {})}
        self._setup = {
            "agent": str(agent),
            "scratch": str(scratch or self.folder / "run"),
            "shm": str(self.shm) if pod else "",
            "slots": str(self.folder / "slots") if pod else "",
            "clean_timeout": clean_timeout,
            "gpu_timeout": gpu_timeout,
            "note_interval": note_interval,
            "slow_memory": slow_memory,
            "slow_volume": slow_volume,
            "hung_failure_file": hung_failure_file,
            "hung_program": hung_program,
            "sandbox": sandbox,
            "ml": str(self.folder / "ml"),
            "environ": {"EVERSTEP_INDEX": str(index), "EVERSTEP_EPOCH": "1"},
            "job": {
                "protocol": 1,
                "job": {"namespace": "default", "name": "digits", "uid": "u-1"},
                "templateEpoch": 1,
                "numNodes": nodes,
                "numProcPerNode": procs,
                "command": list(command),
                "distribution": {"kind": distribution, "options": list(options)},
                "hyperparameters": {"epochs": "10"},
                "restart": {"application": 3, "maxBackoffSeconds": 60},
                "fencing": "checkpoint",
                "fenceTimeoutSeconds": 35,
                "stopGraceSeconds": 110,
                "restartGraceSeconds": 5,
                "instanceType": "on-demand",
                "service": "",
                "port": 8470,
                "ownsSharedMemory": not shares_memory,
                "ownsIpc": not shares_memory,
                "ownsInput": not shares_input,
            },
        }

    async def __aenter__(self) -> Node:
        self.shm.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / "log"
        commands_in, self._commands = os.pipe()
        events, events_out = os.pipe()
        unshare = ["unshare", "--pid", "--ipc", "--fork", "--mount-proc", "--kill-child"] if self._pod else []
        argv = [*unshare, *self._prefix, self._python, "-I", "-S", str(Path(__file__).with_name("driver.py"))]
        argv += [str(SOURCE), json.dumps(self._setup), str(commands_in), str(events_out)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(  # noqa: ASYNC220 - it returns at once
                argv,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log if self._stdout is None else self._stdout,
                stderr=log,
                pass_fds=(commands_in, events_out),
            )
        os.close(commands_in)
        os.close(events_out)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reader = asyncio.ensure_future(self._read(events))
        await self.event("Ready")
        return self

    async def __aexit__(self, *_: object) -> None:
        os.close(self._commands)
        loop = asyncio.get_running_loop()
        try:
            await asyncio.wait_for(loop.run_in_executor(None, self.process.wait), DEADLINE)
        finally:
            self.process.kill()
            self._reader.cancel()

    async def start(self, **changes: Any) -> None:
        self.generation += 1
        layout: dict[str, Any] = {
            "epoch": 1,
            "generation": self.generation,
            "hosts": ["127.0.0.1"] * self._nodes,
            "ports": [8470 + i for i in range(self._nodes)],
            "node_index": self._index,
            "procs_per_node": self._procs,
            "master_addr": "127.0.0.1",
            "master_port": 29500,
        }
        await self.call("start", **{**layout, **changes})

    async def stop(self, grace: float = 0.0) -> str | None:
        result: str | None = await self.call("stop", grace=grace)
        return result

    async def call(self, name: str, **values: Any) -> Any:
        number = len(self._answers)
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        os.write(self._commands, json.dumps({"id": number, "call": name, "values": values}).encode() + b"\n")
        answer = await asyncio.wait_for(future, DEADLINE)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    async def event(self, kind: str, **fields: Any) -> Event:
        """The first event of this kind with these values, once it has come."""

        def found() -> list[Event]:
            return [e for e in self.all(kind) if fields.items() <= e.items()][:1]

        events: list[Event] = await self.until(found, f"{kind} with {fields}")
        return events[0]

    async def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Looks whenever an event comes, and often enough for what events do not tell."""
        deadline = asyncio.get_running_loop().time() + DEADLINE
        while not (result := condition()):
            if asyncio.get_running_loop().time() > deadline:
                raise AssertionError(f"no {what}; events: {self.events}; log: {self.logged()[-4000:]}")
            async with self._changed:
                try:
                    await asyncio.wait_for(self._changed.wait(), 0.05)
                except TimeoutError:
                    continue
        return result

    async def exits(self, count: int) -> list[Event]:
        """Wait for `count` exits of the newest generation, and return them."""

        def ended() -> list[Event]:
            return [e for e in self.all("RankExited") if e["generation"] == self.generation]

        await self.until(lambda: len(ended()) >= count, f"{count} exits")
        return ended()

    def all(self, kind: str) -> list[Event]:
        return [e for e in self.events if e["kind"] == kind]

    def logged(self) -> str:
        return self.log.read_text(errors="replace")

    async def _read(self, descriptor: int) -> None:
        reader = asyncio.StreamReader(limit=2**22)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb"))
        while line := await reader.readline():
            event = json.loads(line)
            if event["kind"] == "Answer":
                self._answers[event["id"]].set_result(event)
                continue
            self.events.append(event)
            async with self._changed:
                self._changed.notify_all()
