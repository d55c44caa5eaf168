"""Rows, ranges and what is read back from the audit log: the arithmetic between a measurement and a verdict."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import main, measure, ranges
from benchmarks.audit import AuditLog
from benchmarks.interval import Interval
from benchmarks.measure import Row, alternate


def test_a_row_is_the_ratio_of_medians() -> None:
    row = Row("x", "s", 1.5, {"ours": [3.0, 1.0, 100.0], "floor": [2.0, 2.0, 1.0]})
    assert (row.value, row.floor, row.ratio) == (3.0, 2.0, 1.5)
    assert row.passed


def test_a_strict_target_must_be_undercut() -> None:
    assert not Row("x", "s", 1.0, {"ours": [1.0], "floor": [1.0]}, strict=True).passed


def test_a_row_with_an_interval_holds_when_all_of_the_interval_does() -> None:
    near = {"ours": [1.0, 1.01, 1.03, 1.05, 1.04], "floor": [1.0] * 5}
    assert Row("x", "s", 1.04, near).passed
    assert not Interval("x", "s", 1.04, near).passed


def test_what_slows_both_arms_of_a_round_widens_no_interval() -> None:
    floor = [1.0, 2.0, 1.5, 3.0, 1.2, 5.0, 1.1]
    low, high = Interval("x", "s", 1.02, {"ours": [1.01 * each for each in floor], "floor": floor}).interval()
    assert (low, high) == pytest.approx((1.01, 1.01))


def test_the_ratio_of_paired_rounds_is_the_median_of_their_ratios() -> None:
    floor = [1.0, 3.0, 2.0, 9.0, 4.0]
    row = Interval("x", "s", 1.02, {"ours": [1.0, 3.3, 2.02, 9.09, 4.04], "floor": floor})
    assert row.ratio == pytest.approx(1.01)  # that of the medians is 1.1
    assert row.interval() == pytest.approx((1.0, 1.1))


def test_arms_that_were_not_measured_in_the_same_rounds_are_compared_by_their_medians() -> None:
    row = Interval("x", "s", 2.0, {"ours": [3.0, 3.0, 3.0], "floor": [1.0, 2.0, 2.0, 9.0]})
    low, high = row.interval()
    assert row.ratio == 1.5
    assert low < 1.5 < high


def test_an_absolute_row_has_no_floor() -> None:
    row = Row("x", "MiB", 250, {"ours": [200.0]}, absolute=True)
    assert row.floor is None
    assert row.passed


def test_a_floor_beside_an_absolute_row_is_shown_and_not_held_against_it() -> None:
    slow = {"ours": [40.0], "floor": [20.0]}
    assert Row("x", "s", 45, slow, absolute=True).passed
    row = Interval("x", "s", 45, slow, absolute=True)
    assert row.passed
    assert (row.floor, row.ratio) == (20.0, 2.0)
    assert not Row("x", "s", 35, {"ours": [40.0], "floor": [400.0]}, absolute=True).passed


def test_arms_alternate_and_the_first_round_is_not_counted() -> None:
    order: list[str] = []
    row = Row("x", "s", 1.0)

    def arm(name: str) -> float:
        order.append(name)
        return float(len(order))

    alternate(row, lambda: arm("ours"), lambda: arm("floor"), repeats=2)
    assert order == ["ours", "floor"] * 3
    assert row.samples == {"ours": [3.0, 5.0], "floor": [4.0, 6.0]}


@pytest.mark.parametrize(("each", "rounds"), [(1.0, 5), (40.0, 3), (150.0, 3)])
def test_a_long_row_stops_in_time_but_never_before_three_rounds(each: float, rounds: int) -> None:
    now = 0.0

    def arm() -> float:
        nonlocal now
        now += each
        return each

    row = alternate(Row("x", "s", 1.0), arm, arm, warm_up=False, seconds=200, clock=lambda: now)
    assert [len(samples) for samples in row.samples.values()] == [rounds, rounds]


def test_rows_of_an_earlier_run_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "main.json"
    measure.write([Row("a", "s", 1.0, {"ours": [1.0], "floor": [1.0]})], path)
    measure.write([Row("b", "s", 1.0, {"ours": [1.0], "floor": [2.0]})], path)
    measure.write([Row("a", "s", 1.0, {"ours": [3.0], "floor": [1.0]})], path)
    assert [(row["name"], row["ratio"]) for row in json.loads(path.read_text())] == [("a", 3.0), ("b", 0.5)]
    assert set(json.loads(path.read_text())[0]) == {
        "name", "samples", "value", "unit", "floor", "ratio", "target", "allowance", "pass",
    }  # fmt: skip


def test_ranges_hold_every_sample_and_name_rows_that_exist() -> None:
    slow = {"name": "x", "samples": {"ours": [2.0, 3.0], "floor": [1.0, 2.0]}}
    quick = {"name": "x", "samples": {"ours": [1.0], "floor": [1.0]}}
    absolute = {"name": "y", "samples": {"ours": [200.0]}}
    found = ranges.ranges([[slow, absolute], [quick]])
    assert found == {"x": (0.495, 3.03), "y": (198.0, 202.0)}
    assert ranges.document(found, 2).endswith("ranges:\n  x: [0.495, 3.03]\n  y: [198, 202]\n")
    pipelines = {name for name in measure.usual() if name.startswith("memory-")}  # `test_pipeline` knows them
    assert set(measure.usual()) - pipelines <= set(main.NAMES)


def test_the_table_shows_every_row() -> None:
    console = Console(file=io.StringIO(), width=200)
    measure.show([Row("agent-overhead", "s", 1.0, {"ours": [9.0], "floor": [1.0]})], console)
    assert isinstance(console.file, io.StringIO)
    assert "misses" in console.file.getvalue()


def event(user: str, verb: str, resource: str, namespace: str = "n") -> str:
    target = {"resource": resource, "namespace": namespace}
    return json.dumps({"user": {"username": user}, "verb": verb, "objectRef": target}) + "\n"


@pytest.fixture
def audit(tmp_path: Path) -> Path:
    path = tmp_path / "audit.log"
    path.write_text(event("system:serviceaccount:everstep-system:everstep", "create", "pods"))
    return path


def test_only_what_came_later_counts(audit: Path) -> None:
    log = AuditLog(audit)
    operator, kubelet = "system:serviceaccount:everstep-system:everstep", "system:node:node-1"
    with audit.open("a") as file:
        file.write(event(operator, "create", "pods"))
        file.write(event(operator, "watch", "pods"))
        file.write(event(operator, "update", "leases"))
        file.write(event(kubelet, "patch", "pods"))
        file.write(event(kubelet, "patch", "pods", "elsewhere"))
        file.write(event(operator, "list", "pods"))
        file.write('{"user": {"usern')  # the server is still writing
    assert [request.verb for request in log.of_operator()] == ["create", "list"]
    assert log.writes({"n"}) == 2


def test_a_log_that_is_begun_anew_meanwhile_is_read_whole(audit: Path) -> None:
    """Before, a round of a benchmark during which the API server did so counted nothing."""
    log, operator = AuditLog(audit), "system:serviceaccount:everstep-system:everstep"
    with audit.open("a") as file:
        file.write(event(operator, "create", "pods"))
    audit.rename(audit.with_name("audit-1.log"))
    audit.write_text(event(operator, "list", "pods"))
    assert [request.verb for request in log.of_operator()] == ["create", "list"]
    with audit.open("a") as file:
        file.write(event(operator, "patch", "pods"))
    assert [request.verb for request in log.of_operator()] == ["create", "list", "patch"]
