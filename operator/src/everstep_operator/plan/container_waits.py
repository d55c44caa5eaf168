"""Why a container of a pod that has a node is not started: its image, a Secret, a ConfigMap, as its kubelet says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_USUAL = ("", "ContainerCreating", "PodInitializing")


def find_container_wait(status: Mapping[str, Any], container: str) -> str:
    """Return why a container waits, as the kubelet says; nothing while it only takes its time.

    An init container that cannot start is what the others wait for.

    Args:
        status: The pod's, as the API server gives it.
        container: Name of the container that counts beside the init containers.
    """
    first = [(f"init container {each.get('name')}: ", each) for each in status.get("initContainerStatuses") or ()]
    own = [("", each) for each in status.get("containerStatuses") or () if each.get("name") == container]
    if any({"running", "terminated"} & (each.get("state") or {}).keys() for _, each in own):
        return ""  # a sidecar that starts over and over beside it is none of the job's
    for which, each in (*first, *own):
        state: Mapping[str, Any] = each.get("state") or {}
        waiting: Mapping[str, Any] = state.get("waiting") or {}
        if (reason := str(waiting.get("reason") or "")) not in _USUAL:
            return f"{which}{reason} {waiting.get('message') or ''}".rstrip()
    return ""
