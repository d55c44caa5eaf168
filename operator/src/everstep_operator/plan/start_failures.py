"""Limits how often agents fail at their start: an unreadable configuration, a port in use, a container killed before it
joins, an init container that fails.

No generation has run, so no budget pays; without a limit of its own such a job would make pods until a timeout, and
say no more than "Starting". Attempts are told apart by the creation times of pods alone (the API server's clock).
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import StartFailures
from everstep_operator.plan import plain_mode
from everstep_operator.plan.observation import INIT_FAILED, PodView
from everstep_operator.plan.plan_context import PlanContext, to_utc

MAX_START_FAILURES = 5  # attempts in a row
BACKOFF_SECONDS = 10.0  # seconds between the pods of one attempt and the next, doubled with each
MAX_BACKOFF_SECONDS = 60.0
# Pods of one attempt are made within a few seconds, those of the next `BACKOFF_SECONDS` after them at the earliest.
_TOGETHER_SECONDS = BACKOFF_SECONDS / 2
_SIGTERM_EXIT_CODE = 143
# Reasons of containers that ended before an agent ran at all: what they need of their node or of a store lacks.
_WITHOUT_AGENT = plain_mode.NOT_STARTED | {INIT_FAILED}


@dataclass(frozen=True)
class StartRecord:
    """A count of failed starts, as it is on record after this pass."""

    record: StartFailures | None = None
    failed: PodView | None = None  # the first of those that lie there now
    fresh: bool = False  # counted in this look
    may_pass: bool = False  # what has failed has worked before

    @property
    def is_exhausted(self) -> bool:
        return self.record is not None and self.record.count >= MAX_START_FAILURES and not self.may_pass

    @property
    def message(self) -> str:
        """Return a message that names the pod, its node, the count, and what its agent said."""
        pod, end = self.failed, self.failed.ended if self.failed is not None else None
        if pod is None or end is None or self.record is None:
            return ""
        said = (end.word.message if end.word else end.message) or f"{end.reason}, exit code {end.exit_code}"
        most = "" if self.may_pass else f" of {MAX_START_FAILURES}"
        times = f"{self.record.count}{most} times in a row"
        who = "the pod" if end.reason in _WITHOUT_AGENT else "the agent"
        return f"{pod.name} on {pod.node}: {who} failed at its start ({times}): {said}"


def count_start_failures(s: PlanContext) -> StartRecord:
    """Count what failed since the last look. Pods that fail together are one failure."""
    known = s.status.start_failures
    if s.plain:
        return StartRecord()
    failed = [pod for pod in s.current.values() if has_failed_at_start(s, pod)]
    first = min(failed, key=lambda p: (p.ended.finished_at or s.now if p.ended else s.now, p.index), default=None)
    counted_until = known.made.timestamp() + _TOGETHER_SECONDS if known is not None else float("-inf")
    # A job that has trained is not lost to a store, or whatever else its init containers need, that is unavailable for
    # two minutes, nor to a node that starts no container: `timeouts.pending` and `timeouts.startup` end it.
    may_pass = s.has_run and all(pod.ended is not None and pod.ended.reason in _WITHOUT_AGENT for pod in failed)
    # So often a job has failed only where its failures were such: an agent that fails after them is the first to count.
    outlived = known is not None and known.count >= MAX_START_FAILURES
    if not any(pod.created > counted_until for pod in failed):
        more = known is not None and known.count > MAX_START_FAILURES
        return StartRecord(known, first, may_pass=may_pass or more)
    made = max(pod.created for pod in s.current.values())
    count = 1 if known is None or (outlived and not may_pass) else known.count + 1
    return StartRecord(StartFailures(count=count, made=to_utc(made)), first, fresh=True, may_pass=may_pass)


def compute_next_attempt(record: StartFailures | None) -> float:
    """Return when the failed pods of the last attempt may be created again, all of them together."""
    if record is None:
        return 0.0
    return record.made.timestamp() + min(MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2.0 ** min(record.count - 1, 10))


def find_failed_node(s: PlanContext) -> str | None:
    """Return the node of the last failed start, if the job's starts fail now: a scheduler that knows of no fault would
    choose it again, with its idle devices and the image."""
    failure = s.status.last_failure
    fails = s.status.start_failures is not None and failure is not None and failure.reason == Reason.START_FAILED.value
    return failure.node if fails and failure is not None else None


def has_failed_at_start(s: PlanContext, pod: PodView) -> bool:
    """Return whether the container, or an init container before it, ended by itself before its agent has joined a
    generation."""
    end = pod.ended
    if end is None or pod.deleting or pod.disruption is not None or end.exit_code in (None, 0, _SIGTERM_EXIT_CODE):
        return False
    if s.may_become_plain and plain_mode.find_agent_obstacle([pod]) is not None:
        return False  # it runs without the agent next
    if end.word is None:
        return s.status.generation == 0 or end.reason in _WITHOUT_AGENT
    return end.word.result == "left" and end.word.generation == 0
