"""Rows of the result: samples of two arms, their medians, the ratio, the verdict."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULT = Path("build/bench/main.json")
REPEATS = 5


@dataclass
class Row:
    """One line of the result. ``strict`` targets must be undercut, not only met."""

    name: str
    unit: str
    target: float
    samples: dict[str, list[float]] = field(default_factory=dict)
    absolute: bool = False  # the value itself is held against the target, there is no floor
    strict: bool = False

    @property
    def value(self) -> float:
        return statistics.median(self.samples["ours"])

    @property
    def floor(self) -> float | None:
        return None if self.absolute else statistics.median(self.samples["floor"])

    @property
    def ratio(self) -> float:
        return self.value if self.floor is None else self.value / self.floor

    @property
    def passed(self) -> bool:
        return self.ratio < self.target if self.strict else self.ratio <= self.target

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "samples": self.samples,
            "value": self.value,
            "unit": self.unit,
            "floor": self.floor,
            "ratio": self.ratio,
            "target": self.target,
            "pass": self.passed,
        }


def alternate(
    row: Row, ours: Callable[[], float], floor: Callable[[], float], repeats: int = REPEATS, warm_up: bool = True
) -> Row:
    """Measure both arms in turn, so that a drift of the machine hits both. The first round only warms caches."""
    for number in range(repeats + warm_up):
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


def show(rows: Iterable[Row], console: Console) -> None:
    table = Table(title="everstep against floors of the same run (medians)")
    for column in ("row", "ours", "floor", "unit", "ratio", "target", ""):
        table.add_column(column, justify="left" if column in ("row", "unit", "") else "right")
    for row in rows:
        sign = "<" if row.strict else "≤"
        floor = "-" if row.floor is None else f"{row.floor:.3g}"
        verdict = "[green]holds[/green]" if row.passed else "[red]misses[/red]"
        ratio = f"{row.ratio:.3f}" if row.floor is not None else "-"
        table.add_row(row.name, f"{row.value:.3g}", floor, row.unit, ratio, f"{sign} {row.target:g}", verdict)
    console.print(table)
