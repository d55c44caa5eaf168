"""Keeps what the operator knows of a job beside what is stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep_operator.api.job import TrainingJob
from everstep_operator.api.status import TrainingJobStatus
from everstep_operator.cluster.cache import CacheEntry
from everstep_operator.plan.observation import PodView


@dataclass
class JobMemory:
    """The state of one job that this process keeps in memory beside what is stored.

    It ends with the job, because names are used again.
    """

    uid: str
    status: TrainingJobStatus | None = None  # as this process has last stored or found it, while the job is active
    status_written_at: float | None = None  # by us, for what may wait for the next write
    edit_reported_at: float | None = None  # when its users were last told that somebody has changed its status
    scale_up_at: float | None = None  # when a node was last promised to a pod of the job
    gated: bool = False  # a queue kept pods of it from the scheduler at the last look
    gated_at: float | None = None  # until when one did, as far as it was seen
    status_refused: bool = False  # its users have been told so
    unreadable: int | None = None  # the version of which they have been told that it breaks the rules
    kept: dict[str, Any] = field(default_factory=dict)  # fields of the status that the CRDs have no place for
    read: tuple[CacheEntry[Mapping[str, Any]], TrainingJob] | None = None  # what is stored, and the job that it says

    def note_gates(self, pods: Iterable[PodView], now: float) -> float | None:
        """Return until when pods of the job had scheduling gates. The first look without any is that time: nothing else
        tells when they have gone, and the look before may be minutes older.

        Args:
            pods: Its pods, as they are now.
            now: Unix seconds.
        """
        gated = any(pod.gated and pod.live for pod in pods)
        if gated or self.gated:
            self.gated_at = now
        self.gated = gated
        return self.gated_at
