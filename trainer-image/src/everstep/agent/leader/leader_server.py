"""The leader's server: answers the operator, carries out what leader_state.py decides, and keeps the lease."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import Coroutine
from typing import Any, Callable

from everstep.agent.config import AgentConfig
from everstep.agent.node.fencing import LeaderLease, StallDetector, answers_tls, find_api_server
from everstep.agent.node.node_agent import NodeAgent
from everstep.agent.node.supervisor_interface import SupervisorInterface
from everstep.agent.system.agent_log import log_line
from everstep.agent.system.clock import read_boottime
from everstep.agent.system.tasks import Tasks
from everstep.agent.wire import protocol
from everstep.agent.wire.checkpoint_request import CheckpointRequest
from everstep.agent.wire.http_server import Handler, HttpError, HttpRequest, HttpResponse

from .commands import AskForCheckpoint, Command, Dial, DumpStacks, EndJob, HangUp, StartRanks, StopRanks
from .leader_state import LeaderState
from .node_links import Links, Loopback
from .remote_daemons import RemoteDaemons

MAX_WAIT_SECONDS = 30.0
MERGE_SECONDS = 0.02  # a thousand agents that join are not a thousand answers
LAST_CHARGES = 16
LINGER_SECONDS = 10.0  # for the operator to fetch the outcome, if it was polling


class LeaderServer:
    def __init__(
        self,
        config: AgentConfig,
        token: bytes,
        node: NodeAgent,
        leader: LeaderState,
        clock: Callable[[], float],
        lease_clock: Callable[[], float] = read_boottime,
    ) -> None:
        self._config = config
        self._node = node
        self._leader = leader
        self._clock = clock
        self._links = Links(config, token, self)
        self._daemons = RemoteDaemons(self._links)
        self._processes: SupervisorInterface | None = None
        self._lease_clock = lease_clock
        self._lease = LeaderLease(config.fence_timeout, lease_clock())
        self._stalls = StallDetector(clock, lease_clock, min(1.0, config.fence_timeout / 4))
        self._changed = asyncio.Event()
        self._version = leader.version
        self._phase = leader.phase
        self._polled_at: float | None = None
        self._told = asyncio.Event()  # an answer with the outcome was written
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = Tasks(node.crash)

    def routes(self) -> dict[str, tuple[str, Handler]]:
        return {
            "/v1/state": ("GET", self._state),
            "/v1/peers": ("POST", self._peers),
            "/v1/announce": ("POST", self._announce),
            "/v1/stop": ("POST", self._stop),
            "/v1/checkpoint": ("POST", self._checkpoint),
        }

    def start(self, processes: SupervisorInterface) -> None:
        self._processes = processes
        crash = self._node.crash
        self._links.own(Loopback(self._node.handle, crash))
        self._node.attach(Loopback(lambda message: self.arrived(0, message), crash))
        self.keep(self._heartbeats())
        self.keep(self._renew_lease())
        self.keep(self._note_running())
        self._pump()

    async def spawn_on(self, index: int, daemon: str, argv: list[str], env: dict[str, str]) -> int:
        """Run a daemon on a node, for this node's launcher; see RemoteDaemons.spawn."""
        return await self._daemons.spawn(index, daemon, argv, env)

    # ---- the operator's requests

    async def _state(self, request: HttpRequest) -> HttpResponse:
        query = request.query
        wait = min(_parse_seconds(query.get("wait", "0"), "wait"), MAX_WAIT_SECONDS)
        allowance = query.get("allowance")
        if allowance is not None and not allowance.isdecimal():
            raise HttpError(400, "allowance must be a number")
        self._polled_at = self._clock()
        # After this process stood still: the request may have waited, and whoever sent it may be gone since.
        self._lease.renew(self._lease_clock(), min(request.age, self._stalls.age()))
        self._leader.release(self._polled_at)
        self._leader.note_poll(
            self._polled_at, query.get("charged", ""), int(allowance) if allowance is not None else None
        )
        self._pump()
        after = query.get("after", "")
        end = self._clock() + wait
        while after == f"{self._leader.incarnation}:{self._leader.version}":
            left = end - self._clock()
            if left <= 0:
                break
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)
                await asyncio.sleep(MERGE_SECONDS)
        if self._leader.outcome is not None:
            asyncio.get_running_loop().call_later(0.25, self._told.set)
        return HttpResponse.of(self._leader.state())

    async def _peers(self, request: HttpRequest) -> HttpResponse:
        body = request.json()
        self._same_epoch(body)
        addresses = body.get("addresses")
        if not isinstance(addresses, dict):
            raise HttpError(400, "addresses must be an object")
        table: dict[int, str] = {}
        for key, address in addresses.items():
            if not (key.isdecimal() and int(key) < self._config.num_nodes and protocol.is_address(address)):
                raise HttpError(400, f"not an index and its address: {key[:20]!r}: {str(address)[:80]!r}")
            table[int(key)] = address
        self._leader.update_addresses(self._clock(), table)
        self._pump()
        return HttpResponse.of({"epoch": self._leader.epoch})

    async def _announce(self, request: HttpRequest) -> HttpResponse:
        """Answer a replacement that says where it is, before the operator can know: the kubelet reports addresses
        late."""
        body = request.json()
        self._same_epoch(body)
        index, uid, address = body.get("index"), body.get("uid"), body.get("address")
        if not isinstance(index, int) or isinstance(index, bool) or not 0 < index < self._config.num_nodes:
            raise HttpError(400, "index must be that of a node, and not the leader's")
        if not isinstance(uid, str) or not 0 < len(uid) <= 64:
            raise HttpError(400, "uid must be the pod's")
        if not isinstance(address, str) or not protocol.is_address(address):
            raise HttpError(400, "address must be ip:port")
        self._leader.announced(self._clock(), index, uid, address)
        self._pump()
        return HttpResponse.of({"epoch": self._leader.epoch})

    async def _stop(self, request: HttpRequest) -> HttpResponse:
        body = request.json()
        reason = body.get("reason", "")
        if not isinstance(reason, str):
            raise HttpError(400, "reason must be a string")
        if "epoch" in body:
            self._same_epoch(body)
        self._leader.stop(self._clock(), reason or "stopped")
        self._pump()
        return HttpResponse.of({"epoch": self._leader.epoch})

    async def _checkpoint(self, request: HttpRequest) -> HttpResponse:
        """Have all ranks save: `deadline` is the seconds left for it. The same id again changes nothing."""
        body = request.json()
        self._same_epoch(body)
        try:
            asked = CheckpointRequest.from_json(body, seconds="deadline")
        except ValueError as error:
            raise HttpError(400, str(error)) from None
        self._leader.request_checkpoint(self._clock(), asked)
        self._pump()
        return HttpResponse.of({"epoch": self._leader.epoch})

    def _same_epoch(self, body: dict[str, Any]) -> None:
        if body.get("epoch") != self._leader.epoch:
            raise HttpError(409, f"this leader's epoch is {self._leader.epoch}")

    # ---- the state machine's commands

    def _pump(self) -> None:
        """Carry out what follows from an input, wake who waits, set the next alarm."""
        for command in self._leader.take_commands():
            self._carry_out(command)
        leader, loop, now = self._leader, asyncio.get_running_loop(), self._clock()
        if leader.version != self._version:
            self._version = leader.version
            self._changed.set()
            self._changed = asyncio.Event()
        if leader.phase != self._phase:
            self._phase = leader.phase
            log_line(f"generation {leader.epoch}.{leader.generation}: {leader.phase}")
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(max(0.001, leader.deadline(now) - now), self._tick)

    def _tick(self) -> None:
        try:
            self._expired()
            self._leader.tick(self._clock())
            self._pump()
        except Exception as error:
            self._node.crash(error)

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Dial):
            self._links.dial(command.index, command.address)
        elif isinstance(command, HangUp):
            self._links.fence(command.index)
            self._links.drop(command.index)
            self._daemons.handle_node_loss(command.index)
        elif isinstance(command, StartRanks):
            self._ping()  # who waited long for this leader has no lease, and would start its ranks fenced
            self._links.send_all(command.layout.to_json())
        elif isinstance(command, DumpStacks):
            log_line("no rank has made a step for too long: dumping the stacks of all ranks")
            self._links.send_all({"type": "dump"})
        elif isinstance(command, StopRanks):
            stop = {"type": "stop", "generation": command.generation, "graceSeconds": command.grace}
            self._links.send(command.indexes, stop)
        elif isinstance(command, AskForCheckpoint):
            log_line(f"a checkpoint is asked for (request {command.request.id})")
            self._links.send_all(command.request.to_message(command.generation))
        elif isinstance(command, EndJob):
            log_line(f"{command.outcome.result}: {command.outcome.message}")
            self._links.send_all(command.outcome.to_message())

    # ---- what happens on the links

    def joined(self, hello: protocol.Hello) -> None:
        self._expired()
        self._daemons.handle_node_loss(hello.index)  # whoever was there before is gone
        self._leader.node_joined(self._clock(), hello)
        if self._leader.outcome is not None:  # it was dialled when the job ended
            self._links.send((hello.index,), self._leader.outcome.to_message())
        self._pump()

    def lost(self, index: int, why: str) -> None:
        self._daemons.handle_node_loss(index)
        self._leader.link_lost(self._clock(), index, why)
        self._pump()

    def superseded(self, index: int, epoch: int) -> None:
        log_line(f"node {index} follows a leader of epoch {epoch}: this one is superseded")
        self._leader.hold(self._clock(), f"superseded by epoch {epoch}", superseded=True)
        self._pump()

    def arrived(self, index: int, message: dict[str, Any]) -> None:
        """Handle one message of a node. Malformed ones raise, which ends the link."""
        self._expired()  # what is told may start ranks, and a process that was starved has looked long ago
        now, leader, kind = self._clock(), self._leader, message["type"]
        leader.note_sign_of_life(now, index)
        if kind == "beat":
            ranks = [protocol.RankProgress.from_json(r) for r in message["ranks"]]
            leader.take_heartbeat(now, *protocol.parse_order(message), ranks)
            if "gpus" in message:
                leader.update_gpus(index, protocol.gpus_from_json(message["gpus"]))
        elif kind == "report":
            leader.take_report(now, index, protocol.GenerationReport.from_json(message))
        elif kind == "hello":
            if index != 0:  # theirs are read where their links are made, and compared with whom was dialled
                raise ValueError("a second hello")
            leader.node_joined(now, protocol.Hello.from_json(message))
        elif kind == "leaving":
            log_line(f"node {index} was told to stop")
            leader.node_leaving(now, index, float(message["graceSeconds"]))
        elif kind == "output":
            if self._processes is not None:
                self._daemons.forward_output(index, message, self._processes)
            return
        elif kind == "exit":
            self._daemons.handle_exit(index, message)
            return
        self._pump()

    # ---- time

    async def _heartbeats(self) -> None:
        while True:
            self._ping()
            await asyncio.sleep(self._config.heartbeat)

    def _ping(self) -> None:
        self._links.send_all({"type": "ping", "age": self._lease.age(self._lease_clock())})

    async def _note_running(self) -> None:
        while True:
            await asyncio.sleep(self._stalls.interval)
            self._stalls.note_running()

    async def _renew_lease(self) -> None:
        """Renew the lease in the second way, by the API server's answers, and fence when neither way works."""
        server = find_api_server(os.environ)
        while True:
            await asyncio.sleep(min(1.0, self._config.fence_timeout / 8))
            now = self._lease_clock()
            if server is not None and self._lease.wants_probe(now) and await answers_tls(*server):
                self._lease.renew(now)  # the time of asking: the answer may have been long on its way
            if self._config.fencing != "strict":
                continue
            if not self._expired():
                self._leader.release(self._clock())
            self._pump()

    def _expired(self) -> bool:
        """Return whether the lease is over, under strict fencing; then nothing runs or starts any more."""
        # A little before the nodes stop their ranks by themselves: seen from here, that would look like failures.
        if self._config.fencing != "strict" or self._lease.age(self._lease_clock()) < 0.9 * self._lease.timeout:
            return False
        self._leader.hold(self._clock(), "the leader's lease was not renewed")
        return True

    def failure(self) -> protocol.EndedGeneration | None:
        """Return the failure that the outcome names, or None."""
        outcome = self._leader.outcome
        if outcome is None or outcome.failure is None:
            return None
        return next((e for e in self._leader.budget.history if e.id == outcome.failure), None)

    def charges(self) -> list[str]:
        """Return the newest ended generations, "epoch.generation cause" each, as the termination message holds them."""
        return [f"{e.id} {e.cause}" for e in self._leader.budget.history][-LAST_CHARGES:]

    def progress(self) -> dict[str, Any] | None:
        """Return how far the job came, without what may be long."""
        told = self._leader.meter.to_json()
        return {key: told[key] for key in ("step", "totalSteps", "stepsPerSecond", "at")} if told else None

    def checkpoint(self) -> dict[str, Any] | None:
        """Return the job's newest checkpoint and what its last generation began from."""
        return self._leader.checkpoints.to_json()

    async def linger(self) -> None:
        """Wait after the end until every agent was told, and the operator too if it was there lately."""
        await self._links.flushed(LINGER_SECONDS)
        polled = self._polled_at
        if self._leader.outcome is not None and polled is not None and self._clock() - polled < 2 * MAX_WAIT_SECONDS:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._told.wait(), LINGER_SECONDS)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._tasks.cancel()
        self._links.close()

    def keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` until `close`; an error in it ends the agent."""
        return self._tasks.start(work)


def find_free_port() -> int:
    """Return a port for MASTER_PORT, below the range from which the kernel takes those of outgoing connections."""
    for _ in range(100):
        port = random.randrange(20000, 32000)  # noqa: S311 - no secret
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no free port between 20000 and 32000")


def _parse_seconds(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise HttpError(400, f"{name} must be a number of seconds")
    return value
