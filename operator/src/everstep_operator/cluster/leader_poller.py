"""Polls the leaders of running jobs: `GET /v1/state` of docs/design/001-training-job.md, one task per job.

The operator calls, leaders never do, so a leader needs no rights and a job no way out of its namespace. What comes back
is signed with the job's token and bounded in size and cost (`leader_answer`, `processor_budget`); what is in
it is judged by `plan.leader`. A job whose leader cannot be reached (a NetworkPolicy, a simulated node) costs one
connection attempt every 30 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

import structlog

from everstep.agent.wire import auth
from everstep.agent.wire.http_client import RequestRejected
from everstep_operator import metrics
from everstep_operator.cluster.leader_answer import ImplausibleAnswer, max_bytes, parse_answer
from everstep_operator.cluster.leader_connection import AnswerRoom, LeaderConnection
from everstep_operator.cluster.processor_budget import PAUSE_MAX, ProcessorBudget
from everstep_operator.plan.actions import LeaderPoll
from everstep_operator.plan.leader_view import LeaderView, parse_leader_state

log = structlog.get_logger(__name__)

Key = tuple[str, str]

MAX_CHALLENGE = 1 << 10
ANSWER_SECONDS = 10.0  # on top of the time the leader may hold a long poll
BACKOFF = 0.5  # seconds, doubled with each failure
BACKOFF_FIRST = 0.1  # before the first answer: its pod's container runs, but the agent does not listen yet
BACKOFF_MAX = 30.0
CHEAP_SECONDS = 0.002  # of processor time: a connection that fails costs less than this
SECONDS_A_BYTE = 2e-9  # of processor time, to receive it
SECONDS_A_PIECE = 1e-5  # … to receive what comes at a time, be it a byte
MAX_LOST_POLLS = 2  # failed attempts in a row before the view says so: one is a restart or a lost packet
PROGRESS_SECONDS = 10.0  # steps alone wake the planner this often; it writes them every 30 s at most
MIN_PAUSE = 0.2
COMMAND_AGAIN_SECONDS = 3.0  # after one that failed


class LeaderAnswerError(Exception):
    """No usable answer: nobody there, not our leader, too large, or not signed by it."""


class CommandUnknown(LeaderAnswerError):
    """The leader's agent is older than the command."""


@dataclass(eq=False)
class _PolledLeader:
    poll: LeaderPoll
    token: bytes
    view: LeaderView
    connection: LeaderConnection  # of the polls; each command has one of its own
    task: asyncio.Task[None] | None = None
    nonce: str = ""  # the leader gives the next one with each answer
    pushed: tuple[str, int, dict[int, str]] | None = None  # incarnation, epoch and addresses it has taken
    pushing: tuple[str, int, dict[int, str]] | None = None  # … that are being sent
    commands: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # in flight, by path: one of each
    unknown: set[str] = field(default_factory=set)  # commands that its agent is too old for, by path
    spent: float = 0.0  # seconds of processor time for its answers that are not charged yet

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Add what the block costs; nothing in it may wait."""
        started = time.thread_time()
        try:
            yield
        finally:
            self.spent += time.thread_time() - started


class LeaderPoller:
    """Keeps one long poll going for each job that the last plan wanted polled.

    `changed(key, delay)` is called when a view says something new; `delay` > 0 where it can wait.
    """

    def __init__(
        self,
        changed: Callable[[Key, float], None],
        *,
        fence_timeout: float = 35.0,
        limit: int = 1000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._changed = changed
        # Three polls within the leader's fence time: one that is lost must not fence anybody.
        self._wait = max(1, min(30, int(fence_timeout / 3)))
        self._limit = limit
        self._clock = clock
        self._jobs: dict[Key, _PolledLeader] = {}
        self._budget = ProcessorBudget(time.monotonic)
        self._commands: set[asyncio.Task[None]] = set()  # also of leaders that were dropped since
        self._exchanges = asyncio.Semaphore(limit + 16)
        self._room = AnswerRoom()
        self._told_of_turns = False  # that there are more leaders than connections

    def view(self, key: Key, pod_uid: str) -> LeaderView | None:
        """Return the last known state of the leader in this pod; None if that pod was never asked."""
        polled = self._jobs.get(key)
        return polled.view if polled is not None and polled.poll.pod_uid == pod_uid else None

    def ensure_polled(self, key: Key, poll: LeaderPoll, token: bytes) -> None:
        """Poll this leader from now on. Another pod, epoch or address is another leader: the last one is forgotten."""
        polled = self._jobs.get(key)
        if polled is not None and _leader_identity(polled.poll) == _leader_identity(poll) and polled.token == token:
            polled.poll = poll  # the next request carries the newest charge and the allowance
            if polled.task is None or polled.task.done():  # it never ends of itself: a bug, but not the job's end
                polled.task = self._start(key, polled)
            return
        self.stop_polling(key)
        view = LeaderView(reachable=False, asked_since=self._clock())
        polled = self._jobs[key] = _PolledLeader(poll, token, view, LeaderConnection(poll.address, self._room))
        polled.task = self._start(key, polled)
        metrics.leaders_polled.set(len(self._jobs))
        if len(self._jobs) > self._limit and not self._told_of_turns:
            log.warning(
                "more leaders than connections: they are asked in turn",
                leaders=len(self._jobs),
                connections=self._limit,
            )
        self._told_of_turns = len(self._jobs) > self._limit

    def _start(self, key: Key, polled: _PolledLeader) -> asyncio.Task[None]:
        return asyncio.create_task(self._poll_forever(key, polled), name=f"leader of {'/'.join(key)}")

    def stop_polling(self, key: Key) -> None:
        polled = self._jobs.pop(key, None)
        if polled is not None:
            polled.connection.close()
            if polled.task is not None:
                polled.task.cancel()
        metrics.leaders_polled.set(len(self._jobs))

    def pause_polling(self, key: Key) -> None:
        """Ask this leader no more, and keep what is known of it until it is polled again, or no more at all."""
        polled = self._jobs.get(key)
        if polled is not None and polled.task is not None:
            polled.connection.close()
            polled.task.cancel()
            polled.task = None

    async def close(self) -> None:
        tasks = [*(polled.task for polled in self._jobs.values() if polled.task is not None), *self._commands]
        for command in self._commands:
            command.cancel()
        for key in list(self._jobs):
            self.stop_polling(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- commands. Nobody waits for a leader's answer: the callers are shared by all jobs, and a leader may hang.

    def push_peers(self, key: Key, epoch: int, addresses: Mapping[int, str]) -> bool:
        """Begin `POST /v1/peers`, unless this leader has had the same. If it fails, the planner is woken.

        A leader that does not answer the poll is not tried: its first answer wakes the planner, and the planner us.

        Args:
            key: Namespace and name of the job.
            epoch: Epoch of the leader.
            addresses: Address of each pod, by its index.

        Returns:
            False if another table is still on its way to this leader: the caller asks again soon.
        """
        polled = self._jobs.get(key)
        if polled is None or not polled.view.reachable:
            return True
        table = (polled.view.incarnation, epoch, dict(addresses))
        if polled.pushed == table:
            return True
        if "/v1/peers" in polled.commands:
            return polled.pushing == table
        body = {"epoch": epoch, "addresses": {str(index): address for index, address in addresses.items()}}
        polled.pushing = table
        self._start_command(polled, "/v1/peers", lambda: self._push(key, polled, body))
        return True

    def send_stop(self, key: Key, reason: str) -> None:
        """Begin `POST /v1/stop`, unless it is on its way. If it fails, the planner is woken."""
        polled = self._jobs.get(key)
        if polled is not None and "/v1/stop" not in polled.commands:
            self._start_command(polled, "/v1/stop", lambda: self._ask(key, polled, "/v1/stop", {"reason": reason}))

    def request_checkpoint(self, key: Key, name: str, deadline: float | None) -> None:
        """Begin `POST /v1/checkpoint`, unless one is on its way. If it fails, the planner is woken.

        Args:
            key: Namespace and name of the job.
            name: Id of the request.
            deadline: When the checkpoint is of no use any more (Unix seconds); None: never.
        """
        polled, path = self._jobs.get(key), "/v1/checkpoint"
        if polled is not None and polled.view.reachable and path not in polled.commands and path not in polled.unknown:
            left = None if deadline is None else max(0.0, round(deadline - self._clock(), 3))
            body = {"epoch": polled.poll.epoch, "id": name, "deadline": left}
            self._start_command(polled, path, lambda: self._ask(key, polled, path, body))

    def _start_command(self, polled: _PolledLeader, path: str, send: Callable[[], Awaitable[object]]) -> None:
        async def run() -> None:
            try:
                await send()
            except Exception:
                log.exception("a request to a leader failed unexpectedly", path=path, address=polled.poll.address)
            finally:
                del polled.commands[path]

        task = polled.commands[path] = asyncio.create_task(run(), name=f"{path} to {polled.poll.address}")
        self._commands.add(task)
        task.add_done_callback(self._commands.discard)

    async def _push(self, key: Key, polled: _PolledLeader, body: Mapping[str, Any]) -> None:
        table = polled.pushing
        if await self._send_command(polled, "/v1/peers", body):
            polled.pushed = table
        else:
            self._wake_planner(key, polled)

    async def _ask(self, key: Key, polled: _PolledLeader, path: str, body: Mapping[str, Any]) -> None:
        if not await self._send_command(polled, path, body):
            self._wake_planner(key, polled)

    def _wake_planner(self, key: Key, polled: _PolledLeader) -> None:
        """Wake the planner after a command has failed; the next plan gives it again if it is still wanted."""
        if self._jobs.get(key) is polled:
            self._changed(key, COMMAND_AGAIN_SECONDS)

    async def _send_command(self, polled: _PolledLeader, path: str, body: Mapping[str, Any]) -> bool:
        try:
            await self._request(polled, "POST", path, json.dumps(body).encode(), hold=0, own_nonce=True)
        except CommandUnknown:
            log.info("a leader's agent is too old for a command", path=path, address=polled.poll.address)
            polled.unknown.add(path)
        except LeaderAnswerError as error:
            log.info("a command did not reach the leader", path=path, address=polled.poll.address, error=str(error))
            return False
        return True

    # --- the poll

    async def _poll_forever(self, key: Key, polled: _PolledLeader) -> None:
        failures = 0
        while True:
            started = time.monotonic()
            try:
                data = await self._fetch_state(polled)
                with polled.spending():
                    answer = parse_answer(data, polled.poll.num_nodes)
                    view = parse_leader_state(answer, answered_at=self._clock(), before=polled.view)
                    only_progress = self._update(key, polled, view)
            except Exception as error:
                failures += 1
                metrics.leader_polls.labels("failed").inc()
                if failures == 1 and not isinstance(error, (LeaderAnswerError, ImplausibleAnswer)):
                    log.exception(
                        "a request to a leader failed unexpectedly",
                        job="/".join(key),
                        address=polled.poll.address,
                    )
                if failures == MAX_LOST_POLLS:
                    log.info("leader unreachable", job="/".join(key), address=polled.poll.address, error=str(error))
                    self._update(key, polled, replace(polled.view, reachable=False))
                least = BACKOFF_FIRST if polled.view.answered_at is None else BACKOFF
                pause = min(BACKOFF_MAX, least * 2.0 ** min(failures, 10)) * (0.5 + random.random() / 2)  # noqa: S311
                # An answer that is dear and of no use is waited for as long as its namespace owes. One that was lost
                # cost nothing: its leader is not to be fenced for what other jobs have cost.
                most = self._wait if polled.spent < CHEAP_SECONDS else PAUSE_MAX
                await asyncio.sleep(max(pause, min(most, self._charge(key, polled))))
                continue
            failures = 0
            metrics.leader_polls.labels("answered").inc()
            # A leader that answers at once for ever (every step, or out of malice) is asked at most so often.
            pause = 1.0 if only_progress else MIN_PAUSE
            # A job whose namespace is in debt is still asked before its leader is fenced.
            pause = max(pause, min(self._wait, self._charge(key, polled)))
            if len(self._jobs) > self._limit:
                pause = self._wait
            await asyncio.sleep(max(0.0, pause - (time.monotonic() - started)))

    def _charge(self, key: Key, polled: _PolledLeader) -> float:
        """Charge what the last answer has cost, and return the seconds until the next one may cost as much."""
        seconds, polled.spent = polled.spent, 0.0
        self._budget.charge(key[0], seconds)
        return self._budget.pause(key[0], seconds)

    async def _fetch_state(self, polled: _PolledLeader) -> bytes:
        view, poll = polled.view, polled.poll
        # More leaders than connections: nobody may hold one open, all are asked in turn.
        hold = self._wait if len(self._jobs) <= self._limit else 0
        after = f"{view.incarnation}:{view.version}" if view.answered_at is not None else ""
        target = (
            f"/v1/state?after={quote(after, safe=':')}&wait={hold}&charged={poll.charged}&allowance={poll.allowance}"
        )
        return await self._request(polled, "GET", target, b"", hold=hold)

    def _update(self, key: Key, polled: _PolledLeader, view: LeaderView) -> bool:
        """Store the view and wake the planner if it matters; True if only steps have changed."""
        old, polled.view = polled.view, view
        if self._jobs.get(key) is not polled:
            return True
        same = _strip_progress(old) == _strip_progress(view)
        if not same:
            self._changed(key, 0.0)
        elif (view.progress, view.checkpoint) != (old.progress, old.checkpoint):
            self._changed(key, PROGRESS_SECONDS)
        return same

    # --- one request

    async def _request(
        self, polled: _PolledLeader, method: str, target: str, body: bytes, *, hold: float, own_nonce: bool = False
    ) -> bytes:
        """Send one signed request; the nonce of the last answer saves the challenge. Commands fetch their own nonce."""
        nonce = ""
        if not own_nonce:
            nonce, polled.nonce = polled.nonce, ""
        connection = LeaderConnection(polled.poll.address, self._room) if own_nonce else polled.connection
        status, data, fresh = 401, b"", ""
        try:
            async with self._exchanges:
                if nonce:
                    status, data, fresh = await _send_signed(polled, connection, method, target, body, nonce, hold)
                if status == 401:  # no nonce; or it has expired; or the leader has restarted
                    nonce = await _fetch_challenge(connection)
                    status, data, fresh = await _send_signed(polled, connection, method, target, body, nonce, hold)
        except (RequestRejected, OSError, ValueError) as error:
            raise LeaderAnswerError(f"{type(error).__name__}: {error}") from error
        finally:
            if own_nonce or len(self._jobs) > self._limit:
                connection.close()
        if status != 200:
            kind = CommandUnknown if status == 404 else LeaderAnswerError
            raise kind(f"{method} {target.partition('?')[0]}: {status}")
        if not own_nonce:
            polled.nonce = fresh
        return data


async def _fetch_challenge(connection: LeaderConnection) -> str:
    response = await connection.exchange(
        "GET", "/v1/challenge", {}, b"", max_bytes=MAX_CHALLENGE, seconds=ANSWER_SECONDS
    )
    if response.status != 200:
        connection.close()
        raise LeaderAnswerError(f"challenge: {response.status}")
    try:
        answer = json.loads(response.body)
    except RecursionError as error:
        raise LeaderAnswerError("challenge: not one of an agent") from error
    nonce = answer.get("nonce") if isinstance(answer, dict) else None
    if not isinstance(nonce, str) or not auth.is_nonce(nonce):
        raise LeaderAnswerError("challenge: no nonce in it")
    return nonce


async def _send_signed(
    polled: _PolledLeader, connection: LeaderConnection, method: str, target: str, body: bytes, nonce: str, hold: float
) -> tuple[int, bytes, str]:
    client, most = auth.new_nonce(), max_bytes(polled.poll.num_nodes)
    headers = auth.request_headers(polled.token, method, target, nonce, client, body)
    try:
        response = await connection.exchange(
            method, target, headers, body, max_bytes=most, seconds=hold + ANSWER_SECONDS
        )
    finally:
        polled.spent += connection.take_pieces() * SECONDS_A_PIECE
    polled.spent += len(response.body) * SECONDS_A_BYTE
    if response.status == 401:
        return 401, b"", ""
    mac = response.headers.get(auth.MAC_HEADER.lower(), "")
    with polled.spending():
        signed = auth.macs_equal(auth.response_mac(polled.token, response.status, client, response.body), mac)
    if not signed:
        connection.close()  # where the next answer would begin on it, nobody knows
        raise LeaderAnswerError("the answer is not signed with the job's token")
    fresh = response.headers.get(auth.NEXT_NONCE_HEADER.lower(), "")
    return response.status, response.body, fresh if auth.is_nonce(fresh) else ""


def _leader_identity(poll: LeaderPoll) -> tuple[str, str, int, int]:
    return poll.address, poll.pod_uid, poll.epoch, poll.template


def _strip_progress(view: LeaderView) -> LeaderView:
    """Return a view without how far the training is, and which step it has saved."""
    kept = view.checkpoint
    if kept is not None:
        kept = replace(kept, step=None, bytes=None, at=None)
    return replace(view, version=0, answered_at=None, progress=None, checkpoint=kept)
