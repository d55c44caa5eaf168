"""The jobs that wait for their set of pods: what the gang policy must know of the other jobs.

Filled once from the first list, then kept up to date by each job's own reconcile, so that nobody parses a thousand
jobs to plan for one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from pydantic import ValidationError

from everstep_operator.api.job import TrainingJob
from everstep_operator.cluster.cache import ClusterCache, Key
from everstep_operator.plan import gang
from everstep_operator.plan.observation import GangView, PodView


def view_waiting_gang(job: TrainingJob, pods: Iterable[PodView], places: int | None = None) -> GangView | None:
    """Return a job as its rivals see it; None unless it waits for nodes."""
    view = gang.make_gang_view(job, pods, places) if gang.is_waiting(job) else None
    return view if view is not None and view.scheduled < view.wanted else None


def _find_queue_position(view: GangView) -> tuple[frozenset[str], bool, str, bool]:
    """Return what decides in whose queue a gang is, and where."""
    return view.pools, view.possible, view.quota, view.gated


class WaitingGangs:
    """The waiting jobs; `changed` hears of each that may want to think again."""

    def __init__(self, changed: Callable[[Key], None]) -> None:
        self._changed = changed
        self._views: dict[Key, GangView] = {}

    async def fill(
        self, cache: ClusterCache, count_places: Callable[[Key, TrainingJob], Awaitable[int | None]]
    ) -> None:
        """Add all jobs that wait now. This happens before the first plan: one that knows of no rival gives back what it
        is to keep."""
        waiting: dict[Key, TrainingJob] = {}
        for key, raw in cache.jobs.items():
            try:
                job = TrainingJob.parse_stored(raw)
            except ValidationError:
                continue  # nobody plans for it, so nobody may wait for it
            if view_waiting_gang(job, cache.pods_of(key)) is not None:
                waiting[key] = job
        counts = await asyncio.gather(*(count_places(key, job) for key, job in waiting.items()))
        for (key, job), places in zip(waiting.items(), counts, strict=True):
            view = view_waiting_gang(job, cache.pods_of(key), places)
            if view is not None:
                self._views[key] = view

    def list_views(self) -> tuple[GangView, ...]:
        """Return all waiting gangs; for the policy, none is a rival of itself."""
        return tuple(self._views.values())

    def update(self, key: Key, view: GangView | None) -> None:
        """Store the gang of a job, or that it waits no longer (None), and wake the rivals for which that matters."""
        old = self._views.get(key)
        if old == view:
            return
        if view is None:
            del self._views[key]
        else:
            self._views[key] = view
        # One more bound pod of a gang that goes on waiting moves nobody: only who begins, ends, gives back, or
        # changes its place in the order.
        moved = old is None or view is None or _find_queue_position(view) != _find_queue_position(old)
        if moved or (old and view and view.scheduled < old.scheduled):
            pools = (old.pools if old else frozenset()) | (view.pools if view else frozenset())
            for other, rival in self._views.items():
                if other == key or not gang.heeds_rivals(rival):
                    continue
                if not pools or not rival.pools or rival.pools & pools or rival.quota == key[0]:
                    self._changed(other)
        if view is not None and gang.heeds_rivals(view) and not (old is not None and gang.heeds_rivals(old)):
            self._changed(key)  # rivals may have moved since this look began, and nobody has woken it for that
