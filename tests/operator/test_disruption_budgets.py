"""The budgets of jobs that the operator knows are those that the API server lists, and what it has done since."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from everstep_operator.cluster import errors
from everstep_operator.cluster.client import ListPage
from everstep_operator.cluster.disruption_budgets import DisruptionBudgets

KEY = ("default", "digits")


def budget(name: str = "digits", uid: str = "b") -> dict[str, Any]:
    owner = {"kind": "TrainingJob", "name": name, "uid": "job", "controller": True}
    meta = {"namespace": "default", "name": name, "uid": uid, "ownerReferences": [owner]}
    return {"metadata": meta, "spec": {"minAvailable": 2}}


class Server:
    """Lists budgets; `meanwhile` happens while a list is under way."""

    def __init__(self, *items: dict[str, Any]) -> None:
        self.items = list(items)
        self.meanwhile: Any = lambda: None
        self.fails: Exception | None = None
        self.lists = 0

    async def list(self, resource: Any, namespace: Any, *, labels: str) -> AsyncIterator[ListPage]:
        assert (resource.plural, labels) == ("poddisruptionbudgets", "app.kubernetes.io/managed-by=everstep")
        self.lists += 1
        if self.fails is not None:
            raise self.fails
        found = list(self.items)
        self.meanwhile()
        yield ListPage(found, 1)


async def test_an_operator_that_starts_knows_the_budgets_that_are_there() -> None:
    server: Any = Server(budget(), {**budget("odd"), "spec": {"minAvailable": "50%"}})
    known = DisruptionBudgets(server, enabled=True)
    await known.refresh([None])
    found, odd = known.find(KEY), known.find(("default", "odd"))
    assert found is not None
    assert (found.uid, found.owner, found.min_available) == ("b", "job", 2)
    assert odd is not None
    assert odd.min_available is None
    server.items = []
    await known.refresh([None])
    assert known.find(KEY) is None, "somebody has deleted it"


async def test_what_is_made_or_deleted_while_a_list_is_under_way_stays_so() -> None:
    server: Any = Server(budget("old", "o"))
    known = DisruptionBudgets(server, enabled=True)
    await known.refresh([None])

    def meanwhile() -> None:
        known.put(budget())
        known.remove(("default", "old"), "o")

    server.meanwhile = meanwhile
    await known.refresh([None])
    assert known.find(KEY) is not None
    assert known.find(("default", "old")) is None


async def test_without_the_setting_or_the_right_nothing_is_listed_and_nothing_fails() -> None:
    server: Any = Server(budget())
    known = DisruptionBudgets(server, enabled=False)
    await known.refresh([None])
    assert server.lists == 0
    server.fails = errors.NotAuthorized(403, "Forbidden", 'User "x" cannot list resource')
    known = DisruptionBudgets(server, enabled=True)
    await known.refresh([None])
    assert known.find(KEY) is None
