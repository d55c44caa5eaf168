"""One generation of ranks, from its start until nothing is left of it: what failed first, and who is how far."""

from __future__ import annotations

from everstep.agent.config import AgentConfig
from everstep.agent.launch.launcher import count_ranks_on_node
from everstep.agent.ranks import failure_causes
from everstep.agent.ranks.failure_causes import GenerationFailure
from everstep.agent.wire.protocol import EndedGeneration, GenerationReport

SETTLE_SECONDS = 0.2  # seconds in which the link of a vanished pod breaks after its peers' connections did
LAUNCHER_SECONDS = 10.0  # seconds after the launcher's end in which the last report of a rank's may come
MAX_FAILURES = 256  # all ranks of a large job may fail at once


class Generation:
    def __init__(self, config: AgentConfig, order: tuple[int, int], now: float) -> None:
        self.order = order  # (epoch, generation)
        self.started_at = now
        self.failures: list[GenerationFailure] = []
        self.grace = 0.0  # seconds, of the stop
        self.stop_deadline = 0.0
        self._config = config
        self._ranks = count_ranks_on_node(config.distribution, config.num_proc_per_node)
        self._counted: set[tuple[int, int | None, bool]] = set()  # (node, rank, launcher) that failed
        self._started: set[int] = set()  # nodes whose ranks are all started
        self._done: set[int] = set()  # nodes whose ranks all exited with 0
        self._launcher_ended_at: float | None = None  # with code 0

    @property
    def started(self) -> bool:
        return len(self._started) == self._config.num_nodes

    @property
    def done(self) -> bool:
        return len(self._done) == self._config.num_nodes

    def take_report(self, now: float, index: int, report: GenerationReport) -> list[GenerationFailure]:
        """Take in a node's report, and return the failures in it that are new."""
        if report.started >= self._ranks:
            self._started.add(index)
        ranks = {e.rank for e in report.exits if e.ok and e.rank is not None}
        launcher = index > 0 or not self._config.mpi or any(e.launcher and e.ok for e in report.exits)
        if index == 0 and self._config.mpi and launcher and self._launcher_ended_at is None:
            self._launcher_ended_at = now
        if len(ranks) >= self._ranks and launcher:
            self._done.add(index)
        new = []
        for end in report.exits:
            key = (index, end.rank, end.launcher)
            if not end.ok and key not in self._counted:
                self._counted.add(key)
                new.append(failure_causes.make_exit_failure(now, index, end))
        return new

    @property
    def unfinished(self) -> list[int]:
        """Return the nodes of which not all ranks have exited with 0."""
        return sorted(set(range(self._config.num_nodes)) - self._done)

    @property
    def launcher_deadline(self) -> float | None:
        """Return when a launcher that has ended well has left ranks out: no report of theirs can come any more from a
        node that has been heard since."""
        return None if self.done or self._launcher_ended_at is None else self._launcher_ended_at + LAUNCHER_SECONDS

    def defer(self, seconds: float) -> None:
        """Put off what nodes are waited for: for so long, nobody has read what they say."""
        self.stop_deadline += seconds
        if self._launcher_ended_at is not None:
            self._launcher_ended_at += seconds

    def explain_left_out(self) -> str:
        """Return what a launcher did that exited with 0, though not all ranks have run to their end."""
        left = self.unfinished
        return (
            f"mpirun exited with code 0, but not all ranks of {len(left)} of {self._config.num_nodes} nodes have run "
            f"and exited with 0 (node {left[0]} for one): look at the options of the job's distribution"
        )

    def fail(self, failure: GenerationFailure) -> None:
        if len(self.failures) < MAX_FAILURES or failure.exit is None:
            self.failures.append(failure)

    @property
    def settled_at(self) -> float:
        """Return when the root cause may be named. Only a failure that looks secondary is worth waiting for its
        cause."""
        first = self.failures[0].at
        waits = self._config.num_nodes > 1 and failure_causes.find_root_cause(self.failures).echo
        return first + SETTLE_SECONDS if waits else first

    @property
    def ran(self) -> float:
        """Return the seconds from its start to its first failure."""
        return self.failures[0].at - self.started_at

    def entry(self, now: float, wall_offset: float) -> EndedGeneration:
        """Return its entry of the generation history, now that it is over; `wall_offset` makes times of day of the
        leader's times."""
        failure = failure_causes.find_root_cause(self.failures)
        end = failure.exit
        return EndedGeneration(
            epoch=self.order[0],
            generation=self.order[1],
            cause=failure.cause,
            index=failure.index,
            rank=end.rank if end else failure.rank,
            exit_code=end.exit_code if end else None,
            signal=end.signal if end else None,
            message=failure.message,
            log_tail=end.log_tail if end else (),
            started_at=self.started_at + wall_offset,
            ended_at=now + wall_offset,
        )
