"""Lines of many ranks become one readable log."""

from __future__ import annotations

from everstep.cli.lines import Line, colour, merged, only_rank, parse, wanted


def test_the_agent_s_tag_becomes_the_rank() -> None:
    assert parse("[rank 12] epoch 1\n", "j-0", stamped=False) == Line("j-0", "epoch 1", 12)


def test_what_carries_no_tag_belongs_to_the_pod() -> None:
    assert parse("listening", "j-0", stamped=False) == Line("j-0", "listening", None)


def test_a_tag_inside_a_line_is_text() -> None:
    assert parse("see [rank 3] there", "j-0", stamped=False).rank is None


def test_times_sort_although_their_zeros_are_cut() -> None:
    early = parse("2026-01-01T00:00:00.5Z [rank 0] a", "j-0", stamped=True)
    late = parse("2026-01-01T00:00:00.123456789Z [rank 0] b", "j-0", stamped=True)
    whole = parse("2026-01-01T00:00:00Z [rank 0] c", "j-0", stamped=True)
    assert whole.stamp < late.stamp < early.stamp
    assert (early.text, early.rank) == ("a", 0)


def test_a_time_that_the_program_printed_itself_is_kept() -> None:
    line = parse("2026-01-01T00:00:00Z 2026-01-01T00:00:00Z start", "j-0", stamped=True)
    assert line.text == "2026-01-01T00:00:00Z start"


def test_pods_are_merged_by_time() -> None:
    first = [Line("a", "1", 0, "t1"), Line("a", "3", 0, "t3")]
    second = [Line("b", "2", 1, "t2"), Line("b", "4", 1, "t4")]
    assert [line.text for line in merged([first, second])] == ["1", "2", "3", "4"]


def test_a_pod_s_own_order_survives_a_clock_that_steps_back() -> None:
    stepped = [Line("a", "1", 0, "t5"), Line("a", "2", 0, "t1"), Line("a", "3", 0, "t6")]
    assert [line.text for line in merged([stepped, [Line("b", "x", 1, "t2")]])] == ["x", "1", "2", "3"]


def test_one_rank_can_be_singled_out() -> None:
    lines = [Line("a", "x", 0), Line("a", "y", 1), Line("a", "z", None)]
    assert [line.text for line in lines if wanted(line, 1)] == ["y"]
    assert len([line for line in lines if wanted(line, None)]) == 3


def test_a_job_of_one_rank_is_not_tagged_and_rank_0_is_all_of_it() -> None:
    assert only_rank({"spec": {}}, 0) is None
    assert only_rank({"spec": {"numProcPerNode": 2}}, 0) == 0
    assert only_rank({"spec": {"numNodes": 2}}, 0) == 0
    assert only_rank({"spec": {}}, 5) == 5


def test_neighbouring_ranks_differ_in_colour() -> None:
    assert all(colour(rank) != colour(rank + 1) for rank in range(64))
