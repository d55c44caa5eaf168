"""The agent on every node: obeys the newest leader, runs one generation of ranks at a time.

It knows no addresses and makes no decisions, but two: a leader that is not the newest is refused, and without any
leader for the fence timeout its ranks lose the right to publish checkpoints (`checkpoint`) or to run (`strict`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import signal
import traceback
from typing import Any, Callable, NamedTuple

from everstep.agent.config import AgentConfig, AgentPaths
from everstep.agent.ranks import events
from everstep.agent.ranks.events import Event
from everstep.agent.ranks.failure_causes import is_echo
from everstep.agent.system.agent_log import log_line
from everstep.agent.system.clock import read_boottime
from everstep.agent.system.faults import explain_fault
from everstep.agent.system.tasks import Tasks
from everstep.agent.wire import auth
from everstep.agent.wire.checkpoint_request import CheckpointRequest, compute_save_seconds
from everstep.agent.wire.generation_layout import GenerationLayout
from everstep.agent.wire.http_server import HttpError, HttpRequest, HttpResponse
from everstep.agent.wire.link import AgentLink, Channel, LinkClosed
from everstep.agent.wire.protocol import (
    FAILED,
    FENCED_RESULT,
    LEFT,
    UNCLEAN,
    GenerationReport,
    Gpu,
    Hello,
    ProcessExit,
    RankProgress,
    split_beats,
)

from .checkpoint_request import CheckpointRequestFile
from .dial_order import DialOrder
from .fencing import FenceFile, LeaderLease, StallDetector
from .supervisor_interface import SupervisorInterface

REPLY_SECONDS = 1.0  # seconds in which a leader that has waited for a checkpoint says so
MERGE_SECONDS = 0.02  # ranks start together: one report for all of them


class AgentExit(NamedTuple):
    """A reason for which this agent leaves."""

    result: str
    exit_code: int
    message: str


class NodeAgent:
    def __init__(
        self,
        config: AgentConfig,
        place: AgentPaths,
        incarnation: str,
        clock: Callable[[], float],
        lease_clock: Callable[[], float] = read_boottime,
    ) -> None:
        self.config, self.incarnation = config, incarnation
        self.epoch = config.epoch  # of the newest leader; never goes back
        self.order = (0, 0)  # (epoch, generation) of the newest ranks
        self.leaving = False
        self.ended: asyncio.Future[AgentExit] = asyncio.get_running_loop().create_future()
        self.processes: SupervisorInterface  # set by `run_with`: the supervisor needs `emit`
        self._clock = clock
        self._token, self._lease_clock = b"", lease_clock
        self._lease = LeaderLease(config.fence_timeout, lease_clock())
        self._stalls = StallDetector(clock, lease_clock, min(1.0, config.fence_timeout / 4))
        self._fence = FenceFile(place.scratch / "fence.json", config.attempt_base)
        self._checkpoint_request = CheckpointRequestFile(place.checkpoint_request)
        self._given_up = (0, 0)  # (epoch, generation) of the ranks that were stopped for want of a lease or a place
        self._channel: Channel | None = None
        self._heard, self._fenced, self._dials = 0.0, False, DialOrder()
        self._started: set[int] = set()  # ranks
        self._exits: list[ProcessExit] = []
        self._clean, self._unclean, self._given_up_because = True, "", ""
        self._progress: dict[int, RankProgress] = {}
        self._gpus: tuple[Gpu, ...] = ()
        self._gpus_told: tuple[Gpu, ...] = ()  # on the present link
        self._starting: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._nobody_saves = asyncio.Event()  # no leader lets these ranks save before they are stopped
        self._leave_at = float("inf")  # when the pod's grace is over
        self._stop_at = 0.0  # when the stop under way will KILL
        self._report_handle: asyncio.TimerHandle | None = None
        self._tasks = Tasks(self.crash)
        self._housekeeper = self._tasks.start(self._housekeep())

    def run_with(self, processes: SupervisorInterface, token: bytes) -> None:
        self.processes = processes
        self._token = token

    @property
    def address(self) -> str:
        host = self.config.pod_ip
        return f"[{host}]:{self.config.port}" if ":" in host else f"{host}:{self.config.port}"

    @property
    def linked(self) -> bool:
        """Return whether a leader has dialled, and is still there."""
        return self._channel is not None

    @property
    def exits(self) -> list[ProcessExit]:
        return self._exits

    # ---- the leader's link

    async def accept(self, request: HttpRequest) -> HttpResponse:
        """Answer POST /v1/link, by which a leader dials. One of a lower epoch is told so, and leads no more."""
        body = request.json()
        epoch, index, uid = body.get("epoch"), body.get("index"), body.get("uid")
        if not isinstance(epoch, int) or isinstance(epoch, bool):
            raise HttpError(400, "epoch must be a number")
        if uid != self.config.job_uid or index != self.config.index or self.config.leads:
            raise HttpError(409, f"this is node {self.config.index} of job {self.config.job_uid}")
        if epoch < self.epoch:
            return HttpResponse.of({"error": "there is a newer leader", "epoch": self.epoch}, 409)
        if self.leaving or self.ended.done():
            raise HttpError(503, "this agent leaves")
        self._dials.take(body)
        self.epoch = epoch
        key = auth.link_key(self._token, request.nonce, request.client)

        async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._obey(AgentLink(reader, writer, key, auth.TO_LEADER), epoch)

        return HttpResponse(101, upgrade=run)

    async def _obey(self, link: AgentLink, epoch: int) -> None:
        if epoch < self.epoch:
            return  # a newer leader came between the answer and now
        self.attach(link)
        try:
            while True:
                message = await link.receive()
                if self._channel is not link:
                    return
                self.handle(message)
        except (LinkClosed, ValueError, KeyError, TypeError) as error:
            if self._channel is link and not self.ended.done():
                log_line(f"lost the leader: {error}")
        finally:
            link.close()
            if self._channel is link:
                self._forget_leader()

    def _forget_leader(self) -> None:
        self._channel = None
        self._nobody_saves.set()

    def attach(self, channel: Channel) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = channel
        self._heard = self._clock()
        hello = Hello(
            index=self.config.index,
            pod_uid=self.config.pod_uid,
            address=self.address,
            incarnation=self.incarnation,
            epoch=self.order[0],
            generation=self.order[1],
            clean=self._clean,
            unclean=self._unclean,
            gpus=self._gpus,
        )
        self._gpus_told = self._gpus
        channel.send(hello.to_json())

    def handle(self, message: dict[str, Any]) -> None:
        """Handle one message of the leader. Malformed ones raise: leader and agent do not fit, and the link ends."""
        self._heard = self._clock()
        kind = message["type"]
        if kind == "ping":
            self._lease.renew(self._lease_clock(), float(message["age"]) + self._stalls.age())
            self._look_at_lease()
        elif kind == "start":
            self._start(GenerationLayout.from_json(message, self.config.index))
        elif kind == "stop":
            # A leader may stop what an older one started, but a late word must not stop a newer generation.
            if (self.epoch, int(message["generation"])) >= self.order:
                self.stop(float(message["graceSeconds"]))
        elif kind == "checkpoint":
            if (self.epoch, int(message["generation"])) == self.order:
                self._checkpoint_request.write(CheckpointRequest.from_json(message))
        elif kind == "fence":
            self._withdraw()
        elif kind == "end":
            self._end(AgentExit(str(message["result"]), int(message["exitCode"]), str(message["message"])))
        elif kind == "spawn":
            self._tasks.start(self.processes.spawn(message["daemon"], list(message["argv"]), dict(message["env"])))
        elif kind == "dump":
            self._tasks.start(self.processes.dump_stacks())
        elif kind == "kill":
            self.processes.kill_daemon(message["daemon"])

    # ---- generations

    def _start(self, layout: GenerationLayout) -> None:
        order = (layout.epoch, layout.generation)
        if layout.epoch != self.epoch or order <= self.order or self.leaving or not self._clean or self.ended.done():
            self._report_soon(0)
            return
        self.order = order
        self._started, self._exits, self._progress, self._clean = set(), [], {}, False
        self._nobody_saves.clear()
        self._checkpoint_request.clear()
        self._fenced = self._lease.expired(self._lease_clock())
        self._starting = self._tasks.start(self._run_start(layout))

    async def _run_start(self, layout: GenerationLayout) -> None:
        try:
            self._fence.write(*self.order, fenced=self._fenced or self._given_up == self.order)
            await self.processes.start(layout)
        except asyncio.CancelledError:
            raise
        except OSError as error:  # commands that cannot be executed are exits: this is a full disk and its like
            self.give_up(f"generation {layout.generation} cannot start here: {explain_fault(error)}")
        except Exception as error:
            log_line(f"generation {layout.generation} cannot start here: {error}")
            self._exits.append(ProcessExit(None, 1, message=f"the ranks cannot be started: {error}"))
            self._report_soon(0)

    def stop(self, grace: float) -> None:
        """Stop all ranks. A second call may shorten the grace, never prolong it."""
        self._nobody_saves.set()
        if self._clean:
            self._report_soon(0)
            return
        self._checkpoint_request.clear()  # ranks that wait after their save go on to their own end
        grace = min(grace, max(0.0, self._leave_at - self._clock()))
        kill_at = self._clock() + grace
        before = self._stopping
        if before is not None and not before.done():
            if kill_at >= self._stop_at - 0.5:
                return
            before.cancel()
        self._stop_at = kill_at
        self._stopping = self._tasks.start(self._run_stop(grace, before))

    async def _run_stop(self, grace: float, before: asyncio.Task[None] | None) -> None:
        for task in (before, self._starting):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait([task])
        why = await self.processes.stop(grace)
        self._clean, self._unclean = why is None, why or ""
        if why:
            log_line(f"this node is not clean: {why}")
        self._report_soon(0)

    def emit(self, event: Event) -> None:
        """Take in what the supervisor saw. Events of an older generation are late, and of no interest."""
        if isinstance(event, events.DaemonOutput):
            data = base64.b64encode(event.data).decode()
            self._send({"type": "output", "daemon": event.daemon, "stream": event.stream, "data": data})
        elif isinstance(event, events.DaemonExited):
            self._send({"type": "exit", "daemon": event.daemon, "exitCode": event.exit_code})
        elif isinstance(event, events.PodUnusable):
            self.give_up(event.message)
        elif event.generation != self.order[1]:
            return
        elif isinstance(event, events.RankStarted):
            self._started.add(event.rank)
            self._report_soon(MERGE_SECONDS)
        elif isinstance(event, events.RankProgressed):
            self._progress[event.rank] = RankProgress(
                event.rank, event.step, event.total, event.phase, dict(event.metrics), event.checkpoint
            )
        elif isinstance(event, (events.RankExited, events.LauncherExited)):
            end = event.to_exit()
            end = end._replace(echo=is_echo(end))  # here, where all of its words are
            self._exits.append(end)
            if end.rank is not None:
                self._started.add(end.rank)
            self._report_soon(0)

    def gpus(self, gpus: tuple[Gpu, ...]) -> None:
        """Take in what is known of the devices now; the leader hears of it with the next beat."""
        self._gpus = gpus

    async def leave(self, grace: float) -> None:
        """Stop because the pod was told to. The leader hears of it, and says when ranks have saved and get TERM."""
        self._leave_at = min(self._clock() + grace, self._leave_at)
        if not self.leaving:
            self.leaving = True
            self._send({"type": "leaving", "graceSeconds": grace})
            if self.linked and not self._clean:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._nobody_saves.wait(), compute_save_seconds(grace) + REPLY_SECONDS)
        if self.ended.done():  # finish() ends what is left, and gives writers of checkpoints their time
            await asyncio.sleep(self._leave_at - self._clock())
        self.stop(grace)
        while self._stopping is not None and not self._stopping.done():
            await asyncio.wait([self._stopping])
        code = next((e.exit_code for e in self._exits if not e.ok), 128 + signal.SIGTERM)
        self._end(AgentExit(UNCLEAN if self._unclean else LEFT, code, self._unclean or "the pod was told to stop"))

    def crash(self, error: BaseException) -> None:
        """End after a mistake in the agent. Half an agent is worse than none: the pod fails, and the operator replaces
        it."""
        log_line("".join(traceback.format_exception(type(error), error, error.__traceback__)))
        self.give_up(f"the agent failed: {error!r}")

    def give_up(self, why: str) -> None:
        """Leave, so that the operator replaces this pod, and let the leader know why before its link breaks."""
        if self.ended.done():
            return
        log_line(why)
        self._given_up_because = self._unclean = why
        self._report()
        self._end(AgentExit(LEFT, 1, why))

    def _end(self, ended: AgentExit) -> None:
        self._nobody_saves.set()
        if not self.ended.done():
            self.ended.set_result(ended)

    async def finish(self, result: str) -> None:
        """Clean up after the end: nothing of the job stays behind in the pod."""
        if self._report_handle is not None:
            self._report()
        if not self._clean:
            if result == "succeeded":
                await self.processes.end_writers(self.config.stop_grace)
            # A failed generation has had its grace; after a success nobody has a reason to hesitate.
            self.stop(self.config.restart_grace if result != FAILED else 0.0)
            while self._stopping is not None and not self._stopping.done():
                await asyncio.wait([self._stopping])
        self._housekeeper.cancel()
        channel = self._channel  # the leader leaves too, and may close it while we wait
        if channel is not None:
            if isinstance(channel, AgentLink):
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(channel.flushed(), 2.0)
            channel.close()

    # ---- time

    async def _housekeep(self) -> None:
        beat_at, pause, looked = 0.0, self._stalls.interval, self._clock()
        while True:
            await asyncio.sleep(pause)
            now = self._clock()
            # So long it was this process that was stopped or starved: what has come meanwhile is still to be read.
            self._heard += max(0.0, now - looked - 2 * pause)
            looked = now
            self._stalls.note_running()
            self._look_at_lease()
            channel = self._channel
            if isinstance(channel, AgentLink) and now - self._heard > self.config.silence:
                log_line(f"lost the leader: silent for {self.config.silence:g} s")
                self._forget_leader()
                channel.close()
            elif channel is not None and now >= beat_at:
                beat_at = now + self.config.heartbeat * 0.99
                self._beat(channel)

    def _beat(self, channel: Channel) -> None:
        changed, self._progress = list(self._progress.values()), {}
        gpus = self._gpus if self._gpus_told != self._gpus else None
        self._gpus_told = self._gpus
        for beat in split_beats(self.order, changed, gpus):
            channel.send(beat)

    def _look_at_lease(self) -> None:
        expired = self._lease.expired(self._lease_clock())
        if self.order == (0, 0):
            return
        # Also where the lease had ended when they started: nothing else would ever stop them.
        stops = expired and self.config.fencing == "strict" and not self._clean and self._given_up != self.order
        if stops:
            self._given_up = self.order
        if expired != self._fenced:
            self._fenced = expired
            if expired:
                log_line(f"no word from the leader for {self.config.fence_timeout:g} s: fenced ({self.config.fencing})")
            # A token given back to ranks that are being stopped would do no harm, but nor would it help them.
            if not self._write_fence(expired or self._given_up == self.order):
                return
        if stops:
            self.stop(self.config.restart_grace)

    def _withdraw(self) -> None:
        """Fence and stop the ranks: the leader has given this node's place to another agent, or has lost it."""
        if self._clean or self._given_up == self.order:
            return
        log_line("the leader goes on without this node's ranks: fenced")
        self._given_up = self.order
        if self._write_fence(True):
            self.stop(self.config.restart_grace)

    def _write_fence(self, fenced: bool) -> bool:
        """Return whether that was possible; if not, this node has given up."""
        try:
            self._fence.write(*self.order, fenced=fenced)
        except OSError as error:
            self.stop(0.0)  # what they would publish in a grace, nothing might keep from being published
            self.give_up(f"the fencing token cannot be written: {explain_fault(error)}")
            return False
        return True

    # ---- reports

    def termination_message(self, ended: AgentExit) -> dict[str, Any]:
        """The termination message. The node's own failure tells more than the job's, where there is one."""
        silent = ended.result == "succeeded" or self._given_up_because
        own = None if silent else next((e for e in self._exits if not e.ok), None)
        return {
            "result": FENCED_RESULT if self._fenced and ended.result == LEFT else ended.result,
            "epoch": self.epoch,
            "generation": self.order[1],
            "index": self.config.index,
            "rank": own.rank if own else None,
            "exitCode": ended.exit_code,
            "message": own.message if own and own.message else ended.message,
            "logTail": list(own.log_tail) if own else [],
        }

    def _report_soon(self, delay: float) -> None:
        if self._report_handle is not None:
            if delay > 0:
                return
            self._report_handle.cancel()
        self._report_handle = asyncio.get_running_loop().call_later(delay, self._report)

    def _report(self) -> None:
        if self._report_handle is not None:
            self._report_handle.cancel()
            self._report_handle = None
        if self._progress and self._channel is not None:
            self._beat(self._channel)  # the last words of ranks that ended come before their end
        report = GenerationReport(*self.order, len(self._started), tuple(self._exits), self._clean, self._unclean)
        self._send(report.to_json())

    def _send(self, message: dict[str, Any]) -> None:
        if self._channel is not None:
            self._channel.send(message)
