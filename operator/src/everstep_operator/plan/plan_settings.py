"""The operator's own configuration, as far as plans depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

# Keep node autoscalers from removing a machine under a job to save money: one pod less stops all ranks. Cluster
# Autoscaler (also GKE's), and Karpenter.
GUARD_ANNOTATIONS: Mapping[str, str] = MappingProxyType(
    {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
)


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """The operator's own configuration, as far as plans depend on it. Allow-lists are exact names; "*" allows all."""

    agent_digest: str = "0" * 64  # SHA-256 of agent.pyz
    operator_key: bytes = field(default=b"", repr=False)  # names the jobs' Secrets, and signs their templates
    previous_keys: tuple[bytes, ...] = field(default=(), repr=False)  # by which earlier ones still hold
    cluster_domain: str = "cluster.local"
    agent_port: int = 8470
    fence_timeout: float = 35.0
    termination_grace: int = 120  # seconds, unless the template says otherwise
    # Seconds until pods of an unreachable node are evicted. Their ranks may well train on meanwhile: a kubelet that is
    # updated is back within minutes, and an eviction that nobody confirms frees no node before.
    node_lost_toleration: int = 300
    service_accounts: frozenset[str] = frozenset({"default"})
    priority_classes: frozenset[str] = frozenset({"*"})
    host_fields: frozenset[str] = (
        frozenset()
    )  # hostNetwork, hostPID, hostIPC, hostPath, hostPort, privileged, automountServiceAccountToken
    copied_labels: frozenset[str] = frozenset(
        {
            f"app.kubernetes.io/{name}" for name in ("name", "part-of", "component", "version")
        }  # never "instance": Argo CD's
    )

    pod_annotations: Mapping[str, str] = field(default_factory=lambda: GUARD_ANNOTATIONS)  # unless the template's
    disruption_budget: bool = False  # a PodDisruptionBudget guards each running job

    out_of_service_taint: bool = False  # dead nodes whose volumes have to be detached are tainted

    @property
    def operator_keys(self) -> tuple[bytes, ...]:
        """Return all keys that hold, the current one first."""
        return (self.operator_key, *self.previous_keys)

    @property
    def agent_config_map(self) -> str:
        return f"everstep-agent-{self.agent_digest[:12]}"
