"""The cache: the newest state wins in whatever order it is told, and what was deleted goes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from everstep_operator.cluster import tombstones
from everstep_operator.cluster.cache import ClusterCache, Key
from everstep_operator.cluster.tombstones import Tombstones


def pod(name: str, job: str, *, version: int, uid: str = "u1", namespace: str = "ns", phase: str = "Pending") -> Any:
    labels = {"everstep.dev/job": job, "everstep.dev/index": name.rsplit("-", 1)[-1]}
    meta = {"namespace": namespace, "name": name, "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"metadata": meta, "spec": {"containers": [{}] * 3}, "status": {"phase": phase}}


class Watched:
    def __init__(self) -> None:
        self.touched: list[Key] = []
        self.pools: list[str] = []
        self.cache = ClusterCache(
            touched=self.touched.append, pool_changed=self.pools.append, pods_touched=self.touched.append
        )


def test_a_pod_touches_its_job_and_is_kept_as_a_view() -> None:
    w = Watched()
    w.cache.pods.put(pod("digits-1", "digits", version=1))
    assert w.touched == [("ns", "digits")]
    (view,) = w.cache.pods_of(("ns", "digits"))
    assert (view.index, view.name) == (1, "digits-1")


def test_of_a_set_that_starts_pod_0_and_the_last_one_are_told_at_once() -> None:
    touched: list[str] = []
    cache = ClusterCache(
        touched=lambda _: None, pool_changed=lambda _: None,
        pods_touched=lambda _: touched.append("at once"), pods_started=lambda _: touched.append("in a moment"),
    )  # fmt: skip
    for number in range(4):
        cache.pods.put(pod(f"digits-{number}", "digits", version=1, uid=f"u{number}"))
    touched.clear()
    for step, (spec, status) in enumerate(
        [({"nodeName": "n"}, {}), ({"nodeName": "n"}, {"containerStatuses": [RUNS], "phase": "Running"})]
    ):
        for number in range(4):
            raw = pod(f"digits-{number}", "digits", version=10 * (step + 1), uid=f"u{number}")
            cache.pods.put({**raw, "spec": spec, "status": status})
        assert touched == ["at once", "in a moment", "in a moment", "at once"]
        touched.clear()
    cache.pods.remove(("ns", "digits-2"), "u2")
    assert touched == ["at once"]
    assert not cache._unbound
    assert not cache._unstarted


RUNS = {"name": "trainer", "state": {"running": {"startedAt": "2026-01-01T12:00:00Z"}}}


def test_a_late_event_does_not_undo_our_own_write() -> None:
    w = Watched()
    w.cache.pods.put(pod("digits-0", "digits", version=9, phase="Running"))
    w.touched.clear()
    assert not w.cache.pods.put(pod("digits-0", "digits", version=7))
    assert w.touched == []
    assert w.cache.pods_of(("ns", "digits"))[0].phase == "Running"


def test_a_pod_is_its_owner_s_whatever_its_labels_become() -> None:
    w = Watched()
    owned = pod("digits-0", "digits", version=1)
    owned["metadata"]["ownerReferences"] = [
        {"kind": "Odd", "name": "other", "uid": "o"},
        {"kind": "TrainingJob", "name": "digits", "uid": "j", "controller": True},
    ]
    w.cache.pods.put(owned)
    labels = {"everstep.dev/job": "other", "everstep.dev/index": "0", "app.kubernetes.io/managed-by": "Helm"}
    w.cache.pods.put({**owned, "metadata": {**owned["metadata"], "labels": labels, "resourceVersion": "2"}})
    (view,) = w.cache.pods_of(("ns", "digits"))
    assert (view.uid, view.owner) == ("u1", "j")
    assert w.cache.pods_of(("ns", "other")) == ()


def test_the_end_of_a_predecessor_does_not_remove_its_successor() -> None:
    w = Watched()
    w.cache.pods.put(pod("digits-0", "digits", version=9, uid="new"))
    w.cache.pods.remove(("ns", "digits-0"), "old")
    assert len(w.cache.pods_of(("ns", "digits"))) == 1


def test_an_event_that_changes_nothing_a_plan_sees_touches_nobody() -> None:
    w = Watched()
    w.cache.pods.put(pod("digits-0", "digits", version=1))
    w.touched.clear()
    assert w.cache.pods.put(pod("digits-0", "digits", version=2))
    assert w.touched == []


def test_a_pod_that_changes_its_job_leaves_the_old_one() -> None:
    w = Watched()
    w.cache.pods.put(pod("x-0", "a", version=1))
    w.cache.pods.put(pod("x-0", "b", version=2))
    assert w.cache.pods_of(("ns", "a")) == ()
    assert len(w.cache.pods_of(("ns", "b"))) == 1


def test_a_list_removes_missed_deletions_but_not_what_is_newer_than_the_list() -> None:
    w = Watched()
    store = w.cache.pods
    store.put(pod("digits-0", "digits", version=5))
    store.put(pod("digits-1", "digits", version=6))
    listing = store.listing(10, store.newest)
    listing.add(pod("digits-0", "digits", version=5))
    store.put(pod("digits-2", "digits", version=11))  # created while the list was being read
    assert listing.finish() == 1
    assert {view.name for view in w.cache.pods_of(("ns", "digits"))} == {"digits-0", "digits-2"}
    assert listing.missed == 0


def test_an_answer_that_comes_after_the_deletion_brings_nothing_back() -> None:
    w = Watched()
    w.cache.pods.remove(("ns", "digits-0"), "u1", 7)  # the watch is faster than the answer to our own create
    assert not w.cache.pods.put(pod("digits-0", "digits", version=5))
    assert w.cache.pods_of(("ns", "digits")) == ()
    assert w.cache.pods.put(pod("digits-0", "digits", version=9, uid="u2")), "a successor is another object"


def test_a_page_of_a_list_that_is_older_than_the_deletion_brings_nothing_back() -> None:
    w = Watched()
    store = w.cache.pods
    store.put(pod("digits-0", "digits", version=5))
    listing = store.listing(6, store.newest)
    store.remove(("ns", "digits-0"), "u1", 7)
    listing.add(pod("digits-0", "digits", version=5))
    assert (listing.missed, listing.finish()) == (0, 0)
    assert w.cache.pods_of(("ns", "digits")) == ()


@pytest.mark.parametrize("later", [0, 5])
def test_what_one_list_leaves_out_is_there_again_with_the_next(later: int) -> None:
    """An API server whose cache is not filled yet, or whose member of etcd has lost data, answers so."""
    w = Watched()
    store = w.cache.pods
    store.put(pod("digits-0", "digits", version=5))
    assert store.listing(10, store.newest).finish() == 1
    assert not store.put(pod("digits-0", "digits", version=5)), "an answer that was on its way"
    listing = store.listing(10 + later, store.newest)
    listing.add(pod("digits-0", "digits", version=5))
    assert (listing.missed, listing.finish()) == (1, 0)
    assert len(w.cache.pods_of(("ns", "digits"))) == 1
    store.remove(("ns", "digits-0"), "u1", 20)
    assert not store.put(pod("digits-0", "digits", version=5), listed_at=19), "now its end was told"
    assert w.cache.pods_of(("ns", "digits")) == ()


def test_a_pod_that_has_got_its_label_again_is_not_removed_by_the_late_news_that_it_had_lost_it() -> None:
    w = Watched()
    w.cache.pods.put(pod("digits-0", "digits", version=5))
    w.cache.pods.put(pod("digits-0", "digits", version=9))  # by a list, ahead of the watch
    assert not w.cache.pods.remove(("ns", "digits-0"), "u1", 7)
    assert len(w.cache.pods_of(("ns", "digits"))) == 1


def test_tombstones_are_dropped_by_age_and_by_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tombstones, "MAX_COUNT", 3)
    now = 0.0
    made = Tombstones(lambda: now)
    for number in range(5):
        made.add(f"u{number}", 10)
    assert [number for number in range(5) if made.covers(f"u{number}", 9)] == [2, 3, 4]
    now = tombstones.LIFETIME_SECONDS + 1
    made.add("u5")
    assert len(made) == 1
    assert made.covers("u5", 1 << 40), "of what is gone at an unknown version nothing is believed"


def test_a_list_of_one_namespace_says_nothing_about_others() -> None:
    w = Watched()
    w.cache.pods.put(pod("a-0", "a", version=1, namespace="one"))
    w.cache.pods.put(pod("a-0", "a", version=2, namespace="two"))
    assert w.cache.pods.listing(10, 2, "one").finish() == 1
    assert len(w.cache.pods_of(("two", "a"))) == 1


def test_a_cluster_restored_from_a_backup_is_believed() -> None:
    w = Watched()
    w.cache.pods.put(pod("digits-0", "digits", version=1000, phase="Running"))
    listing = w.cache.pods.listing(50, w.cache.pods.newest)
    listing.add(pod("digits-0", "digits", version=40, phase="Pending"))
    listing.finish()
    assert w.cache.pods_of(("ns", "digits"))[0].phase == "Pending"


def test_what_was_deleted_after_the_backup_is_there_again_with_it() -> None:
    w = Watched()
    w.cache.pods.put(pod("digits-0", "digits", version=40))
    w.cache.pods.put(pod("digits-1", "digits", version=1000, uid="u2"))
    w.cache.pods.remove(("ns", "digits-0"), "u1", 900)
    listing = w.cache.pods.listing(50, w.cache.pods.newest)
    listing.add(pod("digits-0", "digits", version=40))
    listing.finish()
    assert [view.name for view in w.cache.pods_of(("ns", "digits"))] == ["digits-0"]


def test_a_cluster_restored_with_versions_ahead_of_the_cache_is_believed() -> None:
    """`etcdutl snapshot restore --bump-revision`: lists are newer than all that is known, and what they show is
    older."""
    w = Watched()
    w.cache.pods.put(pod("digits-0", "digits", version=1000, phase="Running", uid="u3"))
    w.cache.pods.put(pod("digits-1", "digits", version=40, uid="u2"))
    w.cache.pods.remove(("ns", "digits-1"), "u2", 900)
    listing = w.cache.pods.listing(1_000_040, w.cache.pods.newest)
    for name, uid in (("digits-0", "u1"), ("digits-1", "u2")):
        listing.add(pod(name, "digits", version=40, uid=uid))
    assert (listing.missed, listing.finish()) == (2, 0)
    assert {(view.name, view.uid, view.phase) for view in w.cache.pods_of(("ns", "digits"))} == {
        ("digits-0", "u1", "Pending"), ("digits-1", "u2", "Pending")
    }  # fmt: skip


def test_a_deletion_is_no_longer_believed_once_a_list_from_after_it_shows_the_object() -> None:
    w = Watched()
    w.cache.pods.put(pod("digits-0", "digits", version=40))
    w.cache.pods.remove(("ns", "digits-0"), "u1", 900)
    for listed_at, shown in ((899, False), (1_000_040, True)):
        listing = w.cache.pods.listing(listed_at, w.cache.pods.newest)
        listing.add(pod("digits-0", "digits", version=40))
        assert bool(w.cache.pods_of(("ns", "digits"))) is shown


def test_an_answer_about_one_object_that_is_older_than_what_was_held_is_of_a_restored_backup() -> None:
    w = Watched()
    w.cache.pods.put(pod("digits-0", "digits", version=1000, phase="Running"))
    held = w.cache.pods.get(("ns", "digits-0"))
    assert not w.cache.pods.put_answer(pod("digits-0", "digits", version=1000, phase="Running"), held)
    w.cache.pods.put(pod("digits-0", "digits", version=1001, phase="Failed"))
    assert not w.cache.pods.put_answer(pod("digits-0", "digits", version=1000), held), "it was on its way"
    held = w.cache.pods.get(("ns", "digits-0"))
    assert w.cache.pods.put_answer(pod("digits-0", "digits", version=40), held)
    (view,) = w.cache.pods_of(("ns", "digits"))
    assert view.phase == "Pending"


def test_an_object_that_nobody_can_read_is_passed_over() -> None:
    w = Watched()
    w.cache.pods.put(pod("digits-0", "digits", version=1))
    listing = w.cache.pods.listing(10, 1)
    odd = pod("digits-0", "digits", version=2)
    odd["status"] = {"conditions": ["Ready"]}
    with capture_logs() as logs:
        listing.add(odd)
    listing.add(pod("digits-1", "digits", version=3))
    assert listing.finish() == 0, "it is there, whatever is in it"
    assert {view.index for view in w.cache.pods_of(("ns", "digits"))} == {0, 1}
    assert [(entry["kind"], entry["name"]) for entry in logs] == [("Pod", "ns/digits-0")]


def test_managed_fields_are_not_kept() -> None:
    w = Watched()
    meta = {"namespace": "ns", "name": "digits", "uid": "u", "resourceVersion": "3", "managedFields": [{"x": 1}]}
    w.cache.jobs.put({"metadata": meta, "spec": {}})
    entry = w.cache.jobs.get(("ns", "digits"))
    assert entry is not None
    assert "managedFields" not in entry.value["metadata"]


@given(st.permutations(range(1, 8)))
def test_any_order_of_news_ends_in_the_newest(order: list[int]) -> None:
    w = Watched()
    for version in order:
        w.cache.pods.put(pod("digits-0", "digits", version=version, phase=f"p{version}"))
    assert w.cache.pods_of(("ns", "digits"))[0].phase == "p7"


def node(name: str, *, version: int, heartbeat: str = "", ready: str = "True") -> Any:
    condition = {"type": "Ready", "status": ready, "reason": "r", "lastHeartbeatTime": heartbeat}
    return {
        "metadata": {"name": name, "uid": name, "resourceVersion": str(version)},
        "status": {"conditions": [condition], "images": [{"names": ["x" * 1000]}] * 50},
    }


def bound(name: str, job: str, on: str | None, *, version: int) -> Any:
    made = pod(name, job, version=version)
    made["spec"]["nodeName"] = on
    return made


def test_a_node_touches_the_jobs_with_pods_on_it_and_no_other() -> None:
    w = Watched()
    w.cache.nodes.put(node("n1", version=1))
    w.cache.pods.put(bound("a-0", "a", "n1", version=2))
    w.cache.pods.put(bound("a-1", "a", "n1", version=3))
    w.cache.pods.put(bound("b-0", "b", "n2", version=4))
    w.touched.clear()
    w.cache.nodes.put(node("n1", version=5, ready="Unknown"))
    assert w.touched == [("ns", "a")]
    w.cache.nodes.remove(("", "n1"), "n1")
    assert w.touched == [("ns", "a")] * 2


def test_a_heartbeat_touches_nobody() -> None:
    w = Watched()
    w.cache.nodes.put(node("n1", version=1, heartbeat="10:00"))
    w.cache.pods.put(bound("a-0", "a", "n1", version=2))
    w.touched.clear()
    assert w.cache.nodes.put(node("n1", version=3, heartbeat="10:05"))
    assert w.touched == []


def test_who_is_on_a_node_is_forgotten_with_the_pods() -> None:
    w = Watched()
    w.cache.pods.put(bound("a-0", "a", None, version=1))
    assert w.cache.jobs_on("n1") == ()
    w.cache.pods.put(bound("a-0", "a", "n1", version=2))
    w.cache.pods.put(bound("a-1", "a", "n1", version=3))
    w.cache.pods.put(bound("a-0", "a", "n1", version=4))
    w.cache.pods.remove(("ns", "a-0"), "u1")
    assert w.cache.jobs_on("n1") == (("ns", "a"),)
    w.cache.pods.remove(("ns", "a-1"), "u1")
    assert w.cache.jobs_on("n1") == ()
    assert not w.cache._pods_on


def test_of_a_node_little_is_kept() -> None:
    w = Watched()
    w.cache.nodes.put(node("n1", version=1))
    entry = w.cache.nodes.get(("", "n1"))
    assert entry is not None
    assert len(repr(entry)) < 400


def job_object(version: int, *, nodes: int = 1, epoch: int = 0) -> Any:
    meta = {"namespace": "ns", "name": "digits", "uid": "u1", "resourceVersion": str(version)}
    return {"metadata": meta, "spec": {"numNodes": nodes}, "status": {"epoch": epoch}}


def test_a_status_that_is_our_own_wakes_nobody_and_one_of_somebody_else_does() -> None:
    w = Watched()
    w.cache.jobs.put(job_object(1))
    w.touched.clear()
    with w.cache.writing_status(("ns", "digits")):
        w.cache.jobs.put(job_object(2, epoch=1))
    assert w.touched == [], "the event came before the answer"
    w.cache.jobs.put(job_object(3, epoch=0))
    assert w.touched == [("ns", "digits")], "somebody reset the status"


def test_a_change_of_the_spec_beside_our_own_write_wakes() -> None:
    w = Watched()
    w.cache.jobs.put(job_object(1))
    w.touched.clear()
    with w.cache.writing_status(("ns", "digits")):
        w.cache.jobs.put(job_object(2, epoch=1, nodes=2))
    assert w.touched == [("ns", "digits")]


def test_a_job_reads_differently_under_other_crds_though_nobody_has_changed_it() -> None:
    w = Watched()
    meta = {"namespace": "ns", "name": "digits", "uid": "u1", "resourceVersion": "5", "managedFields": [1]}
    w.cache.jobs.put({"metadata": meta, "spec": {"later": "new"}})
    w.touched.clear()
    assert not w.cache.jobs.put({"metadata": {**meta, "managedFields": [2]}, "spec": {"later": "new"}})
    assert not w.cache.jobs.put({"metadata": {**meta, "resourceVersion": "4"}, "spec": {}})
    assert w.touched == []
    assert w.cache.jobs.put({"metadata": meta, "spec": {}})
    assert w.touched == [("ns", "digits")]
