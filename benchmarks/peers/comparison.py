"""A row that compares all contenders: its samples, what is written of it, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from rich.table import Table

from benchmarks.measure import Row
from benchmarks.peers.contenders import CONTENDERS, EVERSTEP, Contender

LONGEST_S = 400.0
OURS = "ours"


@dataclass(frozen=True)
class Sample:
    """One measurement.

    Attributes:
        seconds: How long it took, or `LONGEST_S` where nobody waited any longer.
        unfinished: What was there then, of what was waited for; empty where it was reached.
    """

    seconds: float
    unfinished: str = ""


@dataclass
class Comparison(Row):
    """A row with samples of each contender, everstep's as `ours`; its floor is the fastest peer, whichever that is.

    Attributes:
        unfinished: What each contender had reached after `LONGEST_S`, where that was not all.
        versions: The versions of what is compared.
    """

    unfinished: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def add(self, contender: Contender, sample: Sample) -> None:
        self.samples.setdefault(key_of(contender), []).append(sample.seconds)
        if sample.unfinished:
            self.unfinished[key_of(contender)] = sample.unfinished

    @property
    def medians(self) -> dict[str, float]:
        """Return the median of each contender that was measured, in the order of `CONTENDERS`."""
        keys = (key_of(contender) for contender in CONTENDERS)
        return {key: statistics.median(self.samples[key]) for key in keys if key in self.samples}

    @property
    def best_peer(self) -> str | None:
        peers = {key: value for key, value in self.medians.items() if key != OURS}
        return min(peers, key=peers.__getitem__) if peers else None

    @property
    def floor(self) -> float | None:
        return None if self.best_peer is None else self.medians[self.best_peer]

    def as_json(self) -> dict[str, object]:
        told = {"medians": self.medians, "best_peer": self.best_peer, "longest": LONGEST_S}
        return {**super().as_json(), **told, "unfinished": self.unfinished, "versions": self.versions}


def key_of(contender: Contender) -> str:
    """Return the key of a contender's samples."""
    return OURS if contender is EVERSTEP else contender.name


def format_seconds(seconds: float) -> str:
    return f"> {LONGEST_S:.0f}" if seconds >= LONGEST_S else f"{seconds:.3g}"


def measure_all(row: Comparison, measure: Callable[[Contender], Sample], repeats: int, *, warm_up: bool) -> Comparison:
    """Measure all contenders in turn, so that a drift of the machine hits all. The first round may only warm caches."""
    for number in range(repeats + warm_up):
        for contender in CONTENDERS:
            sample = measure(contender)
            if number >= warm_up:
                row.add(contender, sample)
    return row


def make_table(rows: Iterable[Comparison]) -> Table:
    """Return the table of all rows: medians, and from what to what the samples go; the fastest is bold."""
    table = Table(title="everstep and its peers, seconds (medians; less is better)")
    for column in ("row", *(contender.title for contender in CONTENDERS), "n"):
        table.add_column(column, justify="left" if column == "row" else "right")
    for row in rows:
        table.add_row(row.name, *_cells(row), str(max(map(len, row.samples.values()), default=0)))
    return table


def _cells(row: Comparison) -> Iterator[str]:
    medians = row.medians
    for contender in CONTENDERS:
        key = key_of(contender)
        if key not in medians:
            yield "–"
            continue
        median, samples = medians[key], row.samples[key]
        text = format_seconds(median)
        text = f"[bold]{text}[/bold]" if median == min(medians.values()) < LONGEST_S else text
        if key in row.unfinished:
            text += f" ({row.unfinished[key]})"
        elif len(samples) > 1:
            text += f" ({format_seconds(min(samples))}–{format_seconds(max(samples))})"
        yield text
