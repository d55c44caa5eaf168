"""Carries out what a plan asks for. Every action is idempotent: to find its work done is success.

What is in the way is never adopted. An object that belongs to a former job of the same name is waited for (the garbage
collector is slower than a user who applies the manifest again); one that belongs to anybody else is a `Conflict`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from everstep.agent.wire.auth import job_token
from everstep_operator.api.reasons import Reason
from everstep_operator.cluster import agent_code, errors, events
from everstep_operator.cluster.admitted_pods import AdmittedPods
from everstep_operator.cluster.agent_code import AgentCode
from everstep_operator.cluster.api_answer import ApiObject, Decode, decode_body
from everstep_operator.cluster.cache import ClusterCache
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.disruption_budgets import DisruptionBudgets
from everstep_operator.cluster.fair_share import FairSemaphore
from everstep_operator.cluster.frozen_templates import FrozenTemplates
from everstep_operator.cluster.leader_poller import LeaderPoller
from everstep_operator.cluster.out_of_service import OutOfServiceTaints
from everstep_operator.cluster.pod_projection import decode_pod
from everstep_operator.cluster.resources import BUDGETS, CONFIG_MAPS, JOBS, PODS, SECRETS, SERVICES, ApiResource
from everstep_operator.plan import actions as act
from everstep_operator.plan.job_service import lacks_names
from everstep_operator.plan.labels import LABEL_INDEX, LABEL_JOB, LABEL_TEMPLATE
from everstep_operator.plan.operator_keys import find_key, make_secret_name
from everstep_operator.plan.pod_manifest import build_pod
from everstep_operator.plan.rejection import Rejection

log = structlog.get_logger(__name__)

PUSH_RETRY_SECONDS = 3.0
NAME_RETRY_SECONDS = 30.0  # after a rejection: ranks find each other without names
# A quota, a webhook or a policy judges a create before the API server looks whether the name is taken.
_BY_ADMISSION = (errors.Forbidden, errors.Invalid, errors.WebhookUnavailable)
_NO_UID = "none"  # of no object: a delete with it tells whether there is one, and deletes nothing
MAX_REQUESTS_PER_JOB = 50


class StaleObject(Exception):
    """An object of a former job of this name is still there. It is on its way out: try again."""


@dataclass(frozen=True, slots=True)
class JobRef:
    """The job an action is for, as it was observed."""

    namespace: str
    name: str
    uid: str
    version: str  # resourceVersion
    confirmed: bool  # read or written by this very reconcile, so certainly not out of date

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name


@dataclass
class ActionExecutor:
    client: Client
    cache: ClusterCache
    leaders: LeaderPoller
    agent: AgentCode
    frozen: FrozenTemplates
    operator_keys: tuple[bytes, ...] = field(repr=False)  # the current one first
    budgets: DisruptionBudgets
    admitted: AdmittedPods
    requests: FairSemaphore = field(default_factory=lambda: FairSemaphore(100))
    _names_due: dict[str, float] = field(default_factory=dict)  # by UID of jobs of many pods: see `_name_pods`
    # Versions of Services that were made here and select pod 0 alone, likewise. A job may wait for nodes for days.
    _unnamed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.taints = OutOfServiceTaints(self.client)

    def forget(self, uid: str) -> None:
        """Forget what was done for a job."""
        self._names_due.pop(uid, None)
        self._unnamed.pop(uid, None)

    async def execute(
        self, job: JobRef, actions: Sequence[act.Action], *, patient: bool = True
    ) -> tuple[Rejection | None, float | None]:
        """Execute actions in order.

        Args:
            job: The job, as it was observed.
            actions: The actions of its plan.
            patient: Whether an admission webhook that is unavailable is an error, after which the job is looked at
                again soon; otherwise it rejects the action.

        Returns:
            The rejection that stopped the list, if one did; and in how many seconds to reconcile again, if an action
            was put off.
        """
        again: float | None = None
        if not job.confirmed and any(isinstance(action, act.CreatePods) for action in actions):
            await self._confirm_job(job)
        for action in actions:
            log.debug("acting", job=f"{job.namespace}/{job.name}", action=type(action).__name__)
            try:
                if (later := await self._execute_action(job, action)) is not None:
                    again = min(again or later, later)
            except errors.NotOurs as error:
                return Rejection(action, "Conflict", str(error)), again
            except errors.QuotaExceeded as error:
                return Rejection(action, "Quota", error.message), again
            except errors.Invalid as error:
                return Rejection(action, "Invalid", error.message), again
            except errors.Forbidden as error:
                return Rejection(action, "Forbidden", error.message), again
            except errors.WebhookUnavailable as error:
                if patient:
                    raise
                return Rejection(action, "Webhook", error.message), again
        return None, again

    async def _confirm_job(self, job: JobRef) -> None:
        """Read the job once more before pods are created for it, and before what they mount is.

        From a cache that has missed a delete or a suspend we would start ranks that nobody wants any more, and one that
        was told of the job under older CRDs lacks the fields that newer ones have given it.

        Raises:
            errors.Conflict: The job is another one than was observed.
        """
        held = self.cache.jobs.get(job.key)
        live = await self.client.get(JOBS, job.namespace, job.name)
        if self.cache.jobs.put_answer(live, held) or live["metadata"]["resourceVersion"] != job.version:
            raise errors.Conflict(409, "Stale", "the job has changed since it was observed")

    async def _execute_action(self, job: JobRef, action: act.Action) -> float | None:
        """Execute one action. Return in how many seconds it has to be tried again, if it was put off."""
        match action:
            case act.EnsureService():
                await self._ensure_service(job, action)
            case act.NamePods():
                return await self._name_pods(job, action)
            case act.EnsureTemplate():
                await self._ensure_template(job, action)
            case act.EnsureSecret():
                await self._ensure_secret(job, action)
            case act.EnsureAgent():
                await self._ensure_agent(job, action)
            case act.DryRun():
                await self._dry_run(job, action)
            case act.CreatePods():
                await self._create_pods(job, action)
            case act.DeletePods():
                await self._run_in_parallel(job, (self._delete_pod(job, pod) for pod in action.pods))
            case act.DeleteStaleObjects():
                await self._delete_stale(job, action)
            case act.EnsureBudget() | act.DeleteBudget():
                await self._change_budget(job, action)
            case act.MarkOutOfService():
                await self.taints.mark(action.node)
            case act.PushPeers():
                if not self.leaders.push_peers(job.key, action.epoch, action.addresses):
                    return PUSH_RETRY_SECONDS
            case act.StopLeader():
                self.leaders.send_stop(job.key, action.reason)
            case act.RequestCheckpoint():
                self.leaders.request_checkpoint(job.key, action.id, action.deadline)
            case act.DeleteJob():
                await self.client.delete(JOBS, job.namespace, job.name, uid=action.uid)
        return None

    # --- objects made once

    async def _ensure(
        self, resource: ApiResource, job: JobRef, body: Any, decode: Decode = decode_body
    ) -> tuple[ApiObject, bool]:
        """Create an object, or make sure that what has its name is this job's. Return what is stored, and whether it is
        new.

        What is there needs no admission: a quota that the job's own objects have used up rejects their creation once
        more, and a running job would wait for it with a pod missing.
        """
        rejection: errors.ApiError | None = None
        try:
            return await self.client.create(resource, job.namespace, body, decode=decode), True
        except errors.AlreadyExists:
            pass
        except _BY_ADMISSION as error:
            rejection = error
        except errors.Unreachable as error:
            if not error.sent:
                raise
            log.info("the result of a create is unknown; reading", resource=resource.plural, error=str(error))
        try:
            found = await self.client.get(resource, job.namespace, body["metadata"]["name"])
        except errors.NotFound:
            if rejection is None:
                raise
            raise rejection from None
        check_ownership(resource, job, found)
        return found, False

    async def _ensure_service(self, job: JobRef, action: act.EnsureService) -> None:
        found, is_new = await self._ensure(SERVICES, job, action.body)
        if is_new or (lacks_names(found) and self._names_due.get(job.uid) == math.inf):
            self.forget(job.uid)  # another one was named; the answer to the create of this one may have been lost
        if is_new:
            if lacks_names(found):
                self._unnamed[job.uid] = found["metadata"]["resourceVersion"]
        elif lacks_names(found) and not lacks_names(action.body):
            # The job has become a small one while it was suspended.
            try:
                await self._select_all_pods(job, found["metadata"]["resourceVersion"])
            except (errors.NotAuthorized, *_BY_ADMISSION) as error:
                log.warning("pods have no names in DNS", job=f"{job.namespace}/{job.name}", error=str(error))

    async def _name_pods(self, job: JobRef, action: act.NamePods) -> float | None:
        """Let the job's Service select all of its pods, once. Return in how many seconds to try again, if need be."""
        now = time.monotonic()
        if (due := self._names_due.get(job.uid, 0.0)) > now:
            return due - now if due < math.inf else None
        self._names_due[job.uid] = now + NAME_RETRY_SECONDS
        try:
            if not await self._select_all_pods_of_known(job):
                found, _ = await self._ensure(SERVICES, job, action.body)
                if lacks_names(found):
                    await self._select_all_pods(job, found["metadata"]["resourceVersion"])
        except (errors.ApiError, errors.Unreachable, errors.NotOurs, StaleObject) as error:
            log.warning("pods have no names in DNS yet", job=f"{job.namespace}/{job.name}", error=str(error))
            return NAME_RETRY_SECONDS
        self._names_due[job.uid] = math.inf
        return None

    async def _select_all_pods_of_known(self, job: JobRef) -> bool:
        """Do so with the Service that was made here, which need not be read. Return whether it is as it was made."""
        made = self._unnamed.pop(job.uid, None)
        if made is None:
            return False
        with contextlib.suppress(errors.Conflict, errors.NotFound):
            await self._select_all_pods(job, made)
            return True
        return False

    async def _select_all_pods(self, job: JobRef, version: str) -> None:
        meta = {"name": job.name, "resourceVersion": version}
        await self.client.merge(SERVICES, job.namespace, {"metadata": meta, "spec": {"selector": {LABEL_INDEX: None}}})

    async def _ensure_template(self, job: JobRef, action: act.EnsureTemplate) -> None:
        made, _ = await self._ensure(CONFIG_MAPS, job, action.body)
        if self.frozen.put(job.namespace, job.uid, action.template, made) is not None:
            return
        # Pods would mount it. It says that it is this job's, and is not as this operator writes them: forged, damaged,
        # or of a time before signatures. Running pods have theirs already, and keep it.
        await self.client.delete(CONFIG_MAPS, job.namespace, made["metadata"]["name"], uid=made["metadata"]["uid"])
        made, _ = await self._ensure(CONFIG_MAPS, job, action.body)
        if self.frozen.put(job.namespace, job.uid, action.template, made) is None:
            raise StaleObject(f"ConfigMap {job.namespace}/{made['metadata']['name']}")

    async def _ensure_secret(self, job: JobRef, action: act.EnsureSecret) -> None:
        """We may not read Secrets, and need not: only this operator can know the name (`keys.make_secret_name`) before
        the Secret is there. What has it was made by an attempt whose answer was lost, or whose process died."""
        key = find_key((action.name,), job.name, job.uid, action.template, self.operator_keys)
        token = job_token(key, job.uid, action.template)
        body = {**action.body, "data": {**(action.body.get("data") or {}), "token": base64.b64encode(token).decode()}}
        try:
            await self.client.create(SECRETS, job.namespace, body)
        except errors.AlreadyExists:
            return
        except _BY_ADMISSION:
            if await self._is_secret_there(job.namespace, action.name):
                return  # see `_ensure`
            raise
        # Pods of a new template hang without the agent, and the namespace may have been deleted and made again.
        self.agent.forget(job.namespace)

    async def _is_secret_there(self, namespace: str, name: str) -> bool:
        try:
            return await self.client.delete(SECRETS, namespace, name, uid=_NO_UID)
        except errors.ApiError as error:  # admission may reject deletes too: then nobody can tell
            log.info("cannot tell whether a secret is there", secret=f"{namespace}/{name}", error=str(error))
            return False

    async def _ensure_agent(self, job: JobRef, action: act.EnsureAgent) -> None:
        if action.name == self.agent.name:
            await self.agent.ensure(self.client, job.namespace)
            return
        # An older operator's agent, named by a frozen template. We have only our own code; theirs is there as long as
        # any job names it.
        try:
            await agent_code.verify_agent_config_map(self.client, job.namespace, action.name, action.digest)
        except errors.NotFound:
            # A pod without it would wait for its volume until the job has failed.
            raise errors.AgentGone(f"ConfigMap {job.namespace}/{action.name}") from None

    async def _delete_stale(self, job: JobRef, action: act.DeleteStaleObjects) -> None:
        labels = f"{LABEL_JOB}={job.name},{LABEL_TEMPLATE}"
        async for page in self.client.list(CONFIG_MAPS, job.namespace, labels=labels, metadata_only=True):
            for item in page.items:
                meta = item["metadata"]
                template = str(meta["labels"][LABEL_TEMPLATE])
                if (
                    controller_reference(item).get("uid") != job.uid
                    or not template.isdecimal()
                    or int(template) >= action.template
                ):
                    continue
                # Never by a name that was read: who may write ConfigMaps would have us delete any Secret. And the
                # Secret first: its ConfigMap is all that tells of it.
                for key in self.operator_keys:
                    secret = make_secret_name(job.name, job.uid, int(template), key)
                    await self.client.delete(SECRETS, job.namespace, secret, uid=None)
                await self.client.delete(CONFIG_MAPS, job.namespace, meta["name"], uid=meta["uid"])

    async def _change_budget(self, job: JobRef, action: act.EnsureBudget | act.DeleteBudget) -> None:
        """Create or delete the job's budget. No job waits for its guard: what is rejected is told in an event, and
        tried again after the next list."""
        if self.budgets.is_postponed(job.key, job.uid):
            return
        try:
            if isinstance(action, act.EnsureBudget):
                made, is_new = await self._ensure(BUDGETS, job, action.body)
                wanted, found = (each["spec"].get("minAvailable") for each in (action.body, made))
                if is_new and found != wanted:
                    # What the plan would take for edited: it would be made again each second.
                    await self.client.delete(BUDGETS, job.namespace, job.name, uid=made["metadata"]["uid"])
                    raise errors.Invalid(
                        422, "Changed", f"admission has set minAvailable {found!r} instead of {wanted}"
                    )
                self.budgets.put(made)
            else:
                await self.client.delete(BUDGETS, job.namespace, action.name, uid=action.uid)
                self.budgets.remove(job.key, action.uid)
        except StaleObject:
            self.budgets.postpone(job.key, job.uid)  # the garbage collector takes it away in time
        except (errors.NotOurs, errors.NotAuthorized, *_BY_ADMISSION) as error:
            log.warning("a PodDisruptionBudget was rejected", job=f"{job.namespace}/{job.name}", error=str(error))
            if not self.budgets.reject(job.key, job.uid):
                return
            event = act.JobEvent("Warning", Reason.BUDGET_REJECTED.value, f"{Reason.BUDGET_REJECTED.meaning} {error}")
            await events.send_event(self.client, job.namespace, job.name, job.uid, event, self.client.clock.now())

    # --- pods

    async def _dry_run(self, job: JobRef, action: act.DryRun) -> None:
        # "Exists already" comes after admission and validation: the body has passed.
        with contextlib.suppress(errors.AlreadyExists):
            await self.client.create(PODS, job.namespace, dict(action.body), dry_run=True)

    async def _create_pods(self, job: JobRef, action: act.CreatePods) -> None:
        first = next(iter(action.indices), None)
        work = (self._create_pod(job, action, index, is_sample=index == first) for index in action.indices)
        await self._run_in_parallel(job, work)

    async def _create_pod(self, job: JobRef, action: act.CreatePods, index: int, *, is_sample: bool) -> None:
        body = build_pod(action.frozen, index, action.epoch, action.leader, action.avoid, action.shun)
        made, is_new = await self._ensure(PODS, job, body, decode_body if is_sample else decode_pod)
        if is_sample and is_new:
            self.admitted.note(job.key, job.uid, action.frozen.epoch, made)
        self.cache.pods.put(made)  # the watch may be late: the next plan must not miss it
        name = made["metadata"]["name"]
        if not is_new and self.cache.pods.get((job.namespace, name)) is None:
            # Deleted a moment ago, or it never was. A plan that goes on not to see it would make it again at once.
            again = await self.client.get(PODS, job.namespace, name)
            if again["metadata"]["uid"] == made["metadata"]["uid"]:
                self.cache.pods.revive(again)
            raise StaleObject(
                f"Pod {job.namespace}/{name} is there, and lists lack it: has it lost its label {LABEL_JOB}?"
            )

    async def _delete_pod(self, job: JobRef, pod: act.PodRef) -> None:
        there = await self.client.delete(PODS, job.namespace, pod.name, uid=pod.uid, grace=pod.grace_seconds)
        if not there:  # and if its event was missed, the plan would wait for it until the next resync
            self.cache.pods.remove((job.namespace, pod.name), pod.uid)

    async def _run_in_parallel(self, job: JobRef, work: Iterable[Coroutine[Any, Any, None]]) -> None:
        """Run all requests in parallel, within the operator's limit; after the first rejection no more are begun."""
        refused: BaseException | None = None
        # The operator's limit is handed out in turn: a job of 2,000 pods may not queue 2,000 requests before the next.
        turn = asyncio.Semaphore(MAX_REQUESTS_PER_JOB)

        async def one(item: Coroutine[Any, Any, None]) -> None:
            nonlocal refused
            try:
                async with turn, self.requests.slot(job.namespace):
                    if refused is None:
                        await item
            except Exception as error:
                refused = refused or error
            finally:
                item.close()  # one that was never begun

        await asyncio.gather(*(one(item) for item in work))
        if refused is not None:
            raise refused


def controller_reference(item: ApiObject) -> ApiObject:
    """Return the controller's owner reference of an object, or an empty one."""
    references = item["metadata"].get("ownerReferences") or ()
    return next((reference for reference in references if reference.get("controller")), {})


def check_ownership(resource: ApiResource, job: JobRef, found: ApiObject) -> None:
    """Check that the job controls an object that was found under a name that the job needs.

    Raises:
        StaleObject: It is a former job's, and will be collected.
        NotOurs: It belongs to something else.
    """
    reference = controller_reference(found)
    if reference.get("uid") == job.uid:
        return
    what = f"{resource.kind} {job.namespace}/{found['metadata']['name']}"
    waited_for = f"{what} is there of before, and is waited for until it is gone"
    if found["metadata"].get("deletionTimestamp"):
        raise StaleObject(waited_for)
    group = str(reference.get("apiVersion") or "").partition("/")[0]
    if (group, reference.get("kind"), reference.get("name")) == (JOBS.group, JOBS.kind, job.name):
        raise StaleObject(waited_for)
    raise errors.NotOurs(what, f"{reference['kind']} {reference['name']}" if reference else "nobody")
