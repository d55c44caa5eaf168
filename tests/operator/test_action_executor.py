"""An object that is in the way is never adopted, and the user is told of it."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import re
from typing import Any

import pytest
import pytest_asyncio

from everstep.agent.wire.auth import job_token
from everstep_operator.api.job import TrainingJob
from everstep_operator.cluster import action_executor, errors
from everstep_operator.cluster.action_executor import ActionExecutor, JobRef, StaleObject, check_ownership
from everstep_operator.cluster.admitted_pods import AdmittedPods
from everstep_operator.cluster.agent_code import AgentCode
from everstep_operator.cluster.cache import ClusterCache
from everstep_operator.cluster.disruption_budgets import DisruptionBudgets
from everstep_operator.cluster.frozen_templates import FrozenTemplates
from everstep_operator.cluster.leader_poller import LeaderPoller
from everstep_operator.cluster.resources import PODS
from everstep_operator.plan import template
from everstep_operator.plan.actions import (
    Action,
    CreatePods,
    DeleteBudget,
    DeletePods,
    DeleteStaleObjects,
    EnsureAgent,
    EnsureBudget,
    EnsureSecret,
    EnsureService,
    EnsureTemplate,
    NamePods,
    PodRef,
)
from everstep_operator.plan.frozen_template import FrozenTemplate
from everstep_operator.plan.job_service import build_service
from everstep_operator.plan.operator_keys import make_secret_name
from everstep_operator.plan.plan_settings import PlanSettings
from everstep_operator.plan.pod_manifest import build_owner_reference
from tests.builders import job
from tests.operator.stored_objects import StoredObjects

KEY = b"key"
JOB = JobRef("default", "digits", job().build().metadata.uid, "1", confirmed=True)
SECRET_1 = ("digits", JOB.uid, 1, KEY)


@pytest.fixture
def objects() -> Any:
    return StoredObjects()


@pytest_asyncio.fixture
async def actor(objects: Any) -> ActionExecutor:
    cache = ClusterCache(touched=lambda _: None, pool_changed=lambda _: None)
    leaders, frozen = LeaderPoller(lambda *_: None), FrozenTemplates(objects, (KEY,))
    budgets = DisruptionBudgets(objects, enabled=True)
    return ActionExecutor(objects, cache, leaders, AgentCode(b"code"), frozen, (KEY,), budgets, AdmittedPods(objects))


@pytest.mark.parametrize("change", [{"metadata": {"resourceVersion": "2"}}, {"spec": {"later": "new"}}])
async def test_nothing_is_made_for_pods_of_a_job_that_is_not_as_it_was_observed(
    actor: ActionExecutor, objects: Any, change: Any
) -> None:
    """The watch may be behind, or tell of the job as older CRDs have it: the same version reads differently now."""
    observed = job().meta(resourceVersion="1").manifest()
    actor.cache.jobs.put(observed)
    now = {**observed, **{name: {**observed[name], **value} for name, value in change.items()}}
    objects.there[("trainingjobs", JOB.name)] = now
    built = job().build()
    actions: list[Action] = [*of_template(built, 1), CreatePods((0,), 1, resolved(built, 1))]
    with pytest.raises(errors.Conflict):
        await actor.execute(dataclasses.replace(JOB, confirmed=False), actions)
    assert list(objects.there) == [("trainingjobs", JOB.name)]


async def test_the_answer_to_the_creation_of_a_pod_tells_what_admission_made_of_it(
    actor: ActionExecutor, objects: Any
) -> None:
    objects.mutate = lambda body: {**body, "spec": {**body["spec"], "overhead": {"cpu": "3"}}}
    assert await actor.execute(JOB, [CreatePods((0, 1), 1, resolved(job().build(), 1))]) == (None, None)
    admitted = actor.admitted.get(JOB.key, JOB.uid, 1)
    assert admitted is not None
    assert admitted.spec["overhead"] == {"cpu": "3"}
    assert actor.cache.pods.get((JOB.namespace, "digits-1")) is not None
    objects.there[("pods", "digits-0")]["spec"]["overhead"] = {"cpu": "4"}
    await actor.execute(JOB, [CreatePods((0, 1), 1, resolved(job().build(), 1))])
    assert actor.admitted.get(JOB.key, JOB.uid, 1) == admitted, "pods that are there may be of any template"


async def test_a_strangers_secret_is_left_alone_whatever_is_lost(actor: ActionExecutor, objects: Any) -> None:
    """It may have the name of the template's ConfigMap, or one like the job's: its owner has never heard of us."""
    built = job().build()
    secret, configured = of_template(built, 1)
    theirs = {("secrets", name): {"data": {"mine": "yes"}} for name in ("digits-1", "digits-1-0", "digits")}
    objects.there.update(theirs)
    for lost in (secret, configured):
        objects.lose = lost.name
        with contextlib.suppress(errors.Unreachable):
            await actor.execute(JOB, [secret, configured])
    assert await actor.execute(JOB, [secret, configured]) == (None, None)
    made = objects.there[("secrets", secret.name)]
    assert made["data"]["token"] == base64.b64encode(job_token(KEY, JOB.uid, 1)).decode()
    assert await actor.execute(JOB, [secret, configured]) == (None, None), "by the next process too"
    assert await actor.execute(JOB, [DeleteStaleObjects(2)]) == (None, None)
    assert objects.there == theirs


async def test_a_secret_gets_the_token_of_the_key_that_its_name_is_of(actor: ActionExecutor, objects: Any) -> None:
    """The template is of before a rotation, and its Secret was deleted. All Secrets of old templates go, too."""
    secret, configured = of_template(job().build(), 1)
    rotated = dataclasses.replace(actor, operator_keys=(b"new", KEY), frozen=FrozenTemplates(objects, (b"new", KEY)))
    assert await rotated.execute(JOB, [secret, configured]) == (None, None)
    made = objects.there[("secrets", secret.name)]
    assert made["data"]["token"] == base64.b64encode(job_token(KEY, JOB.uid, 1)).decode()
    assert rotated.frozen.of_previous_keys == {JOB.uid}
    assert await rotated.execute(JOB, [DeleteStaleObjects(2)]) == (None, None)
    assert objects.there == {}


@pytest.mark.parametrize(
    "rejection",
    [
        errors.QuotaExceeded(403, "Forbidden", "exceeded quota: small, requested: count/secrets=1"),
        errors.Forbidden(403, "Forbidden", 'admission webhook "labels" denied the request'),
        errors.Invalid(422, "Invalid", "a policy"),
        errors.WebhookUnavailable(500, "InternalError", "failed calling webhook"),
    ],
)
async def test_what_a_job_has_already_needs_no_admission(
    actor: ActionExecutor, objects: Any, rejection: errors.ApiError
) -> None:
    """A quota that the job's own objects use up rejects them before the API server looks whether they are there."""
    built = job().build()
    service = EnsureService("digits", build_service(built, PlanSettings(), is_complete=False))
    actions: list[Action] = [service, *of_template(built, 1), CreatePods((0, 1), 1, resolved(built, 1))]
    assert await actor.execute(JOB, actions) == (None, None)
    there = dict(objects.there)
    objects.admission = rejection
    assert await actor.execute(JOB, actions) == (None, None)
    assert objects.there == there
    for action in actions:
        objects.there.clear()
        refused, _ = await actor.execute(JOB, [action], patient=False)
        assert refused is not None, "what is not there needs it"
        assert refused.message == rejection.message


async def test_a_large_jobs_service_comes_to_select_all_pods_once(actor: ActionExecutor, objects: Any) -> None:
    built, settings = job().nodes(101).build(), PlanSettings()
    few = EnsureService("digits", build_service(built, settings, is_complete=False))
    named = NamePods(build_service(built, settings, is_complete=True))
    for number in (1, 2):
        assert await actor.execute(JOB, [few, named, few, named]) == (None, None)
        assert objects.there[("services", "digits")]["spec"]["selector"] == {"everstep.dev/job": "digits"}
        assert objects.merges == number, "and for one that was deleted and made again, once more"
        del objects.there[("services", "digits")]
    actor.forget(JOB.uid)
    assert await actor.execute(JOB, [named]) == (None, None)
    assert objects.there[("services", "digits")]["spec"]["selector"] == {"everstep.dev/job": "digits"}


async def test_a_service_that_is_made_again_and_whose_answer_is_lost_comes_to_select_all_pods_too(
    actor: ActionExecutor, objects: Any
) -> None:
    built, settings = job().nodes(5).build(), PlanSettings()
    few = EnsureService("digits", build_service(built, settings, is_complete=False))
    named = NamePods(build_service(built, settings, is_complete=True))
    assert await actor.execute(JOB, [few, named]) == (None, None)
    del objects.there[("services", "digits")]
    objects.lose = "digits"
    assert await actor.execute(JOB, [few, named]) == (None, None)
    assert objects.there[("services", "digits")]["spec"]["selector"] == {"everstep.dev/job": "digits"}


@pytest.mark.parametrize("changed", [False, True])
async def test_a_service_that_was_made_here_is_not_read_to_select_all_pods_unless_somebody_has_changed_it(
    actor: ActionExecutor, objects: Any, changed: bool
) -> None:
    built, settings = job().nodes(5).build(), PlanSettings()
    few = EnsureService("digits", build_service(built, settings, is_complete=False))
    named = NamePods(build_service(built, settings, is_complete=True))
    assert await actor.execute(JOB, [few]) == (None, None)
    assert actor._unnamed == {JOB.uid: "1"}, "10,000 jobs that wait for nodes shall not hold 7 KB each for it"
    if changed:
        there = objects.there[("services", "digits")]
        objects.there[("services", "digits")] = {**there, "metadata": {**there["metadata"], "resourceVersion": "2"}}
    assert await actor.execute(JOB, [named]) == (None, None)
    assert objects.there[("services", "digits")]["spec"]["selector"] == {"everstep.dev/job": "digits"}
    assert objects.reads == int(changed)


async def test_no_job_waits_for_the_names_of_its_pods(
    actor: ActionExecutor, objects: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, settings = job().nodes(101).build(), PlanSettings()
    named = NamePods(build_service(built, settings, is_complete=True))
    assert await actor.execute(JOB, [EnsureService("digits", build_service(built, settings, is_complete=False))])
    objects.merge_error = errors.NotAuthorized(403, "Forbidden", "an older chart's rights")
    for _ in range(5):
        rejection, again = await actor.execute(JOB, [named])
        assert rejection is None
        assert again is not None, "nothing else may ever lead to another try"
        assert 0 < again <= action_executor.NAME_RETRY_SECONDS
    assert objects.merges == 1, "it is not tried again at once"
    objects.merge_error = None
    monkeypatch.setattr(action_executor, "NAME_RETRY_SECONDS", 0.0)
    actor.forget(JOB.uid)
    assert await actor.execute(JOB, [named]) == (None, None)
    assert objects.there[("services", "digits")]["spec"]["selector"] == {"everstep.dev/job": "digits"}


@pytest.mark.parametrize("denied", [None, errors.NotAuthorized(403, "Forbidden", "an older chart's rights")])
async def test_the_service_of_a_large_job_that_has_become_a_small_one_names_all_pods(
    actor: ActionExecutor, objects: Any, denied: errors.ApiError | None
) -> None:
    """It was suspended before all of its pods had addresses, and has another number of nodes since."""
    large, small = (job().nodes(nodes).build() for nodes in (5, 4))
    ensured = [
        EnsureService("digits", build_service(each, PlanSettings(), is_complete=False)) for each in (large, small)
    ]
    assert await actor.execute(JOB, ensured[:1]) == (None, None)
    objects.merge_error = denied
    assert await actor.execute(JOB, ensured[1:]) == (None, None), "no job waits for it"
    few = {"everstep.dev/index": "0"} if denied is not None else {}
    assert objects.there[("services", "digits")]["spec"]["selector"] == {"everstep.dev/job": "digits", **few}
    merges = objects.merges
    assert await actor.execute(JOB, ensured[:1]) == (None, None)
    assert objects.merges == merges, "of a large one only once all have addresses"


async def test_where_admission_rejects_deletes_too_its_first_words_are_told(
    actor: ActionExecutor, objects: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, _ = of_template(job().build(), 1)
    objects.admission = errors.QuotaExceeded(403, "Forbidden", "exceeded quota: small")

    async def delete(*_: Any, **__: Any) -> bool:
        raise errors.Forbidden(403, "Forbidden", 'admission webhook "no-deletes" denied the request')

    monkeypatch.setattr(objects, "delete", delete)
    refused, _ = await actor.execute(JOB, [secret])
    assert refused is not None
    assert (refused.kind, refused.message) == ("Quota", "exceeded quota: small")


async def test_the_name_of_a_secret_is_of_one_job_and_one_template_and_takes_the_key() -> None:
    names = {
        make_secret_name("digits", uid, epoch, key) for uid in ("u1", "u2") for epoch in (1, 2) for key in (b"a", b"b")
    }
    assert len(names) == 8
    assert all(re.fullmatch("digits-[12]-[0-9a-f]{20}", name) for name in names)


def resolved(built: TrainingJob, epoch: int) -> FrozenTemplate:
    made = template.resolve_template(
        built, epoch=epoch, pool=None, plain=False, settings=PlanSettings(operator_key=KEY)
    )
    assert isinstance(made, FrozenTemplate)
    return made


def of_template(built: TrainingJob, epoch: int) -> tuple[EnsureSecret, EnsureTemplate]:
    frozen = resolved(built, epoch)
    name = template.secret_name_of(frozen)
    body = template.build_config_map(built, frozen, KEY)
    configured = EnsureTemplate(body["metadata"]["name"], epoch, body)
    return EnsureSecret(name, epoch, template.build_secret(built, epoch, name)), configured


async def test_of_old_templates_only_what_bears_their_name_is_deleted(actor: ActionExecutor, objects: Any) -> None:
    """Somebody may be allowed to write ConfigMaps, and not to delete Secrets."""
    built = job().build()
    for epoch in (1, 2):
        secret, configured = of_template(built, epoch)
        made = dict(configured.body)
        objects.there[("secrets", secret.name)] = secret.body
        objects.there[("configmaps", configured.name)] = {**made, "metadata": {**made["metadata"], "uid": "u"}}
    old, new = (("configmaps", of_template(built, epoch)[1].name) for epoch in (1, 2))
    lure = objects.there[old]
    objects.there[("configmaps", "database")] = {
        **lure,
        "metadata": {**lure["metadata"], "name": "database"},
        "data": {"template.json": lure["data"]["template.json"].replace(make_secret_name(*SECRET_1), "database")},
    }
    objects.there[("secrets", "database")] = {}
    assert await actor.execute(JOB, [DeleteStaleObjects(2)]) == (None, None)
    assert {name for plural, name in objects.there if plural == "secrets"} == {
        "database",
        of_template(built, 2)[0].name,
    }
    assert new in objects.there
    assert old not in objects.there


async def test_a_forged_template_is_replaced_before_a_pod_can_mount_it(actor: ActionExecutor, objects: Any) -> None:
    """Also one of the operator before signatures; and only what says that it is this job's."""
    built = job().build()
    _, configured = of_template(built, 1)
    good = {**configured.body, "metadata": {**configured.body["metadata"], "uid": "u"}}
    forged = {**good, "data": {**good["data"], "template.json": '{"spec":{"hostPID":true}}'}}
    objects.there[("configmaps", configured.name)] = forged
    assert await actor.frozen.get("default", "digits", JOB.uid, 1) is None
    assert await actor.execute(JOB, [configured]) == (None, None)
    assert objects.there[("configmaps", configured.name)]["data"] == good["data"]
    assert await actor.frozen.get("default", "digits", JOB.uid, 1) == resolved(built, 1)

    strangers = {**forged, "metadata": {**forged["metadata"], "ownerReferences": []}}
    objects.there[("configmaps", configured.name)] = strangers
    refused, _ = await actor.execute(JOB, [configured])
    assert refused is not None
    assert refused.kind == "Conflict"
    assert objects.there[("configmaps", configured.name)] == strangers


async def test_a_template_that_an_older_operator_has_stored_is_found_and_kept(
    actor: ActionExecutor, objects: Any
) -> None:
    """It left the job's UID out of the name: pods mount it by that name."""
    built, frozen = job().build(), resolved(job().build(), 1)
    today = template.config_map_name_of(frozen)
    older = dataclasses.replace(frozen, pod=json.loads(json.dumps(frozen.pod).replace(today, "digits-1")))
    body = template.build_config_map(built, older, KEY)
    assert body["metadata"]["name"] == "digits-1"
    objects.there[("configmaps", "digits-1")] = body
    assert await actor.frozen.get("default", "digits", JOB.uid, 1) == older
    assert await actor.execute(JOB, [EnsureTemplate("digits-1", 1, body)]) == (None, None)
    assert list(objects.there) == [("configmaps", "digits-1")]


async def test_no_pod_is_made_with_other_code_under_the_name_of_an_older_agent(
    actor: ActionExecutor, objects: Any
) -> None:
    old = AgentCode(b"old")
    asked: list[Action] = [EnsureAgent(old.name, old.digest)]
    refused, _ = await actor.execute(JOB, asked)
    assert refused is not None
    assert "is gone, with the agent of an older operator" in refused.message, "a pod would wait for its volume"
    objects.there[("configmaps", old.name)] = old.config_map()
    assert await actor.execute(JOB, asked) == (None, None)
    objects.there[("configmaps", old.name)] = {**old.config_map(), **AgentCode(b"evil").config_map(), "metadata": {}}
    refused, _ = await actor.execute(JOB, asked)
    assert refused is not None
    assert refused.kind == "Conflict"
    assert old.name in refused.message


async def test_a_pod_that_is_not_there_to_be_deleted_is_not_waited_for(actor: ActionExecutor) -> None:
    """The watch was down when it went."""
    labels = {"everstep.dev/job": "digits", "everstep.dev/index": "0"}
    meta = {"namespace": "default", "name": "digits-0", "uid": "u1", "resourceVersion": "5", "labels": labels}
    actor.cache.pods.put({"metadata": meta})
    assert await actor.execute(JOB, [DeletePods((PodRef("digits-0", "u1"),), "why")]) == (None, None)
    assert actor.cache.pods_of(("default", "digits")) == ()


async def test_a_pod_that_is_there_and_that_no_list_shows_is_waited_for(actor: ActionExecutor, objects: Any) -> None:
    """Somebody has removed its label. Its name keeps a second one from being made; the queue shall back off."""
    built = job().build()
    body = {"metadata": {"namespace": "default", "name": "digits-0", "uid": "u1", "resourceVersion": "5"}}
    body["metadata"]["ownerReferences"] = [build_owner_reference("digits", built.metadata.uid)]  # type: ignore[assignment]
    objects.there[("pods", "digits-0")] = body
    actor.cache.pods.remove(("default", "digits-0"), "u1", 7)  # as the watch tells it, or a list that lacks it
    with pytest.raises(StaleObject, match=r"default/digits-0.*everstep.dev/job"):
        await actor.execute(JOB, [CreatePods((0,), 1, resolved(built, 1), "")])
    assert actor.cache.pods.get(("default", "digits-0")) is not None, "the next plan goes on from what is there"


async def test_a_new_template_finds_the_agent_in_a_namespace_that_was_made_again(
    actor: ActionExecutor, objects: Any
) -> None:
    """Deleted and created within one resync: nothing has told that the agent went with it."""
    built = job().build()
    secret, configured = of_template(built, 1)
    actions: list[Action] = [secret, EnsureAgent(actor.agent.name, actor.agent.digest), configured]
    for _ in range(2):
        assert await actor.execute(JOB, actions) == (None, None)
        assert ("configmaps", actor.agent.name) in objects.there
        objects.there.clear()


BUDGET: dict[str, Any] = {"metadata": {"name": "digits", "namespace": "default"}, "spec": {"minAvailable": 2}}
OWNER = [build_owner_reference("digits", JOB.uid)]


async def test_a_budget_is_known_once_it_is_made_and_no_more_once_it_is_deleted(
    actor: ActionExecutor, objects: Any
) -> None:
    body = {**BUDGET, "metadata": {**BUDGET["metadata"], "ownerReferences": OWNER}}
    objects.lose = "digits"
    assert await actor.execute(JOB, [EnsureBudget(body)]) == (None, None), "also where the answer is lost"
    known = actor.budgets.find(JOB.key)
    assert known is not None
    assert (known.uid, known.owner, known.min_available) == ("u", JOB.uid, 2)
    assert await actor.execute(JOB, [DeleteBudget("digits", "u")]) == (None, None)
    assert actor.budgets.find(JOB.key) is None
    assert [name for name in objects.there if name[0] == "poddisruptionbudgets"] == []


async def test_a_strangers_budget_stays_and_the_job_goes_on_without_one(actor: ActionExecutor, objects: Any) -> None:
    theirs = {"metadata": {"name": "digits", "uid": "theirs"}, "spec": {"maxUnavailable": 0}}
    objects.there[("poddisruptionbudgets", "digits")] = theirs
    for _ in range(3):
        assert await actor.execute(JOB, [EnsureBudget(BUDGET)]) == (None, None), "no rejection"
        await actor.budgets.refresh([None])
    assert objects.there.pop(("poddisruptionbudgets", "digits")) == theirs
    told = [body for (plural, _), body in objects.there.items() if plural == "events"]
    assert [event["reason"] for event in told] == ["DisruptionBudgetRejected"], "once"
    assert "PodDisruptionBudget default/digits already exists and belongs to nobody" in told[0]["message"]


async def test_a_budget_that_admission_changes_is_not_made_again_and_again(actor: ActionExecutor, objects: Any) -> None:
    objects.mutate = lambda body: {**body, "spec": {"minAvailable": "50%"}} if "spec" in body else body
    for _ in range(3):
        assert await actor.execute(JOB, [EnsureBudget(BUDGET)]) == (None, None)
        assert actor.budgets.find(JOB.key) is None
        assert ("poddisruptionbudgets", "digits") not in objects.there, "it would hold up drains, and guard nothing"
    assert objects.created.count("digits") == 1, "it is tried again after the next list"
    told = [body for (plural, _), body in objects.there.items() if plural == "events"]
    assert [event["reason"] for event in told] == ["DisruptionBudgetRejected"]
    assert "minAvailable '50%' instead of 2" in told[0]["message"]


async def test_a_budget_that_admission_rejects_stops_nothing(actor: ActionExecutor, objects: Any) -> None:
    objects.admission = errors.QuotaExceeded(403, "Forbidden", "exceeded quota")
    assert await actor.execute(JOB, [EnsureBudget(BUDGET)]) == (None, None)
    objects.admission = None
    assert await actor.execute(JOB, [EnsureBudget(BUDGET)]) == (None, None)
    assert actor.budgets.find(JOB.key) is None, "it is tried again after the next list"
    await actor.budgets.refresh([None])
    assert await actor.execute(JOB, [EnsureBudget(BUDGET)]) == (None, None)
    assert actor.budgets.find(JOB.key) is not None


@pytest.mark.parametrize(
    ("api_version", "expected"),
    [("everstep.dev/v1alpha1", StaleObject), ("sagemaker.services.k8s.aws/v1alpha1", errors.NotOurs)],
)
def test_a_job_of_another_group_is_no_former_job_of_this_name(api_version: str, expected: type[Exception]) -> None:
    """Its objects are not about to be collected: whoever waits for that is not told why."""
    owner = {"apiVersion": api_version, "kind": "TrainingJob", "name": JOB.name, "uid": "other", "controller": True}
    found = {"metadata": {"name": "digits-0", "uid": "u1", "ownerReferences": [owner]}}
    with pytest.raises(expected):
        check_ownership(PODS, JOB, found)
