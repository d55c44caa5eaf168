"""Following a job while its pods come, break and go."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from everstep.cli.cluster import ClusterUnavailableError, LogsNotReadyError
from everstep.cli.errors import CliError
from everstep.cli.lines import LogLine
from everstep.cli.tail import follow_lines, list_failure_lines, read_past_lines


def pod(name: str, uid: str, phase: str = "Running") -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": uid}, "status": {"phase": phase}}


def stamped(second: int, text: str) -> str:
    return f"2026-01-01T00:00:{second:02d}.000000000Z {text}"


class Scripted:
    """A cluster that shows one scene per look; what a pod's log says depends on how often it was opened."""

    def __init__(self, scenes: list[tuple[str | None, list[dict[str, Any]]]], logs: dict[str, list[Any]]) -> None:
        self.scenes, self.logs = scenes, logs
        self.look = 0
        self.asked: list[tuple[str, str]] = []
        self.lock = threading.Lock()

    def job(self, name: str) -> dict[str, Any] | None:
        phase, _ = self.scenes[min(self.look, len(self.scenes) - 1)]
        return None if phase is None else {"status": {"phase": phase}}

    def pods(self, job: str) -> list[dict[str, Any]]:
        _, pods = self.scenes[min(self.look, len(self.scenes) - 1)]
        self.look += 1
        return pods

    def log(self, pod: str, *, follow: bool, since: str = "") -> Iterator[str]:
        with self.lock:
            self.asked.append((pod, since))
            content = self.logs[pod]
            now = content.pop(0) if len(content) > 1 else content[0]
        if isinstance(now, Exception):
            raise now
        yield from now


def texts(cluster: Scripted, rank: int | None = None) -> list[str]:
    return [line.text for line in follow_lines(cluster, "j", rank, look_every=0.05)]


def test_the_past_is_told_in_the_order_of_time() -> None:
    cluster = Scripted(
        [("Running", [pod("j-0", "a"), pod("j-1", "b")])],
        {"j-0": [[stamped(1, "[rank 0] one"), stamped(3, "[rank 0] three")]], "j-1": [[stamped(2, "[rank 1] two")]]},
    )
    assert [line.text for line in read_past_lines(cluster, "j", None)] == ["one", "two", "three"]
    assert [line.text for line in read_past_lines(cluster, "j", 1)] == ["two"]


def test_a_pod_that_has_not_started_has_no_past() -> None:
    cluster = Scripted([("Starting", [pod("j-0", "a")])], {"j-0": [LogsNotReadyError()]})
    assert list(read_past_lines(cluster, "j", None)) == []


def test_following_ends_with_the_job() -> None:
    cluster = Scripted(
        [("Running", [pod("j-0", "a")]), ("Succeeded", [pod("j-0", "a", "Succeeded")])],
        {"j-0": [[stamped(1, "[rank 0] hello")], []]},
    )
    assert texts(cluster) == ["hello"]


def test_following_ends_when_the_job_is_deleted() -> None:
    cluster = Scripted([("Running", [pod("j-0", "a")]), (None, [])], {"j-0": [[stamped(1, "x")], []]})
    assert texts(cluster) == ["x"]


def test_a_container_that_starts_late_is_waited_for() -> None:
    running = ("Running", [pod("j-0", "a")])
    cluster = Scripted(
        [running] * 40 + [("Succeeded", [pod("j-0", "a", "Succeeded")])],
        {"j-0": [LogsNotReadyError(), [stamped(1, "late")], []]},
    )
    assert texts(cluster) == ["late"]


def test_a_pod_that_never_started_does_not_outlast_its_job() -> None:
    cluster = Scripted([("Failed", [pod("j-0", "a", "Pending")])], {"j-0": [LogsNotReadyError()]})
    assert texts(cluster) == []


def test_a_replaced_pod_of_the_same_name_is_followed_too() -> None:
    cluster = Scripted(
        [("Running", [pod("j-0", "old")])] * 3
        + [("Restarting", []), ("Running", [pod("j-0", "new")]), ("Succeeded", [pod("j-0", "new", "Succeeded")])],
        {"j-0": [[stamped(1, "before")], [], [stamped(9, "after")], []]},
    )
    assert set(texts(cluster)) >= {"before", "after"}


def test_a_broken_connection_repeats_no_line_and_loses_none() -> None:
    """The API takes a time to resume from, in whole lines of that time: what was shown must be skipped by count."""
    first = [stamped(1, "a"), stamped(2, "b"), stamped(2, "c")]
    again = [stamped(2, "b"), stamped(2, "c"), stamped(2, "d"), stamped(3, "e")]
    cluster = Scripted(
        [("Running", [pod("j-0", "a")])] * 30 + [("Succeeded", [pod("j-0", "a", "Succeeded")])],
        {"j-0": [first, again, [stamped(3, "e")]]},
    )
    assert texts(cluster) == ["a", "b", "c", "d", "e"]
    assert cluster.asked[1] == ("j-0", "2026-01-01T00:00:02.000000000Z")


def test_a_refusal_of_the_api_server_ends_following_with_its_words() -> None:
    cluster = Scripted([("Running", [pod("j-0", "a")])], {"j-0": [CliError("pods/log is forbidden")]})
    with pytest.raises(CliError, match="forbidden"):
        texts(cluster)


class Outages(Scripted):
    """The API server is unavailable in these looks."""

    away: frozenset[int] = frozenset()

    def job(self, name: str) -> dict[str, Any] | None:
        if self.look in self.away:
            self.look += 1
            raise ClusterUnavailableError("the API server is unavailable")
        return super().job(name)


def test_an_api_server_that_is_away_for_a_moment_ends_nothing_and_loses_no_line() -> None:
    running = ("Running", [pod("j-0", "a")])
    away = ClusterUnavailableError("the API server is unavailable")
    cluster = Outages(
        [running] * 40 + [("Succeeded", [pod("j-0", "a", "Succeeded")])],
        {"j-0": [[stamped(1, "before")], away, away, [stamped(1, "before"), stamped(2, "after")]]},
    )
    cluster.away = frozenset(range(2, 20))
    assert texts(cluster) == ["before", "after"]


def test_a_log_that_cannot_be_read_at_the_end_of_the_job_is_read_to_its_end_all_the_same() -> None:
    away = ClusterUnavailableError("the API server is unavailable")
    cluster = Scripted([("Succeeded", [pod("j-0", "a", "Succeeded")])], {"j-0": [away, away, [stamped(1, "last")]]})
    assert texts(cluster) == ["last"]


def test_a_log_that_a_dead_node_keeps_is_told_and_the_others_go_on() -> None:
    """The API server asks the kubelet for it, and answers with 500 where there is none."""
    away = ClusterUnavailableError("the API server rejected the request: dial tcp: no route to host")
    pods = [pod("j-0", "a"), pod("j-1", "b")]
    cluster = Scripted(
        [("Running", pods)] * 20 + [("Succeeded", [pod("j-0", "a", "Succeeded")])],
        {"j-0": [[stamped(1, "here")], []], "j-1": [away]},
    )
    past = [line.text for line in read_past_lines(cluster, "j", None)]
    assert past[1:] == ["here"], "the notice has no time"
    assert past[0].startswith("everstep: the log of j-1 cannot be read")
    cluster.look, cluster.logs["j-0"] = 0, [[stamped(1, "here")], []]
    found = [line.text for line in follow_lines(cluster, "j", None, look_every=0.05, outage_seconds=0.2)]
    assert found[0] == "here"
    assert found[1].startswith("everstep: the log of j-1 cannot be read")
    assert len(found) == 2


def test_an_api_server_that_stays_away_ends_following() -> None:
    cluster = Outages([("Running", [pod("j-0", "a")])], {"j-0": [[]]})
    cluster.away = frozenset(range(1, 10_000))
    with pytest.raises(CliError, match="unavailable"):
        list(follow_lines(cluster, "j", None, look_every=0.01, outage_seconds=0.2))


def test_the_last_failure_s_lines_carry_its_rank() -> None:
    assert list_failure_lines({"rank": 3, "node": "n1", "logTail": ["boom"]}) == [LogLine("n1", "boom", 3)]
