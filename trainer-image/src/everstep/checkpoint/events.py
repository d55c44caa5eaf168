"""Define the events and the figures that tell a run about its checkpoints."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.host.interruptions import raise_interruption
from everstep.progress import get_last_step, report_checkpoint

_log = logging.getLogger("everstep.checkpoint")

_REPEATED_SECONDS = 60.0  # a step may take milliseconds, and each may find the same save in its way

EVENTS = ("saved", "restored", "fell_back", "stalled", "failed", "copy_failed", "skipped")


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

    @property
    def newest_stall(self) -> float | None:
        """Return how many seconds the newest save held up this rank; None before the first."""
        return self.stalls[-1] if self.stalls else self.first_stall

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


class JobReport:
    """The report of a run's checkpoints to the status of its everstep job.

    What a session has restored is told once it trains: a job's ranks, and processes that they start, also read
    checkpoints of other runs, whose steps are not the job's.
    """

    def __init__(self, *, trains: bool = True, every: float | None = None) -> None:
        """Begin a report.

        Args:
            trains: Whether it is known already that what is restored is trained on; else see begin_training().
            every: Seconds between two saves; None where they do not go by time. Saves that a script makes by itself
                do not, whatever it says.
        """
        self._failed = 0  # saves, since the last one that was stored
        self._passed_over = 0  # checkpoints, in the restore that goes on
        self._trains = trains
        self._restored: dict[str, int | str] | None = None  # not told yet
        self._every = 0 if every is None else max(1, round(every))

    def tell(self, event: CheckpointEvent) -> None:
        """Tell the agent of an event, if there is an agent and its job's status shows such events."""
        if event.name == "failed":
            self._failed += 1
            self._report(checkpoints_failed=self._failed)
        elif event.name == "fell_back":
            self._passed_over += 1
        elif event.name == "saved" and event.key is not None:
            self._failed = 0
            size, stall = event.details.get("bytes"), event.details.get("stall_seconds")
            self._report(
                checkpoint=event.key.step,
                checkpoints_failed=0,
                **({} if size is None else {"checkpoint_bytes": int(size)}),
                **({} if stall is None else {"stall_ms": round(1000 * stall)}),
            )
        elif event.name == "restored" and event.key is not None:
            passed_over, self._passed_over = self._passed_over, 0
            details = event.details
            tier = {"restored_from": details["tier"]} if "tier" in details else {}
            took = {"restored_ms": round(1000 * details["seconds"])} if "seconds" in details else {}
            step = event.key.step
            self._tell_restored({"restored": step, "checkpoint": step, "restored_over": passed_over, **tier, **took})

    def tell_empty(self) -> None:
        """Tell that training begins without a checkpoint."""
        self._tell_restored({"restored": 0})

    def begin_training(self) -> None:
        """Tell what was restored, now and from here on."""
        self._trains = True
        restored, self._restored = self._restored, None
        self._report(**(restored or {}), save_every=self._every if self in _stepping else 0)

    def tell_step(self, step: int) -> None:
        """Tell how far training is, by a session that looks for requests to save in each step."""
        begins = self not in _stepping
        _stepping.add(self)
        self._report(trained_step=step, **({"save_every": self._every} if begins else {}))

    def tell_saved_step(self, step: int) -> None:
        """Tell how far training is, by who saves by itself: no more often, where nobody tells it in each step."""
        if not _stepping:
            at = get_last_step()  # what progress counts may be batches, of which it tells more often
            self._report(trained_step=step, **({} if at is None else {"progress_step": at}))

    def end_training(self) -> None:
        """Tell that this session looks for requests no more."""
        if self in _stepping:
            _stepping.discard(self)
            self._report()

    def _report(self, **words: int | str) -> None:
        report_checkpoint(**words, takes_requests=int(bool(_stepping)))

    def _tell_restored(self, words: dict[str, int | str]) -> None:
        self._restored = words
        if self._trains:
            self.begin_training()


_stepping: weakref.WeakSet[JobReport] = weakref.WeakSet()  # of this process; a session that only saves is beside them


class Events:
    """The callbacks that are registered for each event.

    Every event is logged too; a callback that raises ends no training.
    """

    def __init__(self, *, reports: bool = True, trains: bool = True, every: float | None = None) -> None:
        """Begin without callbacks.

        Args:
            reports: Whether the status of an everstep job is to show them; one rank of a run is enough.
            trains: See JobReport.
            every: See JobReport.
        """
        self._callbacks: dict[str, list[Callback]] = {name: [] for name in EVENTS}
        self._report = JobReport(trains=trains, every=every) if reports else None
        self._stalled: tuple[CheckpointEvent, float] | None = None  # the one that was logged last, and when

    def on(self, name: str, callback: Callback) -> None:
        """Call back at every event of this name. ValueError for a name that is none of EVENTS."""
        if name not in self._callbacks:
            raise ValueError(f"no such event: {name!r}; there are {', '.join(EVENTS)}")
        self._callbacks[name].append(callback)

    def tell_restored(self, key: Key | None, fell_back: Mapping[str, str], figures: Mapping[str, Any]) -> None:
        """Tell where training goes on from, with the newer checkpoints that were bad.

        Args:
            key: The checkpoint; None where training begins without one, which the status of an everstep job tells.
            fell_back: Reasons, by the keys of those that were bad.
            figures: Of the restore.
        """
        for bad, why in fell_back.items():
            self.emit(CheckpointEvent("fell_back", Key.parse(bad), why))
        if key is not None:
            self.emit(CheckpointEvent("restored", key, "", figures))
        elif self._report is not None:
            self._report.tell_empty()

    def begin_training(self) -> None:
        """Tell the status of an everstep job what was restored: training goes on from there."""
        if self._report is not None:
            self._report.begin_training()

    def tell_step(self, step: int) -> None:
        """Tell the leader of an everstep job how far training is, which is compared with the steps of checkpoints."""
        if self._report is not None:
            self._report.tell_step(step)

    def tell_saved_step(self, step: int) -> None:
        """Tell the leader of an everstep job at which step training saves by itself."""
        if self._report is not None:
            self._report.tell_saved_step(step)

    def end_training(self) -> None:
        """Tell the leader of an everstep job that nobody meets its requests to save any more."""
        if self._report is not None:
            self._report.end_training()

    def emit(self, event: CheckpointEvent) -> None:
        """Log the event, and call its callbacks. What stalls for the same reason again is logged once a minute."""
        if not self._is_repeated(event):
            level = logging.INFO if event.name in ("saved", "restored") else logging.WARNING
            _log.log(level, "%s", event)
        if self._report is not None:
            self._report.tell(event)
        for callback in self._callbacks[event.name]:
            try:
                callback(event)
            except Exception as error:
                raise_interruption(error)
                _log.exception("a callback of %s", event.name)

    def _is_repeated(self, event: CheckpointEvent) -> bool:
        if event.name != "stalled":
            return False
        now = time.monotonic()
        if self._stalled is not None and self._stalled[0] == event and now < self._stalled[1] + _REPEATED_SECONDS:
            return True
        self._stalled = event, now
        return False
