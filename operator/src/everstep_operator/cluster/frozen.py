"""The jobs' frozen templates: ConfigMap `<job>-<t>`, immutable, so read once and kept while the job is active."""

from __future__ import annotations

import structlog

from everstep_operator.cluster import errors
from everstep_operator.cluster.client import Client, Object
from everstep_operator.cluster.resources import CONFIG_MAPS
from everstep_operator.plan.observed import Frozen
from everstep_operator.plan.template import frozen_view

log = structlog.get_logger(__name__)


class FrozenTemplates:
    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: dict[str, Frozen] = {}  # by job UID; a job has one current template

    async def get(self, namespace: str, job: str, uid: str, template: int) -> Frozen | None:
        """The template of this epoch, or None if there is none of this job's."""
        known = self._known.get(uid)
        if known is not None and known.epoch == template:
            return known
        try:
            found = await self._client.get(CONFIG_MAPS, namespace, f"{job}-{template}")
        except errors.NotFound:
            return None
        owners = found["metadata"].get("ownerReferences") or ()
        if not any(reference.get("uid") == uid for reference in owners):
            return None
        return self.put(uid, template, found)

    def put(self, uid: str, template: int, config_map: Object) -> Frozen | None:
        frozen = frozen_view(config_map)
        if frozen is None or frozen.epoch != template:
            log.warning("a template that nobody can read", config_map=config_map["metadata"]["name"])
            return None
        self._known[uid] = frozen
        return frozen

    def known(self, uid: str) -> Frozen | None:
        return self._known.get(uid)

    def forget(self, uid: str) -> None:
        self._known.pop(uid, None)

    def keep_only(self, uids: set[str]) -> None:
        """Drop what belongs to jobs that are finished or gone."""
        self._known = {uid: frozen for uid, frozen in self._known.items() if uid in uids}
