"""The part of the operator on a laptop: introduces the agents to their leader, polls it, and shows what it says."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from everstep.cli.errors import CliError
from everstep.cli.live import LiveScreen
from everstep.cli.local import EPOCH, LocalAgents, lock_base_folder
from everstep.cli.local_checkpoints import LocalCheckpoints, find_default_base
from everstep.cli.prepare import PreparedJob
from everstep.cli.story import StateNarrator
from everstep.cli.terminal import format_duration

START_SECONDS = 30.0
POLL_SECONDS = 1.0  # a long poll; Ctrl-C is looked at in between
MIN_PAUSE = 0.1
LEAVE_SECONDS = 15.0  # an agent's own last word, after the ranks have ended
INTERRUPTED_EXIT_CODE = 130


class LocalRun:
    """One run of one job."""

    def __init__(self, prepared: PreparedJob, base: Path | None, *, anew: bool = False) -> None:
        """Prepare a run.

        Args:
            prepared: The job.
            base: The folder of its files; None for one that belongs to its manifest.
            anew: Whether to leave behind the checkpoints of an earlier run that did not succeed.

        Raises:
            CliError: There is no folder to be had.
        """
        self._prepared = prepared
        try:
            self._base = base.absolute() if base else find_default_base(prepared.name, prepared.file, anew=anew)
        except OSError as error:
            raise CliError(f"no temporary folder can be made ({error.strerror}): give a folder with --base") from error
        self._anew = anew
        self._story = StateNarrator(prepared.restarts, prepared.ignored_codes, prepared.window_seconds)
        self._interrupts = 0
        self._stop_sent = False
        self._ended_first: int | None = None  # the node whose agent ended before the job did

    def run(self) -> int:
        """Run the job and return its exit code; 130 if it was interrupted.

        Raises:
            CliError: The base cannot be used, or the agents cannot be reached.
        """
        from everstep.agent_zip import build_zipapp

        started = time.time()
        agent = self._base / "agent.pyz"
        with lock_base_folder(self._base) as lock, LiveScreen(self._prepared.name) as screen, self._signals():
            try:
                agent.write_bytes(build_zipapp())
                checkpoints = LocalCheckpoints(self._base, self._prepared.checkpoint, anew=self._anew)
                checkpoints.claim(self._prepared.name)
                for note in (*self._prepared.notes, *checkpoints.list_notes()):
                    screen.say(note)
                job = self._prepared.local.with_variables(checkpoints.make_variables())
                agents = LocalAgents(job, self._base, agent, screen.log, lock)
            except OSError as error:
                where = error.filename or self._base
                raise CliError(
                    f"{where}: {error.strerror}: make room there, or give another folder with --base"
                ) from error
            try:
                self._follow(agents, screen)
                if not self._await_agents(agents) and self._interrupts < 2:
                    screen.say("an agent did not exit; killing it")
            finally:
                if None in agents.exit_codes:
                    agents.kill()
            code = self._verdict(agents, screen)
            if code == 0:
                checkpoints.note_success()
            for line in self._summary(started, time.time()):
                screen.say(line)
        return code

    def _follow(self, agents: LocalAgents, screen: LiveScreen) -> None:
        """Poll the leader until it has told the outcome, or has ended."""
        from everstep.agent.wire.http_client import RequestRejected
        from everstep.cli.leader_client import LeaderClient

        leader = LeaderClient(agents.addresses[0], agents.token)
        peers = {index: address for index, address in agents.addresses.items() if index}
        introduced = False
        deadline = time.monotonic() + START_SECONDS
        while self._story.outcome is None and self._interrupts < 2:
            asked = time.monotonic()
            try:
                if not introduced:
                    leader.peers(EPOCH, peers)
                    introduced = True
                if self._interrupts and not self._stop_sent:
                    leader.stop("interrupted")
                    self._stop_sent = True
                    screen.say("stopping; press Ctrl-C again to kill the ranks")
                state = leader.state(self._story.after, POLL_SECONDS, self._story.charged, self._story.allowance)
            except OSError as error:
                if agents.exit_codes[0] is not None or time.monotonic() > deadline:
                    if self._story.state or agents.exit_codes[0] is not None:
                        return
                    raise CliError(f"the leader is unavailable: {error}") from None
                time.sleep(0.05)
                continue
            except RequestRejected as error:
                raise CliError(f"the leader rejected the request: {error}") from None
            deadline = time.monotonic() + START_SECONDS
            for sentence in self._story.feed(state):
                screen.say(sentence)
            screen.show(state)
            # On a cluster the operator would replace the pod; here nobody does.
            gone = [index for index, code in enumerate(agents.exit_codes) if code is not None]
            if self._story.outcome is None and gone:
                self._ended_first = gone[0]
                screen.say(f"the agent of node {gone[0]} ended unexpectedly")
                return
            time.sleep(max(0.0, MIN_PAUSE - (time.monotonic() - asked)))

    def _await_agents(self, agents: LocalAgents) -> bool:
        """Wait, and return whether all agents ended in time: what was saved last may be on its way after a success."""
        from everstep.agent.wire.http_client import RequestRejected
        from everstep.cli.leader_client import LeaderClient

        has_succeeded = (self._story.outcome or {}).get("result") == "succeeded"
        grace = self._prepared.local.config["stopGraceSeconds"] if has_succeeded else 0.0
        until = time.monotonic() + LEAVE_SECONDS + grace
        leader = LeaderClient(agents.addresses[0], agents.token)
        while self._interrupts < 2 and time.monotonic() < until:
            with contextlib.suppress(OSError, RequestRejected):  # it ends; until then its lease goes on
                leader.state(charged=self._story.charged, allowance=self._story.allowance)
            if agents.wait(POLL_SECONDS):
                return True
        return False

    def _verdict(self, agents: LocalAgents, screen: LiveScreen) -> int:
        # Without an outcome, whoever ended first knows why; the others were told to.
        outcome: dict[str, Any] = self._story.outcome or agents.read_termination_message(self._ended_first or 0)
        result = outcome.get("result")
        code = int(outcome.get("exitCode") or 0)
        message = f": {outcome['message']}" if outcome.get("message") else ""
        if self._interrupts:
            screen.say("stopped" if result == "stopped" else "killed")
            return INTERRUPTED_EXIT_CODE
        if result == "succeeded":
            screen.say("succeeded", "green")
            return 0
        if result == "left":  # the agent itself; on a cluster its pod would be replaced
            result = "failed"
        who = f"the agent of node {self._ended_first}" if self._ended_first else "the leader"
        screen.say(f"{result or f'failed: {who} exited without a message'}{message} (exit code {code or 1})", "red")
        return code or 1

    def _summary(self, started: float, ended: float) -> Iterator[str]:
        words = [f"{format_duration(ended - started)} in all"]
        if self._story.ranks_started is not None:
            words.append(
                f"{format_duration(max(0.0, self._story.ranks_started - started))} until the first ranks were started"
            )
        words.append("1 restart" if self._story.restarts == 1 else f"{self._story.restarts} restarts")
        if (step := self._story.progress.get("step")) is not None:
            words.append(f"step {step}")
        yield ", ".join(words)
        yield f"files: {self._base}/node-*/ml"

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def interrupt(number: int, frame: FrameType | None) -> None:
            self._interrupts += 1

        heard = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        # What was ignored before stays so: `nohup` means that a closed terminal ends nothing.
        previous = {
            number: signal.signal(number, interrupt) for number in heard if signal.getsignal(number) != signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
