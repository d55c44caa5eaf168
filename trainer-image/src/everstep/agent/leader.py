"""When ranks start and stop: the leader as a pure state machine.

No sockets, no clock of its own, no tasks: every input carries `now` (monotonic seconds) and leaves commands behind,
which the caller takes and carries out. `leading.py` is that caller.

    forming -> starting -> running -> stopping -> (backoff) -> forming ... -> ended

Invariants (tests/agent/test_leader_invariants.py): ids strictly increase; a generation starts only when every node has
joined and is clean; application restarts never exceed the allowance; a generation has at most one ledger entry;
ended is final.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Callable

from . import causes, protocol
from .budget import Budget
from .commands import Command, Dial, End, Hangup, Start, StopRanks
from .config import Config
from .events import Layout
from .launch import ranks_on_node
from .meter import Meter
from .protocol import BACKOFF, ENDED, FORMING, RUNNING, STARTING, STOPPING, Hello, LedgerEntry, Outcome, Report

DNS_AFTER = 5.0  # seconds without an address from the operator
SETTLE = 0.2  # seconds in which the link of a vanished pod breaks after its peers' connections did
STOP_LIMIT = 45.0  # seconds beyond the grace in which a node has to say that it is clean, or why not
LEDGER_TAILS = 8  # of the newest entries; with all 64 an answer could reach half a megabyte
MAX_FAILURES = 256  # of one generation; all ranks of a large job may fail at once


@dataclass
class Node:
    index: int
    address: str = ""  # from the operator's table, or by DNS
    joined: Hello | None = None
    seen: float = 0.0
    missing_since: float = 0.0
    leaving: bool = False
    unclean: str = ""
    unclean_uid: str = ""
    busy_with: tuple[int, int] = (0, 0)  # (epoch, generation) whose processes it may still have


@dataclass
class _Generation:
    """What is known of the generation that runs or stops."""

    started_at: float
    failures: list[causes.Failure] = field(default_factory=list)
    counted: set[tuple[int, int | None, bool]] = field(default_factory=set)  # (node, rank, launcher) that failed
    started: set[int] = field(default_factory=set)  # nodes whose ranks are all started
    done: set[int] = field(default_factory=set)  # nodes whose ranks all exited with 0
    stop_deadline: float = 0.0
    grace: float = 0.0


class Leader:
    def __init__(self, config: Config, incarnation: str, now: float, wall: float, free_port: Callable[[], int]) -> None:
        """`wall` is the time of day at `now`, in seconds; `free_port` finds a port for MASTER_PORT on this node."""
        self.config = config
        self.incarnation = incarnation
        self.version = 1
        self.epoch = config.epoch
        self.generation = 0
        self.phase = FORMING
        self.outcome: Outcome | None = None
        self.budget = Budget(config.application_restarts, config.max_backoff)
        self.meter = Meter()
        self.ranks_started_at: float | None = None  # time of day
        self.held = ""  # why no generation may start (lost lease, newer leader)
        self.superseded = False
        self._wall_offset = wall - now
        self._free_port = free_port
        self._nodes = [Node(i, missing_since=now) for i in range(config.num_nodes)]
        self._per_node = ranks_on_node(config.distribution, config.num_proc_per_node)
        self._missing = set(range(config.num_nodes))
        self._busy: set[int] = set()  # joined nodes that may still have processes of a generation
        self._current: _Generation | None = None
        self._stop_reason: str | None = None
        self._backoff_until = 0.0
        self._ticked = now
        self._commands: list[Command] = []

    # ---- what the caller reads

    def take(self) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands

    def deadline(self, now: float) -> float:
        """When to call `tick` next, if nothing happens before."""
        times = [self._ticked + self.config.heartbeat]
        if self.phase == BACKOFF:
            times.append(self._backoff_until)
        if self.phase == STOPPING and self._current:
            times += [self._current.stop_deadline, self._current.failures[0].at + SETTLE]
        if self.meter.changed_at is not None:
            times.append(self.meter.due())
        return min((t for t in times if t > now), default=now)

    def state(self) -> dict[str, Any]:
        """The answer to GET /v1/state."""
        ledger = self.budget.ledger
        tails = len(ledger) - LEDGER_TAILS
        return {
            "protocol": 1,
            "incarnation": self.incarnation,
            "version": self.version,
            "epoch": self.epoch,
            "generation": self.generation,
            "phase": self.phase,
            "nodes": self.config.num_nodes,
            "joined": self.config.num_nodes - len(self._missing),
            "missing": sorted(self._missing),
            "unclean": [
                {"index": n.index, "uid": n.unclean_uid, "message": n.unclean} for n in self._nodes if n.unclean
            ],
            "held": self.held,
            "ranksStartedAt": self.ranks_started_at,
            "progress": self.meter.to_json(),
            "ledger": [e.to_json(tail=i >= tails) for i, e in enumerate(ledger)],
            "outcome": self.outcome.to_json() if self.outcome else None,
        }

    def node(self, index: int) -> Node:
        return self._nodes[index]

    # ---- inputs: the operator

    def peers(self, now: float, addresses: dict[int, str]) -> None:
        """The address table. Whoever is joined stays so until the new address answers: the table may be the old one."""
        for index, address in addresses.items():
            node = self._nodes[index]
            if index == 0 or node.address == address:
                continue
            node.address = address
            if node.joined and node.joined.address == address:
                self._commands.append(Dial(index, ""))
            else:
                self._dial(index)
        self._advance(now)

    def poll(self, now: float, charged: str, allowance: int | None) -> None:
        """`allowance` restarts are left after the ledger entry `charged`. Raises ValueError for a malformed id."""
        if allowance is not None:
            self.budget.grant(charged, allowance)
        self._advance(now)

    def stop(self, now: float, reason: str) -> None:
        if self._stop_reason is None and self.phase != ENDED:
            self._stop_reason = reason[: protocol.MESSAGE_CHARS]
            if self.phase in (STARTING, RUNNING):
                self._fail(now, causes.Failure(now, protocol.STOPPED, None, self._stop_reason))
        self._advance(now)

    # ---- inputs: the lease

    def hold(self, now: float, why: str, superseded: bool = False) -> None:
        """No rank may run until `release`. A leader that met a newer one is held for good."""
        self.superseded = self.superseded or superseded
        if self.phase == ENDED or self.held:
            return
        self.held = why
        self._changed()
        if self.phase in (STARTING, RUNNING):
            self._fail(now, causes.Failure(now, protocol.FENCED, None, why))
        self._advance(now)

    def release(self, now: float) -> None:
        if self.held and not self.superseded:
            self.held = ""
            self._changed()
        self._advance(now)

    # ---- inputs: nodes

    def hello(self, now: float, hello: Hello) -> None:
        """A link to a node stands. Whoever was there before is gone."""
        if self.phase == ENDED:
            return
        node = self._nodes[hello.index]
        if node.joined:
            self._lose(now, hello.index, "the agent was replaced")
        node.joined, node.seen, node.leaving = hello, now, False
        node.unclean = ""
        self._missing.discard(hello.index)
        self._changed()
        if hello.unclean:
            self._mark_unclean(node, hello.unclean)
        if hello.clean:
            self._busy.discard(hello.index)
        else:
            # A survivor of a lost link or of a lost leader: its ranks belong to a generation that is over.
            self._busy.add(hello.index)
            node.busy_with = (hello.epoch, hello.generation)
            if not hello.unclean:
                self._commands.append(StopRanks((hello.index,), hello.generation, self.config.restart_grace))
        self._advance(now)

    def link_lost(self, now: float, index: int, why: str = "the connection to its agent broke") -> None:
        if self.phase == ENDED:
            return  # agents that were told of the end leave
        if self._nodes[index].joined:
            self._lose(now, index, why)
            self._dial(index)
        self._advance(now)

    def seen(self, now: float, index: int) -> None:
        self._nodes[index].seen = now

    def leaving(self, now: float, index: int) -> None:
        """The pod was told to stop. Its ranks got TERM with the long grace, and so do their peers: a last checkpoint
        needs all of them."""
        node = self._nodes[index]
        if not node.joined or node.leaving or self.phase == ENDED:
            return
        node.leaving = True
        self._changed()
        self._fail(now, causes.Failure(now, protocol.LEAVING, index, f"pod {node.joined.pod_uid} was told to stop"))
        self._advance(now)

    def report(self, now: float, index: int, report: Report) -> None:
        node = self._nodes[index]
        if not node.joined or self.phase == ENDED:
            return
        if (report.epoch, report.generation) >= node.busy_with:
            if report.unclean:
                self._mark_unclean(node, report.unclean)
            elif report.clean:
                self._busy.discard(index)
        if self._current and (report.epoch, report.generation) == (self.epoch, self.generation):
            self._look_at(now, self._current, index, report)
        self._advance(now)

    def beat(self, now: float, epoch: int, generation: int, ranks: Iterable[protocol.RankProgress]) -> None:
        if (epoch, generation) == (self.epoch, self.generation) and self.phase in (STARTING, RUNNING):
            self.meter.update(now, now + self._wall_offset, ranks)
            self._advance(now)

    def tick(self, now: float) -> None:
        slept = now - self._ticked - 2 * self.config.heartbeat
        self._ticked = max(now, self._ticked)
        for node in self._nodes:
            if node.index == 0:
                continue  # this process
            if not node.joined:
                self._ask_dns(now, node)
                continue
            if slept > 0:
                # It was this process that was stopped or starved: what arrived meanwhile is still to be read.
                node.seen += slept
            if now - node.seen > self.config.silence:
                self._lose(now, node.index, f"its agent was silent for {self.config.silence:g} s")
                self._commands.append(Hangup(node.index))
                self._dial(node.index)
        self._advance(now)

    # ---- the machine

    def _advance(self, now: float) -> None:
        """Moves through phases until nothing more follows from what is known."""
        if self.meter.flush(now):
            self.version += 1
        while True:
            before = self.phase
            step = {
                FORMING: self._form,
                STARTING: self._watch,
                RUNNING: self._watch,
                STOPPING: self._finish_stop,
                BACKOFF: self._wait,
                ENDED: _nothing,
            }[before]
            step(now)
            if self.phase == before:
                return

    def _form(self, now: float) -> None:
        if self._stop_reason is not None:
            self._end(Outcome(protocol.STOPPED_RESULT, 143, self._stop_reason, None))
            return
        failure = self.budget.exhausted()
        if failure is not None:
            self._end(Outcome(protocol.FAILED, failure.status, failure.message, failure.id))
            return
        if self.held or self._missing or self._busy or any(n.leaving or n.unclean for n in self._nodes):
            return
        hellos = [n.joined for n in self._nodes if n.joined]
        self.generation += 1
        self._current = _Generation(now)
        self._busy = set(range(len(self._nodes)))
        for node in self._nodes:
            node.busy_with = (self.epoch, self.generation)
        self.ranks_started_at = None
        self.meter.restart()
        layout = Layout(
            epoch=self.epoch,
            generation=self.generation,
            hosts=tuple(protocol.host_of(h.address) for h in hellos),
            ports=tuple(protocol.port_of(h.address) for h in hellos),
            node_index=0,
            procs_per_node=self.config.num_proc_per_node,
            master_addr=protocol.host_of(hellos[0].address),
            master_port=self._free_port(),
        )
        self._commands.append(Start(layout))
        self._enter(STARTING)

    def _watch(self, now: float) -> None:
        current = self._current
        assert current is not None
        if current.failures:
            self._begin_stop(now, current)
            return
        if len(self._busy) < len(self._nodes):
            # A node became clean without being told to stop: it fenced itself, or missed the start.
            index = min(set(range(len(self._nodes))) - self._busy)
            self._fail(now, causes.Failure(now, protocol.FENCED, index, "the node stopped its ranks by itself"))
            return
        if self.phase == STARTING and len(current.started) == len(self._nodes):
            self.ranks_started_at = now + self._wall_offset
            self._enter(RUNNING)
        elif self.phase == RUNNING and len(current.done) == len(self._nodes):
            self._end(Outcome(protocol.SUCCEEDED, 0, "all ranks exited with 0"))

    def _begin_stop(self, now: float, current: _Generation) -> None:
        first = current.failures[0]
        if first.cause in (protocol.STOPPED, protocol.LEAVING):
            current.grace = self.config.stop_grace
        else:
            current.grace = self.config.restart_grace
        self._enter(STOPPING)
        self._send_stop(now, current)

    def _send_stop(self, now: float, current: _Generation) -> None:
        current.stop_deadline = now + current.grace + STOP_LIMIT
        if self._busy:
            self._commands.append(StopRanks(tuple(sorted(self._busy)), self.generation, current.grace))

    def _finish_stop(self, now: float) -> None:
        current = self._current
        assert current is not None
        waiting = [i for i in self._busy if not self._nodes[i].unclean and not self._nodes[i].leaving]
        if waiting and now >= current.stop_deadline:
            for index in waiting:
                self._mark_unclean(self._nodes[index], "the node did not become clean, nor did it say why")
            waiting = []
        if waiting or now < self._settled_at(current):
            return
        entry = self._entry(now, current)
        delay = self.budget.close(entry, current.failures[0].at - current.started_at)
        self._current = None
        if self._stop_reason is not None:
            failure = entry.id if entry.application else None
            self._end(Outcome(protocol.STOPPED_RESULT, 143, self._stop_reason, failure))
        elif delay > 0 and self.budget.exhausted() is None:
            self._backoff_until = now + delay
            self._enter(BACKOFF)
        else:
            self._enter(FORMING)

    def _settled_at(self, current: _Generation) -> float:
        """When the root cause may be named. Only a failure that looks like an echo is worth waiting for its cause."""
        if len(self._nodes) == 1 or not causes.root(current.failures).echo:
            return current.failures[0].at
        return current.failures[0].at + SETTLE

    def _wait(self, now: float) -> None:
        if now >= self._backoff_until or self._stop_reason is not None:
            self._enter(FORMING)

    def _entry(self, now: float, current: _Generation) -> LedgerEntry:
        failure = causes.root(current.failures)
        end = failure.exit
        return LedgerEntry(
            epoch=self.epoch,
            generation=self.generation,
            cause=failure.cause,
            index=failure.index,
            rank=end.rank if end else None,
            exit_code=end.exit_code if end else None,
            signal=end.signal if end else None,
            message=failure.message,
            log_tail=end.log_tail if end else (),
            started_at=current.started_at + self._wall_offset,
            ended_at=now + self._wall_offset,
        )

    def _end(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._enter(ENDED)
        self._commands.append(End(outcome))

    # ---- facts

    def _look_at(self, now: float, current: _Generation, index: int, report: Report) -> None:
        if report.started >= self._per_node:
            current.started.add(index)
        ranks = {e.rank for e in report.exits if e.ok and e.rank is not None}
        launcher = index > 0 or not self.config.mpi or any(e.launcher and e.ok for e in report.exits)
        if len(ranks) >= self._per_node and launcher:
            current.done.add(index)
        for end in report.exits:
            key = (index, end.rank, end.launcher)
            if not end.ok and key not in current.counted:
                current.counted.add(key)
                self._fail(now, causes.of_exit(now, index, end))

    def _fail(self, now: float, failure: causes.Failure) -> None:
        current = self._current
        if current is None:
            return
        if len(current.failures) < MAX_FAILURES or failure.exit is None:
            current.failures.append(failure)
        if self.phase in (STARTING, RUNNING):
            self._begin_stop(now, current)
        elif current.failures[0].cause == protocol.LEAVING and not failure.graceful:
            self._hurry(now, current)

    def _hurry(self, now: float, current: _Generation) -> None:
        """A peer is gone, so the others can only hang in collectives: the long grace has become pointless."""
        if current.grace > self.config.restart_grace:
            current.grace = self.config.restart_grace
            self._send_stop(now, current)

    def _lose(self, now: float, index: int, why: str) -> None:
        node = self._nodes[index]
        node.joined, node.leaving = None, False
        node.missing_since = now
        node.unclean = ""  # a verdict on a pod that is out of reach would be applied to its successor
        self._missing.add(index)
        self._busy.discard(index)
        self._changed()
        if self._current:
            self._fail(now, causes.Failure(now, protocol.POD_LOST, index, f"node {index}: {why}"))

    def _mark_unclean(self, node: Node, why: str) -> None:
        if node.unclean != why:
            node.unclean = why
            node.unclean_uid = node.joined.pod_uid if node.joined else ""
            self._changed()

    def _dial(self, index: int) -> None:
        node = self._nodes[index]
        if node.address and self.phase != ENDED:
            self._commands.append(Dial(index, node.address))

    def _ask_dns(self, now: float, node: Node) -> None:
        if node.address or not self.config.service or now - node.missing_since < DNS_AFTER:
            return
        node.address = f"algo-{node.index + 1}.{self.config.service}:{self.config.port}"
        self._dial(node.index)

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self._changed()

    def _changed(self) -> None:
        self.version += 1


def _nothing(now: float) -> None:
    return None
