"""The leader as a pure state machine, which decides when ranks start and stop.

No sockets, no clock of its own, no tasks: every input carries `now` (monotonic seconds) and leaves commands behind,
which the caller takes and carries out. `leader_server.py` is that caller. What it decides from is kept in `members.py`
(the nodes), `generation.py` (the ranks that run or stop) and `restart_allowance.py` (the generation history).

    forming -> starting -> running -> stopping -> (backoff) -> forming ... -> ended

Invariants (tests/agent/test_leader_invariants.py): ids strictly increase; a generation starts only when every node has
joined and is clean; application restarts never exceed the allowance; a generation has at most one entry of the
generation history; ended is final.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

from everstep.agent.config import AgentConfig
from everstep.agent.ranks import failure_causes
from everstep.agent.wire import protocol
from everstep.agent.wire.checkpoint_request import CheckpointRequest
from everstep.agent.wire.generation_layout import GenerationLayout
from everstep.agent.wire.protocol import BACKOFF, ENDED, FORMING, RUNNING, STARTING, STOPPING, Hello, Outcome

from .checkpoint_meter import CheckpointMeter
from .commands import AskForCheckpoint, Command, DumpStacks, EndJob, HangUp, StartRanks, StopRanks
from .departure import Departure
from .generation import SETTLE_SECONDS, Generation
from .hang_watch import HangWatch
from .members import JobMembers
from .pending_checkpoint import PendingCheckpoint
from .progress_meter import ProgressMeter
from .restart_allowance import RestartAllowance

STOP_LIMIT_SECONDS = 45.0  # seconds beyond the grace in which a node has to say that it is clean, or why not
MAX_HISTORY_TAILS = 8  # of the newest entries; with all 64 an answer could reach half a megabyte


class LeaderState:
    def __init__(
        self, config: AgentConfig, incarnation: str, now: float, wall: float, free_port: Callable[[], int]
    ) -> None:
        """Begin without any node.

        Args:
            config: The job.
            incarnation: Tells this process from the one before it.
            now: Monotonic seconds.
            wall: The time of day at `now`, in seconds.
            free_port: Finds a port for MASTER_PORT on this node.
        """
        self.config = config
        self.incarnation = incarnation
        self.version = 1
        self.epoch = config.epoch
        self.generation = 0
        self.phase = FORMING
        self.outcome: Outcome | None = None
        self.budget = RestartAllowance(config.application_restarts, config.max_backoff, config.exit_code_actions)
        self.meter = ProgressMeter()
        self.checkpoints = CheckpointMeter()
        self.pending_checkpoint = PendingCheckpoint()
        self.departure = Departure(self.pending_checkpoint)
        self.hangs = HangWatch(config.hang_timeout)
        self.ranks_started_at: float | None = None  # time of day
        self.held = ""  # why no generation may start (lost lease, newer leader)
        self.superseded = False
        self._commands: list[Command] = []
        self._members = JobMembers(config, now, self._commands.append, self._changed)
        self._current: Generation | None = None
        self._wall_offset = wall - now
        self._free_port = free_port
        self._stop_reason: str | None = None
        self._backoff_until = 0.0
        self._ticked = now

    # ---- what the caller reads

    def take_commands(self) -> list[Command]:
        commands = self._commands.copy()
        self._commands.clear()
        return commands

    def deadline(self, now: float) -> float:
        """Return when to call `tick` next, if nothing happens before."""
        times = [self._ticked + self.config.heartbeat]
        if self.phase == BACKOFF:
            times.append(self._backoff_until)
        if self.phase == STOPPING and self._current:
            times += [self._current.stop_deadline, self._current.failures[0].at + SETTLE_SECONDS]
        if self.meter.changed_at is not None:
            times.append(self.meter.due())
        if self.phase == RUNNING:
            times += [due for due in (self.hangs.due(), self.departure.due) if due is not None]
        return min((t for t in times if t > now), default=now)

    def state(self) -> dict[str, Any]:
        """Return the answer to GET /v1/state."""
        history = self.budget.history
        tails = len(history) - MAX_HISTORY_TAILS
        return {
            "protocol": 1,
            "incarnation": self.incarnation,
            "version": self.version,
            "epoch": self.epoch,
            "generation": self.generation,
            "phase": self.phase,
            **self._members.to_json(),
            "ranksStartedAt": self.ranks_started_at,
            "progress": self.meter.to_json(),
            "checkpoint": self.checkpoints.to_json(),
            "checkpointRequest": self.pending_checkpoint.to_json(),
            "generationHistory": [e.to_json(tail=i >= tails) for i, e in enumerate(history)],
            "outcome": self.outcome.to_json() if self.outcome else None,
        }

    # ---- inputs: the operator

    def update_addresses(self, now: float, addresses: dict[int, str]) -> None:
        """Take in the address table, ip:port by index."""
        if self.phase != ENDED:
            self._members.update_addresses(addresses)
            self._advance(now)

    def note_poll(self, now: float, charged: str, allowance: int | None) -> None:
        """Take in that `allowance` restarts are left after the entry `charged`. Raises ValueError for a
        malformed id."""
        if allowance is not None:
            self.budget.grant(charged, allowance)
        self._advance(now)

    def stop(self, now: float, reason: str) -> None:
        if self._stop_reason is None and self.phase != ENDED:
            self._stop_reason = reason[: protocol.MESSAGE_CHARS]
            if self.phase in (STARTING, RUNNING):
                told = failure_causes.GenerationFailure(now, protocol.STOPPED, None, self._stop_reason)
                self._fail_after_save(now, told, self.config.stop_grace)
        self._advance(now)

    def request_checkpoint(self, now: float, request: CheckpointRequest) -> None:
        """Take in that the ranks shall save: those that run, or those that start next before the deadline."""
        if self.phase != ENDED and self.pending_checkpoint.take(now, request):
            self._changed()
        self._advance(now)

    # ---- inputs: the lease

    def hold(self, now: float, why: str, superseded: bool = False) -> None:
        """Keep ranks from running until `release`. A leader that met a newer one is held for good."""
        self.superseded = self.superseded or superseded
        if self.phase == ENDED or self.held:
            return
        self.held = why
        self._changed()
        if self.phase in (STARTING, RUNNING):
            self._fail(now, failure_causes.GenerationFailure(now, protocol.FENCED, None, why))
        self._advance(now)

    def release(self, now: float) -> None:
        if self.held and not self.superseded:
            self.held = ""
            self._changed()
        self._advance(now)

    # ---- inputs: nodes

    def announced(self, now: float, index: int, pod_uid: str, address: str) -> None:
        """Take in where the agent of a new pod says that it is. It has yet to prove that it holds the token."""
        if self.phase != ENDED:
            self._members.announced(index, pod_uid, address)
            self._advance(now)

    def node_joined(self, now: float, hello: Hello) -> None:
        """Take in a node whose link stands. Whoever was there before is gone."""
        if self.phase == ENDED:
            return
        if self._members[hello.index].joined:
            self._lose(now, hello.index, "the agent was replaced")
        self._members.join(now, hello)
        if not hello.clean and not hello.unclean:
            # A survivor of a lost link or of a lost leader: its ranks belong to a generation that is over.
            self._commands.append(StopRanks((hello.index,), hello.generation, self.config.restart_grace))
        self._advance(now)

    def link_lost(self, now: float, index: int, why: str = "the connection to its agent broke") -> None:
        if self.phase == ENDED:
            return  # agents that were told of the end leave
        if self._members[index].joined:
            self._lose(now, index, why)
            self._members.dial(index)
        self._advance(now)

    def note_sign_of_life(self, now: float, index: int) -> None:
        self._members[index].seen = now

    def node_leaving(self, now: float, index: int, grace: float = 0.0) -> None:
        """Take in that a pod was told to stop, and has so many seconds. All ranks save first, if they can, and get TERM
        with the long grace then, also those of other pods: a last checkpoint needs all of them."""
        node = self._members[index]
        if not node.joined or node.leaving or self.phase == ENDED:
            return
        node.leaving = True
        self._changed()
        self._fail_after_save(now, failure_causes.make_leaving_failure(now, index), grace)
        self._advance(now)

    def take_report(self, now: float, index: int, report: protocol.GenerationReport) -> None:
        if not self._members[index].joined or self.phase == ENDED:
            return
        self._members.report(index, report)
        current = self._current
        if current and (report.epoch, report.generation) == current.order:
            for end in report.exits:
                if end.rank is not None:
                    self.hangs.forget(end.rank)
            for failure in current.take_report(now, index, report):
                self._fail(now, failure)
            if report.unclean and self.phase in (STARTING, RUNNING):
                # It gives up before it has been told to stop: what it says is why its pod is lost.
                self._fail(
                    now,
                    failure_causes.GenerationFailure(now, protocol.POD_LOST, index, f"node {index}: {report.unclean}"),
                )
        self._advance(now)

    def take_heartbeat(self, now: float, epoch: int, generation: int, ranks: Sequence[protocol.RankProgress]) -> None:
        if (epoch, generation) == (self.epoch, self.generation) and self.phase in (STARTING, RUNNING, STOPPING):
            self.hangs.update(now, ranks)
            self.meter.update(now, now + self._wall_offset, ranks)
            if self.checkpoints.update(now + self._wall_offset, (epoch, generation), ranks):
                self._changed()
            self._advance(now)

    def update_gpus(self, index: int, gpus: tuple[protocol.Gpu, ...]) -> None:
        """Take in a node's devices, when something about them has changed. The leader reports them and does not act on
        them."""
        self._members.gpus(index, gpus)

    def tick(self, now: float) -> None:
        slept = now - self._ticked - 2 * self.config.heartbeat
        self.hangs.pause(max(0.0, slept))
        self._ticked = max(now, self._ticked)
        if slept > 0 and self._current:
            self._current.defer(slept)
        if self.phase != ENDED:
            self._members.ask_dns(now)
            for node in self._members.list_silent(now, slept):
                self._lose(now, node.index, f"its agent was silent for {self.config.silence:g} s")
                self._commands.append(HangUp(node.index))
                self._members.dial(node.index)
        self._advance(now)

    # ---- the machine

    def _advance(self, now: float) -> None:
        """Move through phases until nothing more follows from what is known."""
        if self.meter.flush(now):
            self._changed()
        while True:
            before = self.phase
            step = {
                FORMING: self._form,
                STARTING: self._watch,
                RUNNING: self._watch,
                STOPPING: self._finish_stop,
                BACKOFF: self._wait,
                ENDED: _do_nothing,
            }[before]
            step(now)
            if self.phase == before:
                return

    def _form(self, now: float) -> None:
        if self._stop_reason is not None:
            self._end(Outcome(protocol.STOPPED_RESULT, 143, self._stop_reason, None))
            return
        failure = self.budget.find_exhausting_failure()
        if failure is not None:
            self._end(Outcome(protocol.FAILED, failure.status, failure.message, failure.id))
            return
        if self.held or not self._members.ready:
            return
        hellos = [n.joined for n in self._members if n.joined]
        # Newer than what any of them has obeyed, in this epoch too: a restored operator may have given it out before.
        self.generation = 1 + max([self.generation, *(h.generation for h in hellos if h.epoch == self.epoch)])
        self._current = Generation(self.config, (self.epoch, self.generation), now)
        self._members.started(self._current.order)
        self.ranks_started_at = None
        self.hangs.restart()
        self.departure.restart()
        self.checkpoints.restart(self.meter.generation_step)
        self.meter.restart()
        layout = GenerationLayout(
            epoch=self.epoch,
            generation=self.generation,
            hosts=tuple(protocol.host_of(h.address) for h in hellos),
            ports=tuple(protocol.port_of(h.address) for h in hellos),
            node_index=0,
            procs_per_node=self.config.num_proc_per_node,
            master_addr=protocol.host_of(hellos[0].address),
            master_port=self._free_port(),
        )
        self._commands.append(StartRanks(layout))
        self._enter(STARTING)

    def _watch(self, now: float) -> None:
        current, members = self._current, self._members
        assert current is not None
        if current.failures:
            self._begin_stop(now, current)
            return
        if len(members.busy) < len(members):
            # A node became clean without being told to stop: it fenced itself, or missed the start.
            index = min(set(range(len(members))) - members.busy)
            self._fail(
                now,
                failure_causes.GenerationFailure(now, protocol.FENCED, index, "the node stopped its ranks by itself"),
            )
            return
        if self.phase == STARTING and current.started:
            self.ranks_started_at = now + self._wall_offset
            self._enter(RUNNING)
        if self.phase == RUNNING:
            self._ask_for_checkpoint(now)
            trained = self.checkpoints.find_trained_step(self.meter.generation_step)
            left = self.departure.find_failure(now, self.generation, trained)
            if left is not None:
                self._fail(now, left)
                return
        if self.phase == RUNNING and current.done:
            self._end(Outcome(protocol.SUCCEEDED, 0, "all ranks exited with 0"))
        elif (left_out := current.find_left_out_ranks(now, lambda index: members[index].seen)) is not None:
            self._fail(now, left_out)
        elif self.phase == RUNNING:
            self._look_for_hang(now)

    def _look_for_hang(self, now: float) -> None:
        if self._stood_still(now):
            return  # the steps of that time are still to be read
        if self.departure.holds_training(now, self.generation) or self._members.any_quiet:
            self.hangs.excuse(now)
        elif self.hangs.wants_dump(now):
            self._commands.append(DumpStacks())
        elif (found := self.hangs.find_hang(now)) is not None:
            rank, message = found
            index = rank // self.config.num_proc_per_node
            self._fail(now, failure_causes.GenerationFailure(now, protocol.HANG, index, message, rank=rank))

    def _ask_for_checkpoint(self, now: float) -> None:
        """Hand requests on to ranks that run, and note the checkpoints that were saved for them."""
        saved, counted, trained = self.checkpoints.step, self.checkpoints.counted_step, self.meter.generation_step
        for each in self.departure.requests:
            asked = each.find_untold(now, self.generation, trained, saved, counted)
            if asked is not None:
                self._commands.append(AskForCheckpoint(self.generation, asked))
            if asked is not None or each.note_checkpoint(self.generation, saved, counted):
                self._changed()

    def _begin_stop(self, now: float, current: Generation) -> None:
        graceful = current.failures[0].cause in (protocol.STOPPED, protocol.LEAVING)
        current.grace = self.config.stop_grace if graceful else self.config.restart_grace
        self._enter(STOPPING)
        self._send_stop(now, current)

    def _send_stop(self, now: float, current: Generation) -> None:
        current.stop_deadline = now + current.grace + STOP_LIMIT_SECONDS
        if self._members.busy:
            self._commands.append(StopRanks(tuple(sorted(self._members.busy)), self.generation, current.grace))

    def _finish_stop(self, now: float) -> None:
        current = self._current
        assert current is not None
        nodes = [self._members[i] for i in self._members.busy]
        waiting = [n for n in nodes if not n.unclean and not n.leaving]
        if waiting and now >= current.stop_deadline and not self._stood_still(now):
            for node in waiting:
                self._members.mark_unclean(node, "the node did not become clean, nor did it say why")
            waiting = []
        if waiting or now < current.settled_at:
            return
        entry = current.entry(now, self._wall_offset)
        delay = self.budget.record_end(entry, current.ran)
        self._current = None
        if self._stop_reason is not None:
            failure = entry.id if entry.application else None
            self._end(Outcome(protocol.STOPPED_RESULT, 143, self._stop_reason, failure))
        elif delay > 0 and self.budget.find_exhausting_failure() is None:
            self._backoff_until = now + delay
            self._enter(BACKOFF)
        else:
            self._enter(FORMING)

    def _wait(self, now: float) -> None:
        if now >= self._backoff_until or self._stop_reason is not None:
            self._enter(FORMING)

    def _end(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._enter(ENDED)
        self._commands.append(EndJob(outcome))

    # ---- facts

    def _fail(self, now: float, failure: failure_causes.GenerationFailure) -> None:
        current = self._current
        if current is None:
            return
        if self.phase == RUNNING and (left := self.departure.explain_failure(failure)) is not None:
            self._fail(now, left)
        current.fail(failure)
        if self.phase in (STARTING, RUNNING):
            self._begin_stop(now, current)
        elif current.failures[0].cause == protocol.LEAVING and not failure.graceful:
            self._hurry(now, current)

    def _fail_after_save(self, now: float, failure: failure_causes.GenerationFailure, grace: float) -> None:
        if self.phase != RUNNING or not self.checkpoints.ranks_save or grace <= 0:
            self._fail(now, failure)
            return
        order = (self.epoch, self.generation)
        trained = self.checkpoints.find_trained_step(self.meter.generation_step)
        self.departure.begin(now, failure, grace, order, trained)

    def _hurry(self, now: float, current: Generation) -> None:
        """Shorten the grace. A peer is gone, so the others can only hang in collectives: the long grace has become
        pointless."""
        if current.grace > self.config.restart_grace:
            current.grace = self.config.restart_grace
            self._send_stop(now, current)

    def _lose(self, now: float, index: int, why: str) -> None:
        self._members.lose(now, index)
        self._fail(now, failure_causes.GenerationFailure(now, protocol.POD_LOST, index, f"node {index}: {why}"))

    def _stood_still(self, now: float) -> bool:
        """Tell whether this process was stopped or starved until now: what arrived meanwhile is still to be read, and
        the next tick defers what is due."""
        return now - self._ticked > 2 * self.config.heartbeat

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self._changed()

    def _changed(self) -> None:
        self.version += 1


def _do_nothing(now: float) -> None:
    return None
