"""A cache of what the watch has told, as little of it as plans need.

Pods are kept as `PodView` (about 1 KB instead of 30): 5,000 of them must fit beside everything else. Each object is
guarded by its resourceVersion: the watch, the resync and the answers to our own writes arrive in any order, and
the newest wins. So a reconcile never acts on a job older than its own last status, nor misses the pod that it created.
A deleted object leaves a tombstone: a page of a list, or an answer to one of our requests, may come after its DELETED,
and nothing would tell of the deletion a second time.

A watch that was down sends no DELETED for what vanished meanwhile: `Listing` finds these missed deletions.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import structlog

from everstep_operator.cluster.resources import JOBS, NODES, PODS, POOLS
from everstep_operator.cluster.tombstones import NEVER_AGAIN, Tombstones
from everstep_operator.plan.labels import LABEL_JOB
from everstep_operator.plan.node_signals import DEFAULT_RULES, Rules
from everstep_operator.plan.node_view import NodeView, parse_node
from everstep_operator.plan.observation import PodView, parse_pod
from everstep_operator.plan.pod_progress import is_bound, is_one_step, is_started

log = structlog.get_logger(__name__)

T = TypeVar("T")
Key = tuple[str, str]  # namespace ("" for what has none), name


@dataclass(frozen=True, slots=True)
class CacheEntry(Generic[T]):
    uid: str
    version: int
    value: T


def resource_version(raw: Mapping[str, Any]) -> int:
    """Return the resourceVersion as a number. Kubernetes promises since 1.35 that they are numbers, and etcd has always
    made them so."""
    text = str((raw.get("metadata") or {}).get("resourceVersion") or "")
    return int(text) if text.isdecimal() and text.isascii() else 0


def object_key(raw: Mapping[str, Any]) -> Key:
    meta = raw.get("metadata") or {}
    return str(meta.get("namespace") or ""), str(meta.get("name") or "")


class ObjectCache(Generic[T]):
    """A cache of one kind of object. `keep` makes the value from the raw object and the value that its name has now;
    `noticed` is called at each change."""

    def __init__(
        self,
        kind: str,
        keep: Callable[[Mapping[str, Any], T | None], T],
        noticed: Callable[[Key, T | None, T | None], None],
        is_listed: Callable[[T], bool] = lambda value: True,
        *,
        is_custom: bool = False,
    ) -> None:
        self.kind = kind
        self._is_custom = is_custom  # one version of it reads differently under other CRDs
        self.is_listed = is_listed  # whether a list would show it: else that it does not says nothing
        self._keep = keep
        self._noticed = noticed
        self._entries: dict[Key, CacheEntry[T]] = {}
        self._tombstones = Tombstones()
        self.newest = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def get(self, key: Key) -> CacheEntry[T] | None:
        return self._entries.get(key)

    def items(self) -> Iterator[tuple[Key, T]]:
        return ((key, entry.value) for key, entry in self._entries.items())

    def put(self, raw: Mapping[str, Any], listed_at: int = 0) -> bool:
        """Store an object, unless a newer state of the name is known, or its deletion.

        Args:
            raw: The object, as the API server gave it.
            listed_at: resourceVersion of the list that shows it; 0: it is of no list.

        Returns:
            True if anything changed.
        """
        key, version = object_key(raw), resource_version(raw)
        uid = str((raw.get("metadata") or {}).get("uid") or "")
        old = self._entries.get(key)
        if old is not None and 0 < version < old.version <= listed_at:
            old = self._disown_version(key, old)
        if old is not None and 0 < version <= old.version and not self._reads_differently(raw, version, old):
            return False
        if self._tombstones.covers(uid, version, listed_at):
            return False
        self.newest = max(self.newest, version)
        value = self._keep(raw, old.value if old is not None else None)
        if old is not None and old.uid != uid:  # two objects never have one name at a time
            self._tombstones.add(old.uid)
        self._entries[key] = CacheEntry(uid, version, value)
        self._noticed(key, old.value if old is not None else None, value)
        return True

    def put_answer(self, raw: Mapping[str, Any], held: CacheEntry[T] | None) -> bool:
        """Store the answer to a request for one object by its name: its present state, which the API server asks etcd
        for. Where it is older than what was held when it was asked for, the server's data were restored from a backup.

        Args:
            raw: The object, as the API server gave it.
            held: What was held of it when it was asked for.

        Returns:
            True if anything changed.
        """
        key = object_key(raw)
        if held is not None and self._entries.get(key) is held and 0 < resource_version(raw) < held.version:
            self._disown_version(key, held)
        return self.put(raw)

    def _disown_version(self, key: Key, old: CacheEntry[T]) -> CacheEntry[T]:
        """Let anything replace an object of which the server knows no state as new as the one that is held.

        Backups are restored with a revision far ahead of all that watches have told (`etcdutl snapshot restore
        --bump-revision`): then lists are newer than the cache, and what is on them is older. Nor are deletions believed
        that were told before.
        """
        self._tombstones.clear()
        self._entries[key] = made = CacheEntry(old.uid, 0, old.value)
        return made

    def _reads_differently(self, raw: Mapping[str, Any], version: int, old: CacheEntry[T]) -> bool:
        return self._is_custom and version == old.version and self._keep(raw, old.value) != old.value

    def revive(self, raw: Mapping[str, Any]) -> None:
        """Take in an object that was there after it was taken for deleted.

        Args:
            raw: The object as the API server gave it, when it was asked for it by name after that.
        """
        self._tombstones.discard(str((raw.get("metadata") or {}).get("uid") or ""))
        self.put(raw)

    def remove(self, key: Key, uid: str, version: int = 0, *, by_list: bool = False) -> bool:
        """Remove a deleted object, and leave a tombstone. A successor of the same name stays: its event may have come
        first.

        Args:
            key: Namespace and name.
            uid: UID of the deleted object.
            version: resourceVersion at which it was gone. 0: unknown, and no state of it is believed any more.
            by_list: Whether nothing tells of it but a list on which the object is not, or one answer.

        Returns:
            True if it was there.
        """
        self._tombstones.add(uid, version or NEVER_AGAIN, by_list=by_list)
        old = self._entries.get(key)
        if old is None or (uid and old.uid != uid):
            return False
        if 0 < version < old.version:  # a pod that has lost its label and got it again, told late
            return False
        del self._entries[key]
        self._noticed(key, old.value, None)
        return True

    def listing(self, version: int, known: int, within: str | None = None) -> Listing[T]:
        """Begin to compare with a list at `version`, of the namespace `within` or of all.

        `known` is `newest` from before the list was asked for. A list older than that means that the server's data was
        restored from a backup: versions have started over, and what we hold would shadow the truth for ever.
        """
        if version < known:
            self._entries = {key: CacheEntry(e.uid, 0, e.value) for key, e in self._entries.items()}
            self._tombstones.clear()
            self.newest = version
        return Listing(self, version, within)


class Listing(Generic[T]):
    """A complete list, taken page by page: objects on it are stored, and cached objects that are missing from it were
    deleted.

    All pages show the state at the `version` of the first. What the cache holds from later than that is not in the
    list because it was created since.
    """

    def __init__(self, store: ObjectCache[T], version: int, within: str | None) -> None:
        self._store = store
        self._version = version
        self._within = within
        self._seen: set[Key] = set()
        self.missed = 0

    def add(self, raw: Mapping[str, Any]) -> None:
        """Store one object. One that cannot be read is passed over: it must not end the list, and with it all."""
        key = object_key(raw)
        self._seen.add(key)
        try:
            self.missed += self._store.put(raw, self._version)
        except Exception:
            log.exception("an object that cannot be read", kind=self._store.kind, name="/".join(key))

    def find_missing(self) -> list[tuple[Key, str]]:
        """Return the keys and UIDs of the objects whose deletion was never told, if the list tells the truth."""
        return [
            (key, entry.uid)
            for key in self._store
            if key not in self._seen
            and self._within in (None, key[0])
            and (entry := self._store.get(key)) is not None
            and entry.version <= self._version
            and self._store.is_listed(entry.value)
        ]

    def finish(self) -> int:
        """Remove the objects that are missing, and return how many there were."""
        missing = self.find_missing()
        return sum(self._store.remove(key, uid, self._version + 1, by_list=True) for key, uid in missing)


@dataclass
class ClusterCache:
    """A cache of the whole cluster. `touched` is called with jobs that have changed and are to be reconciled again,
    `pods_touched` with those of which a pod or a node under one has, `pods_started` with those of which a pod has come
    one step further in its start, and `pool_changed` with pools."""

    touched: Callable[[Key], None]
    pool_changed: Callable[[str], None]
    pods_touched: Callable[[Key], None] = lambda job: None
    pods_started: Callable[[Key], None] | None = None  # default: `pods_touched`
    node_rules: Rules = field(default_factory=lambda: DEFAULT_RULES)  # by which Nodes are read that announce their end
    node_changes: int = 0  # how often what nodes can hold has changed
    node_view_changes: int = 0  # how often anything of a node has
    pool_changes: int = 0  # how often a pool has
    own_writes: set[Key] = field(default_factory=set)  # jobs whose status this operator writes at this moment
    _pods_of: defaultdict[Key, dict[str, PodView]] = field(default_factory=lambda: defaultdict(dict))
    _sets: dict[Key, tuple[PodView, ...]] = field(default_factory=dict)  # `pods_of`, until a pod changes
    _unbound: Counter[Key] = field(default_factory=Counter)  # pods of each job
    _unstarted: Counter[Key] = field(default_factory=Counter)
    _pods_on: defaultdict[str, Counter[Key]] = field(default_factory=lambda: defaultdict(Counter))  # by node and job

    def __post_init__(self) -> None:
        self.jobs: ObjectCache[Mapping[str, Any]] = ObjectCache(
            JOBS.kind, _strip_managed_fields, self._job_noticed, is_custom=True
        )
        self.pods: ObjectCache[tuple[str, PodView]] = ObjectCache(
            PODS.kind, _parse_pod, self._pod_noticed, lambda pod: pod[1].listed
        )
        self.pools: ObjectCache[Mapping[str, Any]] = ObjectCache(
            POOLS.kind, _strip_managed_fields, self._pool_noticed, is_custom=True
        )
        self.nodes: ObjectCache[NodeView] = ObjectCache(
            NODES.kind, lambda raw, _: parse_node(raw, self.node_rules), self._node_noticed
        )

    def pods_of(self, job: Key) -> tuple[PodView, ...]:
        """Return every pod with this job's label, whoever owns it."""
        known = self._sets.get(job)
        if known is None and (found := self._pods_of.get(job)):
            known = self._sets[job] = tuple(found.values())
        return known or ()

    def count_pods(self, job: Key) -> int:
        """Return how many pods have this job's label."""
        return len(self._pods_of.get(job, ()))

    def jobs_on(self, node: str) -> tuple[Key, ...]:
        """Return the jobs with a pod that is bound to this node."""
        return tuple(self._pods_on.get(node, ()))

    @contextlib.contextmanager
    def writing_status(self, job: Key) -> Iterator[None]:
        """Hold back the wake-ups by this write: its answer and its event come in either order.

        A job whose next action fails would be looked at again by its own status, past the queue's back-off. A status
        that is written by somebody else wakes as any other change does.
        """
        self.own_writes.add(job)
        try:
            yield
        finally:
            self.own_writes.discard(job)

    def _job_noticed(self, key: Key, old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> None:
        if key in self.own_writes and old is not None and new is not None and _strip_status(old) == _strip_status(new):
            return
        self.touched(key)

    def _pool_noticed(self, key: Key, old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> None:
        self.pool_changes += 1
        self.pool_changed(key[1])

    def _node_noticed(self, key: Key, old: NodeView | None, new: NodeView | None) -> None:
        if old is None or new is None or old.capacity != new.capacity:
            self.node_changes += 1
        if old != new:  # a kubelet writes its node's status every few minutes, to say nothing new
            self.node_view_changes += 1
            for job in self.jobs_on(key[1]):
                self.pods_touched(job)

    def _pod_noticed(self, key: Key, old: tuple[str, PodView] | None, new: tuple[str, PodView] | None) -> None:
        namespace, name = key
        if old == new:  # nothing that a plan reads
            return
        if old is not None and (new is None or new[0] != old[0]):
            self._forget_pod((namespace, old[0]), name)
        if new is not None:
            self._pods_of[(namespace, new[0])][name] = new[1]
            self._sets.pop((namespace, new[0]), None)
        if old is not None and old[1].node:
            self._leave_node(old[1].node, (namespace, old[0]))
        if new is not None and new[1].node:
            self._pods_on[new[1].node][(namespace, new[0])] += 1
        for side, change in ((old, -1), (new, 1)):
            if side is not None:
                self._count_starting((namespace, side[0]), side[1], change)
        for job in {side[0] for side in (old, new) if side is not None}:
            self._pick_touch((namespace, job), old, new)((namespace, job))

    def _count_starting(self, job: Key, pod: PodView, change: int) -> None:
        for counter, is_over in ((self._unbound, is_bound), (self._unstarted, is_started)):
            if not is_over(pod):
                counter[job] += change
                if not counter[job]:
                    del counter[job]

    def _pick_touch(
        self, job: Key, old: tuple[str, PodView] | None, new: tuple[str, PodView] | None
    ) -> Callable[[Key], None]:
        if self.pods_started is None or (old is not None and new is not None and old[0] != new[0]):
            return self.pods_touched
        before, now = (side[1] if side is not None else None for side in (old, new))
        one_step = is_one_step(before, now, self._unbound[job], self._unstarted[job])
        return self.pods_started if one_step else self.pods_touched

    def _leave_node(self, node: str, job: Key) -> None:
        jobs = self._pods_on[node]
        jobs[job] -= 1
        if jobs[job] <= 0:
            del jobs[job]
        if not jobs:
            del self._pods_on[node]

    def _forget_pod(self, job: Key, name: str) -> None:
        pods = self._pods_of.get(job, {})
        pods.pop(name, None)
        self._sets.pop(job, None)
        if not pods:
            self._pods_of.pop(job, None)


def _strip_managed_fields(raw: Mapping[str, Any], _: object = None) -> Mapping[str, Any]:
    """Return an object without managedFields, which outweigh the rest."""
    return {**raw, "metadata": {k: v for k, v in (raw.get("metadata") or {}).items() if k != "managedFields"}}


def _strip_status(job: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return everything of a job but its status, and but the resourceVersion that each write changes."""
    rest = {key: value for key, value in job.items() if key not in ("status", "metadata")}
    return rest, {key: value for key, value in job["metadata"].items() if key != "resourceVersion"}


def _parse_pod(raw: Mapping[str, Any], before: tuple[str, PodView] | None) -> tuple[str, PodView]:
    """Return the name of the pod's job, and what plans need to know of the pod.

    Tools and people change labels of running pods. The owner decides; a pod without one only has the label.
    """
    meta = raw.get("metadata") or {}
    owners = (each for each in meta.get("ownerReferences") or () if each.get("controller"))
    name = next((each.get("name") for each in owners if each.get("kind") == JOBS.kind), None)
    return str(name or (meta.get("labels") or {}).get(LABEL_JOB) or ""), parse_pod(
        raw, before[1] if before is not None else None
    )
