"""Durations, quantities and times: what is read, what is written, what is refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep_operator.api.scalars import format_duration, format_time, parse_duration, parse_quantity


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45s", 45), ("10m", 600), ("1h30m", 5400), ("1d", 86400), ("1d1s", 86401), ("90m", 5400), ("0s", 0), ("007s", 7)],
)
def test_duration(text: str, seconds: int) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text", ["", "10", "m", "1m1h", "1m 5s", "1.5h", "-1s", "1w", "1s1s", "10m\n", "12345678s", "٣s"]
)
def test_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="write it like"):
        parse_duration(text)


@given(st.integers(0, 10**9))
def test_duration_is_read_as_it_was_written(seconds: int) -> None:
    span = timedelta(seconds=seconds)
    assert parse_duration(format_duration(span)) == span


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500m", "0.5"), ("2", "2"), (8, "8"), ("1.5Gi", 1610612736), ("1e3", "1000"), ("2E", "2e18"), ("2Ei", 2**61),
        ("2E2", "200"), ("5.", "5"), (".5", "0.5"), ("100n", "1e-7"), ("3k", "3000"), ("1e-2", "0.01"), ("0", "0"),
    ],
)  # fmt: skip
def test_quantity(text: str | int, value: str | int) -> None:
    assert parse_quantity(text) == Decimal(value)


@pytest.mark.parametrize("text", ["", "-1", "+1", "1K", "1GB", "1 Gi", "Gi", ".", "1e", "1e333", "0x1", "1\n", "1mi"])
def test_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="write it like"):
        parse_quantity(text)


def test_times_are_utc_and_drop_empty_fractions() -> None:
    assert format_time(datetime(2026, 1, 1, tzinfo=UTC)) == "2026-01-01T00:00:00Z"
    assert format_time(datetime.fromisoformat("2026-01-01T01:00:00.5+01:00")) == "2026-01-01T00:00:00.500000Z"
