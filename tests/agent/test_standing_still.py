"""Agents that stand still for a while, as on a starved or frozen machine, and go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from everstep.agent.config import AgentConfig
from everstep.agent.node.fencing import StallDetector
from everstep.agent.wire.http_server import HttpRequest

from .bench import running
from .fakes import gang, leader_of, until


async def test_a_leader_that_stands_still_and_goes_on_finds_its_links(tmp_path: Path) -> None:
    """All ranks are healthy: what they said meanwhile is read from the link, and the generation goes on."""
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


def test_a_node_that_stands_still_for_less_than_the_fence_timeout_and_goes_on_costs_nothing() -> None:
    bench = running()
    for _ in range(int(bench.leader.config.fence_timeout) - 1):
        bench.now += 1.0
        bench.leader.tick(bench.now)
    bench.leader.note_sign_of_life(bench.now, 1)
    bench.later(60.0)
    assert (bench.phase, bench.leader.generation, bench.history) == ("running", 1, [])


def test_what_a_process_reads_after_it_stood_still_is_as_much_older() -> None:
    """The machine ran on: both clocks did. A ping that was sent before must not renew a lease that has ended since."""
    now = 100.0
    stalls = StallDetector(lambda: now, lambda: now, 1.0)
    now += 1.5
    assert stalls.age() == 0.0
    now += 30.0
    assert stalls.age() == 30.0
    now += 0.9
    stalls.note_running()
    assert stalls.age() == 30.0, "there may be more to read"
    now += 0.2
    assert stalls.age() == 0.0


async def test_a_ping_that_waited_while_the_agent_stood_still_renews_no_lease(tmp_path: Path) -> None:
    """The leader may have lost its own lease meanwhile, or be gone: another one may have this node's place."""
    async with gang(tmp_path, 2, fence_timeout=40.0) as agents:
        leader, node = leader_of(agents), agents[1].node
        await until(lambda: leader.phase == "running")
        assert agents[0].leading is not None
        agents[0].leading._ping = lambda: None  # type: ignore[method-assign]
        stood, clock, lease_clock = [30.0], node._clock, node._lease_clock
        for owner, name, real in ((node, "_clock", clock), (node, "_lease_clock", lease_clock)):
            setattr(owner, name, lambda real=real: real() + stood[0])
            setattr(node._stalls, name, getattr(owner, name))
        node.handle({"type": "ping", "age": 0.0})
        assert not json.loads(agents[1].fence.read_bytes())["fenced"]
        stood[0] += 15.0
        await until(lambda: json.loads(agents[1].fence.read_bytes())["fenced"], "the lease ends 40 s after the ping")


async def test_a_poll_that_waited_while_the_leader_stood_still_renews_no_lease(tmp_path: Path) -> None:
    """Its operator may have been cut off since. A poll that was signed after the leader went on counts in full."""
    async with gang(tmp_path, 2, fence_timeout=40.0) as agents:
        leading = agents[0].leading
        assert leading is not None
        await until(lambda: leader_of(agents).phase == "running")
        stood, lease_clock = [30.0], leading._lease_clock
        for owner in (leading, leading._stalls):
            owner._lease_clock = lambda: lease_clock() + stood[0]
        leading._stalls._clock = leading._lease_clock
        await leading._state(HttpRequest("GET", "/v1/state", "/v1/state", {}, b"", "", "", age=25.0))
        assert 24.0 < leading._lease.age(leading._lease_clock()) < 30.0
        await leading._state(HttpRequest("GET", "/v1/state", "/v1/state", {}, b"", "", "", age=0.0))
        assert leading._lease.age(leading._lease_clock()) < 5.0


async def test_a_leader_that_never_stood_still_takes_polls_as_they_come(tmp_path: Path) -> None:
    """An operator that was slow to ask again has no older word than one that was quick."""
    async with gang(tmp_path, 1, fence_timeout=1000.0) as agents:
        leading = agents[0].leading
        assert leading is not None
        leading._stalls.interval = 1000.0
        await leading._state(HttpRequest("GET", "/v1/state", "/v1/state", {}, b"", "", "", age=25.0))
        assert leading._lease.age(leading._lease_clock()) < 20.0
