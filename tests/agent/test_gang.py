"""Agents together: leaders come and go, nodes obey the newest, and nobody acts on an old word."""

from __future__ import annotations

import asyncio
import errno
import json
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest

from everstep.agent.leader.leader_state import LeaderState
from everstep.agent.leader.node_links import Links
from everstep.agent.node.announce import announce_agent
from everstep.agent.node.fencing import LeaderLease, StallDetector, answers_tls, make_client_hello
from everstep.agent.ranks.events import DaemonExited, DaemonOutput, RankProgressed
from everstep.agent.system.host_names import addresses_of
from everstep.agent.wire.generation_layout import GenerationLayout
from everstep.agent.wire.http_client import REQUEST_TIMEOUT_SECONDS
from everstep.agent.wire.link import AgentLink, Channel, dial_agent
from everstep.agent.wire.protocol import Gpu

from .fakes import TOKEN, Agent, gang, introduce, local, until


def leader_of(agents: list[Agent]) -> LeaderState:
    assert agents[0].leader is not None
    return agents[0].leader


async def test_a_failure_anywhere_is_a_new_generation_everywhere(tmp_path: Path) -> None:
    async with gang(tmp_path, 3) as agents:
        leader = leader_of(agents)
        await until(lambda: leader.phase == "running")
        agents[2].processes.exit(7, "ValueError: no")
        await until(lambda: leader.generation == 2 and leader.phase == "running")
        assert [a.processes.generations for a in agents] == [[(1, 1), (1, 2)]] * 3
        (entry,) = leader.state()["generationHistory"]
        assert (entry["id"], entry["index"], entry["rank"], entry["exitCode"]) == ("1.1", 2, 4, 7)
        assert (entry["message"], entry["logTail"]) == ("ValueError: no", ["last line"])


async def test_all_agents_leave_when_all_ranks_are_done(tmp_path: Path) -> None:
    async with gang(tmp_path, 2) as agents:
        await until(lambda: leader_of(agents).phase == "running")
        for agent in agents:
            agent.processes.exit(0)
        for agent in agents:
            ended = await asyncio.wait_for(agent.node.ended, 5)
            assert (ended.result, ended.exit_code) == ("succeeded", 0)


async def test_an_agent_whose_leader_leaves_first_ends_as_the_job_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gang(tmp_path, 2) as agents:
        leader = leader_of(agents)
        await until(lambda: leader.phase == "running")
        for agent in agents:
            agent.processes.exit()
        ended = await agents[1].node.ended

        async def left(link: AgentLink) -> None:
            link.close()
            await until(lambda: not agents[1].node.linked)

        monkeypatch.setattr(AgentLink, "flushed", left)
        await agents[1].node.finish(ended.result)
        assert ended.result == "succeeded"


async def test_an_agent_that_joins_after_the_end_hears_of_it(tmp_path: Path) -> None:
    """Its leader was told to stop while it dialled: nobody else would tell this agent to leave."""
    async with gang(tmp_path, 2) as agents:
        leader, leading = leader_of(agents), agents[0].leading
        assert leading is not None
        leader.stop(agents[0].node._clock(), "enough")
        leading._pump()
        assert not agents[1].node.linked
        await until(agents[1].node.ended.done, "it has joined")
        assert (await agents[1].node.ended).result == "stopped"


async def test_progress_reaches_the_leader(tmp_path: Path) -> None:
    async with gang(tmp_path, 2) as agents:
        leader = leader_of(agents)
        await until(lambda: leader.phase == "running")
        agents[1].node.emit(RankProgressed(1, 2, 12, 100, "train", {"loss": 0.5, "bad": float("nan")}))
        await until(lambda: leader.state()["progress"])
        progress = leader.state()["progress"]
        assert (progress["step"], progress["totalSteps"], progress["metrics"]) == (12, 100, {"loss": 0.5})


async def test_a_gpu_that_fails_is_told_by_a_beat_and_by_the_next_hello(tmp_path: Path) -> None:
    async with gang(tmp_path, 2) as agents:
        leader = leader_of(agents)
        await until(lambda: leader.phase == "running")
        assert leader.state()["gpus"] is None
        agents[1].node.gpus((Gpu("GPU-1", "H100"), Gpu("GPU-2", "H100", "3 uncorrected memory errors")))
        await until(lambda: leader.state()["gpus"])
        sick = {"index": 1, "uuid": "GPU-2", "name": "H100", "problem": "3 uncorrected memory errors"}
        assert leader.state()["gpus"] == {"models": {"H100": 2}, "unhealthy": 1, "devices": [sick]}
        newer = Agent(tmp_path, local(2, epoch=2))
        await newer.listen()
        introduce(newer, [agents[1]])
        assert newer.leader is not None
        await until(lambda: newer.leader and newer.leader.phase == "running")
        assert newer.leader.state()["gpus"]["devices"] == [sick]
        await newer.vanish()


async def test_an_agent_that_vanishes_ends_the_generation(tmp_path: Path) -> None:
    async with gang(tmp_path, 2) as agents:
        leader = leader_of(agents)
        await until(lambda: leader.phase == "running")
        await agents[1].vanish()
        await until(lambda: leader.phase == "forming")
        assert leader.state()["generationHistory"][0]["cause"] == "PodLost"
        assert leader.state()["missing"] == [1]
        assert not agents[0].processes.running
        successor = Agent(tmp_path, local(2, 1))
        await successor.listen()
        introduce(agents[0], [successor])
        await until(lambda: leader.phase == "running")
        assert successor.processes.generations == [(1, 2)]
        await successor.vanish()


async def test_an_agent_that_was_starved_does_not_take_its_leader_for_lost(tmp_path: Path) -> None:
    """A machine that stands still for a minute, all agents with it: what the leader says next has yet to be read."""
    async with gang(tmp_path, 2) as agents:
        leader, node = leader_of(agents), agents[1].node
        await until(lambda: leader.phase == "running")
        assert agents[0].leading is not None
        agents[0].leading._ping = lambda: None  # type: ignore[method-assign]
        clock, beat, beats = node._clock, node._beat, []

        def counted(channel: Channel) -> None:
            beats.append(channel)
            beat(channel)

        node._beat = counted  # type: ignore[method-assign]
        node._clock = lambda: clock() + 60.0
        await until(lambda: len(beats) > 1 or not node.linked, "it has looked twice")
        assert node.linked
        assert (leader.phase, leader.generation) == ("running", 1)


async def test_a_replacement_joins_by_its_own_word_and_stops_announcing(tmp_path: Path) -> None:
    async with gang(tmp_path, 2) as agents:
        leader = leader_of(agents)
        await until(lambda: leader.phase == "running")
        await agents[1].vanish()
        successor = Agent(tmp_path, local(2, 1, pod_uid="b"))
        await successor.listen()
        word = asyncio.ensure_future(announce_agent(agents[0].address, TOKEN, successor.node))
        await until(lambda: leader.phase == "running" and leader.generation == 2)
        await asyncio.wait_for(word, 2 * REQUEST_TIMEOUT_SECONDS)
        assert leader.state()["generationHistory"][0]["cause"] == "PodLost"
        await successor.vanish()


async def test_a_gang_forms_by_its_own_words_before_anybody_introduces_it(tmp_path: Path) -> None:
    agents = [Agent(tmp_path, local(3, index, pod_uid=f"pod-{index}")) for index in range(3)]
    for agent in agents:
        await agent.listen()
    by_name = f"localhost:{agents[0].address.rpartition(':')[2]}"
    words = [asyncio.ensure_future(announce_agent(by_name, TOKEN, agent.node)) for agent in agents[1:]]
    introduce(agents[0], agents[:1])
    leader = leader_of(agents)
    await until(lambda: leader.phase == "running")
    for word in words:
        word.cancel()
    for agent in agents:
        await agent.vanish()


@pytest.mark.parametrize("who", ["announce", "dial", "lease"])
def test_an_agent_waits_for_no_name_server_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """Neither one that announces itself, nor a leader that dials by DNS, nor one whose API server has a name."""
    asked, answered = threading.Event(), threading.Event()

    def never(*args: object, **kwargs: object) -> list[object]:
        asked.set()
        answered.wait(60)
        raise OSError("no answer")

    async def life() -> None:
        if who == "announce":
            word: asyncio.Future[Any] = asyncio.ensure_future(
                announce_agent("algo-1.nowhere:8470", TOKEN, Agent(tmp_path, local(2, 1)).node)
            )
        elif who == "dial":
            word = asyncio.ensure_future(dial_agent("algo-2.nowhere:8470", TOKEN, epoch=1, index=1, uid="job-uid"))
        else:
            word = asyncio.ensure_future(answers_tls("api.nowhere", 443))
        await until(asked.is_set)
        word.cancel()

    monkeypatch.setattr("socket.getaddrinfo", never)
    ended = threading.Thread(target=asyncio.run, args=(life(),), daemon=True)
    ended.start()
    ended.join(10)
    assert not ended.is_alive()
    answered.set()


async def test_name_servers_that_are_away_cost_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answered, most = [], threading.Event(), 16

    def never(host: str, *args: object, **kwargs: object) -> list[object]:
        asked.append(host)
        answered.wait(60)
        return [(2, 1, 6, "", ("10.0.0.1", 0))]

    monkeypatch.setattr("socket.getaddrinfo", never)
    questions = [asyncio.ensure_future(addresses_of(f"algo-{i}.nowhere:8470")) for i in range(3 * most)]
    await until(lambda: len(asked) >= most)
    threads = [thread for thread in threading.enumerate() if thread.name == "look-up"]
    assert len(threads) == most
    answered.set()
    assert await asyncio.gather(*questions) == [["10.0.0.1:8470"]] * 3 * most


async def test_a_resolver_that_lacks_resources_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(host: str, *args: object, **kwargs: object) -> list[object]:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("socket.getaddrinfo", fails)
    with pytest.raises(BlockingIOError):
        await addresses_of("algo-1.nowhere:8470")


async def test_a_dial_that_ends_well_after_it_was_called_off_is_no_second_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As wait_for of Python < 3.12 does, when what it waits for ends in the moment of the cancellation."""
    attempt, called_off, begun = Links._try, asyncio.Event(), asyncio.Event()

    async def late(links: Links, index: int, address: str) -> object:
        if not begun.is_set():
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                called_off.set()
        return await attempt(links, index, address)

    monkeypatch.setattr(Links, "_try", late)
    async with gang(tmp_path, 2) as agents:
        leader = leader_of(agents)
        await until(begun.is_set)
        leader.announced(0.0, 1, "b", agents[1].address)
        assert agents[0].leading is not None
        agents[0].leading._pump()
        await until(called_off.is_set)
        await until(lambda: leader.phase == "running")
        for agent in agents:
            agent.processes.exit()
        await until(lambda: leader.outcome is not None)
        assert (leader.generation, list(leader.budget.history)) == (1, [])


async def test_a_leader_of_another_epoch_wants_no_announcement(tmp_path: Path) -> None:
    async with gang(tmp_path, 2) as agents:
        leader = leader_of(agents)
        await until(lambda: leader.phase == "running")
        stranger = Agent(tmp_path, local(2, 1, epoch=2, pod_uid="b"))
        await stranger.listen()
        await asyncio.wait_for(announce_agent(agents[0].address, TOKEN, stranger.node), 5)
        assert not stranger.node.linked
        assert (leader.phase, leader.generation) == ("running", 1)
        await stranger.vanish()


async def test_an_announcement_without_the_token_is_not_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.agent.node.announce.PATIENCE_SECONDS", 0.3)
    async with gang(tmp_path, 2) as agents:
        leader = leader_of(agents)
        await until(lambda: leader.phase == "running")
        heard: list[object] = []
        leader.announced = lambda *args: heard.append(args)  # type: ignore[method-assign]
        stranger = Agent(tmp_path, local(2, 1, pod_uid="b"))
        await stranger.listen()
        await asyncio.wait_for(announce_agent(agents[0].address, b"wrong" * 8, stranger.node), 5)
        assert heard == []
        await stranger.vanish()


async def test_a_leader_of_a_higher_epoch_takes_over_survivors(tmp_path: Path) -> None:
    async with gang(tmp_path, 3) as agents:
        await until(lambda: leader_of(agents).phase == "running")
        await agents[0].vanish()
        assert agents[1].processes.running  # without a leader, ranks go on
        successor = Agent(tmp_path, local(3, 0, epoch=2))
        await successor.listen()
        introduce(successor, agents[1:])
        assert successor.leader is not None
        await until(lambda: successor.leader.phase == "running")  # type: ignore[union-attr]
        assert agents[1].processes.generations == [(1, 1), (2, 1)]
        assert successor.leader.state()["generationHistory"] == []
        await successor.vanish()


async def test_a_leader_that_was_superseded_stops_its_ranks_for_good(tmp_path: Path) -> None:
    async with gang(tmp_path, 2) as agents:
        old = leader_of(agents)
        await until(lambda: old.phase == "running")
        newer = Agent(tmp_path / "newer", local(2, 0, epoch=2))
        await newer.listen()
        introduce(newer, agents[1:])
        await until(lambda: newer.leader and newer.leader.phase == "running")
        # The old leader redials the node that it lost, and hears of the newer epoch.
        await until(lambda: old.superseded and not agents[0].processes.running)
        assert old.phase == "forming"
        assert agents[1].processes.generations == [(1, 1), (2, 1)]
        await newer.vanish()


async def test_a_leaving_node_tells_before_it_goes(tmp_path: Path) -> None:
    async with gang(tmp_path, 2) as agents:
        leader = leader_of(agents)
        await until(lambda: leader.phase == "running")
        await agents[1].node.leave(3.0)
        assert len(agents[1].processes.stops) == 1
        assert 2 < agents[1].processes.stops[0] <= 3.0
        assert (agents[1].node.ended.result().result, agents[1].node.ended.result().exit_code) == ("left", 143)
        await until(lambda: leader.phase == "forming")
        assert leader.state()["generationHistory"][0]["cause"] == "Leaving"
        assert agents[0].processes.stops == [110.0]


async def test_an_unclean_node_is_not_used_again(tmp_path: Path) -> None:
    async with gang(tmp_path, 2) as agents:
        leader = leader_of(agents)
        await until(lambda: leader.phase == "running")
        agents[1].processes.unclean = "process 17 (D) does not die"
        agents[0].processes.exit(1)
        await until(lambda: leader.state()["unclean"])
        assert leader.state()["unclean"][0]["message"] == "process 17 (D) does not die"
        assert leader.phase == "forming"


# ---- fencing


def fence(agent: Agent) -> dict[str, object]:
    state: dict[str, object] = json.loads(agent.fence.read_text())
    return state


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


# ---- scale, in small


async def test_many_agents_join_one_leader(tmp_path: Path) -> None:
    async with gang(tmp_path, 60) as agents:
        leader = leader_of(agents)
        await until(lambda: leader.phase == "running")
        agents[59].processes.exit(1)
        await until(lambda: leader.generation == 2 and leader.phase == "running")


# ---- daemons of MPI


async def test_a_daemon_runs_on_another_node_and_its_output_comes_back(tmp_path: Path) -> None:
    async with gang(tmp_path, 2) as agents:
        await until(lambda: leader_of(agents).phase == "running")
        (leading, there) = (agents[0].leading, agents[1])
        assert leading is not None
        spawned, output = [], []

        async def spawn(daemon: str, argv: list[str], env: dict[str, str]) -> None:
            spawned.append((argv, env))
            there.node.emit(DaemonOutput(daemon, "stdout", b"\x00\xff"))
            there.node.emit(DaemonExited(daemon, 3))

        there.processes.spawn = spawn  # type: ignore[method-assign]
        agents[0].processes.daemon_output = lambda *args: output.append(args)  # type: ignore[method-assign]
        assert await asyncio.wait_for(leading.spawn_on(1, "d1", ["orted", "--x"], {"A": "b"}), 5) == 3
        assert spawned == [(["orted", "--x"], {"A": "b"})]
        assert output == [("d1", "stdout", b"\x00\xff")]


async def test_a_daemon_is_killed_with_its_caller_and_lost_with_its_node(tmp_path: Path) -> None:
    async with gang(tmp_path, 2) as agents:
        await until(lambda: leader_of(agents).phase == "running")
        leading = agents[0].leading
        assert leading is not None
        killed: list[str] = []
        agents[1].processes.kill_daemon = killed.append  # type: ignore[method-assign,assignment]
        call = asyncio.ensure_future(leading.spawn_on(1, "d1", ["orted"], {}))
        await until(lambda: leading._daemons._running)
        call.cancel()
        await until(lambda: killed == ["d1"])
        other = asyncio.ensure_future(leading.spawn_on(1, "d2", ["orted"], {}))
        await until(lambda: leading._daemons._running)
        await agents[1].vanish()
        assert await asyncio.wait_for(other, 5) == 255


async def test_an_agent_with_a_mistake_in_it_leaves_and_says_so(tmp_path: Path) -> None:
    async with gang(tmp_path, 2) as agents:
        leader = leader_of(agents)
        await until(lambda: leader.phase == "running")
        leader.take_report = lambda *args: 1 / 0  # type: ignore[method-assign,assignment]
        agents[1].processes.exit(1)
        ended = await asyncio.wait_for(agents[0].node.ended, 5)
        assert (ended.result, ended.exit_code) == ("left", 1)
        assert "ZeroDivisionError" in ended.message
