"""A node without a leader loses the right to publish, or to run; a lease is as old as its renewal."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest

from everstep.agent.node.fencing import LeaderLease, StallDetector, answers_tls, make_client_hello
from everstep.agent.wire.generation_layout import GenerationLayout

from .fakes import Agent, fence, gang, introduce, leader_of, local, until


async def test_the_token_is_on_disk_before_ranks_start(tmp_path: Path) -> None:
    async with gang(tmp_path, 1) as agents:
        seen = []
        start = agents[0].processes.start

        async def look(layout: object) -> None:
            seen.append(fence(agents[0]))
            await start(layout)  # type: ignore[arg-type]

        agents[0].processes.start = look  # type: ignore[method-assign]
        await until(lambda: leader_of(agents).phase == "running")
        assert seen == [{"epoch": 1, "generation": 1, "fenced": False}]


async def test_without_a_lease_checkpoints_are_fenced_and_ranks_go_on(tmp_path: Path) -> None:
    async with gang(tmp_path, 2, fence_timeout=0.3) as agents:
        await until(lambda: all(a.fence.exists() and fence(a)["fenced"] for a in agents))
        assert all(a.processes.running for a in agents)
        leading = agents[0].leading
        assert leading is not None
        leading._lease.timeout = agents[0].node._lease.timeout = agents[1].node._lease.timeout = 30
        leading._lease.renew(asyncio.get_running_loop().time())
        await until(lambda: not any(fence(a)["fenced"] for a in agents))


async def test_strict_fencing_stops_the_ranks_of_a_node_without_a_leader(tmp_path: Path) -> None:
    async with gang(tmp_path, 2, fence_timeout=2.0, fencing="strict") as agents:
        await until(lambda: leader_of(agents).phase == "running")
        await agents[0].vanish()
        await until(lambda: not agents[1].processes.running)
        assert fence(agents[1])["fenced"]


@pytest.mark.parametrize("fencing", ["checkpoint", "strict"])
async def test_ranks_that_start_after_a_long_wait_for_a_leader_may_publish(tmp_path: Path, fencing: str) -> None:
    """A lease ends while pod 0 is awaited, and its leader starts ranks in the moment in which it has all nodes."""
    options: dict[str, Any] = {"fence_timeout": 60.0, "fencing": fencing}
    waiting, leading = Agent(tmp_path, local(2, 1, **options)), Agent(tmp_path, local(2, **options))
    await waiting.listen()
    waiting.node._lease.renewed -= 3600.0  # so long ago was its own start
    await leading.listen()
    introduce(leading, [leading, waiting])
    start, seen = waiting.processes.start, []

    async def look(layout: GenerationLayout) -> None:
        seen.append(fence(waiting))
        await start(layout)

    waiting.processes.start = look  # type: ignore[method-assign]
    await until(lambda: leader_of([leading]).phase == "running")
    assert seen == [{"epoch": 1, "generation": 1, "fenced": False}]
    for agent in (leading, waiting):
        await agent.vanish()


async def test_strict_fencing_stops_ranks_that_start_without_a_lease(tmp_path: Path) -> None:
    """They would run for ever beside those of a newer leader, whose side of a partition has given them up."""
    async with gang(tmp_path, 2, fence_timeout=60.0, fencing="strict") as agents:
        leader, node = leader_of(agents), agents[1].node
        await until(lambda: leader.phase == "running")
        node._housekeeper.cancel()  # it would find that the lease has ended before the next generation starts
        agents[0].processes.exit(1)
        node._lease.renew = lambda *args: None  # type: ignore[method-assign]
        node._lease.renewed -= 3600.0
        await until(lambda: agents[1].processes.generations[-1] == (1, 2), "the next generation")
        node._look_at_lease()
        await until(
            lambda: [e["cause"] for e in leader.state()["generationHistory"]][1:2] == ["Fenced"],
            "the next one has ended",
        )
        assert fence(agents[1])["fenced"]


async def test_strict_fencing_stops_a_leader_without_a_lease(tmp_path: Path) -> None:
    async with gang(tmp_path, 2, fence_timeout=2.0, fencing="strict") as agents:
        leader = leader_of(agents)
        await until(lambda: leader.state()["generationHistory"], "an interruption")
        assert leader.state()["generationHistory"][0]["cause"] == "Fenced"
        assert not any(a.processes.running for a in agents)


async def test_a_leader_that_was_starved_past_its_lease_starts_nothing_before_it_has_looked(tmp_path: Path) -> None:
    async with gang(tmp_path, 2, fence_timeout=60.0, fencing="strict") as agents:
        leader, leading = leader_of(agents), agents[0].leading
        assert leading is not None
        await until(lambda: leader.phase == "running")
        leading._lease.timeout = 0.0
        agents[1].processes.exit(1, "ValueError: no")
        await until(lambda: leader.state()["generationHistory"] and leader.phase == "forming")
        assert leader.held
        assert [a.processes.generations for a in agents] == [[(1, 1)]] * 2


@pytest.mark.parametrize("asleep", [0, 1])
async def test_a_machine_that_was_suspended_past_the_lease_stops_its_ranks(tmp_path: Path, asleep: int) -> None:
    """It wakes with an hour-old lease, and with words of the leader in its sockets that were sent before."""
    async with gang(tmp_path, 2, fence_timeout=60.0, fencing="strict") as agents:
        leader = leader_of(agents)
        await until(lambda: leader.phase == "running")
        agents[asleep].suspended = 3600.0
        agents[1].node.handle({"type": "ping", "age": 1.0})
        await until(lambda: leader.state()["generationHistory"], "an interruption")
        assert leader.state()["generationHistory"][0]["cause"] in ("Fenced", "PodLost")
        assert agents[asleep].processes.generations[0] == (1, 1)


def test_what_is_read_right_after_a_suspension_is_as_much_older() -> None:
    now, asleep = 100.0, 0.0
    suspensions = StallDetector(lambda: now, lambda: now + asleep, 1.0)
    assert suspensions.age() == 0.0
    asleep = 3600.0
    assert suspensions.age() == 3600.0
    now += 0.9
    assert suspensions.age() == 3600.0, "there may have been two"
    now += 0.2
    assert suspensions.age() == 0.0
    asleep = 3610.0
    assert suspensions.age() == 10.0


async def test_an_answer_of_the_api_server_keeps_a_lease_that_no_operator_renews(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one, strict fencing stops the ranks: see the test above."""
    asked: list[float] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(make_client_hello()))
        asked.append(asyncio.get_running_loop().time())
        writer.write(b"\x15\x03\x01\x00\x02\x02\x28")  # an alert: it does not like the greeting
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
    begun = asyncio.get_running_loop().time()
    async with gang(tmp_path, 2, fence_timeout=4.0, fencing="strict") as agents:
        leader = leader_of(agents)
        await until(lambda: leader.phase == "running")
        await until(lambda: asked and asked[-1] - begun > 4.0, "it is asked for longer than the lease lasts")
        assert (leader.phase, leader.generation, leader.held) == ("running", 1, "")
        assert not any(fence(a)["fenced"] for a in agents)
    server.close()


def test_a_lease_is_as_old_as_the_renewal_of_who_renews_it() -> None:
    lease = LeaderLease(40.0, 0.0)
    lease.renew(100.0, age=30.0)
    assert not lease.expired(109.0)
    assert lease.expired(110.0)
    lease.renew(105.0, age=90.0)  # an older word does not take a newer one back
    assert lease.age(109.0) == 39.0


async def test_any_tls_answer_counts_and_nothing_else() -> None:
    answers = [b"\x15\x03\x01\x00\x02\x02\x28", b"HTTP/1.1 400 Bad Request\r\n\r\n", b""]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(len(make_client_hello())) != b""
        writer.write(answers.pop(0))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    assert [await answers_tls(host, port) for _ in range(3)] == [True, False, False]
    server.close()
    assert not await answers_tls(host, port)


@pytest.mark.parametrize(("host", "port"), [("api..example", 443), ("127.0.0.1", 99999), ("\u2024" * 70, 443)])
async def test_an_api_server_whose_address_is_none_gives_no_answer(host: str, port: int) -> None:
    """It comes from the pod's environment, which a job's template may change; a leader lives without it."""
    assert not await answers_tls(host, port)


def test_the_greeting_is_one_that_a_tls_server_understands() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    incoming.write(make_client_hello())
    server = context.wrap_bio(incoming, outgoing, server_side=True)
    with pytest.raises(ssl.SSLError, match=r"NO_SHARED_CIPHER|NO_SUITABLE"):  # it has no certificate
        server.do_handshake()
    assert outgoing.read()[0] == 0x15
