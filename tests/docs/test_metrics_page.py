"""The page of metrics names each of them, with its type and labels, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram

from everstep_operator import metrics

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def test_the_page_has_every_metric_with_its_type_and_labels() -> None:
    rows = re.findall(r"^\| `(everstep_\w+)` \| (\w+) \| ([^|]*)\|", PAGE.read_text(), re.MULTILINE)
    told = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    there = {}
    for metric in vars(metrics).values():
        if isinstance(metric, Counter | Gauge | Histogram):
            (family,) = metric.describe()
            name = family.name + ("_total" if family.type == "counter" else "")
            there[name] = (family.type, tuple(metric._labelnames))
    assert told == there
