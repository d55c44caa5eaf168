"""`make bench`: all rows, or those named: `python -m benchmarks.main startup-4 restart-tenth`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import local, restart, scale, start
from benchmarks.arms import Site
from benchmarks.barrier import Ear
from benchmarks.measure import RESULT, Row, show, write
from e2e import deploy
from e2e.cluster.network import HOST_ADDRESS

LOCAL: dict[str, Callable[[], Row]] = {
    "agent-overhead": local.agent_overhead,
    "log-flood": local.log_flood,
    "leader-1200": local.leader_1200,
}
ON_NODES: dict[str, Callable[[Site], Row]] = {
    "startup-4": start.startup_4,
    "startup-vs-indexed-4": start.startup_vs_indexed_4,
    "restart-in-place": restart.restart_in_place,
    "restart-tenth": restart.restart_tenth,
    "pod-deleted": restart.pod_deleted,
}


def main(names: Annotated[list[str] | None, typer.Argument(help="Rows; all when none is named.")] = None) -> None:
    """Measure, print tables, write build/bench/main.json; exit 1 when a row misses its target."""
    console = Console()
    done: list[Row] = []
    for row in measured(lambda name: not names or name in names):
        done.append(row)
        write([row])
        show([row], console)
    show(done, console)
    console.print(f"written to {RESULT}")
    if not all(row.passed for row in done):
        raise typer.Exit(1)


def measured(wanted: Callable[[str], bool]) -> Iterator[Row]:
    for name, local_row in LOCAL.items():
        if wanted(name):
            yield local_row()
    with deploy.cluster() as cluster:
        with cluster.namespace("bench") as namespace:
            nodes = tuple(node["metadata"]["name"] for node in cluster.items("/api/v1/nodes"))[:2]
            site = Site(cluster, namespace, Ear(HOST_ADDRESS), nodes)
            for name, row in ON_NODES.items():
                if wanted(name):
                    yield row(site)
        yield from scale.rows(cluster, wanted)


if __name__ == "__main__":
    typer.run(main)
