"""The taint `node.kubernetes.io/out-of-service`, which has Kubernetes detach the volumes of a lost node at once.

Without it the attach-detach controller waits six minutes for a kubelet that does not answer. It believes whoever sets
the taint that nothing runs on the machine any more, and all pods are evicted from it. So the operator sets it only
where an administrator allows it, on a node that `node_loss` has declared dead, for a claim that two nodes cannot share.
It removes its own when the kubelet reports again, and leaves alone that of somebody else.

Reference: "Non-graceful node shutdown handling" in the documentation of Kubernetes.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

TAINT_KEY = "node.kubernetes.io/out-of-service"
TAINT_VALUE = "everstep"  # whose it is: Kubernetes looks at the key
CLOCK_SECONDS = 10.0  # by which the clocks of a node and of the API server may differ


def find_own_taint(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the operator's own out-of-service taint of a Node, as the API server gives it, or None."""
    return next((taint for taint in list_taints(raw) if is_own_taint(taint)), None)


def is_own_taint(taint: Mapping[str, Any]) -> bool:
    return taint.get("key") == TAINT_KEY and taint.get("value") == TAINT_VALUE


def list_taints(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((raw.get("spec") or {}).get("taints") or ())


def has_returned(raw: Mapping[str, Any]) -> bool:
    """Return whether a Node bears the operator's taint although its kubelet has reported it Ready since.

    Never raises on odd values.
    """
    taint = find_own_taint(raw)
    if taint is None:
        return False
    conditions = (raw.get("status") or {}).get("conditions") or ()
    ready: Mapping[str, Any] = next((each for each in conditions if each.get("type") == "Ready"), {})
    reported, added = _parse_time(ready.get("lastHeartbeatTime")), _parse_time(taint.get("timeAdded"))
    is_late = reported is not None and (added is None or reported > added + CLOCK_SECONDS)
    return ready.get("status") == "True" and is_late


def _parse_time(value: Any) -> float | None:
    try:
        return datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError):
        return None
