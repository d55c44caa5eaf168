"""Every right the operator uses: the chart's roles are compared with this table, and this table with the audit log of a
real API server (tests/integration/test_rbac.py). A verb that is not here is not granted.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Scope = Literal["jobs", "budgets", "cluster", "taints", "node-leases", "own"]


class Permission(NamedTuple):
    verb: str
    group: str
    resource: str
    # Where jobs are (all namespaces, or the watched ones) | there, with `disruption_budget`
    # | without a namespace | likewise, with `out_of_service_taint` | kube-node-lease | the operator's own.
    scope: Scope


def _make_permissions(scope: Scope, group: str, resource: str, *verbs: str) -> list[Permission]:
    return [Permission(verb, group, resource, scope) for verb in verbs]


USED_PERMISSIONS: frozenset[Permission] = frozenset(
    [
        *_make_permissions("jobs", "everstep.dev", "trainingjobs", "get", "list", "watch", "delete"),
        *_make_permissions("jobs", "everstep.dev", "trainingjobs/status", "patch"),
        *_make_permissions("jobs", "", "pods", "create", "get", "list", "watch", "delete"),
        *_make_permissions("jobs", "", "services", "create", "get", "patch"),
        *_make_permissions("jobs", "", "secrets", "create", "delete"),  # never get: a token is derived, not read
        *_make_permissions("jobs", "", "configmaps", "create", "get", "list", "delete"),
        *_make_permissions("jobs", "", "persistentvolumeclaims", "get"),
        *_make_permissions("jobs", "", "events", "create", "list"),
        *_make_permissions("budgets", "policy", "poddisruptionbudgets", "create", "get", "list", "delete"),
        *_make_permissions("cluster", "everstep.dev", "trainingpools", "list", "watch"),
        *_make_permissions("cluster", "", "nodes", "get", "list", "watch"),
        *_make_permissions("taints", "", "nodes", "patch"),
        *_make_permissions("node-leases", "coordination.k8s.io", "leases", "get"),
        *_make_permissions("own", "coordination.k8s.io", "leases", "create", "get", "update"),
        *_make_permissions("own", "", "secrets", "create"),
        *_make_permissions("own", "", "configmaps", "create", "get", "update"),
    ]
)

# No request of ours: the admission plug-in OwnerReferencesPermissionEnforcement (on by default in OpenShift) asks
# whether whoever sets `blockOwnerDeletion` may update the owner's finalizers.
CHECKED_BY_ADMISSION: frozenset[Permission] = frozenset(
    _make_permissions("jobs", "everstep.dev", "trainingjobs/finalizers", "update")
)
