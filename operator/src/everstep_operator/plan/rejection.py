"""An action of a plan that the API server has rejected."""

from __future__ import annotations

from dataclasses import dataclass

from everstep_operator.plan.actions import Action, EnsureAgent, EnsureSecret, EnsureService, EnsureTemplate


@dataclass(frozen=True, slots=True)
class Rejection:
    """The API server refused an action in this very reconcile; the plan is made again with this knowledge."""

    action: Action
    # Invalid (422) | Forbidden (403) | Quota (403 of a ResourceQuota) | Conflict (a foreign object)
    # | Webhook (one that is unavailable)
    kind: str
    message: str

    @property
    def told(self) -> str:
        """Return the message with the object that was rejected, which an admission webhook does not name."""
        if self.kind == "Conflict":
            return self.message  # the operator's own, which names it
        match self.action:
            case EnsureService(name):
                return f"Service {name}: {self.message}"
            case EnsureSecret(name):
                return f"Secret {name}: {self.message}"
            case EnsureTemplate(name) | EnsureAgent(name):
                return f"ConfigMap {name}: {self.message}"
        return self.message
