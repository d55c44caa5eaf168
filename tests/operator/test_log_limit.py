"""A failure that goes on is told once a minute, and how often it came about."""

from __future__ import annotations

from everstep_operator.cluster import log_limit
from everstep_operator.cluster.log_limit import LogRateLimiter


def test_one_line_a_minute_for_each_key_with_the_number_left_out() -> None:
    now = [100.0]
    limit = LogRateLimiter(lambda: now[0])
    assert limit.left_out("a") == 0
    assert [limit.left_out("a") for _ in range(5)] == [None] * 5
    assert limit.left_out("b") == 0
    now[0] += 60
    assert limit.left_out("a") == 5
    assert limit.left_out("a") is None
    now[0] += 60
    assert limit.left_out("a") == 1


def test_what_no_longer_fails_is_forgotten() -> None:
    now = [100.0]
    limit = LogRateLimiter(lambda: now[0])
    for number in range(3 * log_limit.FORGET_ABOVE):
        limit.left_out(number)
        now[0] += 1
    assert len(limit._told) <= log_limit.FORGET_ABOVE
