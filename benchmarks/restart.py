"""Measures the time until all ranks meet again after one of them was lost."""

from __future__ import annotations

import itertools
import time

from benchmarks.arms import Arm, Bare, Everstep, Indexed, Site
from benchmarks.measure import Row, alternate
from e2e.harness import wait

_numbers = itertools.count()
WORLD = 2
REPEATS = 9  # each of these takes a moment, and is a matter of when a kubelet looks


def exit_once(site: Site, arm: Arm) -> float:
    """Let a rank exit with 1 (every rank that loses a peer exits too), and return the seconds until the next
    barrier."""
    tag = f"exit-{next(_numbers)}"
    arm.create(site, tag, WORLD)
    try:
        site.ear.listen(tag, WORLD)
        told = site.ear.say(tag, 1, "exit")
        return site.ear.listen(tag, WORLD, barriers=2) - told
    finally:
        site.ear.dismiss(tag)
        arm.delete(site, tag)


def restart_in_place(site: Site) -> Row:
    row = Row("restart-in-place", "s", 1.0)
    return alternate(row, lambda: exit_once(site, Everstep()), lambda: exit_once(site, Indexed("OnFailure")))


def restart_tenth(site: Site, repeats: int = 21) -> Row:
    """Measure the tenth failure in a row beside the first of the same job.

    Often: each is 20 or 40 ms, as ranks that look for each other every 10 ms happen to find themselves.
    """
    row = Row("restart-tenth", "s", 1.2, {"ours": [], "floor": []})
    arm = Everstep(restart={"application": 100, "maxBackoff": "0s"})
    for _ in range(repeats):
        tag = f"tenth-{next(_numbers)}"
        arm.create(site, tag, WORLD)
        try:
            site.ear.listen(tag, WORLD)
            for failure in range(1, 11):
                told = site.ear.say(tag, 1, "exit")
                seconds = site.ear.listen(tag, WORLD, barriers=failure + 1) - told
                if failure in (1, 10):
                    row.samples["floor" if failure == 1 else "ours"].append(seconds)
        finally:
            site.ear.dismiss(tag)
            arm.delete(site, tag)
    return row


def delete_ours(site: Site) -> float:
    tag, arm = f"delete-{next(_numbers)}", Everstep()
    arm.create(site, tag, WORLD)
    try:
        site.ear.listen(tag, WORLD)
        told = _delete(site, tag)
        return site.ear.listen(tag, WORLD, barriers=2) - told
    finally:
        site.ear.dismiss(tag)
        arm.delete(site, tag)


def delete_by_hand(site: Site) -> float:
    """Delete the pod, wait, and create it again; the other rank goes back to the barrier in its process."""
    tag, arm = f"delete-{next(_numbers)}", Bare()
    arm.create(site, tag, WORLD, REJOIN="1")
    try:
        site.ear.listen(tag, WORLD)
        told = _delete(site, tag)
        path = f"/api/v1/namespaces/{site.namespace}/pods"
        wait(lambda: site.cluster.get(f"{path}/{tag}-1") is None, 60, "the deleted pod gone", every=0.02)
        site.cluster.request("POST", path, arm.pod(site, tag, 1, WORLD, REJOIN="1"))
        return site.ear.listen(tag, WORLD, barriers=2) - told
    finally:
        site.ear.dismiss(tag)
        arm.delete(site, tag)


def _delete(site: Site, tag: str) -> float:
    told = time.monotonic()
    path = f"/api/v1/namespaces/{site.namespace}/pods/{tag}-1"
    site.cluster.request("DELETE", path, {"gracePeriodSeconds": 5})
    return told


def pod_deleted(site: Site) -> Row:
    row = Row("pod-deleted", "s", 1.3)
    return alternate(row, lambda: delete_ours(site), lambda: delete_by_hand(site), REPEATS)
