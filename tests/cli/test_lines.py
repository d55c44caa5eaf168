"""Lines of many ranks become one readable log."""

from __future__ import annotations

import pytest

from everstep.cli.errors import CliError
from everstep.cli.lines import LogLine, is_wanted, merge_lines, parse_line, rank_colour, rank_filter


def test_the_agent_s_tag_becomes_the_rank() -> None:
    assert parse_line("[rank 12] epoch 1\n", "j-0", stamped=False) == LogLine("j-0", "epoch 1", 12)


def test_what_carries_no_tag_belongs_to_the_pod() -> None:
    assert parse_line("listening", "j-0", stamped=False) == LogLine("j-0", "listening", None)


def test_a_tag_inside_a_line_is_text() -> None:
    assert parse_line("see [rank 3] there", "j-0", stamped=False).rank is None


def test_of_a_progress_bar_that_rewrites_its_line_only_the_last_state_is_shown() -> None:
    line = parse_line("[rank 1] \r10%|#   |\r20%|##  |\r100%|####|\r\n", "j-0", stamped=False)
    assert (line.text, line.rank) == ("100%|####|", 1)


def test_times_sort_although_their_zeros_are_cut() -> None:
    early = parse_line("2026-01-01T00:00:00.5Z [rank 0] a", "j-0", stamped=True)
    late = parse_line("2026-01-01T00:00:00.123456789Z [rank 0] b", "j-0", stamped=True)
    whole = parse_line("2026-01-01T00:00:00Z [rank 0] c", "j-0", stamped=True)
    assert whole.stamp < late.stamp < early.stamp
    assert (early.text, early.rank) == ("a", 0)


def test_times_of_nodes_in_other_zones_sort_with_those_in_utc() -> None:
    """Container runtimes write the time of their node's own zone, and `sinceTime` asks by what is read here."""
    utc = parse_line("2026-01-01T00:00:01.5Z a", "j-0", stamped=True)
    east = parse_line("2026-01-01T08:00:02.25+08:00 b", "j-1", stamped=True)
    west = parse_line("2025-12-31T20:30:00.75-03:30 c", "j-2", stamped=True)
    assert [line.stamp for line in (west, utc, east)] == [
        "2026-01-01T00:00:00.750000000", "2026-01-01T00:00:01.500000000", "2026-01-01T00:00:02.250000000"
    ]  # fmt: skip


def test_a_time_that_the_program_printed_itself_is_kept() -> None:
    line = parse_line("2026-01-01T00:00:00Z 2026-01-01T00:00:00Z start", "j-0", stamped=True)
    assert line.text == "2026-01-01T00:00:00Z start"


def test_pods_are_merged_by_time() -> None:
    first = [LogLine("a", "1", 0, "t1"), LogLine("a", "3", 0, "t3")]
    second = [LogLine("b", "2", 1, "t2"), LogLine("b", "4", 1, "t4")]
    assert [line.text for line in merge_lines([first, second])] == ["1", "2", "3", "4"]


def test_a_pod_s_own_order_survives_a_clock_that_steps_back() -> None:
    stepped = [LogLine("a", "1", 0, "t5"), LogLine("a", "2", 0, "t1"), LogLine("a", "3", 0, "t6")]
    assert [line.text for line in merge_lines([stepped, [LogLine("b", "x", 1, "t2")]])] == ["x", "1", "2", "3"]


def test_one_rank_can_be_singled_out() -> None:
    lines = [LogLine("a", "x", 0), LogLine("a", "y", 1), LogLine("a", "z", None)]
    assert [line.text for line in lines if is_wanted(line, 1)] == ["y"]
    assert len([line for line in lines if is_wanted(line, None)]) == 3


def test_a_job_of_one_rank_is_not_tagged_and_rank_0_is_all_of_it() -> None:
    assert rank_filter({"spec": {}}, 0) is None
    assert rank_filter({"spec": {"numProcPerNode": 2}}, 0) == 0
    assert rank_filter({"spec": {"numNodes": 2}}, 0) == 0
    assert rank_filter({"spec": {}}, 5) == 5, "it may have as many GPUs"


@pytest.mark.parametrize(("gpus", "wanted"), [("8", 0), (8, 0), ("1", None)])
def test_rank_0_of_a_pod_with_several_gpus_is_one_of_its_ranks(gpus: str | int, wanted: int | None) -> None:
    """Without numProcPerNode, each of its GPUs has a rank."""
    job = {"spec": {"resources": {"limits": {"cpu": "4", "nvidia.com/gpu": gpus}}}}
    assert rank_filter(job, 0) == wanted


def test_a_rank_that_a_job_does_not_have_is_no_silence() -> None:
    job = {"metadata": {"name": "digits"}, "spec": {"numNodes": 2, "numProcPerNode": 2}}
    assert rank_filter(job, 3) == 3
    with pytest.raises(CliError, match="digits has no rank 4: its ranks are 0 to 3"):
        rank_filter(job, 4)


def test_neighbouring_ranks_differ_in_colour() -> None:
    assert all(rank_colour(rank) != rank_colour(rank + 1) for rank in range(64))
