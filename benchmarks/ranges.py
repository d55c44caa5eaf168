"""Take the usual ranges anew from some results: `python -m benchmarks.ranges RESULT.json … >benchmarks/ranges.yaml`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

WIDER = 0.01  # what is counted, not timed, is the same in every run
DIGITS = 4
HEAD = """\
# Between what and what the ratio (of rows without a floor: the value) of each row usually is. `make bench` marks what
# lies outside: a target says what must hold, a range what is to be expected, so a change for the worse is seen
# long before a target is missed. Nothing fails for lying outside.
#
# To take them anew, after a change that moves them on purpose or on another reference machine:
#   1. Let the machine do nothing else. `make cluster-up`, so that no run pays for bringing it up.
#   2. Three times: `make bench`, and `cp build/bench/main.json build/bench/run-<n>.json`. Once, as it
#      counts: `python -m benchmarks.pipeline memory`, and `cp build/bench/pipeline.json build/bench/run-memory.json`.
#   3. `python -m benchmarks.ranges build/bench/run-*.json > ranges.new && mv ranges.new benchmarks/ranges.yaml`:
#      from our best samples over the floor's worst to our worst over the floor's best.
#   4. Read the difference before committing it: a range that moved says why in the commit's message.
"""


def ranges(results: Iterable[list[dict[str, Any]]]) -> dict[str, tuple[float, float]]:
    """Between the ratio of our best to the floor's worst sample, and of our worst to its best."""
    ours: dict[str, list[float]] = {}
    floor: dict[str, list[float]] = {}
    for result in results:
        for row in result:
            ours.setdefault(row["name"], []).extend(row["samples"]["ours"])
            floor.setdefault(row["name"], []).extend(row["samples"].get("floor", [1.0]))
    return {
        name: (
            round(min(samples) / max(floor[name]) * (1 - WIDER), DIGITS),
            round(max(samples) / min(floor[name]) * (1 + WIDER), DIGITS),
        )
        for name, samples in sorted(ours.items())
    }


def document(found: dict[str, tuple[float, float]], runs: int) -> str:
    lines = [f"  {name}: [{low:g}, {high:g}]" for name, (low, high) in found.items()]
    return "\n".join([f"{HEAD}#\n# These are of {runs} run(s).\nranges:", *lines]) + "\n"


if __name__ == "__main__":
    results = [json.loads(Path(path).read_text()) for path in sys.argv[1:]]
    sys.stdout.write(document(ranges(results), len(results)))
