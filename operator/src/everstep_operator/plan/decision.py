"""The decision of the policies, before it becomes a status and a plan."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import Disruption, LastFailure, Phase, Restarts, StartFailures, TemplateStatus
from everstep_operator.plan.actions import Action

_BY_NAME = {reason.value: reason for reason in Reason}


def parse_reason(name: str) -> Reason:
    """Return a reason that was read back. One that only a newer operator knows is as good as none."""
    return _BY_NAME.get(name, Reason.IN_PROGRESS)


@dataclass(frozen=True)
class Decision:
    """A new phase of the job and what follows from it. Fields left at None keep what the status says, unless said
    otherwise."""

    phase: Phase
    reason: Reason
    message: str = ""
    actions: tuple[Action, ...] = ()
    again: bool = False  # the same phase and reason begin anew: another attempt, with its own clock
    stalled: bool = False  # only a human can help
    epoch: int | None = None
    generation: int | None = None
    template: TemplateStatus | None = None
    plain_reason: tuple[Reason, str] | None = None
    restarts: Restarts | None = None
    last_failure: LastFailure | None = None
    start_failures: StartFailures | None = None  # this one is none, not "as it was"
    disruption: Disruption | None = None  # and so is this one
    requeue: tuple[float, ...] = field(default=())

    def with_fields(self, **fields: Any) -> Decision:
        return replace(self, **fields)

    def requeue_at(self, *times: float | None) -> Decision:
        return replace(self, requeue=(*self.requeue, *(t for t in times if t is not None)))

    def with_actions(self, *actions: Action | None) -> Decision:
        return replace(self, actions=(*self.actions, *(a for a in actions if a is not None)))
