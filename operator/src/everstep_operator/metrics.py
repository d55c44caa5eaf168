"""The operator's Prometheus metrics. No label has a value that a user can invent: no job, pod or node names."""

from __future__ import annotations

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from everstep_operator.api.job import TrainingJob
from everstep_operator.api.status import Cause, CheckpointStatus, Phase, Timings, TrainingJobStatus, Usage

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LONG = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 21600)

registry = REGISTRY

reconcile_seconds = Histogram(
    "everstep_reconcile_duration_seconds", "One look at one job, by result", ["result"], buckets=_SECONDS
)
jobs_of_previous_keys = Gauge(
    "everstep_jobs_of_previous_keys", "Unfinished jobs whose pods go by a previous operator key"
)
queue_depth = Gauge("everstep_queue_depth", "Jobs waiting to be looked at")
queue_oldest_seconds = Gauge("everstep_queue_oldest_seconds", "How long the oldest waiting job has been waiting")
queue_longest_work_seconds = Gauge("everstep_queue_longest_work_seconds", "How long the slowest look has been going on")
api_requests = Counter("everstep_api_requests_total", "Requests to the API server", ["verb", "resource", "code"])
api_seconds = Histogram(
    "everstep_api_request_duration_seconds", "Requests to the API server, retries apart", ["verb"], buckets=_SECONDS
)
jobs = Gauge("everstep_jobs", "Training jobs", ["phase"])
pods = Gauge("everstep_pods", "Pods of training jobs")
time_to_running = Histogram(
    "everstep_job_time_to_running_seconds", "From a job's creation to its first running", buckets=_LONG
)
restarts = Counter("everstep_restarts_total", "Generations that ended before their job did", ["cause"])
recovery_seconds = Histogram(
    "everstep_recovery_seconds", "From the end of a generation until all ranks run again", ["cause"], buckets=_LONG
)
phase_seconds = Counter("everstep_phase_seconds_total", "Time that jobs have spent in each phase", ["phase"])
lost_seconds = Counter("everstep_lost_training_seconds_total", "Time of training steps that a restart has lost")
lost_steps = Counter("everstep_lost_steps_total", "Training steps that a restart has lost")
restores = Counter("everstep_restores_total", "Restores of checkpoints, by the farthest place read from", ["tier"])
save_stall = Histogram(
    "everstep_save_stall_seconds",
    "How long a save of a checkpoint held up training, of those that were the newest when a status was stored",
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
)
failed_saves = Counter("everstep_failed_saves_total", "Saves of checkpoints that failed")
node_seconds = Counter("everstep_node_seconds_total", "Time of nodes that pods of jobs have held", ["capacity"])
cost = Counter("everstep_cost_total", "Price of that time, by the prices of the pools")
savings = Counter("everstep_savings_total", "How much more the spot nodes among them would have cost on demand")
watch_restarts = Counter("everstep_watch_restarts_total", "Times a watch failed and was started again")
resync_seconds = Gauge("everstep_resync_age_seconds", "Since the last complete list of everything")
resync_repairs = Counter(
    "everstep_resync_repairs_total", "Objects the watch had missed, found by listing", ["resource", "kind"]
)
node_failures = Counter("everstep_node_failures_total", "Failures of jobs that speak against their node", ["reason"])
avoided_nodes = Gauge("everstep_avoided_nodes", "Nodes that new pods of some namespace avoid")
leaders_polled = Gauge("everstep_leaders_polled", "Jobs whose leader is polled now")
leader_polls = Counter("everstep_leader_polls_total", "Polls of leaders, by result", ["result"])
is_leader = Gauge("everstep_operator_leader", "1 while this process holds the Lease")


def record_status_change(before: TrainingJob, status: TrainingJobStatus, now: float) -> None:
    """Count what a status that has just been stored says anew."""
    old = before.status
    for cause in (each.value.lower() for each in Cause):
        restarts.labels(cause).inc(max(0, getattr(status.restarts, cause) - getattr(old.restarts, cause)))
    _record_timings(old.timings, status.timings)
    _record_usage(old.usage, status.usage)
    _record_checkpoints(old.checkpoint, status.checkpoint)
    if status.phase == Phase.RUNNING and (began := _find_restart(old)) is not None and status.restarts.last is not None:
        recovery_seconds.labels(status.restarts.last.cause.value.lower()).observe(max(0.0, now - began))
    ran_before = any(transition.phase == Phase.RUNNING for transition in old.transitions)
    created = before.metadata.creation_timestamp
    if status.phase == Phase.RUNNING and not ran_before and created is not None:
        time_to_running.observe(max(0.0, now - created.timestamp()))


def _find_restart(status: TrainingJobStatus) -> float | None:
    """Return when the restart began that a job is in: it may wait for nodes, or start, since then."""
    began = None
    for transition in reversed(status.transitions):
        if transition.phase not in _RECOVERING:
            break
        began = transition.start.timestamp() if transition.phase == Phase.RESTARTING else began
    return began


_RECOVERING = frozenset({Phase.RESTARTING, Phase.PENDING, Phase.SCHEDULING, Phase.STARTING})


def _record_timings(old: Timings, new: Timings) -> None:
    for name in ("pending", "scheduling", "starting", "running", "recovering"):
        phase_seconds.labels(name).inc(max(0.0, getattr(new, name) - getattr(old, name)))
    lost_seconds.inc(max(0.0, new.lost - old.lost))


def _record_usage(old: Usage | None, new: Usage | None) -> None:
    if new is None:
        return
    before = old.model_dump() if old is not None else {}

    def grown(field: str) -> float:
        return max(0.0, float(getattr(new, field)) - float(before.get(field, 0.0)))

    node_seconds.labels("spot").inc(grown("spot_node_seconds"))
    node_seconds.labels("on-demand").inc(grown("on_demand_node_seconds"))
    cost.inc(grown("cost"))
    savings.inc(grown("savings"))


def _record_checkpoints(old: CheckpointStatus | None, new: CheckpointStatus | None) -> None:
    if new is None:
        return
    old = old or CheckpointStatus()
    lost_steps.inc(max(0, new.lost_steps - old.lost_steps))
    failed_saves.inc(max(0, new.failed_saves - old.failed_saves))
    if new.stall_seconds is not None and new.step != old.step:
        save_stall.observe(new.stall_seconds)
    # A first generation that finds no checkpoint has restored nothing.
    if new.restored is not None and new.restored.tier and (old.restored is None or old.restored.id != new.restored.id):
        restores.labels(new.restored.tier).inc()
