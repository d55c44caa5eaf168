"""Writes the statuses of jobs, so that they tell what the operator says and nothing else.

Of two operators only the one with the observed resourceVersion gets past a write. Nearly every one is a merge patch of
the status that the cache shows: it costs the API server two thirds of an apply. But it drops what older CRDs lack
without a word. So a status that is not stored as it was sent is applied, and so is one with something that must be on
record and was never stored before.

An apply removes only what nobody else owns. A client that has applied a status, or a restored backup, owns its fields
too, and a manager `before-first-apply` owns all of an object whose `managedFields` were cleared. What is left then is
removed by a merge patch: else a notice could not be withdrawn, and a full list of charges not take one more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep_operator.api.job import OPERATOR_NAME, TrainingJob
from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import Condition, ConditionType, Phase, TrainingJobStatus
from everstep_operator.cluster import errors
from everstep_operator.cluster.api_answer import ApiObject
from everstep_operator.cluster.cache import CacheEntry
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.resources import JOBS
from everstep_operator.cluster.undeclared_fields import UndeclaredFields
from everstep_operator.plan.plan_context import to_utc

_MAX_MESSAGE = 4096
_FINISHED = (Phase.SUCCEEDED.value, Phase.FAILED.value)


@dataclass
class StatusWriter:
    """A writer of statuses through one client."""

    client: Client
    undeclared: UndeclaredFields = field(default_factory=UndeclaredFields)

    async def write(
        self, job: TrainingJob, status: TrainingJobStatus, known: CacheEntry[Mapping[str, Any]] | None = None
    ) -> ApiObject:
        """Write a status, and return the job as it is stored then.

        Args:
            job: The job, as it was observed.
            status: All that its status shall tell.
            known: What the cache shows of the job, which counts where it is of the same resourceVersion.

        Raises:
            errors.Conflict: The job has changed since.
            errors.NotFound: The job is gone.
            errors.Invalid: The API server rejects the status.
        """
        meta = job.metadata
        head = {"name": meta.name, "namespace": meta.namespace, "resourceVersion": meta.resource_version}
        whole = status.manifest()
        if known is not None and str(known.version) == meta.resource_version and self.undeclared.can_hold(whole):
            stored = await self._merge(known.value.get("status") or {}, head, whole)
            if stored.get("status") == self.undeclared.strip(whole):
                return stored
            head["resourceVersion"] = stored["metadata"]["resourceVersion"]
        body = {"apiVersion": JOBS.api_version, "kind": JOBS.kind, "metadata": {**head, "uid": meta.uid}}
        while True:
            declared = self.undeclared.strip(whole)
            try:
                stored = await self.client.apply_status(JOBS, meta.namespace, {**body, "status": declared})
                self.undeclared.note_stored(stored.get("status") or {})
                break
            except (errors.Undeclared, errors.Invalid) as error:
                if self.undeclared.learn(error.message):
                    continue
                if isinstance(error, errors.Undeclared):
                    raise
                # With what others own of a list it may be longer than it can be.
                try:
                    found = await self.client.get(JOBS, meta.namespace, meta.name)
                except errors.NotFound:
                    raise error from None
                stored = await self._replace(found.get("status") or {}, head, declared)
                break
        if stored.get("status") == declared:  # nearly always, and parsing it to see that takes a millisecond
            return stored
        if self.undeclared.strip(TrainingJob.parse_stored(stored).status.manifest()) == declared:
            return stored
        version = stored["metadata"]["resourceVersion"]
        return await self._replace(stored.get("status") or {}, {**head, "resourceVersion": version}, declared)

    async def _merge(self, found: Mapping[str, Any], head: Mapping[str, Any], whole: dict[str, Any]) -> ApiObject:
        while True:
            try:
                return await self._replace(found, head, self.undeclared.strip(whole))
            except errors.Invalid as error:
                if not self.undeclared.learn(error.message):
                    raise

    async def _replace(
        self, found: Mapping[str, Any], head: Mapping[str, Any], declared: Mapping[str, Any]
    ) -> ApiObject:
        change = make_replacing_patch(found, declared)
        return await self.client.merge_status(JOBS, head["namespace"], {"metadata": head, "status": change})

    async def report_broken_rules(self, raw: Mapping[str, Any], message: str, now: float) -> ApiObject | None:
        """Tell in the conditions of a job that it breaks the rules of the API; the rest of its status stays.

        Args:
            raw: The job, as the API server gives it.
            message: Says which rules.
            now: Unix seconds.

        Returns:
            The job as it is stored then; None: its conditions tell so already, or are not ours to write.
        """
        status, meta = raw.get("status") or {}, raw["metadata"]
        if status.get("phase") in _FINISHED or meta.get("deletionTimestamp"):
            return None
        if (raw.get("spec") or {}).get("managedBy") not in (None, OPERATOR_NAME):
            return None
        known = {each["type"]: each for each in status.get("conditions") or ()}
        told = dict(known)
        for kind, holds in ((ConditionType.READY, "False"), (ConditionType.STALLED, "True")):
            old = known.get(kind.value, {})
            made = Condition.model_construct(
                type=kind,
                status=holds,
                reason=Reason.SPEC_INVALID.value,
                message=message[:_MAX_MESSAGE],
                last_transition_time=to_utc(now),
                observed_generation=meta.get("generation") or 0,
            ).manifest()
            if old.get("status") == holds:
                made["lastTransitionTime"] = old["lastTransitionTime"]
            told[kind.value] = made
        if told == known:
            return None
        head = {"name": meta["name"], "resourceVersion": meta["resourceVersion"]}
        change = {"conditions": [*told.values()]}
        return await self.client.merge_status(JOBS, meta["namespace"], {"metadata": head, "status": change})


def make_replacing_patch(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON merge patch (RFC 7386) that makes one object of another.

    Args:
        found: The object as it is.
        wanted: The object as it shall be.
    """
    patch: dict[str, Any] = dict.fromkeys(found.keys() - wanted.keys())
    for name, value in wanted.items():
        old = found.get(name)
        if old == value:
            continue
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        patch[name] = make_replacing_patch(old, value) if both else value  # type: ignore[arg-type]
    return patch
