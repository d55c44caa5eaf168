"""Tells what happened, out of a leader's successive states (`/v1/state` of docs/design/001-training-job.md)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

# Who pays, as the operator counts it; the rest is free.
_PLACES = {"memory": "memory", "peer": "another node's memory", "store": "the store"}
APPLICATION = frozenset({"Application", "OutOfMemory", "Hang"})


@dataclass
class StateNarrator:
    """A narrator that is fed with states, says what is new, and counts restarts the way the operator does."""

    allowed: int
    ignored_codes: frozenset[int] = frozenset()  # exit codes whose restarts are not charged
    window_seconds: float = float("inf")  # for which a restart counts
    clock: Callable[[], float] = time.monotonic
    charged: str = ""  # newest ended generation seen
    state: dict[str, Any] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)  # the newest that any state had
    ranks_started: float | None = None  # seconds since the epoch, of the first generation
    _restored: str = ""  # the newest generation that said what it began from
    _charges: list[float] = field(default_factory=list)  # when restarts were charged

    @property
    def allowance(self) -> int:
        """Return the restarts left that failures of the program may cost."""
        return max(0, self.allowed - self._count_charges())

    @property
    def restarts(self) -> int:
        """Return the number of generations after the first one."""
        return max(0, int(self.state.get("generation", 0)) - 1)

    @property
    def after(self) -> str:
        return f"{self.state['incarnation']}:{self.state['version']}" if self.state else ""

    @property
    def outcome(self) -> dict[str, Any] | None:
        return self.state.get("outcome")

    def feed(self, state: Mapping[str, Any]) -> Iterator[str]:
        """Yield sentences about what is new in this state."""
        self.state = dict(state)
        self.progress = dict(state.get("progress") or self.progress)
        if self.ranks_started is None and state.get("ranksStartedAt"):
            self.ranks_started = float(state["ranksStartedAt"])
        for entry in state.get("generationHistory", []):
            if _parse_token(entry["id"]) <= _parse_token(self.charged):
                continue
            self.charged = entry["id"]
            yield f"generation {entry['id']} ended: {describe_cause(entry)}{self._paid(entry)}"
        restored = (state.get("checkpoint") or {}).get("restored")
        if restored and restored["id"] != self._restored:
            self._restored = restored["id"]
            if restored["step"] or restored.get("lostSteps"):
                yield describe_restore(restored)

    def _paid(self, entry: Mapping[str, Any]) -> str:
        if entry["cause"] not in APPLICATION:
            return ""
        if entry["cause"] == "Application" and entry.get("exitCode") in self.ignored_codes:
            return " (not charged)"
        self._charges.append(self.clock())
        is_allowed = self._count_charges() <= self.allowed
        return f" ({self.allowance} of {self.allowed} restarts left)" if is_allowed else ""

    def _count_charges(self) -> int:
        since = self.clock() - self.window_seconds
        return sum(at > since for at in self._charges)


def describe_cause(entry: Mapping[str, Any]) -> str:
    """Return one line about an ended generation."""
    words = entry["cause"]
    if entry.get("rank") is not None:
        words += f", rank {entry['rank']}"
    if entry.get("signal") is not None:
        words += f", signal {entry['signal']}"
    elif entry.get("exitCode") is not None:
        words += f", exit code {entry['exitCode']}"
    return f"{words}: {entry['message']}" if entry.get("message") else str(words)


def describe_restore(restored: Mapping[str, Any]) -> str:
    """Return one line about what a generation began from."""
    tier = f" from {_PLACES[restored['tier']]}" if restored.get("tier") in _PLACES else ""
    took = f" in {restored['seconds']:.2f} s" if restored.get("seconds") is not None else ""
    lost = f"; {restored['lostSteps']} steps are trained again" if restored.get("lostSteps") else ""
    return f"generation {restored['id']} continues from step {restored['step']}{tier}{took}{lost}"


def _parse_token(identity: str) -> tuple[int, int]:
    epoch, _, generation = identity.partition(".")
    return (int(epoch), int(generation)) if identity else (0, 0)
