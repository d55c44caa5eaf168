"""Events by which the supervisor tells the agent about the processes of this node."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Union

from everstep.agent.wire.protocol import ProcessExit
from everstep.agent.wire.rank_checkpoint import RankCheckpoint


class RankStarted(NamedTuple):
    generation: int
    rank: int
    local_rank: int


class RankExited(NamedTuple):
    """`exit_code` is what a shell would say (128 + signal); `message` is the best single line about the cause."""

    generation: int
    rank: int
    local_rank: int
    exit_code: int
    signal: int | None
    oom: bool
    message: str
    log_tail: tuple[str, ...]

    def to_exit(self) -> ProcessExit:
        return ProcessExit(self.rank, self.exit_code, self.signal, self.oom, self.message, tuple(self.log_tail))


class LauncherExited(NamedTuple):
    """mpirun ended, on the leader's node only. Code 0 follows the exits of all ranks."""

    generation: int
    exit_code: int
    message: str
    log_tail: tuple[str, ...]

    def to_exit(self) -> ProcessExit:
        return ProcessExit(None, self.exit_code, message=self.message, log_tail=tuple(self.log_tail), launcher=True)


class RankProgressed(NamedTuple):
    """The newest of what a rank said since the last event."""

    generation: int
    rank: int
    step: int | None
    total: int | None
    phase: str
    metrics: Mapping[str, float] = MappingProxyType({})
    checkpoint: RankCheckpoint | None = None


class DaemonOutput(NamedTuple):
    """Output of a daemon started by `Supervisor.spawn`; `stream` is stdout or stderr."""

    daemon: str
    stream: str
    data: bytes


class DaemonExited(NamedTuple):
    daemon: str
    exit_code: int


class PodUnusable(NamedTuple):
    """An event that says that the pod or its node keeps the ranks from running, so another pod has to take its
    place."""

    message: str


Event = Union[RankStarted, RankExited, LauncherExited, RankProgressed, DaemonOutput, DaemonExited, PodUnusable]
