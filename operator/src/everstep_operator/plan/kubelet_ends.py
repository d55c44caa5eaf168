"""The reasons for which a kubelet ends a whole pod: it evicts it, or shuts down with its machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The condition has one reason for all that kubelets do. Its message is that of the kubelet's nodeshutdown manager.
_SHUTDOWN_WORDS = "node shutdown"
SHUTDOWN, EVICTED = "Terminated", "Evicted"


def find_kubelet_end(status: Mapping[str, Any]) -> str:
    """Return the kubelet's reason for ending a pod, or nothing if the pod has ended otherwise.

    By kubelets since 1.27, a pod whose containers all exit with 0 when they are told to stop is `Succeeded` and has no
    reason: the condition alone tells that they were told to.

    Args:
        status: The pod's, as the API server gives it.
    """
    if status.get("phase") == "Failed":
        return str(status.get("reason") or "")
    conditions = status.get("conditions") or ()
    target: Mapping[str, Any] = next((c for c in conditions if c.get("type") == "DisruptionTarget"), {})
    if target.get("status") != "True" or target.get("reason") != "TerminationByKubelet":
        return ""
    return SHUTDOWN if _SHUTDOWN_WORDS in str(target.get("message")) else EVICTED
