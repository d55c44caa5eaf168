"""The leader's links to the nodes: dials them until they answer, reads what they say, and drops who is gone."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Coroutine, Iterable
from typing import Any, Callable, Protocol

from everstep.agent.config import AgentConfig
from everstep.agent.system.host_names import is_name
from everstep.agent.wire import protocol
from everstep.agent.wire.http_client import RequestRejected, encode_message
from everstep.agent.wire.link import AgentLink, Channel, LinkClosed, dial_agent

DIALS_AT_ONCE = 128
HELLO_SECONDS = 5.0
REDIAL_SECONDS = (0.1, 2.0)
# Most, if the address is a name. Each try is up to a dozen questions to the cluster's name servers, of each node that
# lacks, and a pod may wait for a machine for hours: whoever starts meanwhile announces itself.
REDIAL_NAME_SECONDS = 30.0


class LinkListener(Protocol):
    """A receiver of what happens on the links; see leader_server.LeaderServer."""

    def joined(self, hello: protocol.Hello) -> None: ...
    def arrived(self, index: int, message: dict[str, Any]) -> None: ...
    def lost(self, index: int, why: str) -> None: ...
    def superseded(self, index: int, epoch: int) -> None: ...
    def keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...


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


class Links:
    def __init__(self, config: AgentConfig, token: bytes, listener: LinkListener) -> None:
        self._config = config
        self._token = token
        self._listener = listener
        self._channels: dict[int, Channel] = {}
        self._incarnations: dict[int, str] = {}  # of the newest agent at each index
        self._dials: dict[int, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(DIALS_AT_ONCE)
        self._process, self._numbers = os.urandom(8).hex(), itertools.count(1)  # an agent tells dials apart by them

    def get(self, index: int) -> Channel | None:
        return self._channels.get(index)

    def own(self, channel: Channel) -> None:
        """Set the link to the leader's own node, which needs no dialling."""
        self._channels[0] = channel

    def send(self, indexes: Iterable[int], message: dict[str, Any]) -> None:
        """Send a message to those of the nodes that are there."""
        payload: bytes | None = None  # encoded once: a layout of a thousand nodes is 20 KB, a thousand times
        for index in list(indexes):
            channel = self._channels.get(index)
            if isinstance(channel, AgentLink):
                payload = payload or encode_message(message)
                channel.send_payload(payload)
            elif channel is not None:
                channel.send(message)

    def send_all(self, message: dict[str, Any]) -> None:
        self.send(self._channels, message)

    def dial(self, index: int, address: str) -> None:
        """Dial until a link stands, instead of any other address. An empty address: no more dialling."""
        task = self._dials.pop(index, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        if address:
            self._dials[index] = self._listener.keep(self._dial(index, address, next(self._numbers)))

    def fence(self, index: int) -> None:
        """Tell a node that is about to be dropped that its ranks are out of the job: nobody may ever dial it again."""
        self.send((index,), {"type": "fence"})

    def drop(self, index: int) -> None:
        channel = self._channels.pop(index, None)
        if channel is not None:
            channel.close()

    async def flushed(self, seconds: float) -> None:
        """Wait until all that was sent has left, at most so many seconds."""
        links = [channel for channel in self._channels.values() if isinstance(channel, AgentLink)]
        if links:
            await asyncio.wait([self._listener.keep(link.flushed()) for link in links], timeout=seconds)

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    async def _dial(self, index: int, address: str, number: int) -> None:
        pause, most = REDIAL_SECONDS
        if is_name(address):
            most = REDIAL_NAME_SECONDS
        while (link := await self._try(index, address, number)) is None:
            if self._dials.get(index) is not asyncio.current_task():
                return  # called off
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))  # noqa: S311 - spreads load, hides nothing
            pause = min(2 * pause, most)
        if self._dials.get(index) is not asyncio.current_task():
            # Told to stop at the moment of success: wait_for of Python < 3.12 then swallows the cancellation, and two
            # links to one agent would look like an agent that was replaced.
            link[0].close()
            return
        del self._dials[index]
        await self._read(index, *link)

    async def _try(self, index: int, address: str, number: int) -> tuple[AgentLink, protocol.Hello] | None:
        """Return a link and the hello on it, or None when it has to be tried again."""
        config = self._config
        async with self._slots:
            try:
                order = {"leader": self._process, "dial": number}
                link = await dial_agent(
                    address, self._token, epoch=config.epoch, index=index, uid=config.job_uid, order=order
                )
            except RequestRejected as error:
                if error.epoch is not None and error.epoch > config.epoch:
                    self._listener.superseded(index, error.epoch)
                return None
            except (OSError, asyncio.TimeoutError, ValueError, asyncio.IncompleteReadError):
                return None
            try:
                message = await asyncio.wait_for(link.receive(), HELLO_SECONDS)
                hello = protocol.Hello.from_json(message)
                possible = hello.epoch <= config.epoch and hello.generation <= protocol.MAX_KNOWN_GENERATION
                fits = message["type"] == "hello" and hello.index == index and protocol.is_address(hello.address)
                if fits and possible:
                    return link, hello
            except (LinkClosed, ValueError, RecursionError, asyncio.TimeoutError):
                pass
            except asyncio.CancelledError:
                link.close()
                raise
            link.close()
            return None

    async def _read(self, index: int, link: AgentLink, hello: protocol.Hello) -> None:
        if self._incarnations.get(index) != hello.incarnation:  # else it has closed its former link itself
            self.fence(index)
        self.drop(index)
        self._channels[index], self._incarnations[index] = link, hello.incarnation
        self._listener.joined(hello)
        try:
            while True:
                message = await link.receive()
                if self._channels.get(index) is link:
                    self._listener.arrived(index, message)
        except LinkClosed as error:
            why = str(error)
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            why = f"its agent sent what nobody understands: {error}"
        finally:
            link.close()
        if self._channels.get(index) is link:
            self.drop(index)
            self._listener.lost(index, why)
