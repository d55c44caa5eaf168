"""Agents together: leaders come and go, nodes obey the newest, and nobody acts on an old word."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path
from typing import Any

import pytest

from everstep.agent.leader.node_links import Links
from everstep.agent.node.announce import announce_agent
from everstep.agent.node.fencing import answers_tls
from everstep.agent.ranks.events import DaemonExited, DaemonOutput, RankProgressed
from everstep.agent.system.host_names import addresses_of
from everstep.agent.wire.http_client import REQUEST_TIMEOUT_SECONDS
from everstep.agent.wire.link import AgentLink, Channel, dial_agent
from everstep.agent.wire.protocol import Gpu
from everstep.agent.wire.rank_checkpoint import RankCheckpoint

from .fakes import TOKEN, Agent, gang, introduce, leader_of, local, until


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


async def test_writers_of_checkpoints_have_the_grace_of_a_stop_where_ranks_have_succeeded(tmp_path: Path) -> None:
    """Not where they have failed: what is in memory is stored by the next ones."""
    async with gang(tmp_path, 2) as agents:
        leader = leader_of(agents)
        await until(lambda: leader.phase == "running")
        agents[1].processes.exit(7)
        await until(lambda: leader.generation == 2 and leader.phase == "running")
        assert [agent.processes.given_to_writers for agent in agents] == [[], []]
        for agent in agents:
            agent.processes.exit()
        for agent in agents:
            ended = await agent.node.ended
            await agent.node.finish(ended.result)
            assert agent.processes.given_to_writers == [agent.config.stop_grace]


@pytest.mark.parametrize("grace", [60.0, 0.0])
async def test_writers_have_their_grace_also_in_a_pod_that_is_deleted_meanwhile(tmp_path: Path, grace: float) -> None:
    """By whoever cleans up after a success: the operator, an autoscaler, a user."""
    async with gang(tmp_path, 1) as (agent,):
        agent.processes.writers_ended.clear()
        await until(lambda: agent.processes.running)
        agent.processes.exit()
        finishing = asyncio.ensure_future(agent.node.finish((await agent.node.ended).result))
        await until(lambda: agent.processes.given_to_writers)
        leaving = asyncio.ensure_future(agent.node.leave(grace))
        await until(lambda: agent.node.leaving and (grace or agent.processes.stops))
        agent.processes.writers_ended.set()
        await finishing
        leaving.cancel()
        assert agent.processes.stops == [agent.config.restart_grace if grace else 0.0]


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


@pytest.mark.parametrize("code", [0, 3])
async def test_the_last_words_of_ranks_come_before_their_end(tmp_path: Path, code: int) -> None:
    """Nobody asks for them later: the last step, and the last checkpoint, of a job that has ended."""
    async with gang(tmp_path, 2, application_restarts=0) as agents:
        leader = leader_of(agents)
        await until(lambda: leader.phase == "running")
        for agent, said in zip(agents, (None, RankCheckpoint(checkpoint=40)), strict=True):
            agent.node.emit(RankProgressed(1, 2 * agent.config.index, 41, None, "train", {}, said))
            agent.processes.exit(code if agent is agents[0] else 0)
        await until(lambda: leader.outcome is not None)
        assert (leader.meter.step, leader.checkpoints.step) == (41, 40)


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


@pytest.mark.parametrize("is_slow", [False, True], ids=["at once", "when another one stands"])
async def test_a_dial_that_ends_well_after_it_was_called_off_is_no_second_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    """As wait_for of Python < 3.12 does, when what it waits for ends in the moment of the cancellation."""
    attempt, called_off, begun, over = Links._try, asyncio.Event(), asyncio.Event(), set[int]()

    async def late(links: Links, index: int, address: str, number: int) -> object:
        if not begun.is_set():
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                called_off.set()
                await until(standing)
        found = await attempt(links, index, address, number)
        over.add(number)
        return found

    monkeypatch.setattr(Links, "_try", late)
    async with gang(tmp_path, 2) as agents:
        leader = leader_of(agents)
        standing = (lambda: leader.phase == "running") if is_slow else (lambda: True)
        await until(begun.is_set)
        leader.announced(0.0, 1, "b", agents[1].address)
        assert agents[0].leading is not None
        agents[0].leading._pump()
        await until(called_off.is_set)
        await until(lambda: 1 in over and leader.phase == "running")
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
