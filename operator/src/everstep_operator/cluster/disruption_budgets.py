"""The jobs' PodDisruptionBudgets, as far as they are known: as they were listed, and as this operator has changed them.

They are few and change seldom, so they are not watched. One that somebody deletes is made again after the next list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import structlog

from everstep_operator.cluster import errors
from everstep_operator.cluster.cache import Key, object_key
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.resources import BUDGETS
from everstep_operator.plan.observation import BudgetView
from everstep_operator.plan.pod_manifest import MANAGED_BY_LABEL

log = structlog.get_logger(__name__)

_SELECTOR = ",".join(f"{name}={value}" for name, value in MANAGED_BY_LABEL.items())


class DisruptionBudgets:
    """The budgets that bear the operator's label, by namespace and name."""

    def __init__(self, client: Client, *, enabled: bool) -> None:
        self._client = client
        self._enabled = enabled
        self._known: dict[Key, BudgetView] = {}
        self._changed: set[Key] = set()  # since the list began that is under way
        self._postponed: set[tuple[Key, str]] = set()  # key and UID of jobs, until the next list
        self._told: set[tuple[Key, str]] = set()  # those for which something was ever rejected

    def find(self, key: Key) -> BudgetView | None:
        """Return the budget of this name, as far as is known."""
        return self._known.get(key)

    async def refresh(self, namespaces: Iterable[str | None]) -> None:
        """List all of them anew.

        Args:
            namespaces: Where; None for all namespaces.
        """
        if not self._enabled:
            return
        self._changed.clear()
        listed: dict[Key, BudgetView] = {}
        try:
            for place in namespaces:
                async for page in self._client.list(BUDGETS, place, labels=_SELECTOR):
                    listed |= {object_key(item): _view_budget(item) for item in page.items}
        except (errors.NotAuthorized, errors.NotFound, errors.Gone) as error:
            log.warning("cannot list PodDisruptionBudgets", error=str(error))
            return
        kept = {key: view for key, view in self._known.items() if key in self._changed}
        self._known = {key: view for key, view in listed.items() if key not in self._changed} | kept
        self._postponed.clear()

    def put(self, raw: Mapping[str, Any]) -> None:
        key = object_key(raw)
        self._known[key] = _view_budget(raw)
        self._changed.add(key)

    def remove(self, key: Key, uid: str) -> None:
        known = self._known.get(key)
        if known is not None and known.uid == uid:
            del self._known[key]
        self._changed.add(key)

    def postpone(self, key: Key, uid: str) -> None:
        """Try nothing more for the job of this UID before the next list."""
        self._postponed.add((key, uid))

    def reject(self, key: Key, uid: str) -> bool:
        """Postpone what the API server rejects. Return whether it is the first time that it does so for this job."""
        self.postpone(key, uid)
        is_first = (key, uid) not in self._told
        self._told.add((key, uid))
        return is_first

    def is_postponed(self, key: Key, uid: str) -> bool:
        return (key, uid) in self._postponed


def _view_budget(raw: Mapping[str, Any]) -> BudgetView:
    meta = raw["metadata"]
    owner: Mapping[str, Any] = next((each for each in meta.get("ownerReferences") or () if each.get("controller")), {})
    least = (raw.get("spec") or {}).get("minAvailable")
    return BudgetView(
        name=str(meta["name"]),
        uid=str(meta.get("uid") or ""),
        owner=str(owner.get("uid") or ""),
        min_available=least if type(least) is int else None,
    )
