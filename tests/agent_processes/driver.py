"""Runs one Supervisor for a test: JSON commands in on one descriptor, JSON events out on another.

Started with `-I -S` by any Python >= 3.9, as the agent is; its stdout and stderr are the agent's logs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any


async def main(source: str, setup: dict[str, Any], commands: int, events: int) -> None:
    sys.path.insert(0, source)
    from everstep.agent.config import AgentPaths, parse_config
    from everstep.agent.node import gpu_health
    from everstep.agent.node import supervisor as module
    from everstep.agent.node.supervisor import DaemonOutput, Supervisor
    from everstep.agent.ranks import environment, failure_file
    from everstep.agent.ranks.events import RankProgressed
    from everstep.agent.system import gpu, shared_memory
    from everstep.agent.wire.generation_layout import GenerationLayout

    gate = threading.Event()
    if setup["slow_volume"]:
        forget = failure_file.remove_failure_file

        def slow_forget(output: Path) -> Path:
            send("Forgetting")
            gate.wait()
            return forget(output)

        failure_file.remove_failure_file = slow_forget
    if setup["hung_failure_file"]:

        def hang(path: Path) -> str:
            send("Reading")
            gate.wait()
            return ""

        failure_file.read_failure_file = hang
    if setup["hung_program"]:

        def wait_for_volume(name: str, path: str | None) -> None:
            send("ReadingProgram", name=name)
            gate.wait()

        environment.read_program = wait_for_volume
    if setup["sandbox"]:
        read_bytes = Path.read_bytes

        def read_sandboxed(self: Path) -> bytes:
            lines = read_bytes(self).splitlines(keepends=True)
            return b"".join(line for line in lines if self.name != "status" or not line.startswith(b"Sig"))

        Path.read_bytes = read_sandboxed  # type: ignore[method-assign]
    if setup["slow_memory"]:
        clear = shared_memory.clear_shared_memory

        def slow(*args: Any, **options: Any) -> Any:
            send("Clearing")
            gate.wait()
            return clear(*args, **options)

        shared_memory.clear_shared_memory = slow

    module.NOTE_SECONDS = setup["note_interval"]
    module.CLEAN_TIMEOUT_SECONDS, gpu.DRIVER_TIMEOUT_SECONDS = setup["clean_timeout"], setup["gpu_timeout"]
    loop = asyncio.get_running_loop()
    remote: dict[str, asyncio.Future[int]] = {}

    def send(kind: str, **values: Any) -> None:
        os.write(events, json.dumps({"kind": kind, **values}).encode() + b"\n")

    def emit(event: Any) -> None:
        values = event._asdict()
        if isinstance(event, DaemonOutput):
            values["data"] = event.data.decode("latin-1")
        elif isinstance(event, RankProgressed) and event.checkpoint is not None:
            values["checkpoint"] = event.checkpoint._asdict()
        send(type(event).__name__, **values)

    async def spawn_on(node: int, daemon: str, argv: list[str], env: dict[str, str]) -> int:
        send("SpawnOn", node=node, daemon=daemon, argv=argv, env=env)
        remote[daemon] = loop.create_future()
        try:
            return await remote[daemon]
        except asyncio.CancelledError:
            send("KillOn", node=node, daemon=daemon)
            raise

    place = AgentPaths(
        agent=Path(setup["agent"]),
        job=Path("/nonexistent"),
        token=Path("/nonexistent"),
        scratch=Path(setup["scratch"]),
        shm=Path(setup["shm"]) if setup["shm"] else None,
        ml=Path(setup["ml"]),
        termination_log=Path("/nonexistent"),
        owns_pod=os.getpid() == 1,
        slots=Path(setup["slots"]) if setup["slots"] else None,
    )
    place.scratch.mkdir(parents=True, exist_ok=True)
    supervisor = Supervisor(parse_config(setup["job"], setup["environ"]), place, emit, spawn_on)
    reader = asyncio.StreamReader(limit=2**22)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(commands, "rb"))
    send("Ready", pid=os.getpid())

    tasks = set()

    async def call(command: dict[str, Any]) -> Any:
        name, values = command["call"], command["values"]
        if name == "start":
            values["hosts"], values["ports"] = tuple(values["hosts"]), tuple(values["ports"])
            return await supervisor.start(GenerationLayout(**values))
        if name == "stop":
            return await supervisor.stop(values["grace"])
        if name == "end_writers":
            return await supervisor.end_writers(values["seconds"])
        if name == "spawn":
            return await supervisor.spawn(values["daemon"], values["argv"], values["env"])
        if name == "daemon_exited":
            waiting = remote[values["daemon"]]
            return None if waiting.done() else waiting.set_result(values["exit_code"])
        if name == "daemon_output":
            return supervisor.daemon_output(values["daemon"], values["stream"], values["data"].encode("latin-1"))
        if name == "go_on":
            return gate.set()
        if name == "kill_daemon":
            return supervisor.kill_daemon(values["daemon"])
        if name == "signal":
            return len(await supervisor.signal(values["signum"]))
        if name == "dump_stacks":
            return await supervisor.dump_stacks()
        if name == "has_run_here":
            return supervisor._processes.has_run_here(values["pid"])
        if name == "gpus":
            devices = await supervisor.gpus()
            return None if devices is None else [dataclasses.asdict(d) for d in devices]
        if name == "watch":

            def tell(gpus: Any) -> None:
                send("Gpus", gpus=[g.to_json() for g in gpus])

            tasks.add(asyncio.ensure_future(gpu_health.watch_gpus(supervisor.gpus, tell, values["every"])))
            return None
        if name == "lag":  # the longest time in which the loop did nothing else
            worst, deadline, used = 0.0, loop.time() + values["seconds"], sum(os.times()[:2])
            while loop.time() < deadline:
                before = loop.time()
                await asyncio.sleep(0.01)
                worst = max(worst, loop.time() - before - 0.01)
            return [worst, sum(os.times()[:2]) - used]
        raise ValueError(name)

    async def serve(command: dict[str, Any]) -> None:
        try:
            result = await call(command)
        except Exception as error:
            send("Answer", id=command["id"], error=repr(error))
        else:
            send("Answer", id=command["id"], result=result)

    while True:
        line = await reader.readline()
        if not line:
            break
        tasks.add(asyncio.ensure_future(serve(json.loads(line))))
    await supervisor.stop(0.0)
    await supervisor.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
