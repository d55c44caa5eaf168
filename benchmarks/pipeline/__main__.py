"""`make bench-pipeline`: all rows, or those named: `python -m benchmarks.pipeline bubble vs-torch-1f1b memory`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.interval import Interval
from benchmarks.measure import report
from benchmarks.pipeline import auto, interpreter, memory, overlap, predicted, schedules, user_path

RESULT = Path("build/bench/pipeline.json")
KINDS = {
    "bubble": list(schedules.SCHEDULES),
    "vs-torch": [*schedules.SCHEDULES, *user_path.KINDS],
    "interpreter": [],
    "overlap": [],
    "predicted": [],
    "memory": [f"{name}{kind}" for name in schedules.SCHEDULES for kind in memory.PRECISIONS.values()],
    "auto-vs-even": list(auto.MODELS),
    "auto-vs-best": list(auto.MODELS),
}


def main(
    kinds: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(KINDS)}; all when none is named.")] = None,
) -> None:
    """Measure, print tables, write build/bench/pipeline.json; exit 1 when a row misses its target."""
    known = {*KINDS, *(f"{kind}-{name}" for kind, names in KINDS.items() for name in names)}
    if unknown := set(kinds or ()) - known:
        raise typer.BadParameter(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    console = Console(width=None if sys.stdout.isatty() else 120)
    report(measured(set(kinds or KINDS)), console, RESULT)


def measured(kinds: set[str]) -> Iterator[Interval]:
    yield from memory.rows(kinds)
    if "interpreter" in kinds:
        yield interpreter.row()
    if "overlap" in kinds:
        yield overlap.row()
    yield from schedules.rows(kinds)
    yield from user_path.rows(kinds)
    yield from auto.rows(kinds)
    if "predicted" in kinds:
        yield predicted.row()


if __name__ == "__main__":
    typer.run(main)
