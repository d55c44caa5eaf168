"""Splits of well-known models against those of others: `python -m benchmarks.pipeline.split [STAGES [MICROBATCHES]]`.

Nothing is measured: times are counted operations (tests/pipeline/graphs), steps are simulated, and all are split for
the same schedule.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import cache
from math import inf
from pathlib import Path

from benchmarks.pipeline.baselines import BASELINES
from everstep.pipeline.graph import Device, Graph, Link, make_uniform_links, stage_graph
from everstep.pipeline.partition.blocks import assign_nodes, contract_graph
from everstep.pipeline.partition.solve import SplitCandidate, partition_graph
from everstep.pipeline.schedules import make_schedule, simulate_schedule

LINK = Link(25e9, 10e-6)
GRAPHS = Path(__file__).parents[2] / "tests" / "pipeline" / "graphs"
MODELS = sorted(path.stem for path in GRAPHS.glob("*.json"))


@dataclass(frozen=True)
class Row:
    """Seconds of a simulated step; `took`: seconds of planning."""

    model: str
    nodes: int
    best: SplitCandidate
    others: dict[str, float]
    took: float


@cache
def graph(name: str) -> Graph:
    return Graph.from_json((GRAPHS / f"{name}.json").read_text())


def row(name: str, stages: int, microbatches: int, schedule: str = "1f1b") -> Row:
    links = make_uniform_links(stages, LINK)
    before = time.process_time()
    best = partition_graph(graph(name), stages, [Device()] * stages, links, microbatches, schedule=schedule)[0]
    took = time.process_time() - before
    blocks = contract_graph(graph(name))
    others = {}
    for other, split in BASELINES.items():
        stage_of = assign_nodes(blocks, split(blocks, stages))
        order = make_schedule(schedule, stages, stages, microbatches)
        whole = len(set(stage_of.values())) == stages
        others[other] = (
            simulate_schedule(order, stage_graph(graph(name), stage_of), None, links).makespan if whole else inf
        )
    return Row(name, len(graph(name).nodes), best, others, took)


def line(found: Row) -> str:
    """Return a line of a table: steps of other splits, relative to the plan's, and how far that is from the best
    possible at most."""
    ratios = [found.others[other] / found.best.simulated for other in BASELINES]
    cells = [found.model, str(found.nodes), *(f"{each:.3f}" for each in (*ratios, min(ratios)))]
    return f"| {' | '.join(cells)} | {found.best.gap:.1%} |"


def main(stages: int = 4, microbatches: int = 16) -> None:
    print(f"| model | nodes | {' | '.join(BASELINES)} | best of these | above the bound |")
    print(f"| --- |{' ---: |' * (len(BASELINES) + 3)}")
    for name in MODELS:
        print(line(row(name, stages, microbatches)), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
