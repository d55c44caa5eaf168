"""Restarts never exceed what the operator granted, however late its answers come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.agent.leader.restart_allowance import RestartAllowance
from everstep.agent.wire.protocol import APPLICATION, POD_LOST, EndedGeneration


def entry(generation: int, cause: str) -> EndedGeneration:
    return EndedGeneration(1, generation, cause, 0, 0, 1, None, "", (), 0.0, 0.0)


@given(
    total=st.integers(0, 5),
    causes=st.lists(st.sampled_from([APPLICATION, APPLICATION, POD_LOST]), max_size=30),
    polls=st.lists(st.integers(0, 30), max_size=30),
)
def test_the_total_holds_for_an_operator_that_lags_behind(total: int, causes: list[str], polls: list[int]) -> None:
    """At each poll, the operator has charged only the entries that it had seen `lag` generations ago."""
    budget, restarts = RestartAllowance(total, 0.0), 0
    for generation, cause in enumerate(causes, start=1):
        budget.record_end(entry(generation, cause), 1.0)
        if polls:
            seen = max(0, generation - polls.pop())
            charged = causes[:seen].count(APPLICATION)
            if charged <= total:
                budget.grant(f"1.{seen}" if seen else "", total - charged)
        if budget.find_exhausting_failure():
            break
        restarts += cause == APPLICATION
    assert restarts == min(total, causes.count(APPLICATION))


def test_entries_of_an_older_epoch_are_charged_already() -> None:
    budget = RestartAllowance(0, 0.0)
    budget.grant("7.3", 1)
    budget.record_end(EndedGeneration(8, 1, APPLICATION, 0, 0, 1, None, "", (), 0.0, 0.0), 1.0)
    assert budget.find_exhausting_failure() is None
    budget.record_end(EndedGeneration(8, 2, APPLICATION, 0, 0, 1, None, "", (), 0.0, 0.0), 1.0)
    assert budget.find_exhausting_failure() is not None
