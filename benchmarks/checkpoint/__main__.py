"""`make bench-checkpoint`: all rows, or those named: `python -m benchmarks.checkpoint stall write --size 1g`."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console

from benchmarks.checkpoint import committing, planning, restoring, saving, starting, training
from benchmarks.interval import Interval
from benchmarks.measure import report

RESULT = Path("build/bench/checkpoint.json")
SIZES = {"100m": 100_000_000, "1g": 1_000_000_000, "4g": 4_000_000_000}
SAVE = ("stall", "stall-dcp", "write")
ONCE = ("train-cost", "start", "plan", "commit")  # of one size
KINDS = (*SAVE, *restoring.TARGETS, *ONCE)
# The state, two slots, the floor's buffer, and a stager's buffers of each mode of DCP with what its process holds.
COPIES, COPIES_WITH_DCP = 4.5, 9.0


def main(
    kinds: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(KINDS)}; all when none is named.")] = None,
    size: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(SIZES)}.")] = None,
    folder: Annotated[Path, typer.Option(help="Where checkpoints go.")] = Path("build/bench"),
) -> None:
    """Measure, print tables, write build/bench/checkpoint.json; exit 1 when a row misses its target."""
    unknown = (set(kinds or ()) - set(KINDS)) | (set(size or ()) - set(SIZES))
    if unknown:
        raise typer.BadParameter(f"there is no {', '.join(sorted(unknown))}")
    console = Console(width=None if sys.stdout.isatty() else 120)
    folder.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=folder.absolute()))
    try:
        report(measured(set(kinds or KINDS), size or list(SIZES), place, console), console, RESULT)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def measured(kinds: set[str], sizes: list[str], folder: Path, console: Console) -> Iterator[Interval]:
    for name in sizes if kinds - set(ONCE) else ():
        room = psutil.virtual_memory().available
        if room < COPIES * SIZES[name]:
            console.print(f"no rows of {name}: they need {COPIES * SIZES[name] / 1e9:.0f} GB of memory")
            continue
        if kinds & set(restoring.TARGETS):
            yield from restoring.rows(SIZES[name], name, folder, kinds)
        saves = kinds & set(SAVE)
        if "stall-dcp" in saves and room < COPIES_WITH_DCP * SIZES[name]:
            console.print(f"no stall-dcp-{name}: it needs {COPIES_WITH_DCP * SIZES[name] / 1e9:.0f} GB of memory")
            saves.remove("stall-dcp")
        if saves:
            yield from saving.rows(SIZES[name], name, folder, saves)
    if "train-cost" in kinds:
        yield training.row(folder)
    if "start" in kinds:
        yield starting.row(folder)
    if "plan" in kinds:
        yield from planning.rows()
    if "commit" in kinds:
        yield from committing.rows()


if __name__ == "__main__":
    typer.run(main)
