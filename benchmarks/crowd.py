"""Many real agents on this machine, one of which leads: `python -m benchmarks.crowd 2000`.

Real wire, real nodes, a real leader; only the users' processes are pretended. The leader has a process of its own,
because its limit of open files is what is measured: the other agents together would need more files than one process
may open, and are spread over as many as it takes.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import resource
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from benchmarks.processor import read_processor_seconds
from everstep.agent import config
from everstep.agent.leader.leader_server import LeaderServer, find_free_port
from everstep.agent.leader.leader_state import LeaderState
from everstep.agent.main import raise_file_limit
from everstep.agent.node.node_agent import NodeAgent
from everstep.agent.ranks.events import Event, RankExited, RankStarted
from everstep.agent.wire.generation_layout import GenerationLayout
from everstep.agent.wire.http_server import Handler, HttpServer
from everstep.cli.leader_client import LeaderClient

SOFT_LIMIT = 1024
AGENTS_PER_PROCESS = 300  # two files each: what it listens on, and the leader's link
TIMEOUT = 240.0
ALLOWANCE = 3  # restarts


@dataclass(frozen=True)
class Crowd:
    """The facts that every process has to know."""

    agents: int
    folder: Path
    token: bytes

    def config(self, index: int) -> config.AgentConfig:
        job = {
            "protocol": config.PROTOCOL,
            "job": {"namespace": "default", "name": "crowd", "uid": "crowd"},
            "templateEpoch": 1,
            "numNodes": self.agents,
            "numProcPerNode": 1,
            "command": ["true"],
            "distribution": {"kind": "torch"},
            "restart": {"application": 3, "maxBackoffSeconds": 0},
            "fencing": "checkpoint",
            "fenceTimeoutSeconds": 35,
            "stopGraceSeconds": 5,
            "restartGraceSeconds": 5,
            "service": "",
            "port": 8470,
        }
        pod = {"EVERSTEP_INDEX": str(index), "EVERSTEP_POD_UID": f"pod-{index}", "EVERSTEP_POD_IP": "127.0.0.1"}
        return config.parse_config(job, {**pod, "EVERSTEP_EPOCH": "1"})


class PretendedRanks:
    """In place of a Supervisor: ranks that start at once and cost nothing."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self.generations: list[int] = []

    async def start(self, layout: GenerationLayout) -> None:
        self.generations.append(layout.generation)
        self._emit(RankStarted(layout.generation, layout.node_index, 0))

    def fail(self, rank: int) -> None:
        self._emit(RankExited(self.generations[-1], rank, 0, 1, None, oom=False, message="", log_tail=()))

    async def stop(self, grace: float) -> str | None:
        return None

    async def end_writers(self, seconds: float) -> None: ...
    def signal(self, signum: int) -> None: ...
    async def spawn(self, daemon: str, argv: list[str], env: dict[str, str]) -> None: ...
    def kill_daemon(self, daemon: str) -> None: ...
    def daemon_output(self, daemon: str, stream: str, data: bytes) -> None: ...
    async def dump_stacks(self) -> None: ...
    async def close(self) -> None: ...


class Agent:
    """An agent as main.py puts it together."""

    def __init__(self, crowd: Crowd, index: int) -> None:
        clock = asyncio.get_running_loop().time
        self._config = crowd.config(index)
        place = config.AgentPaths.for_laptop(crowd.folder / "agent.pyz", crowd.folder, index)
        place.scratch.mkdir(parents=True, exist_ok=True)
        self._node = NodeAgent(self._config, place, f"agent-{index}", clock)
        self.ranks = PretendedRanks(self._node.emit)
        self._node.run_with(self.ranks, crowd.token)
        routes: dict[str, tuple[str, Handler]] = {"/v1/link": ("POST", self._node.accept)}
        self._leading: LeaderServer | None = None
        if self._config.leads:
            raise_file_limit(self._config.num_nodes)
            leader = LeaderState(self._config, "crowd", clock(), time.time(), find_free_port)
            self._leading = LeaderServer(self._config, crowd.token, self._node, leader, clock)
            routes.update(self._leading.routes())
        self._server = HttpServer(crowd.token, routes, clock)

    async def listen(self) -> str:
        port = await self._server.start("127.0.0.1", 0)
        self._node.config = replace(self._config, port=port)
        if self._leading is not None:
            self._leading.start(self.ranks)
        return self._node.address


async def _serve(crowd: Crowd, indexes: range, parent: Connection) -> None:
    agents = [Agent(crowd, index) for index in indexes]
    parent.send({index: await agent.listen() for index, agent in zip(indexes, agents, strict=True)})
    while True:  # until the parent ends this process
        if await asyncio.to_thread(parent.recv) == "fail":
            agents[-1].ranks.fail(indexes[-1])
        else:
            parent.send([agent.ranks.generations for agent in agents])


def _process(crowd: Crowd, indexes: range, parent: Connection) -> None:
    asyncio.run(_serve(crowd, indexes, parent))


@dataclass(frozen=True)
class Gathering:
    """The measurements of one leader and its agents, which share this machine's processors."""

    joined: int  # agents that run the leader's generation
    generation: int
    seconds: float  # until all run
    restarted: int  # agents that run the next one, after a rank has failed
    restart_seconds: float  # from that rank's exit until all run
    leader_bytes: int  # resident memory of agent 0
    round_seconds: float  # of a processor, in which agent 0 handles one heartbeat of each agent
    heartbeat: float  # seconds between the heartbeats of an agent


def gather(agents: int) -> Gathering:
    """Have so many agents join one leader, beat, and start anew when a rank of the last one fails."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        crowd = Crowd(agents, Path(folder), secrets.token_bytes(32))
        parts = [
            range(1),
            *(range(at, min(at + AGENTS_PER_PROCESS, agents)) for at in range(1, agents, AGENTS_PER_PROCESS)),
        ]
        started = []
        try:
            for part in parts:
                ours, theirs = spawn.Pipe()
                process = spawn.Process(target=_process, args=(crowd, part, theirs), daemon=True)
                process.start()
                started.append((process, ours))
            addresses: dict[int, str] = {}
            for _, pipe in started:
                addresses |= pipe.recv()
            pipes = [pipe for _, pipe in started]
            client = LeaderClient(addresses[0], crowd.token)
            began = time.monotonic()
            client.peers(1, addresses)
            generation = _wait_until_running(client, 1)
            seconds, joined = time.monotonic() - began, _count_running(pipes, generation)
            leader, heartbeat = psutil.Process(started[0][0].pid), crowd.config(0).heartbeat
            before = read_processor_seconds(leader)
            time.sleep(heartbeat)
            beats = read_processor_seconds(leader) - before
            began = time.monotonic()
            pipes[-1].send("fail")
            following = _wait_until_running(client, generation + 1)
            again = time.monotonic() - began
            restarted = _count_running(pipes, following) if following > generation else 0
            memory = leader.memory_info().rss
        finally:
            for process, _ in reversed(started):  # the leader last: the others would all tell that they lost it
                process.kill()
                process.join()
    return Gathering(joined, generation, seconds, restarted, again, memory, beats, heartbeat)


def _wait_until_running(client: LeaderClient, generation: int) -> int:
    """Be the operator until this generation or a later one runs, or until there is no hope; its number."""
    deadline = time.monotonic() + TIMEOUT
    state = client.state(allowance=ALLOWANCE)
    while (state["phase"] != "running" or state["generation"] < generation) and time.monotonic() < deadline:
        state = client.state(after=f"{state['incarnation']}:{state['version']}", wait=5, allowance=ALLOWANCE)
    return int(state["generation"])


def _count_running(pipes: list[Connection], generation: int) -> int:
    running = 0
    for pipe in pipes:
        pipe.send("tell")
        running += sum(generations[-1:] == [generation] for generations in pipe.recv())
    return running


def main(agents: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT_LIMIT, hard))
    print(json.dumps(asdict(gather(agents))))


if __name__ == "__main__":
    main(int(sys.argv[1]))
