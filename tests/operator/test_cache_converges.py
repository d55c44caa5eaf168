"""The cache becomes what the API server has, in whatever order lists, events and answers come, and what was deleted
does not come back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from everstep_operator.cluster.cache import ClusterCache, Listing, object_key, resource_version
from tests.operator.test_cache import pod

NAMES = st.sampled_from(["digits-0", "digits-1", "digits-2"])
PAGE = 2


@dataclass
class Server:
    """The pods of an API server with the label that the watch selects by, and what it tells of each change."""

    revision: int = 100
    uids: int = 0
    pods: dict[str, Any] = field(default_factory=dict)
    hidden: dict[str, Any] = field(default_factory=dict)  # their label was removed
    gone: dict[str, int] = field(default_factory=dict)  # UIDs that were deleted, and when
    events: list[tuple[str, Any]] = field(default_factory=list)  # not yet told

    def create(self, name: str) -> None:
        self.uids += 1
        self._store(name, f"u{self.uids}", "ADDED")

    def update(self, name: str) -> None:
        self._store(name, uid_of(self.pods[name]), "MODIFIED")

    def delete(self, name: str) -> None:
        self._tell_deleted(name)
        self.gone[uid_of(self.pods.pop(name))] = self.revision

    def hide(self, name: str) -> None:
        self._tell_deleted(name)
        self.hidden[name] = self.pods.pop(name)

    def show(self, name: str) -> None:
        self._store(name, uid_of(self.hidden.pop(name)), "ADDED")

    def _tell_deleted(self, name: str) -> None:
        self.revision += 1
        last = pod(name, "digits", version=self.revision, uid=uid_of(self.pods[name]))
        self.events.append(("DELETED", last))

    def _store(self, name: str, uid: str, kind: str) -> None:
        self.revision += 1
        self.pods[name] = pod(name, "digits", version=self.revision, uid=uid, phase=f"p{self.revision}")
        self.events.append((kind, self.pods[name]))


@dataclass
class List:
    """One list on its way: its pages show one moment, and come one by one."""

    listing: Listing[Any]
    version: int
    pages: list[list[Any]]


def uid_of(raw: Any) -> str:
    return str(raw["metadata"]["uid"])


class Convergence(RuleBasedStateMachine):
    """Rules are what the server does and what reaches the cache, in any order but that of one watch."""

    def __init__(self) -> None:
        super().__init__()
        self.server = Server()
        self.cache = ClusterCache(touched=lambda _: None, pool_changed=lambda _: None)
        self.answers: list[tuple[str, Any]] = []  # to our own requests: what was there, or that nothing was
        self.lists: list[List] = []
        self.told_gone: set[str] = set()  # deleted, and the cache has heard of it
        self.was_cut = False

    @initialize()
    def begin(self) -> None:
        self.server.create("digits-0")

    # --- the server

    @rule(name=NAMES)
    def create(self, name: str) -> None:
        if name not in self.server.pods and name not in self.server.hidden:
            self.server.create(name)

    @rule(name=NAMES)
    def update(self, name: str) -> None:
        if name in self.server.pods:
            self.server.update(name)

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        if name in self.server.pods:
            self.server.delete(name)

    @rule(name=NAMES)
    def hide_or_show(self, name: str) -> None:
        if name in self.server.pods:
            self.server.hide(name)
        elif name in self.server.hidden:
            self.server.show(name)

    # --- what reaches the cache

    @precondition(lambda self: self.server.events)
    @rule()
    def watch(self) -> None:
        kind, raw = self.server.events.pop(0)
        if kind == "DELETED":
            self._remove(raw, resource_version(raw))
        else:
            self.cache.pods.put(raw)

    @precondition(lambda self: self.server.events)
    @rule()
    def cut(self) -> None:
        """The watch is down, and begins again with a list of its own, that tells of no deletion."""
        self.was_cut = True
        self.server.events = [("LISTED", raw) for raw in self.server.pods.values()]

    @rule(name=NAMES)
    def ask(self, name: str) -> None:
        """A create, a status write or a read of ours: the server has answered, and the answer is on its way."""
        if name in self.server.pods:
            self.answers.append(("200", self.server.pods[name]))
        elif name not in self.server.hidden and (entry := self.cache.pods.get(("ns", name))) is not None:
            self.answers.append(("404", pod(name, "digits", version=0, uid=entry.uid)))

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        self._answer(data.draw(st.integers(0, len(self.answers) - 1)))

    @precondition(lambda self: len(self.lists) < 2)
    @rule()
    def list(self) -> None:
        there = [*self.server.pods.values()]
        pages = [there[i : i + PAGE] for i in range(0, len(there), PAGE)]
        store = self.cache.pods
        version = self.server.revision
        self.lists.append(List(store.listing(version, store.newest), version, pages))

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def page(self, data: st.DataObject) -> None:
        self._page(data.draw(st.integers(0, len(self.lists) - 1)))

    # --- the promises

    @invariant()
    def nothing_comes_back(self) -> None:
        back = {self.cache.pods.get(key).uid for key in self.cache.pods} & self.told_gone  # type: ignore[union-attr]
        assert not back

    @invariant()
    def pods_of_the_job_are_those_of_the_store(self) -> None:
        views = {view.name: view.uid for view in self.cache.pods_of(("ns", "digits"))}
        assert views == {name: entry[0] for name, entry in self._cached()}

    @invariant()
    def pods_that_have_yet_to_start_are_counted(self) -> None:
        cached = {key: self.cache.pods.get(key) for key in self.cache.pods}
        waiting = sum(1 for entry in cached.values() if entry is not None and entry.value[1].started_at is None)
        assert self.cache._unstarted.total() == self.cache._unbound.total() == waiting

    def teardown(self) -> None:
        """Deliver all that is on its way, until the cache is what the server has; a list only if events were lost."""
        while self.answers:
            self._answer(0)
        while self.lists:
            self._page(0)
        while self.server.events:
            self.watch()
        self.nothing_comes_back()
        if self.was_cut:
            self.list()
            while self.lists:
                self._page(0)
        assert dict(self._cached()) == {
            name: (uid_of(raw), resource_version(raw), raw["status"]["phase"]) for name, raw in self.server.pods.items()
        }

    def _cached(self) -> Iterator[tuple[str, tuple[str, int, str]]]:
        for key in self.cache.pods:
            entry = self.cache.pods.get(key)
            assert entry is not None
            yield key[1], (entry.uid, entry.version, entry.value[1].phase)

    def _answer(self, number: int) -> None:
        status, raw = self.answers.pop(number)
        if status == "404":
            self._remove(raw, 0)
        else:
            self.cache.pods.put(raw)

    def _page(self, number: int) -> None:
        of = self.lists[number]
        if of.pages:
            for raw in of.pages.pop(0):
                of.listing.add(raw)
            return
        self.lists.remove(of)
        before = {entry[0] for _, entry in self._cached()}
        of.listing.finish()
        for uid in before - {entry[0] for _, entry in self._cached()}:
            self._note_gone(uid, of.version)

    def _remove(self, raw: Any, version: int) -> None:
        self.cache.pods.remove(object_key(raw), uid_of(raw), version)
        self._note_gone(uid_of(raw), version or self.server.revision)

    def _note_gone(self, uid: str, version: int) -> None:
        """Not if it only had no label at that version."""
        if version >= self.server.gone.get(uid, version + 1):
            self.told_gone.add(uid)


TestConvergence = Convergence.TestCase
TestConvergence.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
