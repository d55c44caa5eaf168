"""A connection to a leader costs the operator no more than its bytes, and no answer is lost with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from e2e.cluster.ports import free_ports
from everstep.agent.wire.http_client import RequestRejected
from everstep_operator.cluster import leader_poller
from everstep_operator.cluster.leader_connection import AnswerRoom, LeaderConnection
from everstep_operator.cluster.leader_poller import LeaderPoller
from everstep_operator.plan.actions import LeaderPoll
from tests.integration.world import FakeLeader, until
from tests.operator.odd_leaders import serve_endless_leader

KEY = ("ns", "digits")
TOKEN = bytes(range(32))
Serve = Callable[[asyncio.StreamWriter], Awaitable[None]]
StartServer = Callable[[Serve], Awaitable[str]]


@pytest_asyncio.fixture
async def poller() -> AsyncIterator[LeaderPoller]:
    made = LeaderPoller(lambda *_: None, fence_timeout=6)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def leader() -> AsyncIterator[FakeLeader]:
    made = await FakeLeader(TOKEN, "127.0.0.1", free_ports(1)[0], epoch=1).start()
    yield made
    await made.stop()


def begin_polling(poller: LeaderPoller, port: int) -> None:
    poller.ensure_polled(KEY, LeaderPoll(f"127.0.0.1:{port}", "pod-a", 1, 1, "", 3), TOKEN)


def count_failed_polls() -> float:
    return REGISTRY.get_sample_value("everstep_leader_polls_total", {"result": "failed"}) or 0.0


async def wait_for_generation(poller: LeaderPoller, generation: int) -> None:
    async def news() -> bool:
        view = poller.view(KEY, "pod-a")
        return view is not None and view.generation == generation

    await until(news, f"generation {generation}")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1;e=" + b"e" * 100_000,
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 100_000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}{}",
    ],
    ids=["informational", "extension", "headers", "unasked"],
)
async def test_an_answer_without_end_is_not_read(
    poller: LeaderPoller, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    """Ten leaders that answered so kept the event loop for seconds at a time, at no cost to their namespace."""
    monkeypatch.setattr(leader_poller, "ANSWER_SECONDS", 3600.0)
    server, port = await serve_endless_leader(answer)
    before = count_failed_polls()
    begin_polling(poller, port)

    async def asked() -> bool:
        return count_failed_polls() >= before + 3

    await until(asked, "three rejected answers")
    server.close()


async def test_a_leader_that_has_closed_an_idle_connection_is_asked_on_another(
    poller: LeaderPoller, leader: FakeLeader
) -> None:
    await leader.say(generation=6)
    begin_polling(poller, leader.port)
    await wait_for_generation(poller, 6)
    before = count_failed_polls()
    await leader.stop()
    again = await FakeLeader(TOKEN, leader.address, leader.port, epoch=1).start()
    try:
        await again.say(generation=7)
        await wait_for_generation(poller, 7)
        assert count_failed_polls() - before <= 1
    finally:
        await poller.close()
        await again.stop()


@pytest.mark.parametrize("incarnation", ["a b", "a\r\nX: y", "é&wait=0", "x" * 64])
async def test_whatever_a_leader_calls_itself_it_is_asked_again(
    poller: LeaderPoller, leader: FakeLeader, incarnation: str
) -> None:
    await leader.say(incarnation=incarnation)
    begin_polling(poller, leader.port)

    async def asked_again() -> bool:
        return len(leader.asked("state")) > 1

    await until(asked_again, "the second poll")
    assert all(set(query) == {"after", "wait", "charged", "allowance"} for _, _, query, _ in leader.asked("state"))


@pytest.mark.parametrize("target", ["/v1/state?a b", "/v1/state\r\nX: y", "/é"])
async def test_what_is_no_target_is_not_sent(leader: FakeLeader, target: str) -> None:
    with pytest.raises(RequestRejected, match="not the target"):
        await LeaderConnection(f"127.0.0.1:{leader.port}").exchange("GET", target, {}, b"", max_bytes=10, seconds=60)


@pytest.fixture
def serve() -> Iterator[StartServer]:
    """Starts servers that read a request and then do as they are told; returns their addresses."""
    servers: list[asyncio.Server] = []

    async def start(answer: Serve) -> str:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, EOFError):
                while await reader.readuntil(b"\r\n\r\n"):
                    await answer(writer)
            writer.close()

        servers.append(await asyncio.start_server(handle, "127.0.0.1", 0))
        return f"127.0.0.1:{servers[-1].sockets[0].getsockname()[1]}"

    yield start
    for server in servers:
        server.close()


async def test_an_answer_that_comes_byte_by_byte_is_not_read_to_its_end(serve: StartServer) -> None:
    """Its 200,000 bytes took half a second of the processor, again and again, and were charged as their number."""

    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n")
        for _ in range(200_000):
            writer.write(b"x")
            await asyncio.sleep(0)

    connection = LeaderConnection(await serve(drip))
    with pytest.raises(RequestRejected, match="pieces"):
        await connection.exchange("GET", "/v1/state", {}, b"", max_bytes=900_000, seconds=60)
    assert connection.take_pieces() > 0
    assert connection.take_pieces() == 0


async def test_a_whole_answer_is_read_however_it_is_cut_into_segments(serve: StartServer) -> None:
    body = bytes(range(256)) * 3000

    async def send(writer: asyncio.StreamWriter) -> None:
        data = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        for at in range(0, len(data), 536):
            writer.write(data[at : at + 536])
            await asyncio.sleep(0)

    connection = LeaderConnection(await serve(send))
    for _ in range(2):
        response = await connection.exchange("GET", "/v1/state", {}, b"", max_bytes=900_000, seconds=60)
        assert response.body == body
    connection.close()


async def test_leaders_that_stop_in_long_answers_hold_little_memory_and_no_others_answer(serve: StartServer) -> None:
    stopped = 0

    async def stop(writer: asyncio.StreamWriter) -> None:
        nonlocal stopped
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 900000\r\n\r\n" + b"x" * 899_999)
        stopped += 1

    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 900000\r\n\r\n" + b"y" * 900_000)

    room = AnswerRoom(max_bytes=4_000_000)
    stopping, address = await serve(stop), await serve(send)

    async def ask(where: str) -> bytes:
        connection = LeaderConnection(where, room)
        try:
            return (await connection.exchange("GET", "/", {}, b"", max_bytes=900_000, seconds=3600)).body
        finally:
            connection.close()

    waiting = [asyncio.create_task(ask(stopping)) for _ in range(10)]

    async def have_made_room() -> bool:
        return sum(task.done() for task in waiting) == 6

    await until(have_made_room, "six of ten were given up, since there is room for four")
    assert stopped == 10, "what was given up is not asked for at once again"
    assert await ask(address) == b"y" * 900_000
    assert sum(task.done() for task in waiting) == 7
    for task in waiting:
        task.cancel()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, OSError | asyncio.CancelledError) for result in results)
