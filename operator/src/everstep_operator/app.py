"""The process: settings, the Lease, and the parts put together. Nothing but the command imports this module.

Order of a start: the Lease (nobody acts before holding it), the operator key, one complete list into the cache, then
the workers and the watch. A start with 5,000 pods is that one list.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from everstep_operator import garbage_collector, health, logs, metrics, open_file_limit
from everstep_operator.api.status import Phase
from everstep_operator.cluster import errors, operator_key
from everstep_operator.cluster.action_executor import ActionExecutor, StaleObject
from everstep_operator.cluster.agent_code import AgentCode
from everstep_operator.cluster.cache import ClusterCache, Key, object_key, resource_version
from everstep_operator.cluster.client import Client, load_credentials
from everstep_operator.cluster.disruption_budgets import DisruptionBudgets
from everstep_operator.cluster.fair_share import FairSemaphore, FairShare
from everstep_operator.cluster.frozen_templates import FrozenTemplates
from everstep_operator.cluster.leader_poller import LeaderPoller
from everstep_operator.cluster.lease import LeaseLost, OperatorLease
from everstep_operator.cluster.log_limit import LogRateLimiter
from everstep_operator.cluster.node_directory import NodeDirectory
from everstep_operator.cluster.node_failures import NodeFailures
from everstep_operator.cluster.node_leases import NodeLeases
from everstep_operator.cluster.object_stream import RawObject, StreamWatch
from everstep_operator.cluster.resources import JOBS, NODES, PODS, POOLS, ApiResource
from everstep_operator.cluster.resync import Resync
from everstep_operator.cluster.waiting_gangs import WaitingGangs
from everstep_operator.cluster.watch import KopfWatch
from everstep_operator.cluster.work_queue import WorkQueue
from everstep_operator.plan.node_signals import index_rules
from everstep_operator.plan.plan_settings import PlanSettings as PlanSettings
from everstep_operator.reconcile import Reconciler
from everstep_operator.settings import OperatorSettings

log = structlog.get_logger(__name__)

PHASES = tuple(phase.value for phase in Phase)
DRAIN_SECONDS = 10.0
REPORTED_FAILURES = 5  # failures in a row of which an event tells: about three seconds of them
# Between two looks at a job for the sake of its pods: what a look costs grows with the pods, too.
GAP_SECONDS_PER_POD, GAP_MAX_SECONDS = 0.00025, 0.25
STEP_GAP_SECONDS = 1.0  # … of a pod in the middle of a start, or of another job that waits for the same nodes
# The watch's list is over when it has told nothing for so long: after its last object, and where there is none.
LISTED_SECONDS, STARTED_SECONDS = 0.5, 5.0


class Operator:
    """All parts of one process, from the Lease on."""

    def __init__(
        self, settings: OperatorSettings, client: Client, operator_keys: tuple[bytes, ...], agent: AgentCode
    ) -> None:
        self.settings = settings
        self.client = client
        self.workers = FairShare(settings.workers)
        self.queue: WorkQueue[Key] = WorkQueue(share=self.workers, namespace=lambda key: key[0])
        rules = index_rules(rule.to_rule() for rule in settings.node_signals)
        self.cache = ClusterCache(
            touched=self.queue.add, pool_changed=self._requeue_jobs_of_pool, pods_touched=self._requeue_spaced,
            pods_started=self._requeue_in_a_moment,
            node_rules=rules,
        )  # fmt: skip
        self.leaders = LeaderPoller(
            self.queue.add_after,
            fence_timeout=settings.fence_timeout,
            clock=client.clock.now,
            limit=open_file_limit.raise_open_file_limit(settings.leader_connections),
        )
        self.frozen = FrozenTemplates(client, operator_keys)
        self.gangs = WaitingGangs(self._requeue_in_a_moment)
        budgets = DisruptionBudgets(client, enabled=settings.disruption_budget)
        nodes = NodeDirectory(client, self.cache, client.clock.now)
        actor = ActionExecutor(
            client, self.cache, self.leaders, agent, self.frozen, operator_keys, budgets, nodes.admitted
        )
        actor.requests = FairSemaphore(settings.parallel_creates)
        client.throttled = actor.requests.slow_down
        self.leases = NodeLeases(
            client, self.cache, self.queue.add, clock=client.clock.now, silence=settings.node_silence
        )
        self.node_failures = NodeFailures(
            client, settings.pod_namespace, window=settings.node_failure_window, clock=client.clock.now,
            count_nodes=lambda: len(self.cache.nodes),
            has_node=lambda name: self.cache.nodes.get(("", name)) is not None,
        )  # fmt: skip
        self.reconciler = Reconciler(
            client, self.cache, self.queue, self.leaders, self.frozen, self.gangs, nodes, self.leases,
            self.node_failures, actor,
            make_plan_settings(settings, agent, operator_keys), operator_keys, client.clock.now,
        )  # fmt: skip
        self.watch = KopfWatch(
            lambda: load_credentials(settings.kubeconfig),
            self._receive_event,
            namespaces=settings.watch_namespaces,
            ready=self._wait_until_served,
        )
        self.resync = Resync(
            client, self.cache, self.frozen, agent, budgets, settings.watch_namespaces, settings.resync_seconds,
            deaf=self._restart_watches, wake=self.queue.add, readable=self.watch.readmit,
        )  # fmt: skip
        self.streams = StreamWatch(
            client, {PODS: self.cache.pods, NODES: self.cache.nodes}, self._receive_event, settings.watch_namespaces
        )
        self._stores = {
            JOBS: self.cache.jobs, PODS: self.cache.pods, POOLS: self.cache.pools, NODES: self.cache.nodes
        }  # fmt: skip
        self._listed: asyncio.TimerHandle | None = None
        self._draining = False
        self._logs = LogRateLimiter()

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop`; then finish what is in work, briefly. An exception of any part ends all of them."""
        await self._fill_cache()
        garbage_collector.tune_garbage_collector()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self.watch.run(lambda: self._schedule_resync(STARTED_SECONDS))),
                group.create_task(self.streams.run(self.resync.listed)),
                group.create_task(self.resync.run()),
            ]
            if self.settings.out_of_service_taint:
                tasks.append(group.create_task(self.reconciler.actor.taints.run(self.cache)))
            tasks += [group.create_task(self._run_worker()) for _ in range(self.workers.most)]
            await stop.wait()
            self._draining = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_SECONDS):
                    await self.queue.idle()
            for task in tasks:
                task.cancel()
        await self.leases.close()
        await self.leaders.close()

    async def _fill_cache(self) -> None:
        """List all objects once, and find the gangs that wait."""
        await self._wait_until_served()
        started = time.monotonic()
        while self.resync.done_at is None:
            try:
                await self.resync.run_once()
            except (errors.ApiError, errors.Unreachable) as error:
                log.warning("cannot list", error=str(error))
                await asyncio.sleep(1)
        await self.gangs.fill(self.cache, self.reconciler.read_and_count_places)
        log.info("listed", jobs=len(self.cache.jobs), pods=len(self.cache.pods), seconds=time.monotonic() - started)

    async def _wait_until_served(self) -> None:
        """Return once the API server serves our kinds: the CRDs may be installed after the operator."""
        told = False
        while True:
            for place in self.settings.watch_namespaces or (None,):  # one may be gone, and its Role with it
                try:
                    for resource in (JOBS, POOLS):
                        async for _ in self.client.list(resource, place if resource.namespaced else None, page=1):
                            break
                    return
                except (errors.ApiError, errors.Unreachable) as error:
                    if not told:
                        log.warning("waiting for the API server and the CRDs", error=str(error))
                    told = True
            await asyncio.sleep(1)

    async def _run_worker(self) -> None:
        while not self._draining:
            job = await self.queue.get()
            started, result = time.monotonic(), "ok"
            try:
                async with asyncio.timeout(self.settings.stuck_seconds):
                    rejection = await self.reconciler.reconcile(job)
                if rejection is None:
                    self.queue.forget(job)
                else:
                    result = "refused"
                    await self._requeue_with_backoff(
                        log.info, "the API server still rejects an action; trying again", job, message=rejection.message
                    )
            except StaleObject as error:
                result = "waiting"
                await self._requeue_with_backoff(log.info, "waiting for the deletion of a stale object", job, error)
            except (errors.ApiError, errors.Unreachable) as error:
                result = "refused"
                await self._requeue_with_backoff(
                    log.warning, "a request to the API server failed; trying again", job, error
                )
            except LeaseLost:
                raise
            except Exception as error:
                result = "error"
                await self._requeue_with_backoff(
                    log.exception, "reconcile failed with an unexpected error; trying again", job, error
                )
            finally:
                self.queue.done(job)
                metrics.reconcile_seconds.labels(result).observe(time.monotonic() - started)

    async def _requeue_with_backoff(
        self, write: Callable[..., None], text: str, job: Key, error: Exception | None = None, **about: str
    ) -> None:
        """Let the job be tried again after its back-off, and say so: in one line a minute of the log for each job and
        kind of trouble, and in one event for each row of failures."""
        again_in = self.queue.retry(job)
        if (left_out := self._logs.left_out((job, self.reconciler.get_known_uid(job), text))) is not None:
            about |= {"error": str(error)} if error is not None else {}
            write(text, job=job, again_in=again_in, times_before=left_out, **about)
        if error is None or isinstance(error, errors.Unreachable):
            return  # the status tells of a rejection, and nobody can be told of a server that is away
        if self.queue.failures(job) == REPORTED_FAILURES:
            await self.reconciler.report_retries(job, error)

    def _receive_event(self, resource: ApiResource, kind: str | None, raw: RawObject) -> None:
        store: Any = self._stores[resource]
        self.resync.note_event(resource)
        if kind == "DELETED":
            store.remove(object_key(raw), str((raw.get("metadata") or {}).get("uid") or ""), resource_version(raw))
            return
        if resource == JOBS and (raw.get("metadata") or {}).get("namespace") in self.resync.forbidden:
            self.resync.request_soon()  # it can be read again: all of its pods first, then its jobs
            return
        if kind is None:
            self._schedule_resync(LISTED_SECONDS)
        store.put(raw)

    def _schedule_resync(self, seconds: float) -> None:
        """Schedule a resync: the watch lists at its start, or since it was cut off, and tells nothing of what vanished
        before."""
        if self._listed is not None:
            self._listed.cancel()
        self._listed = asyncio.get_running_loop().call_later(seconds, self.resync.request_soon)

    def _restart_watches(self, silent: set[ApiResource]) -> None:
        """Start watches again that have not told what a list has shown."""
        if silent & {JOBS, POOLS}:
            self.watch.restart()
        self.streams.restart(silent)

    def _requeue_spaced(self, job: Key) -> None:
        """Requeue a job of which a pod has changed; of a large set many do within a moment, and one look sees all."""
        self.queue.add_spaced(job, min(GAP_MAX_SECONDS, self.cache.count_pods(job) * GAP_SECONDS_PER_POD))

    def _requeue_in_a_moment(self, job: Key) -> None:
        self.queue.add_spaced(job, STEP_GAP_SECONDS)

    def _requeue_jobs_of_pool(self, pool: str) -> None:
        """Requeue the jobs that may run in a pool which has changed."""
        for job, raw in self.cache.jobs.items():
            if any(choice.get("name") == pool for choice in (raw.get("spec") or {}).get("pools") or ()):
                self.queue.add(job)

    # --- health

    def describe_hang(self) -> str | None:
        """Return what hangs, so that a restart of the process would help; None if nothing does."""
        if self.queue.longest_work() > self.settings.stuck_seconds + 60:
            return f"a job has been in work for {self.queue.longest_work():.0f} s"
        if (waited := self.queue.oldest_wait_unserved()) > self.settings.stuck_seconds + 60:
            return f"a job has been waiting for {waited:.0f} s"
        if (age := time.monotonic() - self.resync.tried_at) > 3 * self.settings.resync_seconds + 60:
            return f"no resync was tried for {age:.0f} s"
        return None

    def update_gauges(self) -> None:
        """Set the metrics that are read when they are scraped."""
        metrics.queue_depth.set(self.queue.depth)
        metrics.queue_oldest_seconds.set(self.queue.oldest_wait())
        metrics.queue_longest_work_seconds.set(self.queue.longest_work())
        metrics.pods.set(len(self.cache.pods))
        metrics.avoided_nodes.set(len(self.node_failures.list_avoided_by_all()))
        metrics.jobs_of_previous_keys.set(len(self.frozen.of_previous_keys))
        if self.resync.done_at is not None:
            metrics.resync_seconds.set(time.monotonic() - self.resync.done_at)
        phases = Counter(str((raw.get("status") or {}).get("phase") or "Pending") for _, raw in self.cache.jobs.items())
        health.set_phase_gauges(phases, PHASES)


def make_plan_settings(settings: OperatorSettings, agent: AgentCode, operator_keys: tuple[bytes, ...]) -> PlanSettings:
    """Return what plans depend on, in the planner's words."""
    return PlanSettings(
        agent_digest=agent.digest,
        operator_key=operator_keys[0],
        previous_keys=operator_keys[1:],
        cluster_domain=settings.cluster_domain,
        agent_port=settings.agent_port,
        fence_timeout=settings.fence_timeout,
        service_accounts=frozenset({"default", *settings.allowed_service_accounts}),
        priority_classes=frozenset(settings.allowed_priority_classes),
        host_fields=frozenset(settings.allowed_host_fields),
        copied_labels=frozenset(settings.copied_labels),
        pod_annotations=settings.job_pod_annotations,
        disruption_budget=settings.disruption_budget,
        out_of_service_taint=settings.out_of_service_taint,
    )


async def run_operator(settings: OperatorSettings, agent_code: bytes, stop: asyncio.Event) -> None:
    """Run the process until it is stopped. Raises `LeaseLost` (in a group) when another process may act."""
    running: list[Operator] = []
    client = await Client.connect(settings.kubeconfig, timeout=settings.request_timeout)
    identity = settings.pod_uid or f"{socket.gethostname()}-{os.getpid()}"
    lease = OperatorLease(client, settings.pod_namespace, settings.lease_name, identity)
    waiting = True

    def describe_what_is_missing() -> str | None:
        # A replica that stands by is ready: else a rollout, and `helm --wait`, would wait for it for ever.
        if waiting:
            return lease.describe_why_not_standing_by()
        return None if running and running[0].resync.done_at is not None else "not listed yet"

    servers = health.HealthServers(
        alive=lambda: running[0].describe_hang() if running else None,
        ready=describe_what_is_missing,
        measure=lambda: running[0].update_gauges() if running else None,
    )
    await servers.start(settings.bind, settings.health_port, settings.metrics_port)
    try:
        if not await _finish_unless_stopped(stop, lease.acquire()):
            return
        waiting = False
        metrics.is_leader.set(1)
        client.may_write = lease.check
        async with asyncio.TaskGroup() as group:
            holding = group.create_task(lease.hold())
            loading = group.create_task(_load_keys(client, settings))
            if await _finish_unless_stopped(stop, loading):
                running.append(Operator(settings, client, loading.result(), AgentCode(agent_code)))
                await running[0].run(stop)
            holding.cancel()
        await lease.release()
    finally:
        metrics.is_leader.set(0)
        await servers.stop()
        await client.close()


async def _load_keys(client: Client, settings: OperatorSettings) -> tuple[bytes, ...]:
    """Return the operator keys, the current one first."""
    previous = operator_key.read_previous_keys(settings.previous_keys_folder)
    current = await operator_key.load_or_create_key(
        client, settings.pod_namespace, settings.key_folder, settings.key_secret
    )
    return (current, *(each for each in previous if each != current))


async def _finish_unless_stopped(stop: asyncio.Event, work: Any) -> bool:
    """Wait for the work, or for `stop`; False if it was the latter."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not task.done():
        task.cancel()
        return False
    await task
    return True


async def _run_until_signalled(settings: OperatorSettings, agent_code: bytes) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await run_operator(settings, agent_code, stop)


def parse_settings(arguments: list[str] | None, environment: Mapping[str, str]) -> OperatorSettings:
    """Return the settings from the command line and, for what it leaves out, from the environment."""
    parser = argparse.ArgumentParser("everstep-operator", description="Runs TrainingJobs on Kubernetes.")
    for name, about in OperatorSettings.model_fields.items():
        parser.add_argument(f"--{name.replace('_', '-')}", help=(about.description or "").replace("%", "%%"))
    return OperatorSettings.load(environment, vars(parser.parse_args(arguments)))


def main(arguments: list[str] | None = None) -> None:
    """Run the command `everstep-operator`."""
    settings = parse_settings(arguments, os.environ)
    logs.configure_logging(settings.log_level, settings.log_format)
    # kopf names itself after the login name, which a UID without a passwd entry does not have.
    os.environ.setdefault("LOGNAME", "everstep")
    from everstep import agent_zip

    try:
        asyncio.run(_run_until_signalled(settings, agent_zip.build_zipapp()))
    except* LeaseLost as group:
        log.error("another operator may act now; leaving", error=str(group.exceptions[0]))
        sys.exit(1)
    except* operator_key.KeyUnavailable as group:
        log.error("no operator key", error=str(group.exceptions[0]))
        sys.exit(1)
