"""Agents that stand still for a while, as on a starved or frozen machine, and go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.agent.config import AgentConfig

from .fakes import gang, until
from .test_gang import leader_of


async def test_a_leader_that_stands_still_and_goes_on_finds_its_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks are healthy: what they said meanwhile is read from the link, and the generation goes on."""
    monkeypatch.setattr(AgentConfig, "silence", property(lambda _: 0.5))
    async with gang(tmp_path, 2, fence_timeout=4.0) as agents:
        leader, leading, node = leader_of(agents), agents[0].leading, agents[1].node
        assert leading is not None
        await until(lambda: leader.phase == "running")
        # As if its process were stopped: nothing is sent, and nothing of what arrives is read.
        ping, arrived, read = leading._ping, leading.arrived, []
        leading._ping = lambda: None  # type: ignore[method-assign]
        leading.arrived = lambda *message: read.append(message)  # type: ignore[method-assign]
        leader.tick = lambda now: None  # type: ignore[method-assign]
        agents[1].processes.exit(0)
        await until(lambda: not node.linked or node._clock() - node._heard > 2.0, "the leader was silent")
        assert node.linked
        del leading._ping, leading.arrived, leader.tick
        for message in read:
            arrived(*message)
        ping()
        agents[0].processes.exit(0)
        await until(lambda: leader.outcome)
        assert (leader.state()["outcome"]["result"], leader.generation) == ("succeeded", 1)


async def test_a_leader_that_is_silent_for_the_fence_timeout_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AgentConfig, "silence", property(lambda _: 0.5))
    async with gang(tmp_path, 2, fence_timeout=2.0) as agents:
        leader = leader_of(agents)
        await until(lambda: leader.phase == "running")
        assert agents[0].leading is not None
        agents[0].leading._ping = lambda: None  # type: ignore[method-assign]
        leader.tick = lambda now: None  # type: ignore[method-assign]
        await until(lambda: not agents[1].node.linked)
