"""The operator's own configuration, as far as plans depend on it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """The operator's own configuration, as far as plans depend on it. Allow-lists are exact names; "*" allows all."""

    agent_digest: str = "0" * 64  # SHA-256 of agent.pyz
    operator_key: bytes = field(default=b"", repr=False)  # names the jobs' Secrets, and signs their templates
    previous_keys: tuple[bytes, ...] = field(default=(), repr=False)  # by which earlier ones still hold
    cluster_domain: str = "cluster.local"
    agent_port: int = 8470
    fence_timeout: float = 40.0
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

    @property
    def operator_keys(self) -> tuple[bytes, ...]:
        """Return all keys that hold, the current one first."""
        return (self.operator_key, *self.previous_keys)

    @property
    def agent_config_map(self) -> str:
        return f"everstep-agent-{self.agent_digest[:12]}"
