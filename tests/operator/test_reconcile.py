"""One look at a job, where the API server does not agree."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from benchmarks.generated_cluster import apply_merge_patch
from everstep_operator.api.status import Cause, LastFailure, Phase, TemplateStatus, TrainingJobStatus
from everstep_operator.app import REPORTED_FAILURES, Operator
from everstep_operator.cluster import errors
from everstep_operator.cluster.action_executor import ActionExecutor
from everstep_operator.cluster.agent_code import AgentCode
from everstep_operator.cluster.cache import ClusterCache, Key
from everstep_operator.cluster.disruption_budgets import DisruptionBudgets
from everstep_operator.cluster.frozen_templates import FrozenTemplates
from everstep_operator.cluster.leader_poller import LeaderPoller
from everstep_operator.cluster.node_directory import NodeDirectory
from everstep_operator.cluster.node_failures import NodeFailures
from everstep_operator.cluster.node_leases import NodeLeases
from everstep_operator.cluster.server_clock import ServerClock
from everstep_operator.cluster.waiting_gangs import WaitingGangs
from everstep_operator.cluster.work_queue import WorkQueue
from everstep_operator.plan.observation import GangView
from everstep_operator.plan.plan_settings import PlanSettings
from everstep_operator.reconcile import Reconciler
from everstep_operator.settings import OperatorSettings
from tests.builders import CREATED, job

KEY = ("default", "digits")
FAILURE = LastFailure(cause=Cause.APPLICATION, reason="ApplicationError", message="odd")


class Server:
    """Accepts everything but a status for which `refuse` has a message."""

    def __init__(self) -> None:
        self.refuse: Any = lambda status: None
        self.statuses: list[Any] = []
        self.created: list[Any] = []
        self.merged: list[Any] = []  # bodies of merge patches
        self.fails = False
        self.there: dict[tuple[str, str], Any] = {}  # by plural and name
        self.protected: set[str] = set()  # kinds of which nothing may be deleted
        self.jobs: Any = None  # the cache, which shows what is stored of the others

    async def apply_status(self, resource: Any, namespace: str, body: Any) -> Any:
        if self.fails:
            raise errors.Unreachable("down", sent=False)
        self.statuses.append(body["status"])
        if (message := self.refuse(body["status"])) is not None:
            raise errors.Invalid(422, "Invalid", message)
        stored = job().meta(uid=body["metadata"]["uid"], resourceVersion=str(len(self.statuses) + 1)).manifest()
        return {**stored, "status": body["status"]}

    async def merge_status(self, resource: Any, namespace: str, body: Any) -> Any:
        if (resource.plural, name := body["metadata"]["name"]) not in self.there:
            found = self.jobs.get((namespace, name)).value
            meta = {**body["metadata"], "uid": found["metadata"]["uid"]}
            return await self.apply_status(
                resource,
                namespace,
                {"metadata": meta, "status": apply_merge_patch(found.get("status") or {}, body["status"])},
            )
        self.merged.append(body)
        found = self.there[(resource.plural, name)]
        meta = {**found["metadata"], "resourceVersion": str(int(found["metadata"]["resourceVersion"]) + 1)}
        return {**found, "metadata": meta, "status": {**found.get("status", {}), **body["status"]}}

    async def create(self, resource: Any, namespace: str, body: Any, *, dry_run: bool = False, **_: Any) -> Any:
        self.created.append(body)
        return {**body, "metadata": {"resourceVersion": "1", "uid": "u", **body["metadata"]}}

    async def delete(self, resource: Any, *_: Any, **__: Any) -> bool:
        if resource.plural in self.protected:
            raise errors.Forbidden(403, "Forbidden", 'admission webhook "no-deletes" denied the request')
        return True

    async def get(self, resource: Any, namespace: str, name: str, **_: Any) -> Any:
        if (resource.plural, name) in self.there:
            return self.there[(resource.plural, name)]
        raise errors.NotFound(404, "NotFound", name)

    def events(self) -> list[Any]:
        return [body for body in self.created if body["kind"] == "Event"]


@pytest.fixture
def server() -> Any:
    return Server()


@pytest_asyncio.fixture
async def reconciler(server: Any) -> Reconciler:
    queue: WorkQueue[Key] = WorkQueue()
    cache = ClusterCache(touched=lambda _: None, pool_changed=lambda _: None)
    server.jobs = cache.jobs
    leaders, frozen = LeaderPoller(lambda *_: None), FrozenTemplates(server, (b"key",))
    gangs, clock = WaitingGangs(lambda _: None), CREATED.timestamp
    budgets, nodes = DisruptionBudgets(server, enabled=False), NodeDirectory(server, cache, clock)
    actor = ActionExecutor(server, cache, leaders, AgentCode(b"code"), frozen, (b"key",), budgets, nodes.admitted)
    leases = NodeLeases(server, cache, queue.add, clock=clock, silence=0)
    failures = NodeFailures(
        server, "everstep-system", window=86_400.0, clock=clock, count_nodes=lambda: 4, has_node=lambda _: True
    )
    return Reconciler(
        server, cache, queue, leaders, frozen, gangs, nodes, leases, failures, actor,
        PlanSettings(operator_key=b"key", agent_digest=actor.agent.digest), (b"key",), clock,
    )  # fmt: skip


async def test_a_refused_status_is_written_without_what_came_from_the_pods_and_an_event_says_why(
    reconciler: Reconciler, server: Any
) -> None:
    server.refuse = lambda status: "status.lastFailure.message: too odd" if "lastFailure" in status else None
    for version in ("10", "20"):
        before = TrainingJobStatus.parse(server.statuses[-1]) if server.statuses else TrainingJobStatus()
        odd = job().status(before.model_copy(update={"last_failure": FAILURE})).meta(resourceVersion=version)
        reconciler.cache.jobs.put(odd.manifest())
        await reconciler.reconcile(KEY)
        reconciler.clock = lambda: CREATED.timestamp() + 60  # a rejection is planned for anew
    assert ["lastFailure" in status for status in server.statuses] == [True, False] * 2
    assert any(body["kind"] == "Pod" for body in server.created), "the job goes on"
    told = [event["message"] for event in server.events() if event["reason"] == "StatusRefused"]
    assert len(told) == 1, "once"
    assert "status.lastFailure.message: too odd" in told[0]


async def test_a_refused_status_does_not_wake_its_job_again_and_again(reconciler: Reconciler, server: Any) -> None:
    """The rest of it is stored already, and storing it once more changes nothing: the server tells of no event."""
    stored: list[Any] = [job().status(TrainingJobStatus(last_failure=FAILURE)).meta(resourceVersion="10").manifest()]

    async def apply_status(resource: Any, namespace: str, body: Any) -> Any:
        server.statuses.append(body["status"])
        if "lastFailure" in body["status"]:
            raise errors.Invalid(422, "Invalid", "status.lastFailure.message: too odd")
        if body["status"] != stored[-1]["status"]:
            version = str(int(stored[-1]["metadata"]["resourceVersion"]) + 1)
            stored.append({**job().meta(resourceVersion=version).manifest(), "status": body["status"]})
        return stored[-1]

    async def plan_with_a_failure(key: Key, observed: Any) -> Any:
        made: Any = await planned(key, observed)
        return replace(made, status=made.status.model_copy(update={"last_failure": FAILURE}), changed=True)

    server.apply_status = apply_status
    planned, reconciler._make_plan = reconciler._make_plan, plan_with_a_failure  # type: ignore[method-assign]
    reconciler.cache.jobs.put(stored[0])
    looks = 0
    reconciler.queue.add(KEY)
    while (key := reconciler.queue.take()) is not None and looks < 20:
        await reconciler.reconcile(key)
        reconciler.queue.done(key)
        looks += 1
    assert len(stored) > 1, "what can be stored is stored, and looked at once more"
    assert looks < 10


async def test_a_status_that_is_refused_whatever_is_left_out_is_told_too(reconciler: Reconciler, server: Any) -> None:
    server.refuse = lambda status: "spec.image: too odd"
    reconciler.cache.jobs.put(job().manifest())
    with pytest.raises(errors.Invalid):
        await reconciler.reconcile(KEY)
    assert [event["reason"] for event in server.events()] == ["StatusRefused"]
    assert [body["kind"] for body in server.created] == ["Event"], "nothing is done that is not on record"


async def test_of_a_job_that_is_too_large_for_the_api_server_its_users_are_told_once(
    reconciler: Reconciler, server: Any
) -> None:
    """A job of 1.5 MB is stored, and with its status it is more than etcd takes."""

    async def apply_status(resource: Any, namespace: str, body: Any) -> Any:
        server.statuses.append(body["status"])
        raise errors.from_status(500, {"message": "etcdserver: request is too large"})

    server.apply_status = apply_status
    for version in range(10, 15):
        reconciler.cache.jobs.put(job().meta(resourceVersion=str(version)).manifest())
        with pytest.raises(errors.TooLarge):  # for the queue to back off from
            await reconciler.reconcile(KEY)
    assert len(server.statuses) == 5, "there is nothing to leave out"
    (told,) = server.events()
    assert told["reason"] == "StatusRefused"
    assert "etcdserver: request is too large" in told["message"]
    assert "podTemplate" in told["message"], "what to do"
    assert [body["kind"] for body in server.created] == ["Event"], "nothing is done that is not on record"


async def test_what_is_refused_again_and_again_is_for_the_queue_to_back_off_from(
    reconciler: Reconciler, server: Any
) -> None:
    """A policy against deletions, and a job whose TTL is over: there is no other plan."""
    server.protected = {"trainingjobs"}
    over = TrainingJobStatus(phase=Phase.SUCCEEDED, observed_generation=1)
    reconciler.cache.jobs.put(job().ttl("1s").status(over).manifest())
    reconciler.clock = lambda: CREATED.timestamp() + 3600
    rejection = await reconciler.reconcile(KEY)
    assert rejection is not None
    assert "no-deletes" in rejection.message
    server.protected = set()
    assert await reconciler.reconcile(KEY) is None


async def test_of_a_job_that_nobody_can_read_its_users_are_told_once(reconciler: Reconciler, server: Any) -> None:
    unreadable = job().status(TrainingJobStatus(phase=Phase.RUNNING, epoch=3)).manifest()
    unreadable["spec"]["numNodes"] = "many"
    server.there[("trainingjobs", "digits")] = unreadable
    for version in ("10", "20"):
        unreadable["metadata"]["resourceVersion"] = version
        reconciler.cache.jobs.put(unreadable)
        for _ in range(3):  # its pods change
            assert await reconciler.reconcile(KEY) is None
    assert [event["reason"] for event in server.events()] == ["SpecInvalid"] * 2, "once for each correction"
    for body, version in zip(server.merged, ("10", "20"), strict=True):
        assert body["metadata"] == {"name": "digits", "resourceVersion": version}
        assert list(body["status"]) == ["conditions"], "the rest is as it was"
        told = {each["type"]: (each["status"], each["reason"]) for each in body["status"]["conditions"]}
        assert told == {"Ready": ("False", "SpecInvalid"), "Stalled": ("True", "SpecInvalid")}


@pytest.mark.parametrize("change", ["managed elsewhere", "finished"])
async def test_conditions_of_a_job_that_nobody_can_read_stay_if_they_are_not_to_be_changed(
    reconciler: Reconciler, server: Any, change: str
) -> None:
    phase = Phase.SUCCEEDED if change == "finished" else Phase.RUNNING
    unreadable = job().status(TrainingJobStatus(phase=phase)).manifest()
    unreadable["spec"]["numNodes"] = "many"
    if change == "managed elsewhere":
        unreadable["spec"]["managedBy"] = "kueue.x-k8s.io/multikueue"
    reconciler.cache.jobs.put(unreadable)
    await reconciler.reconcile(KEY)
    assert server.merged == []


def successor(version: str) -> Any:
    """The job, deleted and made again under its name."""
    return job().meta(uid="another", resourceVersion=version)


async def test_users_of_a_job_hear_what_users_of_its_predecessor_have_heard(
    reconciler: Reconciler, server: Any
) -> None:
    """Deleted and made again between two looks: nobody has seen that there was none."""
    server.refuse = lambda status: "too odd" if "lastFailure" in status else None
    odd = TrainingJobStatus(last_failure=FAILURE)
    for built in (job().status(odd).meta(resourceVersion="10"), successor("20").status(odd)):
        reconciler.cache.jobs.put(built.manifest())
        await reconciler.reconcile(KEY)
    refused = [event for event in server.events() if event["reason"] == "StatusRefused"]
    assert [event["involvedObject"]["uid"] for event in refused] == [job().manifest()["metadata"]["uid"], "another"]


async def test_nothing_of_a_former_job_of_the_same_name_is_remembered(reconciler: Reconciler, server: Any) -> None:
    seen: list[Any] = []
    planned = reconciler._make_plan

    async def plan(key: Key, observed: Any) -> Any:
        seen.append(observed)
        return await planned(key, observed)

    reconciler._make_plan = plan  # type: ignore[method-assign]
    reconciler.cache.jobs.put(job().meta(resourceVersion="10").manifest())
    await reconciler.reconcile(KEY)
    reconciler.gangs.update(KEY, GangView("default/digits", "old", 0.0, frozenset(), wanted=4))
    for _ in range(REPORTED_FAILURES):
        reconciler.queue.retry(KEY)
    server.fails = True
    reconciler.cache.jobs.put(successor("20").manifest())
    with pytest.raises(errors.Unreachable):
        await reconciler.reconcile(KEY)
    assert (seen[0].status_written_at, seen[-1].status_written_at) == (None, None)
    assert reconciler.queue.failures(KEY) == 0, "its own back-off, and its own events"
    assert reconciler.gangs.list_views() == ()
    server.fails = False
    assert await reconciler.reconcile(KEY) is None
    await reconciler.reconcile(KEY)
    assert seen[-1].status_written_at is not None


async def test_a_failure_is_told_to_the_job_that_was_looked_at(reconciler: Reconciler, server: Any) -> None:
    reconciler.cache.jobs.put(job().meta(uid="one", resourceVersion="10").manifest())
    await reconciler.reconcile(KEY)
    server.created.clear()
    reconciler.cache.jobs.put(successor("20").manifest())
    await reconciler.report_retries(KEY, errors.ServerError(500, "", "in trouble"))
    assert [event["involvedObject"]["uid"] for event in server.events()] == ["one"]


async def test_users_hear_of_a_job_that_no_plan_can_be_made_of(server: Any) -> None:
    """Its status tells nothing: there was no plan to write one."""
    server.clock = ServerClock()
    operator = Operator(OperatorSettings.load({}, {}), server, (b"key",), AgentCode(b"code"))
    has_told, report = asyncio.Event(), operator.reconciler.report_retries

    async def fail(job: Key) -> None:
        raise KeyError("name")

    async def tell(key: Key, error: Exception) -> None:
        await report(key, error)
        has_told.set()

    operator.reconciler.unlisted.refresh = fail  # type: ignore[method-assign]
    operator.reconciler.report_retries = tell  # type: ignore[method-assign]
    operator.cache.jobs.put(job().manifest())
    worker = asyncio.create_task(operator._run_worker())
    await asyncio.wait_for(has_told.wait(), 60)
    worker.cancel()
    (told,) = server.events()
    assert told["reason"] == "Retrying"
    assert "KeyError('name')" in told["message"]


async def test_a_name_that_somebody_else_has_taken_raises_no_epoch(reconciler: Reconciler, server: Any) -> None:
    """It is tried again twice a minute, for as long as the other pod is there."""
    known = TrainingJobStatus(
        phase=Phase.SCHEDULING, epoch=3, template=TemplateStatus(epoch=1, pool="", plain=False, spec_hash="")
    )
    server.there[("pods", "digits-0")] = {"metadata": {"name": "digits-0", "namespace": "default", "uid": "other"}}
    reconciler.cache.jobs.put(job().status(known).meta(resourceVersion="10").manifest())
    for _ in range(3):
        rejection = await reconciler.reconcile(KEY)
        assert rejection is None
    assert {status["epoch"] for status in server.statuses} == {3}
    assert server.statuses[-1]["transitions"][-1]["reason"] == "NameConflict"


async def test_a_status_that_somebody_edits_again_and_again_is_put_back_and_told_once(
    reconciler: Reconciler, server: Any
) -> None:
    reconciler.cache.jobs.put(job().meta(resourceVersion="10").manifest())
    await reconciler.reconcile(KEY)
    right = server.statuses[-1]
    for version in range(20, 25):
        edited = {**job().meta(resourceVersion=str(version)).manifest(), "status": {**right, "epoch": 0}}
        reconciler.cache.jobs.put(edited)
        await reconciler.reconcile(KEY)
        assert server.statuses[-1]["epoch"] == right["epoch"]
    assert len([event for event in server.events() if event["reason"] == "StatusRestored"]) == 1


async def test_a_job_that_the_watch_has_told_of_under_older_crds_is_not_started(
    reconciler: Reconciler, server: Any
) -> None:
    """A watch that began before newer CRDs goes on without their fields for a second, the event of a write included."""
    apply_status = server.apply_status

    async def apply_with_newer_crds(*arguments: Any) -> Any:
        return with_later_field(await apply_status(*arguments))

    def with_later_field(stored: Any) -> Any:
        server.there[("trainingjobs", "digits")] = made = {**stored, "spec": {**stored["spec"], "later": "new"}}
        return made

    server.apply_status = apply_with_newer_crds
    reconciler.cache.jobs.put(job().meta(resourceVersion="1").manifest())
    assert await reconciler.reconcile(KEY) is None
    for _ in range(2):
        stored = server.there[("trainingjobs", "digits")]
        spec = {name: value for name, value in stored["spec"].items() if name != "later"}
        reconciler.cache.jobs.put({**stored, "spec": spec})  # as the old watch tells of the write
        with contextlib.suppress(errors.Conflict):
            await reconciler.reconcile(KEY)
        assert await reconciler.reconcile(KEY) is None
    assert [body["kind"] for body in server.created if body["kind"] != "Event"] == []
    stalled = {condition["type"]: condition for condition in server.statuses[-1]["conditions"]}["Stalled"]
    assert (stalled["status"], stalled["reason"]) == ("True", "UnknownFields")


async def test_a_copy_of_pod_0_does_not_hide_the_leader(
    reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kubectl get pod -o yaml`, applied under another name: it has the job's owner and labels, and is newer."""
    monkeypatch.setattr(reconciler.leaders, "view", lambda key, uid: uid)
    built = job().build()
    owner = {"controller": True, "kind": "TrainingJob", "name": "digits", "uid": built.metadata.uid}
    labels = {"everstep.dev/job": "digits", "everstep.dev/index": "0", "everstep.dev/epoch": "1"}
    for number, name in enumerate(("digits-0", "copy", "digits-1"), 1):
        created = f"2026-01-01T12:00:0{number}Z"
        meta = {"namespace": "default", "name": name, "uid": name, "resourceVersion": str(number), "labels": labels}
        reconciler.cache.pods.put({"metadata": {**meta, "creationTimestamp": created, "ownerReferences": [owner]}})
    found: object = reconciler._find_leader_view(KEY, built, reconciler.cache.pods_of(KEY))
    assert found == "digits-0"


async def test_what_older_crds_cannot_store_is_known_in_the_next_look(reconciler: Reconciler, server: Any) -> None:
    """Else each look would decide and write the same again."""
    apply_status = server.apply_status

    async def apply(resource: Any, namespace: str, body: Any) -> Any:
        if "nodes" in body["status"]:
            message = "failed to create typed patch object: .status.nodes: field not declared in schema"
            raise errors.from_status(500, {"message": message})
        return await apply_status(resource, namespace, body)

    async def prune(resource: Any, namespace: str, body: Any) -> Any:
        status = {name: value for name, value in body["status"].items() if name != "nodes"}
        return await merge_status(resource, namespace, {**body, "status": status})

    merge_status, server.merge_status = server.merge_status, prune
    server.apply_status = apply
    reconciler.cache.jobs.put(job().manifest())
    looks = 0
    reconciler.queue.add(KEY)
    while (key := reconciler.queue.take()) is not None and looks < 20:
        await reconciler.reconcile(key)
        reconciler.queue.done(key)
        looks += 1
    assert server.statuses
    assert len(server.statuses) < 5, "what has changed nothing is not written again"
    assert all("nodes" not in status for status in server.statuses)
    assert reconciler._memories[KEY].kept == {"nodes": 1}


async def test_a_job_that_an_answer_denies_is_believed_with_the_next_list_that_shows_it(
    reconciler: Reconciler, server: Any
) -> None:
    """A member of etcd that has lost data answers so. A list that was on its way tells nothing."""

    async def conflict(*_: Any) -> Any:
        raise errors.Conflict(409, "Conflict", "another version")

    server.apply_status = conflict
    jobs, there = reconciler.cache.jobs, job().meta(resourceVersion="20").manifest()
    jobs.put(there)
    await reconciler.reconcile(KEY)
    assert jobs.get(KEY) is None
    assert not jobs.put(there)
    listing = jobs.listing(19, 0)
    listing.add(there)
    assert jobs.get(KEY) is None
    listing = jobs.listing(25, jobs.newest)
    listing.add(there)
    assert jobs.get(KEY) is not None
    jobs.remove(KEY, there["metadata"]["uid"], 26)
    listing = jobs.listing(25, 0)
    listing.add(there)
    assert jobs.get(KEY) is None, "now its end was told"
