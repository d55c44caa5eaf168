"""The generation history names the failure that the others are echoes of."""

from __future__ import annotations

from everstep.agent.wire.protocol import ProcessExit

from .bench import Bench, running

ECHO = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:3021"


def entry(bench: Bench) -> tuple[str, int | None, int | None]:
    last = bench.leader.budget.history[-1]
    return last.cause, last.index, last.rank


def test_the_first_failure_is_named() -> None:
    bench = running().fail(1, 3, 1, "ValueError: first")
    bench.now += 0.01
    bench.fail(0, 0, 1, "ValueError: second").clean()
    assert entry(bench) == ("Application", 1, 3)


def test_an_echo_that_arrives_first_is_not_named() -> None:
    bench = running().fail(0, 0, 1, ECHO)
    bench.now += 0.03
    bench.fail(1, 3, 1, "ValueError: the cause").clean()
    assert entry(bench) == ("Application", 1, 3)


def test_only_an_echo_is_waited_for_and_not_longer_than_a_fifth_of_a_second() -> None:
    bench = running().fail(0, 0, 1, ECHO).clean()
    assert bench.phase == "stopping"
    bench.later(0.2)
    assert bench.phase == "starting"
    assert entry(bench) == ("Application", 0, 0)


def test_a_pod_that_vanishes_just_after_its_peers_connections_is_the_cause() -> None:
    bench = running().fail(0, 0, 1, ECHO)
    bench.now += 0.1
    bench.leader.link_lost(bench.now, 1)
    bench.clean(0)
    assert entry(bench) == ("PodLost", 1, None)


def test_a_rank_that_took_its_pod_with_it_is_the_cause() -> None:
    bench = running().fail(1, 2, 137, "", signal=9, oom=True)
    bench.leader.link_lost(bench.now, 1)
    bench.clean(0)
    assert entry(bench) == ("OutOfMemory", 1, 2)


def test_a_rank_killed_with_its_pod_is_not() -> None:
    bench = running().fail(1, 2, 137, "", signal=9)
    bench.leader.link_lost(bench.now, 1)
    bench.clean(0)
    assert entry(bench) == ("PodLost", 1, None)


def test_ranks_that_left_on_our_own_term_are_no_cause() -> None:
    bench = running().fail(0, 0, 1, ECHO)
    bench.now += 0.05
    bench.fail(1, 2, 143, "", signal=15).clean().later(0.2)
    assert entry(bench) == ("Application", 0, 0)


def test_a_rank_is_named_before_the_launcher_that_failed_because_of_it() -> None:
    bench = running(distribution="mpi").report(
        0, [ProcessExit(None, 1, message="mpirun: a process died", launcher=True)]
    )
    bench.now += 0.05
    bench.fail(1, 3, 1, "ValueError: the cause").clean()
    assert entry(bench) == ("Application", 1, 3)


def test_a_launcher_that_fails_alone_is_named() -> None:
    bench = running(distribution="mpi").report(0, [ProcessExit(None, 213, message="mpirun: no slots", launcher=True)])
    bench.clean().later(0.2)
    assert entry(bench) == ("Application", 0, None)


def test_failures_long_after_the_first_are_its_consequences() -> None:
    bench = running().fail(0, 0, 1, ECHO)
    bench.now += 2
    bench.fail(1, 3, 1, "ValueError: too late").clean()
    assert entry(bench) == ("Application", 0, 0)
