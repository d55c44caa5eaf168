"""Whatever happens, in whatever order: the promises that the leader never breaks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from everstep.agent.leader.commands import Command, EndJob, StartRanks, StopRanks
from everstep.agent.leader.leader_state import LeaderState
from everstep.agent.wire.protocol import GenerationReport, Hello, Outcome, ProcessExit

from .bench import configuration

NODES, PROCS, ALLOWANCE = 3, 2, 4
index = st.integers(0, NODES - 1)


@dataclass
class Agent:
    """A node as it really is; the leader learns of it through `link`, later or never."""

    pod: int = 0
    linked: bool = False
    leaving: bool = False
    order: tuple[int, int] = (0, 0)
    alive: bool = False  # has processes of `order`
    exits: dict[int, ProcessExit] = field(default_factory=dict)
    link: deque[GenerationReport | str] = field(default_factory=deque)

    def report(self, clean: bool = False) -> None:
        self.link.append(GenerationReport(*self.order, PROCS, tuple(self.exits.values()), clean))


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        config = configuration(NODES, PROCS, application_restarts=ALLOWANCE, max_backoff=4.0, epoch=2)
        self.leader = LeaderState(config, "incarnation", 0.0, 0.0, lambda: 29500)
        self.agents = [Agent() for _ in range(NODES)]
        self.started: list[tuple[int, int]] = []
        self.outcome: Outcome | None = None
        self.granted = ALLOWANCE

    def obey(self) -> None:
        for node, agent in enumerate(self.agents):
            assert bool(self.leader._members[node].joined) == agent.linked or self.leader.phase == "ended", (
                "nothing but its own link makes a node joined, or lost"
            )
        commands: list[Command] = self.leader.take_commands()
        for command in commands:
            assert self.outcome is None, "a command after the end"
            if isinstance(command, StartRanks):
                self.check_start(command)
            elif isinstance(command, StopRanks):
                for node in command.indexes:
                    assert self.agents[node].linked, "a stop for a node that is not there"
            elif isinstance(command, EndJob):
                self.outcome = command.outcome

    def check_start(self, command: StartRanks) -> None:
        order = (command.layout.epoch, command.layout.generation)
        assert not self.started or order > self.started[-1], "ids strictly increase"
        for number, agent in enumerate(self.agents):
            assert agent.linked, f"node {number} has not joined"
            assert not agent.leaving or "leaving" in agent.link, f"node {number} said that it leaves"
            assert not agent.alive, f"node {number} still has ranks"
        charged = [e for e in self.leader.budget.history if e.application]
        assert len(charged) <= self.granted, "more restarts than were granted"
        self.started.append(order)
        for agent in self.agents:
            if not agent.leaving:
                agent.order, agent.alive, agent.exits = order, True, {}
                agent.report()

    # What nodes do

    @initialize()
    def all_join(self) -> None:
        for node in range(NODES):
            self.dial(node)

    @rule(nodes=st.sets(index, min_size=1))
    def obey_and_tell(self, nodes: set[int]) -> None:
        """The ordinary course, for some of the nodes: without it, long histories are rare."""
        for node in nodes:
            if self.leader.phase == "stopping":
                self.become_clean(node)
            self.dial(node)
            for _ in range(len(self.agents[node].link)):
                self.deliver(node)

    @rule(node=index, oom=st.booleans())
    def fail(self, node: int, oom: bool) -> None:
        self.exit(node, 0, 1, oom)
        for _ in range(len(self.agents[node].link)):
            self.deliver(node)

    @rule(node=index)
    def dial(self, node: int) -> None:
        agent = self.agents[node]
        if agent.linked or agent.leaving:
            return
        agent.linked = True
        hello = Hello(node, f"{node}-{agent.pod}", f"10.0.0.{node}:8470", "x", *agent.order, not agent.alive)
        self.leader.node_joined(self.now, hello)
        self.obey()

    @rule(node=index)
    def deliver(self, node: int) -> None:
        agent = self.agents[node]
        if agent.linked and agent.link:
            message = agent.link.popleft()
            if isinstance(message, GenerationReport):
                self.leader.take_report(self.now, node, message)
            else:
                self.leader.node_leaving(self.now, node)
            self.obey()

    @rule(node=index, local=st.integers(0, PROCS - 1), code=st.sampled_from([0, 0, 0, 1, 7, 143]), oom=st.booleans())
    def exit(self, node: int, local: int, code: int, oom: bool) -> None:
        agent, rank = self.agents[node], node * PROCS + local
        if agent.alive and rank not in agent.exits:
            agent.exits[rank] = ProcessExit(rank, code, oom=oom and code != 0, message="ValueError")
            agent.report()

    @rule(node=index)
    def become_clean(self, node: int) -> None:
        """The leader's stop, or the node's own doing (fencing): either way its processes are gone."""
        agent = self.agents[node]
        if agent.alive:
            agent.alive = False
            agent.report(clean=True)

    @rule(node=index)
    def cut(self, node: int) -> None:
        agent = self.agents[node]
        if agent.linked:
            agent.linked = False
            agent.link.clear()
            self.leader.link_lost(self.now, node)
            self.obey()

    @rule(node=index)
    def leave(self, node: int) -> None:
        agent = self.agents[node]
        if agent.linked and not agent.leaving:
            agent.leaving = True
            agent.link.append("leaving")

    @rule(node=index)
    def replace(self, node: int) -> None:
        self.cut(node)
        self.agents[node] = Agent(pod=self.agents[node].pod + 1)

    @rule(node=index, pod=st.integers(0, 3), host=st.integers(0, 9))
    def announce(self, node: int, pod: int, host: int) -> None:
        """By any pod that was, is or will be, from anywhere: late, twice, out of order."""
        self.leader.announced(self.now, node, f"{node}-{pod}", f"10.0.0.{host}:8470")
        self.obey()

    @rule(node=index, host=st.integers(0, 9))
    def table(self, node: int, host: int) -> None:
        self.leader.update_addresses(self.now, {node: f"10.0.0.{host}:8470"})
        assert self.leader.phase == "ended" or self.leader._members[node].address in ("", f"10.0.0.{host}:8470")
        self.obey()

    # What the operator and time do

    @rule(allowance=st.integers(0, 3))
    def poll(self, allowance: int) -> None:
        """The operator charges what it sees, and grants anew."""
        history = self.leader.state()["generationHistory"]
        charged = [e for e in history if e["cause"] in ("Application", "OutOfMemory")]
        self.granted = len(charged) + allowance
        self.leader.note_poll(self.now, history[-1]["id"] if history else "", allowance)
        self.obey()

    @rule(held=st.booleans())
    def lease(self, held: bool) -> None:
        if held:
            self.leader.hold(self.now, "no lease")
        else:
            self.leader.release(self.now)
        self.obey()

    @precondition(lambda self: self.now > 300)
    @rule()
    def stop(self) -> None:
        self.leader.stop(self.now, "enough")
        self.obey()

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.0, 5.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for node, agent in enumerate(self.agents):
            if agent.linked:
                self.leader.note_sign_of_life(self.now, node)
        self.leader.tick(self.now)
        self.obey()

    @invariant()
    def each_generation_ends_once(self) -> None:
        ids = [(e.epoch, e.generation) for e in self.leader.budget.history]
        assert ids == sorted(set(ids))

    @invariant()
    def ended_is_final(self) -> None:
        assert (self.leader.phase == "ended") == (self.outcome is not None)
        assert self.leader.outcome == self.outcome


World.TestCase.settings = settings(stateful_step_count=50)
TestWorld = World.TestCase
