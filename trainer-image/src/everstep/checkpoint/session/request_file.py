"""Looks for a request to save that comes from outside: a file that the agent writes for all ranks of its node."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger("everstep.checkpoint")

VARIABLE = "EVERSTEP_CHECKPOINT_REQUEST"
PERIOD = 1.0  # seconds between two looks
_handled: set[str] = set()  # ids that this process has asked for


@dataclass(frozen=True)
class OutsideRequest:
    """A request of the job's leader, as when a node is about to go away."""

    id: str
    seconds: float | None  # left for the save; None: no hurry


class RequestFile:
    """Looks at most once a second, by one `stat`, whether a request has come.

    Each of several in one process takes it; one that is made later does not, as a session that begins anew.

    Args:
        path: The file; None: there is no agent, and no request comes.
        clock: Monotonic seconds.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._look_at = float("-inf") if path is not None else float("inf")
        self._was_there = False
        self._seen: tuple[int, int] | None = None
        self._handled = set(_handled)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> RequestFile:
        """Return that of this process's agent, whose path is in `EVERSTEP_CHECKPOINT_REQUEST`."""
        path = environment.get(VARIABLE)
        return cls(Path(path) if path else None)

    def is_gone(self) -> bool:
        """Tell whether a request was seen and is there no more: the ranks are being stopped."""
        is_there = self._path is not None and self._path.exists()
        self._was_there |= is_there
        return self._was_there and not is_there

    def take(self) -> OutsideRequest | None:
        """Return a request that has come since the last look, once; None where there is none, or it is too late."""
        now = self._clock()
        if self._path is None or now < self._look_at:
            return None
        self._look_at = now + PERIOD
        try:
            found = os.stat(self._path)  # noqa: PTH116 - in every step of a training
            seen = (found.st_ino, found.st_mtime_ns)
            if seen == self._seen:
                return None
            self._seen = seen
            said = json.loads(self._path.read_bytes())
            name, deadline = str(said["id"]), said["deadline"]
            seconds = None if deadline is None else float(deadline) - time.time()
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s cannot be read, so that no save is begun for it: %s", self._path, error)
            return None
        if name in self._handled or (seconds is not None and seconds <= 0):
            return None
        self._handled.add(name)
        _handled.add(name)
        return OutsideRequest(name, seconds)
