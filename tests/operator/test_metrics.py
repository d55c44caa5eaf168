"""News of a status is counted once, when the status is stored."""

from __future__ import annotations

from datetime import timedelta

from everstep_operator import metrics
from everstep_operator.api.status import (
    Cause,
    Charge,
    CheckpointStatus,
    Phase,
    Restarts,
    RestoreStatus,
    Timings,
    TrainingJobStatus,
    Transition,
    Usage,
)
from tests.builders import CREATED, job

NOW = CREATED + timedelta(hours=1)


def value(name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


def transition(phase: Phase, seconds: float) -> Transition:
    return Transition(phase=phase, reason="x", start=NOW + timedelta(seconds=seconds))


def test_a_recovery_counts_from_the_end_of_a_generation_to_the_next_run() -> None:
    charge = Charge(id="1.1", cause=Cause.INFRASTRUCTURE, time=NOW)
    before = TrainingJobStatus(
        phase=Phase.STARTING,
        restarts=Restarts(total=1, infrastructure=1, charges=[charge]),
        transitions=[transition(Phase.RUNNING, -60), transition(Phase.RESTARTING, 0), transition(Phase.STARTING, 20)],
        timings=Timings(running=60, recovering=20),
    )
    after = before.model_copy(update={"phase": Phase.RUNNING, "timings": Timings(running=60, recovering=42, lost=3)})
    names = ("everstep_recovery_seconds_sum", "everstep_recovery_seconds_count")
    known = [value(name, cause="infrastructure") for name in names]
    lost = value("everstep_lost_training_seconds_total")
    recovering = value("everstep_phase_seconds_total", phase="recovering")
    metrics.record_status_change(job().status(before).build(), after, NOW.timestamp() + 42)
    assert [value(name, cause="infrastructure") for name in names] == [known[0] + 42, known[1] + 1]
    assert value("everstep_lost_training_seconds_total") == lost + 3
    assert value("everstep_phase_seconds_total", phase="recovering") == recovering + 22


def test_a_first_run_is_no_recovery() -> None:
    before = TrainingJobStatus(phase=Phase.STARTING, transitions=[transition(Phase.PENDING, 0)])
    known = [value("everstep_recovery_seconds_count", cause=cause.value.lower()) for cause in Cause]
    after = before.model_copy(update={"phase": Phase.RUNNING})
    metrics.record_status_change(job().status(before).build(), after, NOW.timestamp())
    assert [value("everstep_recovery_seconds_count", cause=cause.value.lower()) for cause in Cause] == known


def test_checkpoints_are_counted_when_they_are_news() -> None:
    restored = RestoreStatus(id="1.2", step=5, tier="peer", lost_steps=2)
    before = TrainingJobStatus(phase=Phase.RUNNING, checkpoint=CheckpointStatus(step=4, failed_saves=1))
    after = before.model_copy(
        update={
            "checkpoint": CheckpointStatus(step=5, stall_seconds=0.5, failed_saves=2, lost_steps=2, restored=restored)
        }
    )
    names = ("everstep_failed_saves_total", "everstep_lost_steps_total", "everstep_save_stall_seconds_count")
    known, restores = [value(name) for name in names], value("everstep_restores_total", tier="peer")
    metrics.record_status_change(job().status(before).build(), after, NOW.timestamp())
    metrics.record_status_change(job().status(after).build(), after, NOW.timestamp())
    assert [value(name) for name in names] == [known[0] + 1, known[1] + 2, known[2] + 1]
    assert value("everstep_restores_total", tier="peer") == restores + 1


def test_nodes_and_their_price_are_counted_as_they_are_booked() -> None:
    before = TrainingJobStatus(usage=Usage(until=NOW, spot_node_seconds=10, cost=1.0, savings=2.0))
    more = Usage(until=NOW, spot_node_seconds=40, on_demand_node_seconds=5, cost=1.5, savings=1.5)
    names = ("everstep_node_seconds_total", "everstep_cost_total", "everstep_savings_total")
    known = value(names[0], capacity="spot"), value(names[0], capacity="on-demand"), *map(value, names[1:])
    metrics.record_status_change(job().status(before).build(), before.model_copy(update={"usage": more}), 0.0)
    now = value(names[0], capacity="spot"), value(names[0], capacity="on-demand"), *map(value, names[1:])
    assert now == (known[0] + 30, known[1] + 5, known[2] + 0.5, known[3]), "a counter never goes back"
