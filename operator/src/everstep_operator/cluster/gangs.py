"""Which jobs are waiting for their set of pods: what the gang policy must know of the other jobs.

Filled once from the first list, then kept up to date by each job's own reconcile, so that nobody parses a thousand
jobs to plan for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pydantic import ValidationError

from everstep_operator.api.job import TrainingJob
from everstep_operator.cluster.cache import Cache, Key
from everstep_operator.plan import gang
from everstep_operator.plan.observed import GangView, PodView


def gang_view(job: TrainingJob, pods: Iterable[PodView]) -> GangView | None:
    """The job as its rivals see it; None unless it is waiting for nodes."""
    view = gang.view(job, pods) if gang.waits(job) else None
    return view if view is not None and view.scheduled < view.wanted else None


class Gangs:
    """The waiting jobs; `changed` hears of each that may want to think again."""

    def __init__(self, changed: Callable[[Key], None]) -> None:
        self._changed = changed
        self._views: dict[Key, GangView] = {}

    def fill(self, cache: Cache) -> None:
        """All that wait now. Before the first plan: one that knows of no rival gives back what it is to keep."""
        for key, raw in cache.jobs.items():
            try:
                view = gang_view(TrainingJob.parse(raw), cache.pods_of(key))
            except ValidationError:
                continue  # nobody plans for it, so nobody may wait for it
            if view is not None:
                self._views[key] = view

    def others(self, key: Key) -> tuple[GangView, ...]:
        return tuple(view for other, view in self._views.items() if other != key)

    def update(self, key: Key, view: GangView | None) -> None:
        old = self._views.get(key)
        if old == view:
            return
        if view is None:
            del self._views[key]
        else:
            self._views[key] = view
        # One more bound pod of a gang that goes on waiting moves nobody: only who begins, ends or gives back.
        if old is None or view is None or view.scheduled < old.scheduled or view.pools != old.pools:
            pools = (old.pools if old else frozenset()) | (view.pools if view else frozenset())
            for other, rival in self._views.items():
                if other != key and (not pools or not rival.pools or rival.pools & pools):
                    self._changed(other)
