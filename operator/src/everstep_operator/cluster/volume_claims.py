"""The access modes of the PersistentVolumeClaims that jobs mount, read once for each start of a job.

They are only told of in a warning: what cannot be read is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from everstep_operator.cluster import errors
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.resources import CLAIMS
from everstep_operator.plan.frozen_template import FrozenTemplate
from everstep_operator.plan.volume_claims import list_claim_names

log = structlog.get_logger(__name__)

READ_AGAIN_SECONDS = 60.0  # a claim that was not there


@dataclass
class _Known:
    template: int
    modes: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by the claim's name
    missing_until: dict[str, float] = field(default_factory=dict)


class VolumeClaims:
    """The claims of each active job, by its UID."""

    def __init__(self, client: Client, timer: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._timer = timer
        self._known: dict[str, _Known] = {}

    async def read(self, namespace: str, uid: str, frozen: FrozenTemplate | None) -> Mapping[str, tuple[str, ...]]:
        """Return the access modes of each claim that the job's pods mount and that exists.

        Args:
            namespace: Namespace of the job.
            uid: Its UID.
            frozen: Its template; None: there is none yet.
        """
        names = list_claim_names(frozen.pod) if frozen is not None else ()
        if not names or frozen is None:
            return {}
        known = self._known.get(uid)
        if known is None or known.template != frozen.epoch:
            known = self._known[uid] = _Known(frozen.epoch)
        for name in names:
            if name in known.modes or self._timer() < known.missing_until.get(name, 0.0):
                continue
            try:
                claim = await self._client.get(CLAIMS, namespace, name)
            except (errors.ApiError, errors.Unreachable) as error:
                log.info("cannot read a claim", claim=f"{namespace}/{name}", error=str(error))
                known.missing_until[name] = self._timer() + READ_AGAIN_SECONDS
            else:
                known.modes[name] = tuple(map(str, (claim.get("spec") or {}).get("accessModes") or ()))
        return dict(known.modes)

    def forget(self, uid: str) -> None:
        self._known.pop(uid, None)
