"""Every right the operator uses: the chart's roles are compared with this table, and this table with the audit log of a
real API server (tests/integration/test_rbac.py). A verb that is not here is not granted.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Scope = Literal["jobs", "cluster", "own"]


class Right(NamedTuple):
    verb: str
    group: str
    resource: str
    scope: Scope  # where jobs are (all namespaces, or the watched ones) | without a namespace | the operator's own


def _rights(scope: Scope, group: str, resource: str, *verbs: str) -> list[Right]:
    return [Right(verb, group, resource, scope) for verb in verbs]


USED: frozenset[Right] = frozenset(
    [
        *_rights("jobs", "everstep.dev", "trainingjobs", "get", "list", "watch", "delete"),
        *_rights("jobs", "everstep.dev", "trainingjobs/status", "patch"),
        *_rights("jobs", "", "pods", "create", "get", "list", "watch", "delete"),
        *_rights("jobs", "", "services", "create", "get"),
        *_rights("jobs", "", "secrets", "create", "delete"),  # never get: a token is derived, not read
        *_rights("jobs", "", "configmaps", "create", "get", "list", "delete"),
        *_rights("jobs", "", "events", "create", "list"),
        *_rights("cluster", "everstep.dev", "trainingpools", "list", "watch"),
        *_rights("cluster", "", "nodes", "get", "list", "watch"),
        *_rights("own", "coordination.k8s.io", "leases", "create", "get", "update"),
        *_rights("own", "", "secrets", "create"),
    ]
)

# No request of ours: the admission plug-in OwnerReferencesPermissionEnforcement (on by default in OpenShift) asks
# whether whoever sets `blockOwnerDeletion` may update the owner's finalizers.
CHECKED_BY_ADMISSION: frozenset[Right] = frozenset(_rights("jobs", "everstep.dev", "trainingjobs/finalizers", "update"))
