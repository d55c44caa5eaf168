"""`spec.restart`: how often a job may be restarted, and what the exit codes of its program say about that."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, Strict

from everstep_operator.api.base import ApiModel
from everstep_operator.api.scalars import Atomic, Duration, Whole, limit_duration


class ExitCodeAction(StrEnum):
    """Names what follows a rank's exit with a code that `restart.onExitCodes` lists."""

    RETRY = "Retry"
    FAIL = "Fail"
    IGNORE = "Ignore"


class ExitCodeRule(ApiModel):
    """Says what follows when a rank exits with one of these codes."""

    codes: Annotated[list[Annotated[int, Field(ge=1, le=255), Whole]], Field(min_length=1, max_length=64), Atomic()]
    """Exit codes of the program. A rank that a signal has ended has 128 and the signal's number."""
    action: Annotated[ExitCodeAction, Strict(False)]
    """`Retry`: all ranks start again, and `application` pays. `Fail`: the job fails at once. `Ignore`: all ranks start
    again after the usual back-off, and no budget pays."""


class RestartPolicy(ApiModel):
    """Limits how often the job may be restarted. Pre-emption is never charged."""

    application: Annotated[int, Field(ge=0, le=1000), Whole] = 3
    """Restarts within `window` that failures of the program may cause."""
    infrastructure: Annotated[int, Field(ge=0, le=1000), Whole] = 20
    """Restarts within `window` that lost pods and nodes may cause."""
    window: Annotated[Duration, limit_duration("1s", "28d")] = timedelta(hours=1)
    """The period over which restarts are counted."""
    reset_after: Annotated[Duration, limit_duration("1s", "28d")] | None = None
    """Time of progress after which earlier restarts do not count any more, within `window` too. Progress begins with
    the first step beyond all that were made before the last restart; the program must report its steps. Absent: only
    `window` lets restarts expire."""
    on_exit_codes: Annotated[list[ExitCodeRule], Field(max_length=16), Atomic()] = Field(default_factory=list)
    """Rules for ranks that exit with certain codes. The first rule that lists a code decides; a code that none lists is
    `Retry`. Ranks that are killed for memory, or hang, are charged whatever their exit code."""
    fencing: Literal["checkpoint", "strict"] = "checkpoint"
    """Stops ranks without a connection to the leader from publishing checkpoints, or with `strict` from running."""
    max_backoff: Annotated[Duration, limit_duration("0s", "1h")] = timedelta(minutes=1)
    """Longest pause before a restart after repeated failures of the program; `0s` disables pauses, but for one
    second before restarts that `onExitCodes` ignores."""

    def find_action(self, exit_status: int | None) -> ExitCodeAction:
        """Return what follows an exit of the program.

        Args:
            exit_status: The exit code, or 128 and the number of the signal; None: it is not known.
        """
        found = (rule.action for rule in self.on_exit_codes if exit_status in rule.codes)
        return next(found, ExitCodeAction.RETRY)
