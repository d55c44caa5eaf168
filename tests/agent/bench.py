"""A leader on the bench: its inputs by name, its commands in lists, a clock that a test turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from everstep.agent import config
from everstep.agent.leader.commands import Command, EndJob, StartRanks, StopRanks
from everstep.agent.leader.leader_state import LeaderState
from everstep.agent.wire.protocol import GenerationReport, Hello, ProcessExit

JOB: dict[str, Any] = {
    "protocol": 1,
    "job": {"namespace": "default", "name": "digits", "uid": "job-uid"},
    "templateEpoch": 1,
    "numNodes": 2,
    "numProcPerNode": 2,
    "command": ["python", "train.py"],
    "distribution": {"kind": "torch"},
    "hyperparameters": {"epochs": "10"},
    "restart": {"application": 3, "maxBackoffSeconds": 60},
    "fencing": "checkpoint",
    "fenceTimeoutSeconds": 35,
    "stopGraceSeconds": 110,
    "restartGraceSeconds": 5,
    "instanceType": "on-demand",
    "service": "digits.default.svc",
    "port": 8470,
}


def configuration(nodes: int = 2, procs: int = 2, index: int = 0, epoch: int = 1, **fields: Any) -> config.AgentConfig:
    environ = {"EVERSTEP_INDEX": str(index), "EVERSTEP_EPOCH": str(epoch), "EVERSTEP_POD_IP": f"10.0.0.{index}"}
    parsed = config.parse_config({**JOB, "numNodes": nodes, "numProcPerNode": procs}, environ)
    return dataclasses.replace(parsed, **fields)


class Bench:
    """Nodes answer only when a test makes them."""

    def __init__(self, nodes: int = 2, procs: int = 2, **fields: Any) -> None:
        self.config = configuration(nodes, procs, **fields)
        self.now = 1000.0
        self.leader = LeaderState(self.config, "incarnation", self.now, 1_760_000_000.0, lambda: 29500)
        self.commands: list[Command] = []

    # What the leader wants

    def take(self) -> list[Command]:
        new = self.leader.take_commands()
        self.commands += new
        return new

    def starts(self) -> list[StartRanks]:
        self.take()
        return [c for c in self.commands if isinstance(c, StartRanks)]

    def stops(self) -> list[StopRanks]:
        self.take()
        return [c for c in self.commands if isinstance(c, StopRanks)]

    def ends(self) -> list[EndJob]:
        self.take()
        return [c for c in self.commands if isinstance(c, EndJob)]

    @property
    def phase(self) -> str:
        return self.leader.phase

    @property
    def history(self) -> list[tuple[str, str, int | None]]:
        return [(e.id, e.cause, e.index) for e in self.leader.budget.history]

    # What happens

    def later(self, seconds: float) -> Bench:
        """Time passes; nodes are heard of, alarms ring."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.leader.deadline(self.now))
            for node in range(self.config.num_nodes):
                self.leader.note_sign_of_life(self.now, node)
            self.leader.tick(self.now)
        return self

    def join(self, index: int, *, pod: str = "a", **fields: Any) -> Bench:
        hello = Hello(index, f"{index}-{pod}", f"10.0.0.{index}:8470", f"agent-{index}-{pod}")
        self.leader.node_joined(self.now, dataclasses.replace(hello, **fields))
        return self

    def join_all(self) -> Bench:
        for index in range(self.config.num_nodes):
            self.join(index)
        return self

    def report(self, index: int, exits: Sequence[ProcessExit] = (), **fields: Any) -> Bench:
        report = GenerationReport(
            self.leader.epoch, self.leader.generation, self.config.num_proc_per_node, tuple(exits)
        )
        self.leader.take_report(self.now, index, report._replace(**fields))
        return self

    def run(self) -> Bench:
        """All ranks of the generation are started."""
        for index in range(self.config.num_nodes):
            self.report(index)
        assert self.phase == "running"
        return self

    def fail(self, index: int, rank: int, code: int = 1, message: str = "ValueError: no", **fields: Any) -> Bench:
        return self.report(index, [ProcessExit(rank, code, message=message, **fields)])

    def clean(self, *indexes: int) -> Bench:
        for index in indexes or range(self.config.num_nodes):
            self.report(index, clean=True)
        return self

    def poll(self, charged: str, allowance: int) -> Bench:
        self.leader.note_poll(self.now, charged, allowance)
        return self


def running(nodes: int = 2, procs: int = 2, **fields: Any) -> Bench:
    return Bench(nodes, procs, **fields).join_all().run()
