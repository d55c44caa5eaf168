"""An agent that sends what no agent can mean loses its own link; the leader and the other links stay."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from everstep.agent.wire.link import AgentLink, Channel
from everstep.agent.wire.protocol import GenerationReport, ProcessExit, RankProgress

from .fakes import gang, until

BEAT: dict[str, Any] = {"type": "beat", "epoch": 1, "generation": 1, "ranks": []}
RANK = RankProgress(2, 1).to_json()
REPORT = GenerationReport(1, 1).to_json()
EXIT = ProcessExit(2, 1).to_json()
HELLO = {"type": "hello", "podUid": "u", "address": "127.0.0.1:1", "incarnation": "i", "epoch": 1, "generation": 1}
HUGE = 10**400


@pytest.mark.parametrize(
    "frame",
    [
        {**BEAT, "epoch": float("inf")},
        {**BEAT, "generation": HUGE},
        {**BEAT, "ranks": [{**RANK, "rank": -1}]},
        {**BEAT, "ranks": [{**RANK, "step": HUGE}]},
        {**BEAT, "ranks": [{**RANK, "total": -5}]},
        {**BEAT, "ranks": [{**RANK, "metrics": {"loss": HUGE}}]},
        {**REPORT, "started": HUGE},
        {**REPORT, "exits": [{**EXIT, "exitCode": HUGE}]},
        {**REPORT, "exits": [{**EXIT, "rank": -7}]},
        {**HELLO, "index": 2},
        {**HELLO, "index": 1},
        {**HELLO, "index": 9},
        {**HELLO, "index": 1, "address": "nowhere"},
    ],
    ids=lambda frame: str(frame)[:60],
)
async def test_an_impossible_frame_ends_only_the_link_of_its_sender(tmp_path: Path, frame: dict[str, Any]) -> None:
    async with gang(tmp_path, 3) as agents:
        leader, leading, sender = agents[0].leader, agents[0].leading, agents[1].node
        assert leader is not None
        assert leading is not None
        await until(lambda: leader.phase == "running")
        other, link = leading._links.get(2), sender._channel
        assert isinstance(link, AgentLink)
        link.send(frame)
        await until(lambda: leader.budget.history or agents[0].node.ended.done(), "the end of the generation")
        assert not agents[0].node.ended.done(), agents[0].node.ended.result()
        assert (leader.budget.history[0].cause, leader.budget.history[0].index) == ("PodLost", 1)
        assert leading._links.get(2) is other
        await until(lambda: leader.phase == "running")


async def test_words_that_are_no_text_end_no_leader(tmp_path: Path) -> None:
    async with gang(tmp_path, 2, application_restarts=0) as agents:
        leader = agents[0].leader
        assert leader is not None
        await until(lambda: leader.phase == "running")
        agents[1].processes.exit(1, "not text: \ud800")
        await asyncio.wait_for(agents[1].node.ended, 10)
        assert agents[0].node.ended.result().result == "failed"


@pytest.mark.parametrize("running", [False, True])
async def test_a_leader_goes_on_after_the_newest_generation_that_a_node_knows(tmp_path: Path, running: bool) -> None:
    """An operator whose cluster was restored from a backup may give an epoch twice."""
    async with gang(tmp_path, 2) as agents:
        leader, leading, node = agents[0].leader, agents[0].leading, agents[1].node
        assert leader is not None
        assert leading is not None
        await until(lambda: leader.phase == "running")
        leading._links.drop(1)
        node.order = (1, 9)
        if not running:
            node.stop(0.0)
            await until(lambda: node._clean)
        leading.lost(1, "it was cut off")
        await until(lambda: leader.phase == "running" and leader.generation == 10)
        assert node.order == (1, 10)
        assert [entry.id for entry in leader.budget.history] == ["1.1"]


@pytest.mark.parametrize("order", [(2, 1), (1, 10**9), (1, 2**53)])
async def test_a_hello_of_a_generation_that_cannot_be_makes_no_link(tmp_path: Path, order: tuple[int, int]) -> None:
    """A leader of a higher epoch would have been obeyed in this one's place, and no id has ten digits."""
    async with gang(tmp_path, 2) as agents:
        leader, leading, node = agents[0].leader, agents[0].leading, agents[1].node
        assert leader is not None
        assert leading is not None
        await until(lambda: leader.phase == "running")
        leading._links.drop(1)
        attach, hellos = node.attach, []

        def attached(channel: Channel) -> None:
            hellos.append(channel)
            attach(channel)

        node.order, node.attach = order, attached  # type: ignore[method-assign]
        leading.lost(1, "it was cut off")
        await until(lambda: len(hellos) > 1, "the first hello was rejected")
        assert leader.state()["missing"] == [1]
        assert not agents[0].node.ended.done()
