"""Strangers get nothing, garbage ends nothing, and nothing that was heard on the wire can be said again."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everstep.agent.ranks.events import RankExited, RankProgressed
from everstep.agent.wire import auth, http_server
from everstep.agent.wire.http_client import RequestRejected
from everstep.agent.wire.link import AgentLink, LinkClosed, dial_agent
from everstep.cli.leader_client import LeaderClient

from .fakes import TOKEN, Agent, gang, until

ENDPOINTS = [
    ("GET", "/v1/state", b""),
    ("POST", "/v1/peers", b'{"epoch": 1, "addresses": {}}'),
    ("POST", "/v1/announce", b'{"epoch": 1, "index": 1, "uid": "u", "address": "10.0.0.1:1"}'),
    ("POST", "/v1/stop", b'{"reason": "evil"}'),
    ("POST", "/v1/checkpoint", b'{"epoch": 1, "id": "n1", "deadline": 60}'),
    ("POST", "/v1/link", b'{"epoch": 9, "index": 0, "uid": "job-uid"}'),
    ("GET", "/v1/nothing", b""),
]


@pytest.fixture
async def agents(tmp_path: Path) -> AsyncIterator[list[Agent]]:
    async with gang(tmp_path, 2) as agents:
        yield agents


class Wire:
    """A connection on which anything can be said."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, agent: Agent) -> Wire:
        host, _, port = agent.address.rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def say(self, data: bytes) -> int:
        """Returns the status of the answer; 0 if the connection is closed without one."""
        self.writer.write(data)
        try:
            head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 5)
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0
        self.head = head.decode()
        length = next((int(x.split(":")[1]) for x in self.head.split("\r\n") if x.startswith("Content-Length")), 0)
        self.body = await self.reader.readexactly(length)
        return int(self.head.split(" ")[1])

    async def nonce(self) -> str:
        assert await self.say(b"GET /v1/challenge HTTP/1.1\r\n\r\n") == 200
        return str(json.loads(self.body)["nonce"])


def request(method: str, target: str, body: bytes, headers: dict[str, str]) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def signed(method: str, target: str, body: bytes, nonce: str, token: bytes = TOKEN) -> bytes:
    return request(method, target, body, auth.request_headers(token, method, target, nonce, auth.new_nonce(), body))


@pytest.mark.parametrize(("method", "target", "body"), ENDPOINTS)
async def test_no_token_no_answer(agents: list[Agent], method: str, target: str, body: bytes) -> None:
    for agent in agents:
        wire = await Wire.to(agent)
        assert await wire.say(request(method, target, body, {})) == 401
        wire = await Wire.to(agent)
        assert await wire.say(signed(method, target, body, await wire.nonce(), b"wrong" * 8)) == 401
        assert auth.MAC_HEADER not in wire.head
        assert wire.body == b""
    assert agents[0].leader is not None
    assert agents[0].leader.phase != "ended"
    assert agents[1].node.epoch == 1


async def test_a_request_cannot_be_sent_twice(agents: list[Agent]) -> None:
    wire = await Wire.to(agents[0])
    data = signed("GET", "/v1/state", b"", await wire.nonce())
    assert await wire.say(data) == 200
    assert await wire.say(data) == 401


async def test_a_nonce_of_ones_own_making_is_refused(agents: list[Agent]) -> None:
    wire = await Wire.to(agents[0])
    assert await wire.say(signed("GET", "/v1/state", b"", auth.new_nonce())) == 401


async def test_the_next_nonce_saves_a_challenge(agents: list[Agent]) -> None:
    wire = await Wire.to(agents[0])
    assert await wire.say(signed("GET", "/v1/state", b"", await wire.nonce())) == 200
    nonce = next(x.split(": ")[1] for x in wire.head.split("\r\n") if x.startswith(auth.NEXT_NONCE_HEADER))
    assert await wire.say(signed("GET", "/v1/state", b"", nonce)) == 200


async def test_strangers_cannot_crowd_out_a_known_callers_nonce(agents: list[Agent]) -> None:
    wire = await Wire.to(agents[0])
    assert await wire.say(signed("GET", "/v1/state", b"", await wire.nonce())) == 200
    nonce = next(x.split(": ")[1] for x in wire.head.split("\r\n") if x.startswith(auth.NEXT_NONCE_HEADER))
    for number in range(auth.MAX_NONCES + 1):
        if number % http_server.MAX_CHALLENGES == 0:
            stranger = await Wire.to(agents[0])
        await stranger.nonce()
    assert await wire.say(signed("GET", "/v1/state", b"", nonce)) == 200


@pytest.mark.parametrize(
    ("method", "target", "body", "status"),
    [
        ("GET", "/v1/nothing", b"", 404),
        ("POST", "/v1/state", b"{}", 405),
        ("POST", "/v1/stop", b"[1]", 400),
        ("POST", "/v1/stop", b"\xff", 400),
        ("POST", "/v1/stop", b"[" * 100_000, 400),
        ("POST", "/v1/peers", b'{"epoch": 2, "addresses": {}}', 409),
        ("POST", "/v1/peers", b'{"epoch": 1, "addresses": {"7": "10.0.0.1:1"}}', 400),
        ("POST", "/v1/peers", b'{"epoch": 1, "addresses": {"1": "nowhere"}}', 400),
        ("POST", "/v1/announce", b'{"epoch": 2, "index": 1, "uid": "u", "address": "10.0.0.1:1"}', 409),
        ("POST", "/v1/announce", b'{"epoch": 1, "index": 0, "uid": "u", "address": "10.0.0.1:1"}', 400),
        ("POST", "/v1/announce", b'{"epoch": 1, "index": 2, "uid": "u", "address": "10.0.0.1:1"}', 400),
        ("POST", "/v1/announce", b'{"epoch": 1, "index": true, "uid": "u", "address": "10.0.0.1:1"}', 400),
        ("POST", "/v1/announce", b'{"epoch": 1, "index": 1, "uid": "", "address": "10.0.0.1:1"}', 400),
        ("POST", "/v1/announce", b'{"epoch": 1, "index": 1, "uid": "u", "address": "nowhere"}', 400),
        ("GET", "/v1/state?wait=nan", b"", 400),
        ("GET", "/v1/state?charged=x&allowance=1", b"", 400),
        ("GET", "/v1/state?allowance=-1", b"", 400),
    ],
)
async def test_mistakes_of_a_known_caller_are_named_and_keep_the_connection(
    agents: list[Agent], method: str, target: str, body: bytes, status: int
) -> None:
    wire = await Wire.to(agents[0])
    assert await wire.say(signed(method, target, body, await wire.nonce())) == status
    assert json.loads(wire.body)["error"]
    assert auth.MAC_HEADER in wire.head
    assert await wire.say(signed("GET", "/v1/state", b"", await wire.nonce())) == 200


@pytest.mark.parametrize(
    ("garbage", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"GET / HTTP/2\r\n\r\n", 400),
        (b"GET /v1/state HTTP/1.1\r\nA: 1\r\na: 2\r\n\r\n", 400),
        (b"GET /v1/state HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET /v1/state HTTP/1.1\r\nContent-Length: \xb2\r\n\r\n", 400),
        (b"POST /v1/stop HTTP/1.1\r\nContent-Length: 1048577\r\n\r\n", 413),
        (b"POST /v1/stop HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 501),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET /v1/state HTTP/1.1\r\nX-Everstep-Nonce: \xe9\r\n\r\n", 401),
    ],
)
async def test_garbage_ends_its_own_connection_only(agents: list[Agent], garbage: bytes, status: int) -> None:
    wire = await Wire.to(agents[0])
    assert await wire.say(garbage) == status
    assert await wire.reader.read() == b""
    fresh = await Wire.to(agents[0])
    assert await fresh.say(signed("GET", "/v1/state", b"", await fresh.nonce())) == 200


async def test_who_sends_slowly_is_cut_off(agents: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SEND_SECONDS", 0.05)
    wire = await Wire.to(agents[0])
    assert await wire.say(b"GET /v1/chall") == 408
    wire = await Wire.to(agents[0])
    assert await wire.say(signed("POST", "/v1/stop", b"abcde", await wire.nonce())[:-3]) == 408


async def test_what_a_stranger_may_send_is_little_and_needs_a_challenge(agents: list[Agent]) -> None:
    """The MAC covers the body, so that the body has to be read first: that must not be a way to fill the memory."""
    post, made_up = (
        "POST /v1/peers HTTP/1.1\r\n",
        auth.request_headers(b"wrong" * 8, "POST", "/", "0" * 32, "0" * 32, b""),
    )
    head = post + "".join(f"{name}: {value}\r\n" for name, value in made_up.items())

    async def says(text: str) -> int:
        return await (await Wire.to(agents[0])).say(text.encode())

    assert await says(f"{post}Content-Length: 5000\r\n\r\n") == 401, "not one byte of the body is waited for"
    assert await says(f"{head}Content-Length: {http_server.MAX_FIRST_BODY + 1}\r\n\r\n") == 413
    assert await says("GET /v1/challenge HTTP/1.1\r\nContent-Length: 1\r\n\r\n") == 413
    slow = [await Wire.to(agents[0]) for _ in range(12)]
    for wire in slow:
        wire.writer.write(f"{head}Content-Length: {http_server.MAX_FIRST_BODY}\r\n\r\n".encode() + b"x" * 1000)
    for wire in slow[: len(slow) - http_server.MAX_FIRST_BODIES // http_server.MAX_FIRST_BODY]:
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(wire.reader.read(), 5) == b"", "dropped long before its time is up"
    known, table = await Wire.to(agents[0]), b'{"epoch": 1, "addresses": {}}' + b" " * 200_000
    assert await known.say(signed("POST", "/v1/peers", table, await known.nonce())) == 200
    assert await known.say(signed("POST", "/v1/peers", table * 4, await known.nonce())) == 400, "JSON of four values"


async def test_idle_strangers_make_room(agents: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 8)
    known = await Wire.to(agents[0])
    assert await known.say(signed("GET", "/v1/state", b"", await known.nonce())) == 200
    strangers = [await Wire.to(agents[0]) for _ in range(20)]
    assert await known.say(signed("GET", "/v1/state", b"", await known.nonce())) == 200
    assert await asyncio.wait_for(strangers[0].reader.read(), 5) == b""


# ---- the link


async def to_the_end(link: AgentLink) -> None:
    while True:
        await link.receive()


async def test_a_link_needs_the_token(agents: list[Agent]) -> None:
    with pytest.raises(RequestRejected, match="401"):
        await dial_agent(agents[1].address, b"wrong" * 8, epoch=9, index=1, uid="job-uid")
    assert agents[1].node.epoch == 1


@pytest.mark.parametrize(("index", "uid"), [(0, "job-uid"), (1, "another")])
async def test_a_link_for_somebody_else_is_refused(agents: list[Agent], index: int, uid: str) -> None:
    with pytest.raises(RequestRejected, match="409"):
        await dial_agent(agents[1].address, TOKEN, epoch=9, index=index, uid=uid)


async def test_a_leader_of_a_lower_epoch_is_refused_and_told_why(agents: list[Agent]) -> None:
    newer = await dial_agent(agents[1].address, TOKEN, epoch=5, index=1, uid="job-uid")
    with pytest.raises(RequestRejected) as refused:
        await dial_agent(agents[1].address, TOKEN, epoch=4, index=1, uid="job-uid")
    assert refused.value.epoch == 5
    newer.close()


async def test_a_forged_frame_ends_the_link(agents: list[Agent]) -> None:
    link = await dial_agent(agents[1].address, TOKEN, epoch=5, index=1, uid="job-uid")
    assert (await link.receive())["type"] == "hello"
    link._writer.write(b"0" * 32 + b' {"type":"end","result":"failed","exitCode":1,"message":""}\n')
    with pytest.raises(LinkClosed):
        await to_the_end(link)
    assert not agents[1].node.ended.done()


async def test_a_repeated_frame_ends_the_link(agents: list[Agent]) -> None:
    link = await dial_agent(agents[1].address, TOKEN, epoch=5, index=1, uid="job-uid")
    link.send({"type": "ping", "age": 0})
    link._sent -= 1
    link.send({"type": "ping", "age": 0})
    with pytest.raises(LinkClosed):
        await to_the_end(link)


async def test_a_peer_that_does_not_read_is_dropped_and_blocks_nobody() -> None:
    accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        accepted.set_result(writer)

    server = await asyncio.start_server(deaf, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    link = AgentLink(reader, writer, b"key", auth.TO_AGENT)
    for _ in range(100):
        link.send({"type": "padding", "text": "x" * 500_000})
    with pytest.raises(LinkClosed, match="does not read"):
        await link.receive()
    (await accepted).close()
    server.close()


async def test_a_frame_that_is_too_large_is_not_sent(agents: list[Agent]) -> None:
    link = await dial_agent(agents[1].address, TOKEN, epoch=5, index=1, uid="job-uid")
    link.send({"type": "padding", "text": "x" * 2_000_000})
    with pytest.raises(LinkClosed, match="too large"):
        await to_the_end(link)


@pytest.mark.parametrize("letter", ["x", "\U0001f600", "\x1b"], ids=["ASCII", "emoji", "control"])
async def test_no_number_of_ranks_that_fail_with_long_last_words_breaks_a_link(
    agents: list[Agent], letter: str
) -> None:
    """Two hundred on one node, in letters of which each is four bytes, or six as JSON escapes them."""
    leader, node = agents[0].leader, agents[1].node
    assert leader is not None
    await until(lambda: leader.phase == "running")
    for rank in range(200):
        message, tail = f"rank {rank}: {letter * 2000}", (letter * 400,) * 20
        node.emit(RankExited(leader.generation, rank, rank, 1, None, False, message, tail))
    await until(lambda: leader.state()["generationHistory"])
    (entry,) = leader.state()["generationHistory"]
    assert (entry["cause"], entry["index"], entry["rank"]) == ("Application", 1, 0)
    assert entry["message"].startswith(f"rank 0: {letter * 1000}")
    assert entry["logTail"] == [letter * 400] * 20


async def test_no_number_of_ranks_with_long_metrics_breaks_a_link(agents: list[Agent]) -> None:
    leader, node = agents[0].leader, agents[1].node
    assert leader is not None
    await until(lambda: leader.phase == "running")
    metrics = {f"{i:02}{chr(0x1F600) * 62}": 1 / 3 for i in range(32)}
    for rank in range(200):
        node.emit(RankProgressed(leader.generation, rank, 7 + rank, 1000, "train", metrics))
    await until(lambda: (leader.state()["progress"] or {}).get("step") == 206 or leader.phase != "running")
    assert leader.phase == "running"


async def test_a_failure_whose_last_words_are_not_sent_is_still_known_for_an_echo(agents: list[Agent]) -> None:
    """Sixteen ranks of a node abort because a peer has failed, as their last lines say: eight of them are sent. One of
    the others is not taken for the cause while the peer's own report is on its way."""
    leader, node = agents[0].leader, agents[1].node
    assert leader is not None
    await until(lambda: leader.phase == "running")
    lines = ("NCCL error: connection closed by peer",)
    for rank in range(16):
        node.emit(RankExited(leader.generation, rank, rank, 134, 6, False, "killed by SIGABRT", lines))
    await until(lambda: leader.phase == "stopping")
    agents[0].node.emit(RankExited(leader.generation, 99, 0, 1, None, False, "ValueError: boom", ()))
    await until(lambda: leader.state()["generationHistory"])
    (entry,) = leader.state()["generationHistory"]
    assert (entry["rank"], entry["message"]) == (99, "ValueError: boom")


# ---- the client


async def test_the_client_polls_pushes_and_stops(agents: list[Agent]) -> None:
    leader = agents[0].leader
    assert leader is not None
    await until(lambda: leader.phase == "running")

    def talk() -> None:
        client = LeaderClient(agents[0].address, TOKEN)
        state = client.state()
        after = f"{state['incarnation']}:{state['version']}"
        assert state["phase"] == "running"
        client.peers(1, {0: agents[0].address, 1: agents[1].address})
        with pytest.raises(RequestRejected, match="409"):
            client.peers(2, {})
        client.stop("enough")
        assert client.state(after, wait=5)["version"] > state["version"]

    await asyncio.to_thread(talk)
    await until(lambda: leader.phase == "ended")
    assert agents[1].node.ended.result().result == "stopped"


@pytest.mark.parametrize(
    ("said", "error", "match"),
    [
        (b"", ConnectionError, "before the answer was complete"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\n{", ConnectionError, "before the answer was complete"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999\r\n\r\n", RequestRejected, "bytes, more than"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", RequestRejected, "bytes, more than"),
        (b"no words of HTTP\r\n\r\n", RequestRejected, "not HTTP"),
    ],
    ids=["nothing", "half", "too much", "less than nothing", "no HTTP"],
)
async def test_what_is_no_answer_is_an_error_that_says_so(said: bytes, error: type[Exception], match: str) -> None:
    """Somebody else may listen at a leader's address: a hang-up is no rejection, and no answer fills our memory."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    client = LeaderClient("{}:{}".format(*server.sockets[0].getsockname()[:2]), TOKEN)
    with pytest.raises(error, match=match):
        await asyncio.to_thread(client.state)
    server.close()


async def test_the_client_trusts_nobody_without_the_token(agents: list[Agent]) -> None:
    with pytest.raises(RequestRejected, match="401"):
        await asyncio.to_thread(LeaderClient(agents[0].address, b"wrong" * 8).state)

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for body in (json.dumps({"nonce": auth.new_nonce()}).encode(), b'{"phase": "ended"}'):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        writer.close()

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    address = "{}:{}".format(*server.sockets[0].getsockname()[:2])
    with pytest.raises(RequestRejected, match="not authentic"):
        await asyncio.to_thread(LeaderClient(address, TOKEN).state)
    server.close()


async def test_a_long_poll_answers_when_something_changes(agents: list[Agent]) -> None:
    leader = agents[0].leader
    assert leader is not None
    await until(lambda: leader.phase == "running")

    def poll() -> str:
        client = LeaderClient(agents[0].address, TOKEN)
        state = client.state()
        return str(client.state(f"{state['incarnation']}:{state['version']}", wait=20)["phase"])

    waiting = asyncio.ensure_future(asyncio.to_thread(poll))
    await until(lambda: agents[0].leading and agents[0].leading._changed._waiters)
    agents[1].processes.exit(1, "ValueError: no")
    assert await asyncio.wait_for(waiting, 5) != ""


def test_log_tails_in_any_script_are_sent_as_they_are_and_what_is_no_text_ends_no_answer() -> None:
    said = "\U0001f600" * 1000
    body = http_server.HttpResponse.of({"tail": said}).body
    assert len(body) == len(said.encode()) + len('{"tail":""}')
    assert json.loads(body) == {"tail": said}
    assert json.loads(http_server.HttpResponse.of({"tail": "a\udcffb"}).body) == {"tail": "a?b"}
