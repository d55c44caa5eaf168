"""The jobs' frozen templates: ConfigMaps, immutable, so read once and kept while the job is active."""

from __future__ import annotations

import contextlib

import structlog

from everstep_operator.cluster import errors
from everstep_operator.cluster.api_answer import ApiObject
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.resources import CONFIG_MAPS
from everstep_operator.plan.agent_volume import make_template_name
from everstep_operator.plan.frozen_template import FrozenTemplate
from everstep_operator.plan.template import read_frozen_template

log = structlog.get_logger(__name__)


class FrozenTemplates:
    """The templates of the active jobs, each read once and believed only with the operator's signature."""

    def __init__(self, client: Client, operator_keys: tuple[bytes, ...]) -> None:
        self._client = client
        self._keys = operator_keys  # the current one first
        self._known: dict[str, FrozenTemplate] = {}  # by job UID; a job has one current template
        self.of_previous_keys: set[str] = set()  # UIDs of the jobs whose template a previous key has signed
        self._damaged: dict[str, int] = {}  # the epoch whose ConfigMap cannot be verified: it stays so until replaced

    async def get(self, namespace: str, job: str, uid: str, template: int) -> FrozenTemplate | None:
        """Return the template of this epoch, or None if there is none, or none that the operator has signed."""
        known = self._known.get(uid)
        if known is not None and known.epoch == template:
            return known
        if self._damaged.get(uid) == template:
            return None
        for name in (make_template_name(job, uid, template), f"{job}-{template}"):  # the latter by an older operator
            with contextlib.suppress(errors.NotFound):
                found = await self._client.get(CONFIG_MAPS, namespace, name)
                if (frozen := self.put(namespace, uid, template, found)) is not None:
                    return frozen
        return None

    def put(self, namespace: str, uid: str, template: int, config_map: ApiObject) -> FrozenTemplate | None:
        """Keep what a ConfigMap holds for the job of this UID.

        Args:
            namespace: Namespace of the job.
            uid: UID of the job.
            template: The template epoch that the ConfigMap is to be of.
            config_map: The ConfigMap as the API server gave it.

        Returns:
            The template, or None if it does not verify: the job is resolved again when it next needs a pod.
        """
        frozen = read_frozen_template(config_map, namespace=namespace, uid=uid, epoch=template, keys=self._keys)
        if frozen is None:
            if self._damaged.get(uid) != template:
                log.warning(
                    "the signature of a template does not hold; the job is resolved again when it needs a pod",
                    config_map=f"{namespace}/{config_map['metadata']['name']}",
                )
            self._damaged[uid] = template
            return None
        self._known[uid] = frozen
        self._damaged.pop(uid, None)
        self.of_previous_keys.discard(uid)
        current = self._keys[:1]
        if (
            current != self._keys
            and read_frozen_template(config_map, namespace=namespace, uid=uid, epoch=template, keys=current) is None
        ):
            self.of_previous_keys.add(uid)
        return frozen

    def known(self, uid: str) -> FrozenTemplate | None:
        return self._known.get(uid)

    def forget(self, uid: str) -> None:
        self._known.pop(uid, None)
        self.of_previous_keys.discard(uid)
        self._damaged.pop(uid, None)

    def keep_only(self, uids: set[str]) -> None:
        """Drop what belongs to jobs that are finished or gone."""
        self._known = {uid: frozen for uid, frozen in self._known.items() if uid in uids}
        self.of_previous_keys &= uids
        self._damaged = {uid: template for uid, template in self._damaged.items() if uid in uids}
