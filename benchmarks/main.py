"""`make bench`: all rows, or those named: `python -m benchmarks.main startup-4 restart-tenth`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import local, mpi, restart, scale, start
from benchmarks.arms import Site
from benchmarks.barrier import Ear
from benchmarks.ending import clean_up_on_term
from benchmarks.measure import Row, report
from e2e import deploy
from e2e.cluster import backend
from e2e.cluster.network import HOST_ADDRESS
from e2e.harness import Cluster

LOCAL: dict[str, Callable[[], Row]] = {
    "agent-overhead": local.agent_overhead,
    "log-flood": local.log_flood,
    "leader-1200": local.leader_1200,
    "leader-2000-start": local.leader_2000_start,
    "leader-2000-restart": local.leader_2000_restart,
    "leader-2000-memory": local.leader_2000_memory,
    "leader-2000-beats": local.leader_2000_beats,
}
ON_NODES: dict[str, Callable[[Site], Row]] = {
    "startup-4": start.startup_4,
    "restart-in-place": restart.restart_in_place,
    "restart-tenth": restart.restart_tenth,
    "pod-deleted": restart.pod_deleted,
    "startup-vs-mounted-4": start.startup_vs_mounted_4,
    "startup-vs-indexed-4": start.startup_vs_indexed_4,
    "startup-vs-token-4": start.startup_vs_token_4,
    "startup-mpi-4": mpi.startup_mpi_4,
}
NAMES = (*LOCAL, *ON_NODES, *scale.NAMES)


def main(names: Annotated[list[str] | None, typer.Argument(help="Rows; all when none is named.")] = None) -> None:
    """Measure, print tables, write build/bench/main.json; exit 1 when a row misses its target."""
    unknown = set(names or ()) - set(NAMES)
    if unknown:
        raise typer.BadParameter(f"no row {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    clean_up_on_term()
    console = Console(width=None if sys.stdout.isatty() else 120)
    report(measured(set(names or NAMES)), console)


def measured(wanted: set[str]) -> Iterator[Row]:
    for name, local_row in LOCAL.items():
        if name in wanted:
            yield local_row()
    if wanted <= set(LOCAL):
        return
    with running(wanted) as cluster:
        if wanted & set(ON_NODES):
            with cluster.namespace("bench") as namespace:
                nodes = tuple(node["metadata"]["name"] for node in cluster.items("/api/v1/nodes"))[:2]
                site = Site(cluster, namespace, Ear(HOST_ADDRESS), nodes)
                for name, row in ON_NODES.items():
                    if name in wanted:
                        yield row(site)
        if wanted & set(scale.NAMES):
            yield from scale.rows(cluster, wanted)


@contextmanager
def running(wanted: set[str]) -> Iterator[Cluster]:
    """Provide the cluster with the images that these rows need; taken down afterwards only if it was not up before."""
    kind = backend.choose()
    was_up = kind.is_up()
    try:
        yield deploy.up(only={"operator", "byo"} | ({"trainer"} if "startup-mpi-4" in wanted else set()))
    finally:
        if not was_up:
            kind.down()


if __name__ == "__main__":
    typer.run(main)
