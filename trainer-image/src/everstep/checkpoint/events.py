"""Define the events and the figures that tell a run about its checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.checkpoint.format.keys import Key

_log = logging.getLogger("everstep.checkpoint")

EVENTS = ("saved", "restored", "fell_back", "stalled", "failed", "uncopied", "skipped")


@dataclass(frozen=True)
class CheckpointEvent:
    """An event in the life of a checkpoint.

    Attributes:
        name: One of EVENTS.
        key: The checkpoint that it is about, if any.
        why: Words for a person.
        details: By kind of event, in SI units.
    """

    name: str
    key: Key | None = None
    why: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        subject = f" step {self.key.step} (attempt {self.key.attempt})" if self.key else ""
        details = ", ".join(f"{name} {value}" for name, value in self.details.items())
        return f"checkpoint{subject} {self.name}" + "".join(f": {each}" for each in (self.why, details) if each)


Callback = Callable[[CheckpointEvent], None]


@dataclass
class Metrics:
    """Figures of this rank since its start; a plain snapshot of them is Checkpointer.metrics()."""

    saved: int = 0
    failed: int = 0
    skipped: int = 0
    fell_back: int = 0
    stalls: list[float] = field(default_factory=list)  # seconds that each save held up this rank
    first_stall: float | None = None  # the first one also plans and maps memory
    bytes: int = 0  # of the newest checkpoint, all ranks
    bandwidth: float | None = None  # bytes per second into the store, newest save
    duration: float | None = None  # seconds from filled to committed, newest save
    saved_at: float | None = None  # seconds since 1970

    def stalled(self, seconds: float) -> None:
        """Count one more save that held up this rank so long."""
        if self.first_stall is None:
            self.first_stall = seconds
        else:
            self.stalls = [*self.stalls[-99:], seconds]

    def snapshot(self) -> dict[str, float | int | None]:
        """Return names and figures, in seconds, bytes, bytes per second and counts; None for what is not known yet."""
        return {
            "saved": self.saved,
            "failed": self.failed,
            "skipped": self.skipped,
            "fell_back": self.fell_back,
            "stall_seconds": self.stalls[-1] if self.stalls else None,
            "first_stall_seconds": self.first_stall,
            "bytes": self.bytes,
            "bandwidth": self.bandwidth,
            "save_seconds": self.duration,
            "age_seconds": None if self.saved_at is None else max(0.0, time.time() - self.saved_at),
        }


class Events:
    """The callbacks that are registered for each event.

    Every event is logged too; a callback that raises ends no training.
    """

    def __init__(self) -> None:
        self._callbacks: dict[str, list[Callback]] = {name: [] for name in EVENTS}

    def on(self, name: str, callback: Callback) -> None:
        """Call back at every event of this name. ValueError for a name that is none of EVENTS."""
        if name not in self._callbacks:
            raise ValueError(f"no such event: {name!r}; there are {', '.join(EVENTS)}")
        self._callbacks[name].append(callback)

    def emit(self, event: CheckpointEvent) -> None:
        """Log the event and call its callbacks."""
        level = logging.INFO if event.name in ("saved", "restored") else logging.WARNING
        _log.log(level, "%s", event)
        for callback in self._callbacks[event.name]:
            try:
                callback(event)
            except Exception:
                _log.exception("a callback of %s", event.name)
