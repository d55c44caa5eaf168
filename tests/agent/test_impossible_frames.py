"""An agent that sends what no agent can mean loses its own link; the leader and the other links stay."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from everstep.agent.link import AgentLink
from everstep.agent.protocol import GenerationReport, ProcessExit, RankProgress

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
        await until(lambda: leader.budget.ledger or agents[0].node.ended.done(), "the end of the generation")
        assert not agents[0].node.ended.done(), agents[0].node.ended.result()
        assert (leader.budget.ledger[0].cause, leader.budget.ledger[0].index) == ("PodLost", 1)
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
