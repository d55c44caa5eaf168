"""The leader's decisions, one promise in each test."""

from __future__ import annotations

import pytest

from everstep.agent.leader.commands import Dial
from everstep.agent.wire.protocol import Gpu, ProcessExit, RankProgress

from .bench import Bench, running


def test_forms_once_all_nodes_have_joined() -> None:
    bench = Bench(nodes=3).join(0).join(2)
    assert bench.starts() == []
    assert bench.leader.state()["missing"] == [1]
    bench.join(1)
    (start,) = bench.starts()
    assert start.layout.hosts == ("10.0.0.0", "10.0.0.1", "10.0.0.2")
    assert start.layout.ports == (8470, 8470, 8470)
    assert (start.layout.master_addr, start.layout.master_port) == ("10.0.0.0", 29500)
    assert bench.phase == "starting"


def test_runs_once_all_ranks_are_started() -> None:
    bench = Bench().join_all().report(0).report(1, started=1)
    assert bench.phase == "starting"
    assert bench.leader.state()["ranksStartedAt"] is None
    bench.report(1)
    assert bench.phase == "running"
    assert bench.leader.state()["ranksStartedAt"] == pytest.approx(1_760_000_000.0)


def test_succeeds_when_every_rank_exited_with_0() -> None:
    bench = running()
    bench.report(0, [ProcessExit(0, 0), ProcessExit(1, 0)]).report(1, [ProcessExit(2, 0)])
    assert bench.phase == "running"
    bench.report(1, [ProcessExit(2, 0), ProcessExit(3, 0)])
    assert bench.leader.state()["outcome"] == {
        "result": "succeeded",
        "exitCode": 0,
        "message": "all ranks exited with 0",
        "failure": None,
    }
    assert bench.history == []


def test_mpi_succeeds_only_with_its_launcher() -> None:
    bench = running(distribution="mpi")
    bench.report(0, [ProcessExit(0, 0), ProcessExit(1, 0)]).report(1, [ProcessExit(2, 0), ProcessExit(3, 0)])
    assert bench.phase == "running"
    bench.report(0, [ProcessExit(0, 0), ProcessExit(1, 0), ProcessExit(None, 0, launcher=True)])
    assert bench.ends()[0].outcome.result == "succeeded"


def test_a_launcher_that_ended_well_is_waited_for_no_longer_than_a_report_takes() -> None:
    """Ranks that it did not start will never tell of an end, nor of a start."""
    bench = Bench(distribution="mpi").join_all()
    bench.report(0, [ProcessExit(0, 0), ProcessExit(1, 0), ProcessExit(None, 0, launcher=True)])
    bench.later(9.0)
    assert bench.phase == "starting"
    bench.later(1.1).clean().later(0.5)
    assert bench.history == [("1.1", "Application", 0)]
    assert "node 1 for one" in bench.leader.budget.history[0].message


def test_a_node_that_is_silent_when_a_launcher_ends_is_waited_for() -> None:
    """A frozen machine or a slow network: that all of its ranks have ended well, it has yet to tell."""
    bench = running(distribution="mpi")
    bench.report(0, [ProcessExit(0, 0), ProcessExit(1, 0), ProcessExit(None, 0, launcher=True)])
    for _ in range(30):
        bench.now += 1.0
        bench.leader.note_sign_of_life(bench.now, 0)
        bench.leader.tick(bench.now)
    assert bench.phase == "running"
    bench.report(1, [ProcessExit(2, 0), ProcessExit(3, 0)])
    assert bench.ends()[0].outcome.result == "succeeded"


def test_a_leader_that_stood_still_while_ranks_stopped_reads_first_who_is_clean() -> None:
    """Else the nodes of all reports that waited meanwhile would be called unclean, and their pods be replaced."""
    bench = running().fail(1, 3)
    bench.now += 120.0
    bench.clean(0)
    assert bench.leader.state()["unclean"] == []
    bench.leader.tick(bench.now)
    bench.clean(1)
    assert (bench.phase, bench.leader.generation) == ("starting", 2)
    bench.run().fail(1, 3).later(5 + 45 + 1)
    assert [node["index"] for node in bench.leader.state()["unclean"]] == [0, 1]


def test_a_failed_rank_restarts_all_in_place_at_once() -> None:
    bench = running().fail(1, 3)
    (stop,) = bench.stops()
    assert (stop.indexes, stop.grace) == ((0, 1), 5)
    bench.clean(0)
    assert bench.phase == "stopping"
    bench.clean(1)
    assert bench.phase == "starting"
    assert [s.layout.generation for s in bench.starts()] == [1, 2]
    assert bench.history == [("1.1", "Application", 1)]


def test_a_late_report_of_the_last_generation_does_not_make_the_next_one_clean() -> None:
    bench = running().fail(1, 3).clean()
    bench.report(0, generation=1, clean=True)
    assert bench.phase == "starting"
    bench.run()


def test_backs_off_from_the_second_failure_on() -> None:
    bench = running(application_restarts=10, max_backoff=3.0).fail(0, 0).clean()
    waits = []
    for _ in range(4):
        bench.run().fail(0, 0).clean()
        assert bench.phase == "backoff"
        begin = bench.now
        while bench.phase == "backoff":
            bench.later(0.5)
        waits.append(bench.now - begin)
    assert waits == [1, 2, 3, 3]


def test_backoff_is_forgotten_after_ten_minutes_of_running() -> None:
    bench = running().fail(0, 0).clean().run().later(601).fail(0, 0).clean()
    assert bench.phase == "starting"


def test_without_backoff_restarts_are_immediate() -> None:
    bench = running(max_backoff=0.0).fail(0, 0).clean().run().fail(0, 0).clean()
    assert bench.phase == "starting"


def test_ends_when_the_allowance_is_used_up() -> None:
    bench = running(application_restarts=1).fail(1, 2, 7).clean().run()
    bench.fail(1, 3, 9, "RuntimeError: again").clean()
    outcome = bench.ends()[0].outcome
    assert (outcome.result, outcome.exit_code, outcome.failure) == ("failed", 9, "1.2")
    assert outcome.message == "RuntimeError: again"


def test_the_operator_grants_what_is_left_after_what_it_charged() -> None:
    bench = running(application_restarts=0).poll("", 2).fail(0, 0).clean().run()
    bench.poll("1.1", 0).fail(0, 0).clean()  # 1.1 is charged; nothing is left for 1.2
    assert bench.ends()[0].outcome.failure == "1.2"


def test_an_overtaken_poll_grants_nothing() -> None:
    bench = running(application_restarts=5).fail(0, 0).clean().run().poll("1.1", 0).poll("", 9).fail(0, 0).clean()
    assert bench.phase == "ended"


def test_a_signal_becomes_the_exit_code_that_a_shell_says() -> None:
    bench = running(application_restarts=0).fail(0, 1, 139, signal=11).clean()
    assert bench.ends()[0].outcome.exit_code == 139


def test_a_lost_pod_is_not_charged_and_waits_for_its_successor() -> None:
    bench = running(application_restarts=0)
    bench.leader.link_lost(bench.now, 1)
    bench.clean(0)
    assert bench.history == [("1.1", "PodLost", 1)]
    assert bench.phase == "forming"
    bench.leader.update_addresses(bench.now, {1: "10.0.0.77:8470"})
    assert bench.take()[-1] == Dial(1, "10.0.0.77:8470")
    bench.join(1, pod="b", address="10.0.0.77:8470")
    assert bench.starts()[-1].layout.hosts == ("10.0.0.0", "10.0.0.77")


def test_the_same_pod_may_come_back_after_its_old_ranks_are_stopped() -> None:
    bench = running()
    bench.leader.link_lost(bench.now, 1)
    bench.clean(0).join(1, epoch=1, generation=1, clean=False)
    assert bench.phase == "forming"
    assert bench.stops()[-1].indexes == (1,)
    bench.report(1, clean=True)
    assert bench.phase == "starting"


def test_a_new_leader_takes_over_survivors_of_an_older_epoch() -> None:
    bench = Bench(epoch=2).join(0).join(1, epoch=1, generation=7, clean=False)
    (stop,) = bench.stops()
    assert (stop.indexes, stop.generation) == ((1,), 7)
    bench.report(1, epoch=1, generation=7, clean=True)
    assert (bench.starts()[0].layout.epoch, bench.starts()[0].layout.generation) == (2, 1)


def test_peers_of_a_leaving_pod_get_the_long_grace_until_it_is_gone() -> None:
    bench = running()
    bench.leader.node_leaving(bench.now, 1)
    assert bench.stops()[-1].grace == 110
    bench.leader.link_lost(bench.now, 1)
    assert bench.stops()[-1].grace == 5
    bench.clean(0)
    assert bench.history == [("1.1", "Leaving", 1)]
    assert bench.phase == "forming"


def test_a_rank_that_has_no_handler_for_term_ends_the_long_grace() -> None:
    bench = running()
    bench.leader.node_leaving(bench.now, 1)
    bench.fail(1, 2, 143, "")  # it had a handler and came to its end
    assert bench.stops()[-1].grace == 110
    bench.fail(0, 0, 143, "", signal=15)
    assert bench.stops()[-1].grace == 5


def test_a_leaving_pod_does_not_run_another_generation() -> None:
    bench = running()
    bench.leader.node_leaving(bench.now, 1)
    bench.clean()
    assert bench.phase == "forming"
    bench.join(1, pod="b")
    assert bench.phase == "starting"


def test_silence_is_a_lost_pod() -> None:
    bench = running(fence_timeout=20.0)
    for _ in range(21):
        bench.now += 1.0
        bench.leader.note_sign_of_life(bench.now, 0)
        bench.leader.tick(bench.now)
    bench.clean(0)
    assert bench.history == [("1.1", "PodLost", 1)]


def test_a_leader_that_was_suspended_blames_nobody() -> None:
    bench = running()
    bench.now += 3600
    bench.leader.tick(bench.now)
    assert bench.phase == "running"


def test_an_unclean_node_is_named_until_its_pod_is_replaced() -> None:
    bench = running().fail(0, 0).clean(0).report(1, unclean="process 17 does not die")
    assert bench.phase == "forming"
    assert bench.leader.state()["unclean"] == [{"index": 1, "uid": "1-a", "message": "process 17 does not die"}]
    bench.join(1, pod="b")
    assert bench.leader.state()["unclean"] == []
    assert bench.phase == "starting"


def test_a_node_that_never_answers_a_stop_is_unclean() -> None:
    bench = running().fail(0, 0).clean(0).later(51)
    assert [u["index"] for u in bench.leader.state()["unclean"]] == [1]


def test_stop_ends_the_job_as_stopped_after_the_long_grace() -> None:
    bench = running()
    bench.leader.stop(bench.now, "the user said so")
    assert bench.stops()[0].grace == 110
    bench.fail(0, 0, 1, "ignored").clean()
    outcome = bench.ends()[0].outcome
    assert (outcome.result, outcome.message, outcome.failure) == ("stopped", "the user said so", None)
    assert bench.history == [("1.1", "Stopped", None)]


@pytest.mark.parametrize("when", ["forming", "backoff"])
def test_stop_needs_no_running_ranks(when: str) -> None:
    bench = Bench().join(0)
    if when == "backoff":
        bench = running().fail(0, 0).clean().run().fail(0, 0).clean()
    assert bench.phase == when
    bench.leader.stop(bench.now, "enough")
    assert bench.ends()[0].outcome.result == "stopped"


def test_names_come_from_dns_when_no_table_comes() -> None:
    bench = Bench().join(0).later(6)
    assert bench.take() == [Dial(1, "algo-2.digits.default.svc:8470")]


def test_a_new_address_is_tried_before_the_old_pod_is_given_up() -> None:
    bench = running()
    bench.leader.update_addresses(bench.now, {0: "10.0.0.0:8470", 1: "10.0.0.99:8470"})
    assert bench.take()[-1] == Dial(1, "10.0.0.99:8470")
    assert bench.phase == "running"
    bench.leader.update_addresses(bench.now, {1: "10.0.0.1:8470"})  # the table was an old one
    assert bench.take()[-1] == Dial(1, "")


def announce(bench: Bench, pod: str, address: str) -> Bench:
    """The agent of node 1's pod `pod`, as Bench.join names it."""
    bench.leader.announced(bench.now, 1, f"1-{pod}", address)
    return bench


def lost() -> Bench:
    """Node 1 is gone; its old address is dialled."""
    bench = running()
    bench.leader.update_addresses(bench.now, {1: "10.0.0.1:8470"})
    bench.leader.link_lost(bench.now, 1)
    bench.clean(0)
    bench.take()
    return bench


def test_a_replacement_that_announces_itself_is_dialled_at_once() -> None:
    bench = announce(lost(), "b", "10.0.0.77:8470")
    assert bench.take() == [Dial(1, "10.0.0.77:8470")]
    bench.join(1, pod="b", address="10.0.0.77:8470")
    assert bench.phase == "starting"
    bench.leader.update_addresses(bench.now, {1: "10.0.0.77:8470"})  # the operator knows it now, too
    assert not [c for c in bench.take() if isinstance(c, Dial)]


def test_an_announcement_that_is_repeated_is_dialled_anew() -> None:
    """The first dial may have met an agent that was not ready, and wait now for seconds."""
    bench = announce(announce(lost(), "b", "10.0.0.77:8470"), "b", "10.0.0.77:8470")
    assert bench.take() == [Dial(1, "10.0.0.77:8470")] * 2


@pytest.mark.parametrize("linked", [True, False])
def test_an_announcement_of_a_pod_that_has_joined_is_late_and_displaces_nobody(linked: bool) -> None:
    bench = running()
    if not linked:
        bench.leader.link_lost(bench.now, 1)
    bench.take()
    announce(bench, "a", "10.0.0.66:8470")
    assert not [c for c in bench.take() if isinstance(c, Dial)]
    assert (bench.phase == "running") == linked


def test_a_dead_pods_late_announcement_does_not_lead_astray_from_its_successor() -> None:
    bench = lost().join(1, pod="b", address="10.0.0.77:8470")
    bench.take()
    announce(bench, "a", "10.0.0.1:8470")
    assert bench.take() == []
    assert bench.phase == "starting"


def test_a_live_link_stays_until_the_announced_pod_answers() -> None:
    """Its predecessor may be cut off from the API server, and still train."""
    bench = announce(running(), "b", "10.0.0.77:8470")
    assert bench.take()[-1] == Dial(1, "10.0.0.77:8470")
    assert bench.phase == "running"
    bench.join(1, pod="b", address="10.0.0.77:8470").clean(0)
    assert bench.history == [("1.1", "PodLost", 1)]


def test_a_later_table_wins_over_an_announcement() -> None:
    bench = announce(lost(), "b", "10.0.0.77:8470")
    bench.leader.update_addresses(bench.now, {1: "10.0.0.78:8470"})
    assert bench.take()[-1] == Dial(1, "10.0.0.78:8470")


def test_after_the_end_nobody_is_dialled() -> None:
    bench = Bench().join(0)
    bench.leader.stop(bench.now, "enough")
    bench.take()
    announce(bench, "b", "10.0.0.77:8470")
    bench.leader.update_addresses(bench.now, {1: "10.0.0.78:8470"})
    assert bench.take() == []


def test_two_spellings_of_an_address_are_one_place() -> None:
    bench = Bench().join(0).join(1, address="[fd00::1]:8470")
    bench.take()
    bench.leader.update_addresses(bench.now, {1: "fd00::1:8470"})
    assert bench.take() == [Dial(1, "")]
    announce(bench, "b", "fd00::1:8470")
    assert bench.take() == [Dial(1, "[fd00::1]:8470")]


def test_of_gpus_the_state_tells_numbers_and_names_the_sick() -> None:
    well = Gpu("GPU-1", "H100")
    bench = Bench(nodes=3).join(0, gpus=(well, Gpu("GPU-2", "H100"))).join(1, gpus=(Gpu("GPU-3", "A10"),))
    assert bench.leader.state()["gpus"] == {"models": {"H100": 2, "A10": 1}, "unhealthy": 0, "devices": []}
    before = bench.leader.version
    bench.leader.update_gpus(0, (well, Gpu("GPU-2", "H100", "2 uncorrected memory errors")))
    assert bench.leader.version > before
    sick = {"index": 0, "uuid": "GPU-2", "name": "H100", "problem": "2 uncorrected memory errors"}
    assert bench.leader.state()["gpus"] == {"models": {"H100": 2, "A10": 1}, "unhealthy": 1, "devices": [sick]}
    bench.leader.link_lost(bench.now, 0)
    assert bench.leader.state()["gpus"]["models"] == {"A10": 1}


def test_a_state_names_a_bounded_number_of_sick_gpus() -> None:
    bench = Bench(nodes=20)
    for index in range(20):
        bench.join(index, gpus=tuple(Gpu(f"GPU-{index}-{i}", f"model {index}", "no spare rows") for i in range(8)))
    gpus = bench.leader.state()["gpus"]
    assert (gpus["unhealthy"], len(gpus["devices"]), len(gpus["models"])) == (160, 32, 8)


def test_a_job_without_gpus_has_nothing_to_say_of_them() -> None:
    assert running().leader.state()["gpus"] is None


def test_without_a_lease_strict_fencing_stops_and_waits() -> None:
    bench = running()
    bench.leader.hold(bench.now, "the lease was not renewed")
    bench.clean()
    assert bench.history == [("1.1", "Fenced", None)]
    assert bench.phase == "forming"
    bench.leader.release(bench.now)
    assert bench.phase == "starting"


def test_a_superseded_leader_never_starts_again() -> None:
    bench = running()
    bench.leader.hold(bench.now, "superseded by epoch 2", superseded=True)
    bench.clean()
    bench.leader.release(bench.now)
    assert bench.phase == "forming"
    assert len(bench.starts()) == 1


def test_progress_alone_raises_the_version_once_a_second() -> None:
    bench = running().later(2)
    versions = set()
    for step in range(10):
        bench.now += 0.05
        bench.leader.take_heartbeat(bench.now, 1, 1, [RankProgress(0, step, 100, "train", {"loss": 0.5})])
        versions.add(bench.leader.version)
    assert len(versions) == 1
    bench.later(1)
    assert bench.leader.version == versions.pop() + 1
    progress = bench.leader.state()["progress"]
    assert (progress["step"], progress["totalSteps"], progress["metrics"]) == (9, 100, {"loss": 0.5})


def test_the_rate_of_steps() -> None:
    bench = running()
    for step in range(0, 100, 5):
        bench.leader.take_heartbeat(bench.now, 1, 1, [RankProgress(0, step)])
        bench.later(0.5)
    assert bench.leader.state()["progress"]["stepsPerSecond"] == pytest.approx(10, rel=0.01)


def test_the_history_keeps_64_entries() -> None:
    bench = Bench(application_restarts=1000, max_backoff=0.0).join_all()
    for _ in range(70):
        bench.run().fail(0, 0).clean()
    assert len(bench.leader.state()["generationHistory"]) == 64
    assert bench.leader.state()["generationHistory"][-1]["id"] == "1.70"


def test_a_node_that_obeys_no_start_is_asked_ever_more_rarely() -> None:
    """It is clean at once, again and again, and no pod is replaced that would take its time."""
    bench = Bench().join_all().clean()
    assert (bench.leader.generation, bench.phase) == (2, "starting"), "the first time costs nothing"
    bench.clean()
    assert (bench.leader.generation, bench.phase) == (2, "backoff")
    bench.later(1.0)
    assert (bench.leader.generation, bench.phase) == (3, "starting")
    assert {cause for _, cause, _ in bench.history} == {"Fenced"}
