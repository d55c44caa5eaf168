"""Tells which changes of a pod no plan is in a hurry for: its start goes on, and others have yet to follow.

A set acts when all of its pods have a node, when all run, and when pod 0 runs, which leads. What comes between is a
number in the status. It is looked at too, but many such changes together.
"""

from __future__ import annotations

from dataclasses import replace

from everstep_operator.plan.observation import PodView


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
    if old is None:
        return new == replace(
            new,
            phase="Pending",
            node=None,
            scheduled_at=None,
            started_at=None,
            ended=None,
            deleting_since=None,
            disruption=None,
            unschedulable="",
        )
    if is_bound(new) and not is_bound(old) and not unbound:
        return False  # the last one
    if old.node not in (None, new.node) or (is_bound(old) and not is_bound(new)):
        return False
    if is_started(old) and not is_started(new):
        return False
    return new == replace(
        old,
        phase=new.phase if new.phase in ("Pending", "Running") else old.phase,
        node=new.node,
        ip=new.ip,
        scheduled_at=new.scheduled_at,
        started_at=new.started_at,
        waiting_reason=new.waiting_reason,
        waiting_message=new.waiting_message,
        avoids=new.avoids,
        unschedulable="",
    )
