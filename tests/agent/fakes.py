"""Agents in this process: real wire, real node, real leader; only the user's processes are pretended."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from everstep.agent.config import AgentConfig, AgentPaths
from everstep.agent.leader.leader_server import LeaderServer
from everstep.agent.leader.leader_state import LeaderState
from everstep.agent.node.node_agent import NodeAgent
from everstep.agent.ranks.events import Event, RankExited, RankStarted
from everstep.agent.wire.generation_layout import GenerationLayout
from everstep.agent.wire.http_server import Handler, HttpServer

from .bench import configuration

TOKEN = b"t" * 32
DEADLINE = 10.0


class FakeProcesses:
    """Ranks that start at once and do what a test says."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self.emit = emit
        self.layout: GenerationLayout | None = None
        self.generations: list[tuple[int, int]] = []
        self.stops: list[float] = []
        self.given_to_writers: list[float] = []  # seconds
        self.writers_ended = asyncio.Event()
        self.writers_ended.set()
        self.unclean: str | None = None

    async def start(self, layout: GenerationLayout) -> None:
        self.layout = layout
        self.generations.append((layout.epoch, layout.generation))
        for local, rank in enumerate(self.ranks):
            self.emit(RankStarted(layout.generation, rank, local))

    @property
    def ranks(self) -> range:
        assert self.layout is not None
        first = self.layout.node_index * self.layout.procs_per_node
        return range(first, first + self.layout.procs_per_node)

    @property
    def running(self) -> bool:
        return self.layout is not None

    def exit(self, code: int = 0, message: str = "") -> None:
        assert self.layout is not None
        for local, rank in enumerate(self.ranks):
            self.emit(RankExited(self.layout.generation, rank, local, code, None, False, message, ("last line",)))

    async def stop(self, grace: float) -> str | None:
        self.stops.append(grace)
        await asyncio.sleep(0)
        self.layout = None
        return self.unclean

    async def end_writers(self, seconds: float) -> None:
        self.given_to_writers.append(seconds)
        await self.writers_ended.wait()

    async def spawn(self, daemon: str, argv: list[str], env: dict[str, str]) -> None: ...
    def kill_daemon(self, daemon: str) -> None: ...
    def daemon_output(self, daemon: str, stream: str, data: bytes) -> None: ...
    async def dump_stacks(self) -> None: ...
    async def close(self) -> None: ...


class Agent:
    """One agent: what main.py puts together, in this process."""

    def __init__(self, folder: Path, config: AgentConfig, token: bytes = TOKEN) -> None:
        clock = asyncio.get_running_loop().time
        self.suspended = 0.0  # seconds for which this agent's machine was: only the clock of leases has gone on
        self.config = config
        place = AgentPaths.for_laptop(folder / "agent.pyz", folder, config.index)
        self.fence = place.scratch / "fence.json"
        self.node = NodeAgent(
            config, place, f"agent-{config.index}-{config.epoch}", clock, lambda: clock() + self.suspended
        )
        self.processes = FakeProcesses(self.node.emit)
        self.node.run_with(self.processes, token)
        routes: dict[str, tuple[str, Handler]] = {"/v1/link": ("POST", self.node.accept)}
        self.leader: LeaderState | None = None
        self.leading: LeaderServer | None = None
        if config.leads:
            self.leader = LeaderState(config, f"leader-{config.epoch}", clock(), time.time(), lambda: 29500)
            self.leading = LeaderServer(config, token, self.node, self.leader, clock, lambda: clock() + self.suspended)
            routes.update(self.leading.routes())
        self.server = HttpServer(token, routes, clock)

    async def listen(self) -> None:
        port = await self.server.start("127.0.0.1", 0)
        self.node.config = self._with_port(port)
        if self.leading is not None:
            self.leading.start(self.processes)

    def _with_port(self, port: int) -> AgentConfig:
        from dataclasses import replace

        return replace(self.config, port=port)

    @property
    def address(self) -> str:
        return self.node.address

    async def vanish(self) -> None:
        """As if its pod were killed: no last words."""
        if self.leading is not None:
            self.leading.close()
        self.server.close()
        self.node._housekeeper.cancel()


def local(nodes: int, index: int = 0, epoch: int = 1, **fields: Any) -> AgentConfig:
    return configuration(nodes, 2, index, epoch, pod_ip="127.0.0.1", service="", **fields)


@asynccontextmanager
async def gang(folder: Path, nodes: int, **fields: Any) -> AsyncIterator[list[Agent]]:
    """Agents of one job, the first of which leads and knows the others' addresses."""
    agents = [Agent(folder, local(nodes, index, **fields)) for index in range(nodes)]
    for agent in reversed(agents):
        await agent.listen()
    introduce(agents[0], agents)
    try:
        yield agents
    finally:
        for agent in agents:
            await agent.vanish()


def introduce(leader: Agent, agents: list[Agent]) -> None:
    """Give the leader the addresses of all agents, as the operator's address table does."""
    assert leader.leader is not None
    assert leader.leading is not None
    leader.leader.update_addresses(asyncio.get_running_loop().time(), {a.config.index: a.address for a in agents})
    leader.leading._pump()


async def until(condition: Callable[[], Any], what: str = "") -> None:
    """Waits for the event loop to make it true."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"not within {DEADLINE:g} s: {what or condition}"
        await asyncio.sleep(0.002)


def leader_of(agents: list[Agent]) -> LeaderState:
    assert agents[0].leader is not None
    return agents[0].leader


def fence(agent: Agent) -> dict[str, object]:
    state: dict[str, object] = json.loads(agent.fence.read_text())
    return state
