"""The profile of the operator runs to its end without a cluster, and its parts add up."""

from __future__ import annotations

import pytest
import typer

from benchmarks.operator_profile import THREADS, parse_shape, profile_operator


async def test_a_profile_follows_all_pods_until_they_run() -> None:
    profile = await profile_operator(jobs=2, pods=3, rate=100.0)
    assert profile.name == "2 x 3"
    assert profile.reconciles >= 2, "each job is looked at"
    assert profile.requests >= 1, "each pod is created"
    assert THREADS in profile.parts
    assert profile.total == pytest.approx(sum(profile.parts.values()))


def test_a_shape_is_jobs_and_pods_of_each() -> None:
    assert parse_shape("100x10") == (100, 10)
    for wrong in ("10", "0x5", "ax3"):
        with pytest.raises(typer.BadParameter, match="jobs"):
            parse_shape(wrong)
