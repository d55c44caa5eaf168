"""Rows of the result: samples of two arms, their medians, the ratio, the verdict."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import typer
import yaml
from rich.console import Console
from rich.table import Table

RESULT = Path("build/bench/main.json")
RANGES = Path(__file__).parent / "ranges.yaml"
REPEATS = 5
FEWEST = 3


@dataclass
class Row:
    """One line of the result. ``strict`` targets must be undercut, not only met.

    ``allowance``: what ours may take beyond the target times the floor, in the row's unit: a fixed cost that no size
    of the measured thing explains.
    """

    name: str
    unit: str
    target: float
    samples: dict[str, list[float]] = field(default_factory=dict)
    absolute: bool = False  # the value itself is held against the target; a floor is only shown beside it
    strict: bool = False
    allowance: float = 0.0

    @property
    def value(self) -> float:
        return statistics.median(self.samples["ours"])

    @property
    def floor(self) -> float | None:
        return None if "floor" not in self.samples else statistics.median(self.samples["floor"])

    @property
    def ratio(self) -> float:
        return self.value if self.floor is None else self.value / self.floor

    @property
    def passed(self) -> bool:
        return self._holds(self.value if self.absolute else self.ratio)

    def _holds(self, ratio: float) -> bool:
        """Tell whether a ratio (of absolute rows: a value) meets the target."""
        if self.floor is not None and not self.absolute and self.allowance:
            return ratio * self.floor <= self.target * self.floor + self.allowance
        return ratio < self.target if self.strict else ratio <= self.target

    def interval(self) -> tuple[float, float] | None:
        """Return between what the ratio lies, where the row knows."""
        return None

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "samples": self.samples,
            "value": self.value,
            "unit": self.unit,
            "floor": self.floor,
            "ratio": self.ratio,
            "target": self.target,
            "allowance": self.allowance,
            "pass": self.passed,
        }


def alternate(
    row: Row,
    ours: Callable[[], float],
    floor: Callable[[], float],
    repeats: int = REPEATS,
    warm_up: bool = True,
    seconds: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> Row:
    """Measure both arms in turn, so that a drift of the machine hits both. The first round only warms caches.

    After ``seconds`` no further round is begun, but three are always measured: how many there were, the row shows.
    """
    began = clock()
    for number in range(repeats + warm_up):
        if number >= FEWEST + warm_up and clock() - began > seconds:
            break
        for arm, measure in (("ours", ours), ("floor", floor)):
            sample = measure()
            if number >= warm_up:
                row.samples.setdefault(arm, []).append(sample)
    return row


def write(rows: Iterable[Row], path: Path = RESULT) -> None:
    """Write the rows, those of earlier partial runs kept unless measured again."""
    kept = {old["name"]: old for old in json.loads(path.read_text())} if path.exists() else {}
    kept |= {row.name: row.as_json() for row in rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(kept.values()), indent=1))


def report(rows: Iterable[Row], console: Console, path: Path = RESULT) -> None:
    """Measure them one after the other, each shown and written at once, and all shown in the end; exit 1 when one
    misses its target."""
    done: list[Row] = []
    for row in rows:
        done.append(row)
        write([row], path)
        show([row], console)
    show(done, console)
    console.print(f"written to {path}")
    if not all(row.passed for row in done):
        raise typer.Exit(1)


def usual() -> dict[str, tuple[float, float]]:
    """Between what and what each row's ratio (or absolute value) was when the ranges were last taken."""
    ranges: dict[str, list[float]] = yaml.safe_load(RANGES.read_text())["ranges"]
    return {name: (low, high) for name, (low, high) in ranges.items()}


def show(rows: Iterable[Row], console: Console) -> None:
    ranges = usual()
    table = Table(title="everstep against floors of the same run (medians)")
    for column in ("row", "ours", "floor", "unit", "n", "ratio", "95 %", "usual", "target", ""):
        table.add_column(column, justify="left" if column in ("row", "unit", "") else "right")
    for row in rows:
        sign = "<" if row.strict else "≤"
        floor = "-" if row.floor is None else f"{row.floor:.3g}"
        verdict = "[green]holds[/green]" if row.passed else "[red]misses[/red]"
        ratio = f"{row.ratio:.3f}" if row.floor is not None else "-"
        low, high = ranges.get(row.name, (row.ratio, row.ratio))
        range_ = f"{low:.3g}–{high:.3g}" if row.name in ranges else "-"
        if not low <= row.ratio <= high:  # better or worse: something has changed, in everstep or in the machine
            range_ = f"[yellow]{range_}[/yellow]"
        target = f"{sign} {row.target:g}" + (f" + {row.allowance:g} {row.unit}" if row.allowance else "")
        count = str(len(row.samples["ours"]))
        within = row.interval()
        interval = "-" if within is None else f"{within[0]:.3f}–{within[1]:.3f}"
        table.add_row(row.name, f"{row.value:.3g}", floor, row.unit, count, ratio, interval, range_, target, verdict)
    console.print(table)
