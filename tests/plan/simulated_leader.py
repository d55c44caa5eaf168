"""The leader of a simulated job: it forms generations of whatever runs, and restarts as often as it may."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from everstep_operator.api.restart import ExitCodeAction
from everstep_operator.plan.leader_view import LeaderOutcome, ReportedGeneration


@dataclass
class SimulatedLeader:
    """Agent 0 of one pod: forms generations of whatever runs, and keeps the generation history."""

    epoch: int
    uid: str
    budget: int  # application restarts, before the operator says more
    generation: int = 0
    phase: str = "forming"
    members: tuple[str, ...] = ()
    history: list[ReportedGeneration] = field(default_factory=list)
    outcome: LeaderOutcome | None = None
    started_at: float | None = None
    step: int = 0
    charged: str = ""
    request: str = ""  # id of the newest request for a checkpoint
    request_due: float | None = None  # when the ranks have saved for it
    saved_step: int | None = None

    def end_generation(self, cause: str, now: float, **fields: object) -> None:
        entry = ReportedGeneration(id=f"{self.epoch}.{self.generation}", cause=cause, ended_at=now)
        self.history.append(dataclasses.replace(entry, **fields))  # type: ignore[arg-type]
        self.phase, self.members = "forming", ()

    def left(self, find_action: Callable[[int | None], ExitCodeAction]) -> int:
        """Application restarts that are still allowed."""
        known = [e.id for e in self.history]
        after = known.index(self.charged) + 1 if self.charged in known else 0
        failed = [e for e in self.history[after:] if e.cause == "Application"]
        return self.budget - sum(find_action(e.exit_code) is ExitCodeAction.RETRY for e in failed)
