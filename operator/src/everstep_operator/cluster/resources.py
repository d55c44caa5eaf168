"""The kinds of objects the operator touches, and their paths. RBAC in the chart lists exactly these."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote


@dataclass(frozen=True, slots=True)
class ApiResource:
    """A resource type as the API server addresses it."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, sub: str | None = None) -> str:
        """Return the URL path of the collection, of one object, or of its subresource; without a namespace, of all
        namespaces."""
        parts = ["/apis", self.group, self.version] if self.group else ["/api", self.version]
        if namespace and self.namespaced:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        if name:
            parts.append(quote(name, safe=""))
        if sub:
            parts.append(sub)
        return "/".join(parts)


GROUP = "everstep.dev"

JOBS = ApiResource(GROUP, "v1alpha1", "trainingjobs", "TrainingJob")
POOLS = ApiResource(GROUP, "v1alpha1", "trainingpools", "TrainingPool", namespaced=False)
PODS = ApiResource("", "v1", "pods", "Pod")
NODES = ApiResource("", "v1", "nodes", "Node", namespaced=False)
SERVICES = ApiResource("", "v1", "services", "Service")
SECRETS = ApiResource("", "v1", "secrets", "Secret")
CONFIG_MAPS = ApiResource("", "v1", "configmaps", "ConfigMap")
EVENTS = ApiResource("", "v1", "events", "Event")
CLAIMS = ApiResource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
BUDGETS = ApiResource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
LEASES = ApiResource("coordination.k8s.io", "v1", "leases", "Lease")
