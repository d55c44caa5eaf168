"""An agent whose place another one has taken: its ranks may publish no more, at once and not when its lease ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from everstep.agent.config import AgentConfig

from .fakes import Agent, gang, introduce, leader_of, local, until

FENCED = {"epoch": 1, "generation": 1, "fenced": True}


async def test_the_replaced_one_of_two_agents_is_fenced_and_stops_its_ranks(tmp_path: Path) -> None:
    async with gang(tmp_path, 2, fence_timeout=1000.0) as agents:
        leader, replaced = leader_of(agents), agents[1]
        await until(lambda: leader.phase == "running")
        successor = Agent(tmp_path / "successor", local(2, 1, fence_timeout=1000.0))
        successor.node.incarnation = "successor"
        await successor.listen()
        introduce(agents[0], [successor])
        await until(lambda: json.loads(replaced.fence.read_bytes()) == FENCED)
        await until(lambda: not replaced.processes.running)
        await until(lambda: leader.phase == "running" and leader.generation == 2)
        assert json.loads(successor.fence.read_bytes()) == {**FENCED, "generation": 2, "fenced": False}
        await successor.vanish()


async def test_an_agent_that_is_dialled_twice_keeps_its_ranks_until_its_leader_stops_them(tmp_path: Path) -> None:
    """Its own second link is no other agent's."""
    async with gang(tmp_path, 2) as agents:
        leader, leading = leader_of(agents), agents[0].leading
        assert leading is not None
        await until(lambda: leader.phase == "running")
        leading._links.dial(1, agents[1].address)
        await until(lambda: leader.phase == "running" and leader.generation == 2)
        assert agents[1].processes.stops == [agents[1].config.restart_grace]
        assert json.loads(agents[1].fence.read_bytes()) == {**FENCED, "generation": 2, "fenced": False}


async def test_an_agent_that_was_silent_hears_that_its_ranks_may_publish_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then another one may have its place, and no leader ever dials it again."""
    monkeypatch.setattr(AgentConfig, "silence", property(lambda config: 0.5 if config.leads else 1000.0))
    async with gang(tmp_path, 2, fence_timeout=1000.0) as agents:
        leader, silent = leader_of(agents), agents[1]
        await until(lambda: leader.phase == "running")
        assert agents[0].leading is not None
        agents[0].leading._links.dial = lambda index, address: None  # type: ignore[method-assign]
        silent.node._beat = lambda channel: None  # type: ignore[method-assign]
        await until(lambda: json.loads(silent.fence.read_bytes()) == FENCED)
        await until(lambda: not silent.processes.running)
