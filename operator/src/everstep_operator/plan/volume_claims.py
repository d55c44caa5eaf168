"""Finds PersistentVolumeClaims that keep pods from their nodes: those that one node can mount at a time.

Several pods of one job on several nodes can never mount such a claim together. And a lost node goes on holding it: no
kubelet confirms that it is unmounted, so Kubernetes detaches it by force after six minutes (`maxWaitForUnmountDuration`
of the attach-detach controller), and the replacement waits for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep_operator.plan.plan_context import PlanContext

DETACH_MINUTES = 6
_SHARED_MODES = frozenset({"ReadWriteMany", "ReadOnlyMany"})


def list_claim_names(pod: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the claims that a pod template mounts."""
    volumes = (pod.get("spec") or {}).get("volumes") or ()
    claims = (volume.get("persistentVolumeClaim") or {} for volume in volumes)
    return tuple(dict.fromkeys(str(claim["claimName"]) for claim in claims if claim.get("claimName")))


def list_unshared_claims(s: PlanContext) -> dict[str, str]:
    """Return the claims that one node can mount at a time, by name, each with its access mode."""
    claims = s.observed.claims.items()
    return {name: modes[0] for name, modes in claims if modes and not _SHARED_MODES.intersection(modes)}


def describe_unshared_claims(s: PlanContext) -> str | None:
    """Return a message about claims that one node can mount at a time, and what follows; None if there are none."""
    found = list_unshared_claims(s)
    if not found or (s.wanted == 1 and s.observed.settings.out_of_service_taint):
        return None
    names = ", ".join(f"{name!r} is {mode}" for name, mode in sorted(found.items()))
    if s.wanted > 1:
        once = "ReadWriteOncePod" in found.values()
        what = "one pod can mount it at a time" if once else "pods on different nodes cannot mount it together"
        then = f"and the job has {s.wanted}: those that lack it do not start. Use ReadWriteMany, or an object store"
        return f"PersistentVolumeClaim {names}: {what}, {then}, or set numNodes to 1"
    return (
        f"PersistentVolumeClaim {names}: after its node is lost, Kubernetes detaches it after {DETACH_MINUTES} minutes "
        "at the earliest, and the replacement waits for that. Use ReadWriteMany, or an object store"
    )
