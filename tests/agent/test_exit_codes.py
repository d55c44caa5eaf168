"""The leader decides by itself what an exit code says about the next generation (`restart.onExitCodes`)."""

from __future__ import annotations

from .bench import running

ACTIONS = {42: "Fail", 75: "Ignore", 137: "Ignore"}


def test_a_fatal_exit_code_ends_the_job_at_once() -> None:
    bench = running(application_restarts=10, exit_code_actions=ACTIONS).fail(1, 2, 42, "ValueError: bad data").clean()
    outcome = bench.ends()[0].outcome
    assert (outcome.result, outcome.exit_code, outcome.failure) == ("failed", 42, "1.1")
    assert outcome.message == "ValueError: bad data"


def test_an_exit_code_that_is_ignored_uses_nothing_of_the_allowance_but_is_slowed_down() -> None:
    bench = running(application_restarts=1, exit_code_actions=ACTIONS, max_backoff=1.0)
    for _ in range(4):
        bench.fail(0, 0, 75).clean()
        bench.later(1.0).run()
    bench.fail(0, 0, 1).clean().later(1.0).run()
    bench.fail(0, 0, 75).clean().later(1.0).run()
    bench.fail(0, 0, 1).clean()
    assert [end.outcome.result for end in bench.ends()] == ["failed"]


def test_an_exit_code_that_is_ignored_is_slowed_down_where_pauses_are_disabled_too() -> None:
    """Restarts that no budget pays would fill the generation history, and push out those that one does."""
    bench = running(application_restarts=0, exit_code_actions=ACTIONS, max_backoff=0.0).fail(0, 0, 75).clean()
    bench.run().fail(0, 0, 75).clean()
    assert bench.later(0.9).phase == "backoff"
    assert bench.later(0.1).phase == "starting"


def test_a_signal_counts_as_128_and_its_number() -> None:
    bench = running(application_restarts=0, exit_code_actions=ACTIONS).fail(0, 0, 137, signal=9).clean()
    assert (bench.phase, bench.history) == ("starting", [("1.1", "Application", 0)])


def test_a_kill_for_memory_has_chosen_no_exit_code() -> None:
    bench = running(application_restarts=0, exit_code_actions=ACTIONS).fail(0, 0, 137, oom=True).clean()
    assert [end.outcome.result for end in bench.ends()] == ["failed"]
