"""The leader's hands: dials the agents, carries out what leader.py decides, and answers the operator."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import random
import socket
from typing import Any, Callable

from . import protocol
from .commands import Command, Dial, End, Hangup, Start, StopRanks
from .config import Config
from .fencing import Lease, answers_tls, api_server
from .http import Handler, HttpError, Request, Response
from .leader import Leader
from .link import DIAL_SECONDS, Channel, Link, LinkClosed, Refused, dial, encode
from .node import Node, Processes, layout_to
from .report import say

MAX_WAIT = 30.0
MERGE_SECONDS = 0.02  # a thousand agents that join are not a thousand answers
DIALS_AT_ONCE = 128
REDIAL_SECONDS = (0.1, 2.0)
LINGER_SECONDS = 10.0  # for the operator to fetch the outcome, if it was polling


class Loopback:
    """The leader's link to its own node. Delivery is deferred, as on a network: no state machine is entered twice."""

    def __init__(self, deliver: Callable[[dict[str, Any]], None], crash: Callable[[BaseException], None]) -> None:
        self._deliver: Callable[[dict[str, Any]], None] | None = deliver
        self._crash = crash

    def send(self, message: dict[str, Any]) -> None:
        asyncio.get_running_loop().call_soon(self._arrive, message)

    def close(self) -> None:
        self._deliver = None

    def _arrive(self, message: dict[str, Any]) -> None:
        try:
            if self._deliver is not None:
                self._deliver(message)
        except Exception as error:
            self._crash(error)


class Leading:
    def __init__(self, config: Config, token: bytes, node: Node, leader: Leader, clock: Callable[[], float]) -> None:
        self._config = config
        self._token = token
        self._node = node
        self._leader = leader
        self._clock = clock
        self._processes: Processes | None = None
        self._lease = Lease(config.fence_timeout, clock())
        self._links: dict[int, Channel] = {}
        self._dials: dict[int, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(DIALS_AT_ONCE)
        self._daemons: dict[str, tuple[int, asyncio.Future[int]]] = {}
        self._changed = asyncio.Event()
        self._version = leader.version
        self._phase = leader.phase
        self._polled_at: float | None = None
        self._told = asyncio.Event()  # an answer with the outcome was written
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def routes(self) -> dict[str, tuple[str, Handler]]:
        return {
            "/v1/state": ("GET", self._state),
            "/v1/peers": ("POST", self._peers),
            "/v1/stop": ("POST", self._stop),
        }

    def start(self, processes: Processes) -> None:
        self._processes = processes
        crash = self._node.crash
        self._links[0] = Loopback(self._node.handle, crash)
        self._node.attach(Loopback(lambda message: self._arrived(0, self._links.get(0), message), crash))
        self._keep(self._heartbeats())
        self._keep(self._renew_lease())
        self._pump()

    # ---- the operator's requests

    async def _state(self, request: Request) -> Response:
        query = request.query
        wait = min(_number(query.get("wait", "0"), "wait"), MAX_WAIT)
        allowance = query.get("allowance")
        if allowance is not None and not allowance.isdecimal():
            raise HttpError(400, "allowance must be a number")
        self._polled_at = self._clock()
        self._lease.renew(self._polled_at)
        self._leader.release(self._polled_at)
        self._leader.poll(self._polled_at, query.get("charged", ""), int(allowance) if allowance is not None else None)
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
        return Response.of(self._leader.state())

    async def _peers(self, request: Request) -> Response:
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
        self._leader.peers(self._clock(), table)
        self._pump()
        return Response.of({"epoch": self._leader.epoch})

    async def _stop(self, request: Request) -> Response:
        body = request.json()
        reason = body.get("reason", "")
        if not isinstance(reason, str):
            raise HttpError(400, "reason must be a string")
        if "epoch" in body:
            self._same_epoch(body)
        self._leader.stop(self._clock(), reason or "stopped")
        self._pump()
        return Response.of({"epoch": self._leader.epoch})

    def _same_epoch(self, body: dict[str, Any]) -> None:
        if body.get("epoch") != self._leader.epoch:
            raise HttpError(409, f"this leader's epoch is {self._leader.epoch}")

    # ---- the state machine's commands

    def _pump(self) -> None:
        """After every input: carry out what follows from it, wake who waits, set the next alarm."""
        for command in self._leader.take():
            self._carry_out(command)
        leader, loop, now = self._leader, asyncio.get_running_loop(), self._clock()
        if leader.version != self._version:
            self._version = leader.version
            self._changed.set()
            self._changed = asyncio.Event()
        if leader.phase != self._phase:
            self._phase = leader.phase
            say(f"generation {leader.epoch}.{leader.generation}: {leader.phase}")
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(max(0.001, leader.deadline(now) - now), self._tick)

    def _tick(self) -> None:
        try:
            self._leader.tick(self._clock())
            self._pump()
        except Exception as error:
            self._node.crash(error)

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, Dial):
            self._stop_dialling(command.index)
            if command.address:
                task = self._keep(self._dial(command.index, command.address))
                self._dials[command.index] = task
        elif isinstance(command, Hangup):
            self._drop(command.index)
        elif isinstance(command, Start):
            self._broadcast(self._links, layout_to(command.layout))
        elif isinstance(command, StopRanks):
            stop = {"type": "stop", "generation": command.generation, "graceSeconds": command.grace}
            self._broadcast(command.indexes, stop)
        elif isinstance(command, End):
            outcome = command.outcome
            say(f"{outcome.result}: {outcome.message}")
            end = {"type": "end", "result": outcome.result, "exitCode": outcome.exit_code, "message": outcome.message}
            self._broadcast(self._links, end)

    def _broadcast(self, indexes: Any, message: dict[str, Any]) -> None:
        payload: bytes | None = None  # encoded once: a layout of a thousand nodes is 20 KB, a thousand times
        for index in list(indexes):
            channel = self._links.get(index)
            if isinstance(channel, Link):
                payload = payload or encode(message)
                channel.send_payload(payload)
            elif channel is not None:
                channel.send(message)

    # ---- links

    async def _dial(self, index: int, address: str) -> None:
        least, most = REDIAL_SECONDS
        pause = least
        while True:
            link = await self._try(index, address)
            if link is not None:
                break
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))  # noqa: S311 - spreads load, hides nothing
            pause = min(2 * pause, most)
        self._dials.pop(index, None)
        await self._read(index, *link)

    async def _try(self, index: int, address: str) -> tuple[Link, protocol.Hello] | None:
        """A link and the hello on it, or None when it has to be tried again."""
        async with self._slots:
            try:
                link = await dial(address, self._token, epoch=self._leader.epoch, index=index, uid=self._config.job_uid)
            except Refused as error:
                if error.epoch is not None and error.epoch > self._leader.epoch:
                    say(f"node {index} follows a leader of epoch {error.epoch}: this one is superseded")
                    self._leader.hold(self._clock(), f"superseded by epoch {error.epoch}", superseded=True)
                    self._pump()
                return None
            except (OSError, asyncio.TimeoutError, ValueError, asyncio.IncompleteReadError):
                return None
            try:
                message = await asyncio.wait_for(link.receive(), DIAL_SECONDS)
                hello = protocol.Hello.from_json(message)
                if message["type"] == "hello" and hello.index == index and protocol.is_address(hello.address):
                    return link, hello
            except (LinkClosed, ValueError, asyncio.TimeoutError):
                pass
            except asyncio.CancelledError:
                link.close()
                raise
            link.close()
            return None

    async def _read(self, index: int, link: Link, hello: protocol.Hello) -> None:
        self._drop(index)
        self._links[index] = link
        self._leader.hello(self._clock(), hello)
        self._pump()
        try:
            while True:
                self._arrived(index, link, await link.receive())
        except LinkClosed as error:
            why = str(error)
        except (ValueError, KeyError, TypeError) as error:
            why = f"its agent sent what nobody understands: {error}"
        finally:
            link.close()
        if self._links.get(index) is link:
            self._drop(index)
            self._leader.link_lost(self._clock(), index, why)
            self._pump()

    def _drop(self, index: int) -> None:
        channel = self._links.pop(index, None)
        if channel is not None:
            channel.close()
        for daemon, (where, waiter) in list(self._daemons.items()):
            if where == index:
                self._daemon_exited(daemon, 255, waiter)

    def _stop_dialling(self, index: int) -> None:
        task = self._dials.pop(index, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def _arrived(self, index: int, channel: Channel | None, message: dict[str, Any]) -> None:
        """One message of a node. Malformed ones raise, which ends the link."""
        if channel is None or self._links.get(index) is not channel:
            return
        now, leader, kind = self._clock(), self._leader, message["type"]
        leader.seen(now, index)
        if kind == "beat":
            ranks = [protocol.RankProgress.from_json(r) for r in message["ranks"]]
            leader.beat(now, int(message["epoch"]), int(message["generation"]), ranks)
        elif kind == "report":
            leader.report(now, index, protocol.Report.from_json(message))
        elif kind == "hello":
            leader.hello(now, protocol.Hello.from_json(message))
        elif kind == "leaving":
            say(f"node {index} was told to stop")
            leader.leaving(now, index)
        elif kind == "output":
            if self._processes is not None and self._daemons.get(message["daemon"], (-1,))[0] == index:
                data = base64.b64decode(message["data"])
                self._processes.daemon_output(message["daemon"], str(message["stream"]), data)
            return
        elif kind == "exit":
            where, waiter = self._daemons.get(message["daemon"], (-1, None))
            if where == index and waiter is not None:
                self._daemon_exited(message["daemon"], int(message["exitCode"]), waiter)
            return
        self._pump()

    # ---- MPI daemons on other nodes

    async def spawn_on(self, index: int, daemon: str, argv: list[str], env: dict[str, str]) -> int:
        """Runs a launcher's daemon on node `index` until it exits; 255, as ssh says, when the node is out of reach."""
        channel = self._links.get(index)
        if channel is None:
            return 255
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._daemons[daemon] = (index, waiter)
        channel.send({"type": "spawn", "daemon": daemon, "argv": argv, "env": env})
        try:
            return await waiter
        finally:
            if self._daemons.pop(daemon, None) is not None:  # cancelled: the daemon still runs
                channel.send({"type": "kill", "daemon": daemon})

    def _daemon_exited(self, daemon: str, code: int, waiter: asyncio.Future[int]) -> None:
        del self._daemons[daemon]
        if not waiter.done():
            waiter.set_result(code)

    # ---- time

    async def _heartbeats(self) -> None:
        while True:
            self._broadcast(self._links, {"type": "ping", "age": self._lease.age(self._clock())})
            await asyncio.sleep(self._config.heartbeat)

    async def _renew_lease(self) -> None:
        """The second way to keep the lease, and what happens when neither works."""
        server = api_server(os.environ)
        while True:
            await asyncio.sleep(min(1.0, self._config.fence_timeout / 8))
            now = self._clock()
            if server is not None and self._lease.wants_probe(now) and await answers_tls(*server):
                self._lease.renew(now)  # the time of asking: the answer may have been long on its way
            if self._config.fencing != "strict":
                continue
            # A little before the nodes stop their ranks by themselves: seen from here, that would look like failures.
            if self._lease.age(self._clock()) >= 0.9 * self._lease.timeout:
                self._leader.hold(self._clock(), "the leader's lease was not renewed")
            else:
                self._leader.release(self._clock())
            self._pump()

    def failure(self) -> protocol.LedgerEntry | None:
        """The failure that the outcome names."""
        outcome = self._leader.outcome
        if outcome is None or outcome.failure is None:
            return None
        return next((e for e in self._leader.budget.ledger if e.id == outcome.failure), None)

    async def linger(self) -> None:
        """After the end: until every agent was told, and the operator too if it was there lately."""
        links = [link for link in self._links.values() if isinstance(link, Link)]
        if links:
            await asyncio.wait([asyncio.ensure_future(link.flushed()) for link in links], timeout=LINGER_SECONDS)
        polled = self._polled_at
        if self._leader.outcome is not None and polled is not None and self._clock() - polled < 2 * MAX_WAIT:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._told.wait(), LINGER_SECONDS)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        for link in self._links.values():
            link.close()

    def _keep(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._node.crash(error)


def free_port() -> int:
    """A port for MASTER_PORT, below the range from which the kernel takes those of outgoing connections."""
    for _ in range(100):
        port = random.randrange(20000, 32000)  # noqa: S311 - no secret
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no free port between 20000 and 32000")


def _number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise HttpError(400, f"{name} must be a number of seconds")
    return value
