"""Which jobs are waiting for their set of pods: what the gang policy must know of the other jobs.

Kept up to date by each job's own reconcile, so that nobody parses a thousand jobs to plan for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from everstep_operator.api.job import TrainingJob
from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import Phase
from everstep_operator.plan.observed import GangView, PodView

Key = tuple[str, str]

_WAITING = (None, Phase.PENDING, Phase.SCHEDULING, Phase.RESTARTING)


def gang_view(job: TrainingJob, pods: Iterable[PodView]) -> GangView | None:
    """The job as its rivals see it; None unless it is waiting for nodes."""
    status = job.status
    if status.phase not in _WAITING or job.spec.suspend or not job.managed_here or job.metadata.deletion_timestamp:
        return None
    scheduled = sum(1 for pod in pods if pod.owner == job.metadata.uid and pod.live and pod.scheduled)
    if status.phase == Phase.RESTARTING and scheduled >= job.spec.num_nodes:
        return None
    chosen = status.template.pool if status.template is not None else ""
    pool = chosen or next((choice.name for choice in job.spec.pools), "")
    released = [t.start.timestamp() for t in status.transitions if t.reason == Reason.GANG_RELEASED]
    created = job.metadata.creation_timestamp
    return GangView(
        key=f"{job.metadata.namespace}/{job.metadata.name}",
        uid=job.metadata.uid,
        created=created.timestamp() if created is not None else 0.0,
        pools=frozenset({pool} if pool else ()),
        wanted=job.spec.num_nodes,
        scheduled=scheduled,
        released_at=max(released, default=None),
    )


class Gangs:
    """The waiting jobs; `changed` hears of each that may want to think again."""

    def __init__(self, changed: Callable[[Key], None]) -> None:
        self._changed = changed
        self._views: dict[Key, GangView] = {}

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
