"""Lay a user's partial pod spec over ours, the way `kubectl patch --type=strategic` merges.

Objects merge field by field; lists of named things merge by their key, in our order and then the user's; tolerations
and other plain lists are appended or replaced as in the Kubernetes API's own patch strategies
(https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/).
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from typing import Any

# patchMergeKey of k8s.io/api/core/v1/types.go, by field name; the names are unambiguous inside a pod spec.
_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
    "ports": "containerPort",
}
# Lists without a key in the API: a user adds to these. Losing ours would lose the pool's nodes, the job's DNS, or the
# credentials of its checkpoints.
_APPENDED = frozenset({"envFrom", "tolerations", "searches", "nameservers", "options", "supplementalGroups"})
# Exactly one source is allowed in a volume, one `valueFrom` or `value` in a variable: theirs replaces ours as a whole.
_REPLACED = frozenset({"volumes", "env"})


def merge_overlay(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return a new object: `base` with `over` laid on top. A null in `over` removes the field. Neither input is
    changed."""
    merged = dict(base)
    for name, value in over.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, Mapping):
            below = merged.get(name)
            merged[name] = merge_overlay(below if isinstance(below, Mapping) else {}, value)
        elif isinstance(value, list):
            below = merged.get(name)
            merged[name] = _merge_lists(name, below if isinstance(below, list) else [], value)
        else:
            merged[name] = value
    return merged


def _merge_lists(name: str, base: list[Any], over: list[Any]) -> list[Any]:
    if name in _APPENDED:
        return base + [item for item in over if item not in base]
    key = _KEYS.get(name)
    if key is None:
        return list(over)
    merged: dict[Any, Any] = {_merge_key(item, key, number): item for number, item in enumerate(base)}
    ours = set(merged)
    for number, item in enumerate(over, len(base)):
        at = _merge_key(item, key, number)
        if at in ours:
            merged[at] = item if name in _REPLACED else {**merge_overlay(merged[at], item), key: merged[at][key]}
            ours.discard(at)
        else:
            # The user's own items are not merged with each other: one port may be of two protocols, and one key of
            # two spread constraints.
            merged[at if at not in merged else ("again", number)] = item
    return list(merged.values())


def _merge_key(item: Any, key: str, number: int) -> Any:
    """Return the key by which an item merges. One without a name stands alone: the API server will say what is wrong
    with it."""
    name = item.get(key) if isinstance(item, Mapping) else None
    if key == "mountPath" and isinstance(name, str):
        return normalize_mount_path(name)
    return name if isinstance(name, (str, int)) else ("unnamed", number)


def normalize_mount_path(path: str) -> str:
    """Return one spelling for all paths that a container runtime takes for the same mount point.

    Args:
        path: A `mountPath`; one that is not absolute is for the API server to reject.

    Returns:
        The path without a slash at its end, doubled slashes, and steps such as `.`.
    """
    return posixpath.normpath("/" + path.lstrip("/")) if path.startswith("/") else path
