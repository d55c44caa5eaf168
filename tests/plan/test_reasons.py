"""The table of reasons promises nothing that nobody tells of."""

from __future__ import annotations

from pathlib import Path

import everstep_operator
from everstep_operator.api.reasons import Reason
from everstep_operator.api.status import Timings

CODE = Path(everstep_operator.__file__).parent


def test_each_reason_is_told_by_some_code_or_marked_as_reserved() -> None:
    text = "\n".join(path.read_text() for path in CODE.rglob("*.py") if path.name != "reasons.py")
    untold = {reason.value for reason in Reason if f"Reason.{reason.name}" not in text}
    reserved = {reason.value for reason in Reason if reason.meaning.startswith("Reserved")}
    assert untold == reserved


def test_each_timing_is_of_a_phase_that_is_booked() -> None:
    assert set(Timings.model_fields) == {
        "pending",
        "scheduling",
        "starting",
        "running",
        "recovering",
        "lost",
        "goodput",
    }
