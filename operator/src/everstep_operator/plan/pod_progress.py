"""Tells which changes of a pod no plan is in a hurry for: its start goes on, and others have yet to follow.

A set acts when all of its pods have a node, when all run, and when pod 0 runs, which leads. What comes between is a
number in the status. It is looked at too, but many such changes together.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter

from everstep_operator.plan.observation import PodView

# What changes while a pod starts. The rest is compared field by field: this is asked for each event of each pod.
_START_FIELDS = {
    "phase", "node", "ip", "scheduled_at", "started_at", "waiting_reason", "waiting_message", "avoids", "unschedulable"
}  # fmt: skip
_get_rest = attrgetter(*(field.name for field in fields(PodView) if field.name not in _START_FIELDS))


def is_bound(pod: PodView) -> bool:
    """Return whether the pod waits for no node."""
    return pod.scheduled_at is not None or pod.ended is not None


def is_started(pod: PodView) -> bool:
    """Return whether the pod's trainer container was started."""
    return pod.started_at is not None or pod.ended is not None


def is_one_step(old: PodView | None, new: PodView | None, unbound: int, unstarted: int) -> bool:
    """Tell whether a pod has only come one step further, of many that its set still has to take.

    Args:
        old: The pod before; None: it was not there.
        new: The pod now; None: it is gone.
        unbound: Pods of the set that have no node now.
        unstarted: Pods of the set that were not started until now.
    """
    if new is None or new.index == 0 or not unstarted or new.container_wait:
        return False
    if new.unschedulable:
        return False
    if old is None:
        later = (new.node, new.scheduled_at, new.started_at, new.ended, new.deleting_since, new.disruption)
        return new.phase == "Pending" and all(each is None for each in later)
    if is_bound(new) and not is_bound(old) and not unbound:
        return False  # the last one
    if old.node not in (None, new.node) or (is_bound(old) and not is_bound(new)):
        return False
    if is_started(old) and not is_started(new):
        return False
    return new.phase in ("Pending", "Running", old.phase) and _get_rest(new) == _get_rest(old)
