"""Reconciles one job: observe, plan, write the status, act, send events. Everything clever is in the plan.

The status goes first, with the resourceVersion that was observed: an epoch or a charge is on record before anything
follows from it, and of two operators only one gets past this line. Killed after it, the next look does the rest: the
same plan comes out of what is then observed, and each action finds done what is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import structlog
from pydantic import ValidationError

from everstep.agent.wire.auth import job_token
from everstep_operator import metrics
from everstep_operator.api.job import TrainingJob
from everstep_operator.api.pool import TrainingPool
from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import Phase, TrainingJobStatus
from everstep_operator.cluster import errors, events
from everstep_operator.cluster.action_executor import ActionExecutor, JobRef, StaleObject
from everstep_operator.cluster.api_answer import ApiObject
from everstep_operator.cluster.cache import CacheEntry, ClusterCache, Key, resource_version
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.frozen_templates import FrozenTemplates
from everstep_operator.cluster.job_memory import JobMemory
from everstep_operator.cluster.leader_poller import LeaderPoller
from everstep_operator.cluster.node_directory import NodeDirectory
from everstep_operator.cluster.node_failures import NodeFailures
from everstep_operator.cluster.node_leases import NodeLeases
from everstep_operator.cluster.resources import JOBS
from everstep_operator.cluster.status_writer import StatusWriter
from everstep_operator.cluster.unlisted_pods import UnlistedPods
from everstep_operator.cluster.volume_claims import VolumeClaims
from everstep_operator.cluster.waiting_gangs import WaitingGangs, view_waiting_gang
from everstep_operator.cluster.work_queue import WorkQueue
from everstep_operator.plan import make_plan, pod_creation
from everstep_operator.plan.actions import CreatePods, JobEvent, JobPlan
from everstep_operator.plan.frozen_template import FrozenTemplate
from everstep_operator.plan.gang import BLOCKED_REASONS, is_waiting
from everstep_operator.plan.leader_view import LeaderView
from everstep_operator.plan.node_loss import declare_lost_nodes
from everstep_operator.plan.node_view import NodeView
from everstep_operator.plan.observation import Observation, PodView
from everstep_operator.plan.operator_keys import find_key
from everstep_operator.plan.plan_context import RUN_PHASES
from everstep_operator.plan.plan_settings import PlanSettings
from everstep_operator.plan.pod_manifest import make_pod_name
from everstep_operator.plan.rejection import Rejection
from everstep_operator.plan.status_memory import undo_edit

log = structlog.get_logger(__name__)

MAX_OBSTACLES = 5  # in one reconcile
EDIT_REPORT_SECONDS = 60.0
PATIENT_FAILURES = 3  # in a row, until a webhook that is unavailable is told in the status


@dataclass(frozen=True)
class _Obstacle:
    """A pod that a plan would make is there. `rejection`: it is somebody else's."""

    rejection: Rejection | None = None


@dataclass
class Reconciler:
    """A reconciler of jobs and all that it needs. `reconcile` is never run twice at the same time for one key; the
    queue sees to that."""

    client: Client
    cache: ClusterCache
    queue: WorkQueue[Key]
    leaders: LeaderPoller
    frozen: FrozenTemplates
    gangs: WaitingGangs
    nodes: NodeDirectory
    leases: NodeLeases
    node_failures: NodeFailures
    actor: ActionExecutor
    settings: PlanSettings
    operator_keys: tuple[bytes, ...] = field(repr=False)  # the current one first
    clock: Callable[[], float]  # of the API server, by which the times that plans compare were written
    _memories: dict[Key, JobMemory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.statuses = StatusWriter(self.client)
        self.claims = VolumeClaims(self.client)
        self.unlisted = UnlistedPods(self.client, self.cache, self.actor.requests)

    async def reconcile(self, key: Key) -> Rejection | None:
        """Reconcile the job once. What the API server goes on rejecting is returned, anything else that went wrong is
        raised: the queue should back off from both."""
        job = await self._read_job(key)
        if job is None:
            return None
        rejection: Rejection | None = None
        written = False
        job, edited = self._undo_edit(key, job)
        job = self._add_kept_fields(key, job)
        await self.unlisted.refresh(key)
        for _ in range(2):  # what is refused is planned for once more; a refusal of that too waits for the next look
            made = await self._plan_around_obstacles(key, job, rejection)
            if made.status is None:
                self._forget_job(key, job.metadata.uid)
                return None
            confirmed = made.changed or edited
            if made.changed or edited:
                stored = await self._write_status(key, job, made.status)
                if stored is None:
                    return None
                if edited:
                    await self._report_edit(key, job)
                # A write that changes nothing (the server drops fields that its CRD lacks) would be repeated for ever.
                written = written or stored.metadata.resource_version != job.metadata.resource_version
                job, edited = stored, False
            self._update_polling(key, job, made)
            reference, patient = _make_job_ref(key, job, confirmed), self._is_patient(key, job)
            rejection, again = await self.actor.execute(reference, made.actions, patient=patient)
            for event in made.events:
                await events.send_event(self.client, *key, job.metadata.uid, event, self.clock())
            if rejection is None:
                break
            log.info("refused", job="/".join(key), kind=rejection.kind, message=rejection.message)
        self.gangs.update(key, view_waiting_gang(job, self.cache.pods_of(key), self.count_places(key, job)))
        if again is not None:
            self.queue.add_after(key, again)
        if made.requeue_at is not None:
            self.queue.add_after(key, max(0.1, made.requeue_at - self.clock()))
        if written and rejection is None:
            self.queue.add(key)  # the status that was written is part of what the next plan is made from
        return rejection

    # --- plan

    async def _plan_around_obstacles(self, key: Key, job: TrainingJob, rejection: Rejection | None) -> JobPlan:
        """Make a plan that replaces no pod that is there.

        Raises:
            StaleObject: Pods go on appearing where it would make some.
        """
        made = await self._make_plan(key, await self._observe(key, job, rejection))
        for _ in range(MAX_OBSTACLES):  # more pods may have lost their label meanwhile
            if (obstacle := await self._find_obstacle(key, job, made)) is None:
                return made
            made = await self._make_plan(key, await self._observe(key, job, obstacle.rejection or rejection))
        raise StaleObject("pods that are there without their label come and go")

    async def _make_plan(self, key: Key, observed: Observation) -> JobPlan:
        """Make the plan. Nodes are not given back while an autoscaler makes more of them; it is asked only then, and
        its word kept."""
        made = make_plan(observed, self.clock())
        if told := await self.node_failures.record(made.node_failures):
            observed = replace(observed, avoided_nodes=await self.node_failures.list_avoided(key[0]))
            made = make_plan(observed, self.clock())
            made = replace(made, events=(*made.events, *told))
        pod = pod_creation.find_pod_to_scale_up(observed, made)
        if pod is None:
            return made
        promised = min(self.clock(), await events.find_last_scale_up(self.client, key[0], pod.uid))
        if promised <= (observed.scale_up_at or 0.0):
            return made
        self._get_memory(key, observed.job.metadata.uid).scale_up_at = promised
        return make_plan(replace(observed, scale_up_at=promised), self.clock())

    async def _find_obstacle(self, key: Key, job: TrainingJob, made: JobPlan) -> _Obstacle | None:
        """Look whether the plan replaces a pod that is there, though no list shows it, or whose name is taken. To raise
        the epoch for it, or to count a loss, could not be taken back. Nor does a job whose pods go on hold no node."""
        if not job.status.epoch:
            return None
        phase = made.status.phase if made.status is not None else None
        if phase is Phase.SUSPENDED and job.status.phase is not phase:
            with contextlib.suppress(errors.NotOurs, StaleObject):  # a stranger's pod holds no node of this job
                found = await self.unlisted.find(_make_job_ref(key, job, True), range(job.spec.num_nodes))
                return _Obstacle() if found else None
        for action in made.actions:
            if isinstance(action, CreatePods):
                # Before it runs, a job loses nothing by another attempt but an epoch.
                asked = [index for index in action.indices if index == 0 or job.status.phase in RUN_PHASES]
                try:
                    return _Obstacle() if await self.unlisted.find(_make_job_ref(key, job, True), asked) else None
                except errors.NotOurs as error:
                    return _Obstacle(Rejection(action, "Conflict", str(error)))
        return None

    # --- observe

    async def _read_job(self, key: Key) -> TrainingJob | None:
        entry = self.cache.jobs.get(key)
        if entry is None:
            self._forget_job(key, "")
            return None
        memory = self._get_memory(key, entry.uid)
        if memory.read is not None and memory.read[0] is entry:
            return memory.read[1]  # most looks are for the sake of pods
        try:
            job = TrainingJob.parse_stored(entry.value)
            memory.read = (entry, job)
            return job
        except ValidationError as error:
            # Stored before a rule existed, or by a newer version. Nothing is touched until somebody corrects it.
            self.leaders.stop_polling(key)
            self.leases.follow(key, frozenset())
            self.gangs.update(key, None)  # nobody plans for it, so nobody may wait for it
            if memory.unreadable != entry.version:  # its pods go on changing, and each change is a look
                about = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
                log.warning("a job that breaks the rules of the API", job="/".join(key), error=about)
                event = JobEvent("Warning", Reason.SPEC_INVALID.value, f"{Reason.SPEC_INVALID.meaning} {about}")
                memory.unreadable = await self._report_broken_rules(key, entry, event.message)
                await events.send_event(self.client, *key, entry.uid, event, self.clock())
            return None

    async def _report_broken_rules(self, key: Key, entry: CacheEntry[Mapping[str, Any]], message: str) -> int:
        """Tell in the conditions what an event tells for an hour only. Return the version of the job after that."""
        try:
            stored = await self.statuses.report_broken_rules(entry.value, message, self.clock())
        except (errors.Conflict, errors.NotFound):
            return entry.version  # another version of it comes, or none
        except errors.Invalid as error:  # the status breaks rules too
            log.warning("a status was refused", job="/".join(key), error=error.message)
            return entry.version
        if stored is None:
            return entry.version
        self.cache.jobs.put(stored)
        return resource_version(stored)

    def _undo_edit(self, key: Key, job: TrainingJob) -> tuple[TrainingJob, bool]:
        """Return the job with the status that this operator knows, and whether somebody has stored another one that
        tells of less."""
        memory, found = self._get_memory(key, job.metadata.uid), job.status
        active = job.managed_here and not (found.phase is not None and found.phase.finished)
        right = undo_edit(memory.status, found) if job.managed_here and memory.status is not None else None
        if right is None:
            memory.status = found if active else None
            return job, False
        return job.model_copy(update={"status": right}), True

    async def _report_edit(self, key: Key, job: TrainingJob) -> None:
        """Tell of an edited status, once a minute at most: whoever edits it may be a program that does so again."""
        memory, now = self._get_memory(key, job.metadata.uid), self.clock()
        if memory.edit_reported_at is not None and now < memory.edit_reported_at + EDIT_REPORT_SECONDS:
            return
        memory.edit_reported_at = now
        log.warning("somebody has changed a status; it is put back", job="/".join(key))
        event = JobEvent("Warning", Reason.STATUS_RESTORED.value, Reason.STATUS_RESTORED.meaning)
        await events.send_event(self.client, *key, job.metadata.uid, event, now)

    async def _observe(self, key: Key, job: TrainingJob, rejection: Rejection | None) -> Observation:
        pods = self.cache.pods_of(key)
        leader = self._find_leader_view(key, job, pods)
        memory, frozen = self._get_memory(key, job.metadata.uid), None
        finished = job.status.phase is not None and job.status.phase.finished
        if job.status.template is not None and not finished:
            frozen = await self.frozen.get(*key, job.metadata.uid, job.status.template.epoch)
            await self._learn_admitted_pod(key, job)
        return Observation(
            job=job,
            pods=pods,
            pools=self._read_pools(job),
            leader=leader,
            gangs=self.gangs.list_views(),
            frozen=frozen,
            settings=self.settings,
            rejection=rejection,
            status_written_at=memory.status_written_at,
            nodes=await self._find_nodes(job, pods, leader, frozen),
            silent_nodes=self.leases.list_silent_nodes(),
            avoided_nodes=await self.node_failures.list_avoided(key[0]),
            places=self.count_places(key, job),
            claims=await self.claims.read(key[0], job.metadata.uid, frozen),
            budget=self.actor.budgets.find(key),
            scale_up_at=memory.scale_up_at,
            gated_at=memory.note_gates(pods, self.clock()),
        )

    async def _find_nodes(
        self, job: TrainingJob, pods: tuple[PodView, ...], leader: LeaderView | None, frozen: FrozenTemplate | None
    ) -> dict[str, NodeView]:
        left = job.status.disruption.nodes if job.status.disruption is not None else ()
        nodes = self.leases.mark_silent((await self.nodes.find_nodes_under(pods, left)).values())
        return declare_lost_nodes(job, nodes, pods, leader, frozen=frozen, settings=self.settings, now=self.clock())

    def count_places(self, key: Key, job: TrainingJob) -> int | None:
        """Count the pods of a waiting job that today's nodes could hold; None: it does not wait, or nobody knows."""
        frozen = self.frozen.known(job.metadata.uid)
        if frozen is None or not is_waiting(job):
            self.nodes.forget(key)
            return None
        return self.nodes.count_places_of_set(key, job.metadata.uid, frozen, job.spec.num_nodes)

    async def read_and_count_places(self, key: Key, job: TrainingJob) -> int | None:
        """Like `count_places`, with the job's template read first: an operator that has just started knows none."""
        if job.status.template is not None:
            try:
                await self.frozen.get(*key, job.metadata.uid, job.status.template.epoch)
                await self._learn_admitted_pod(key, job)
            except (errors.ApiError, errors.Unreachable) as error:
                log.warning("cannot read a template", job="/".join(key), error=str(error))
        return self.count_places(key, job)

    async def _learn_admitted_pod(self, key: Key, job: TrainingJob) -> None:
        if job.status.template is not None and is_waiting(job):
            template = job.status.template.epoch
            await self.nodes.admitted.learn(key, job.metadata.uid, template, self.cache.pods_of(key))

    def _read_pools(self, job: TrainingJob) -> dict[str, TrainingPool]:
        found = {}
        for choice in job.spec.pools:
            entry = self.cache.pools.get(("", choice.name))
            if entry is not None:
                try:
                    found[choice.name] = TrainingPool.parse_stored(entry.value)
                except ValidationError as error:
                    log.warning("a pool that breaks the rules of the API", pool=choice.name, error=str(error))
        return found

    def _find_leader_view(self, key: Key, job: TrainingJob, pods: tuple[PodView, ...]) -> LeaderView | None:
        # By its name: a copy of a pod under another name has its owner and its labels too.
        name, uid = make_pod_name(job.metadata.name, 0), job.metadata.uid
        head = next((pod for pod in pods if pod.name == name and pod.owner == uid), None)
        return self.leaders.view(key, head.uid) if head is not None else None

    # --- write

    async def _write_status(self, key: Key, job: TrainingJob, status: TrainingJobStatus) -> TrainingJob | None:
        """Return the job as stored, or None if it has changed, has gone or reads differently: then the next pass begins
        with what it is now."""
        try:
            with self.cache.writing_status(key):
                stored = await self._store_status(key, job, status)
        except (errors.Conflict, errors.NotFound):
            await self._read_again(key, job.metadata.uid)
            return None
        written, memory = TrainingJob.parse_stored(stored), self._get_memory(key, job.metadata.uid)
        memory.status_written_at, memory.status = self.clock(), written.status
        memory.kept = self.statuses.undeclared.keep(status)
        if (entry := self.cache.jobs.get(key)) is not None and entry.version == resource_version(stored):
            memory.read = (entry, written)
        metrics.record_status_change(job, written.status, self.clock())
        if (written.spec, written.unknown_fields) != (job.spec, job.unknown_fields):
            # Nobody has edited it, but the CRDs: a watch that began before them goes on for a second as it was, and
            # tells of jobs without their new fields.
            self.queue.add(key)
            return None
        return self._add_kept_fields(key, written)

    def _add_kept_fields(self, key: Key, job: TrainingJob) -> TrainingJob:
        """Return the job with what older CRDs could not store of its status: else the same would be decided anew in
        each look, as a request for a checkpoint."""
        kept = self._get_memory(key, job.metadata.uid).kept
        return job.model_copy(update={"status": job.status.model_copy(update=kept)}) if kept else job

    async def _store_status(self, key: Key, job: TrainingJob, status: TrainingJobStatus) -> ApiObject:
        try:
            stored = await self.statuses.write(job, status, self.cache.jobs.get(key))
        except errors.Invalid as error:
            # What came out of the user's pods is the likeliest to be refused, and nothing depends on it.
            lean = status.model_copy(update={"progress": None, "last_failure": None})
            await self._report_refused_status(key, job, error)
            if lean == status:
                raise
            stored = await self.statuses.write(job, lean)
        self.cache.jobs.put(stored)
        known = self.cache.jobs.get(key)
        if known is not None and known.version > resource_version(stored):
            self.queue.add(key)  # somebody else has written since, and may have been taken for us
        return stored

    async def _report_refused_status(self, key: Key, job: TrainingJob, error: errors.Invalid) -> None:
        """Send an event about a status that was rejected, which cannot tell of it itself; one, for the same is rejected
        with every write."""
        log.warning("a status was refused", job="/".join(key), error=error.message)
        memory = self._get_memory(key, job.metadata.uid)
        if not memory.status_refused:
            memory.status_refused = True
            event = JobEvent("Warning", Reason.STATUS_REFUSED.value, f"{Reason.STATUS_REFUSED.meaning} {error.message}")
            await events.send_event(self.client, *key, job.metadata.uid, event, self.clock())

    async def _read_again(self, key: Key, uid: str) -> None:
        """Read the job from the server itself: the watch is behind, and the next pass is not to be as stale as this
        one."""
        held = self.cache.jobs.get(key)
        try:
            self.cache.jobs.put_answer(await self.client.get(JOBS, *key), held)
        except errors.NotFound:
            # A member of etcd that has lost data says so too: the next list that shows the job is believed.
            self.cache.jobs.remove(key, uid, self.cache.jobs.newest + 1, by_list=True)
        self.queue.add(key)

    async def report_retries(self, key: Key, error: Exception) -> None:
        """Tell the users of a job that does not go on why: its status need not show it."""
        uid = self.get_known_uid(key)
        if uid is not None:
            said = str(error) if isinstance(error, errors.ApiError | StaleObject) else f"unexpected error: {error!r}"
            event = JobEvent("Warning", Reason.RETRYING.value, f"{Reason.RETRYING.meaning} {said}")
            await events.send_event(self.client, *key, uid, event, self.clock())

    # --- what follows

    def _is_patient(self, key: Key, job: TrainingJob) -> bool:
        """Return whether the next failure may be a short one, as of a webhook whose pods are being replaced."""
        told = any(transition.reason in BLOCKED_REASONS for transition in job.status.transitions[-2:])
        return not told and self.queue.failures(key) < PATIENT_FAILURES

    def _update_polling(self, key: Key, job: TrainingJob, made: JobPlan) -> None:
        self.leases.follow(key, made.suspects)
        if made.holds_leader:
            self.leaders.pause_polling(key)
        elif made.poll is None:
            self.leaders.stop_polling(key)
        else:
            uid, template = job.metadata.uid, made.poll.template
            operator_key = find_key((made.poll.token_secret,), key[1], uid, template, self.operator_keys)
            self.leaders.ensure_polled(key, made.poll, job_token(operator_key, uid, template))

    def get_known_uid(self, key: Key) -> str | None:
        """Return the UID of the job that was last looked at under this name; None: there is none."""
        memory = self._memories.get(key)
        return memory.uid if memory is not None else None

    def _get_memory(self, key: Key, uid: str) -> JobMemory:
        """Return what is known of this very job. Whatever is kept by name was its predecessor's, and is dropped."""
        memory = self._memories.get(key)
        if memory is None or memory.uid != uid:
            if memory is not None:
                self._forget_job(key, memory.uid)
            memory = self._memories[key] = JobMemory(uid)
        return memory

    def _forget_job(self, key: Key, uid: str) -> None:
        self.leaders.stop_polling(key)
        self.leases.follow(key, frozenset())
        self.gangs.update(key, None)
        self.nodes.forget(key)
        known = self._memories.pop(key, None)
        for each in {uid, known.uid if known is not None else uid}:
            self.frozen.forget(each)
            self.claims.forget(each)
            self.actor.forget(each)
        self.queue.discard(key)


def _make_job_ref(key: Key, job: TrainingJob, confirmed: bool) -> JobRef:
    return JobRef(*key, uid=job.metadata.uid, version=job.metadata.resource_version, confirmed=confirmed)
