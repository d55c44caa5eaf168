"""One namespace's dear answers keep its own jobs waiting, and nobody else's."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep_operator.cluster import processor_budget
from everstep_operator.cluster.processor_budget import BURST_SECONDS, JOB_SHARE, NAMESPACE_SHARE, ProcessorBudget


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_cheap_answer_keeps_nobody_waiting() -> None:
    budget = ProcessorBudget(Clock())
    budget.charge("ns", 0.0002)
    assert budget.pause("ns", 0.0002) <= 0.05


def test_a_job_waits_in_proportion_to_what_its_answer_has_cost() -> None:
    budget = ProcessorBudget(Clock())
    budget.charge("ns", 0.2)
    assert budget.pause("ns", 0.2) == 0.2 / JOB_SHARE


def test_a_debt_is_worked_off_with_time_and_is_nobody_elses() -> None:
    clock = Clock()
    budget = ProcessorBudget(clock)
    budget.charge("tenant", 12 * 0.2)
    due = budget.pause("tenant", 0.0)
    assert due == (12 * 0.2 - BURST_SECONDS) / NAMESPACE_SHARE
    assert budget.pause("other", 0.0) == 0
    clock.now += due + 1
    assert budget.pause("tenant", 0.0) == 0


def test_a_debt_of_a_whole_day_is_over_in_minutes() -> None:
    """Three jobs that answer as dearly as one job may run into debt by a hundredth of a core."""
    clock = Clock()
    budget = ProcessorBudget(clock)
    for _ in range(24 * 60):
        budget.charge("tenant", 3 * JOB_SHARE * 60)
        clock.now += 60
    assert budget.pause("tenant", 0.0) <= processor_budget.PAUSE_MAX


@given(st.integers(1, 30), st.floats(0.001, 0.5))
def test_a_namespace_never_spends_more_than_its_share_and_a_burst(jobs: int, cost: float) -> None:
    clock = Clock()
    budget = ProcessorBudget(clock)
    due, spent = [clock.now] * jobs, 0.0
    for _ in range(200):
        number = min(range(jobs), key=due.__getitem__)
        clock.now = max(clock.now, due[number])
        budget.charge("tenant", cost)
        spent += cost
        due[number] = clock.now + budget.pause("tenant", cost)
    assert spent <= BURST_SECONDS + (clock.now - 100.0) * NAMESPACE_SHARE + 2 * jobs * cost


def test_namespaces_without_a_debt_are_forgotten() -> None:
    clock = Clock()
    budget = ProcessorBudget(clock)
    for number in range(3 * processor_budget.FORGET_ABOVE):
        budget.charge(f"ns-{number}", 0.001)
        clock.now += 1
    assert len(budget._debts) <= processor_budget.FORGET_ABOVE
