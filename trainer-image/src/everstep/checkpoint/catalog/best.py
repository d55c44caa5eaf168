"""The best checkpoints by a number that users note beside them: which is the first, and which retention keeps."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from everstep.checkpoint.catalog.candidates import read_index
from everstep.checkpoint.catalog.verification import VerifiedCheckpoints
from everstep.checkpoint.errors import Damaged, Missing, UnknownFormat
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.format.user_metadata import read_metadata

Mode = Literal["min", "max"]


def rank_by_metric(metadata: Iterable[tuple[Key, Mapping[str, Any]]], metric: str, mode: Mode) -> list[Key]:
    """Return the keys that have a metric, the best first; of equals the newest first. NaN is none.

    Raises:
        ValueError: For a mode that is neither "min" nor "max".
    """
    if mode not in ("min", "max"):
        raise ValueError(f"best_mode is 'min' or 'max', not {mode!r}")
    sign = 1 if mode == "min" else -1
    found: list[tuple[float, Key]] = []
    for key, noted in metadata:
        value = noted.get(metric)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not (isinstance(value, float) and math.isnan(value)):
            found.append((sign * value, key))  # not as a float, which some whole numbers exceed
    newest_first = sorted(found, key=lambda each: each[1], reverse=True)
    return [key for _, key in sorted(newest_first, key=lambda each: each[0])]


def explain_missing_metric(metadata: Collection[Mapping[str, Any]], metric: str) -> str:
    """Return that no checkpoint has a metric, and what they have instead; for a message."""
    names = sorted({name for noted in metadata for name in noted})
    return (
        f"none of {len(metadata)} checkpoints has a number called {metric!r} in its metadata; there are "
        f"{', '.join(names) or 'no metadata at all'}{f', and {metric} is no number or NaN' if metric in names else ''}"
    )


@dataclass
class KeepBest:
    """Retention that keeps the `count` best by `metric` beside the newest; those without the metric do not count."""

    count: int
    metric: str = "loss"
    mode: Mode = "min"
    _noted: dict[Key, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"keep_best is at least 1, or None for none, not {self.count}")
        rank_by_metric((), self.metric, self.mode)

    def select(self, found: VerifiedCheckpoints, keys: Iterable[Key]) -> set[Key]:
        """Return those of the keys that are to be kept: the best of all, and the best of the verified ones.

        What is not verified may be damaged, and what has no mark may be good: neither takes another's place.
        """
        noted = {key: self._read(found, key) for key in keys}
        kept = set(rank_by_metric(noted.items(), self.metric, self.mode)[: self.count])
        marked = [(key, noted[key]) for key in found.marked(noted)]
        whole = (key for key in rank_by_metric(marked, self.metric, self.mode) if found.is_whole(key))
        return kept | set(islice(whole, self.count))

    def explain_missing(self, found: VerifiedCheckpoints, keys: Iterable[Key]) -> str:
        """Return that none of the keys has the metric, and what they have instead."""
        return explain_missing_metric([self._read(found, key) for key in keys], self.metric)

    def _read(self, found: VerifiedCheckpoints, key: Key) -> Mapping[str, Any]:
        if key not in self._noted:
            try:
                self._noted[key] = read_metadata(read_index(found.store, key).values)
            except (Missing, Damaged, UnknownFormat):
                return {}
        return self._noted[key]
