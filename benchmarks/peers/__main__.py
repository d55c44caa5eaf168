"""`make bench-peers`: all rows, or those named: `python -m benchmarks.peers start-4 scale-1x1000`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.barrier import Ear
from benchmarks.ending import clean_up_on_term
from benchmarks.measure import write
from benchmarks.peers import at_scale, on_nodes
from benchmarks.peers.chart import draw
from benchmarks.peers.comparison import Comparison, make_table
from benchmarks.peers.install import installed, load_images, read_versions
from benchmarks.pretended import LABELS
from e2e import deploy
from e2e.cluster import backend
from e2e.cluster.network import HOST_ADDRESS

RESULT = Path("build/bench/peers.json")
NAMES = (*on_nodes.NAMES, *at_scale.NAMES)


def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Rows; all when none is named. scale-JOBSxPODS and scale-raised-JOBSxPODS of any size."),
    ] = None,
    repeats: Annotated[int | None, typer.Option(help="Of each row but node-killed; by default 3, at scale 1.")] = None,
) -> None:
    """Measure, print tables, draw pictures, write build/bench/peers.json; whoever is faster."""
    unknown = [name for name in names or () if name not in NAMES and at_scale.parse_name(name) is None]
    if unknown:
        raise typer.BadParameter(f"no row {', '.join(unknown)}; there are {', '.join(NAMES)}")
    clean_up_on_term()
    console = Console(width=None if sys.stdout.isatty() else 160)
    done: list[Comparison] = []
    for row in measured(names or list(NAMES), repeats):
        row.versions = read_versions()
        done.append(row)
        write([row], RESULT)
        console.print(make_table([row]))
    console.print(make_table(done))
    for picture in write_pictures(done, RESULT.parent):
        console.print(f"drawn in {picture}")
    console.print(f"written to {RESULT}")


def measured(names: list[str], repeats: int | None) -> Iterator[Comparison]:
    """Measure the rows that are named on a cluster with everstep and its peers; taken down afterwards only if it was
    not up before."""
    kind = backend.choose()
    was_up = kind.is_up()
    try:
        load_images(kind)
        cluster = deploy.up(only={"operator"})
        with installed(cluster, keep=not was_up) as peers:
            wanted = set(names)
            if wanted & set(on_nodes.NAMES):
                with cluster.namespace("peers", **LABELS) as namespace:
                    site = on_nodes.Site(cluster, namespace, Ear(HOST_ADDRESS), peers.node)
                    yield from on_nodes.rows(site, wanted, repeats or on_nodes.REPEATS)
            scale = [row for name in names if (row := at_scale.parse_name(name))]
            if scale:
                yield from at_scale.rows(peers, scale, repeats or at_scale.REPEATS)
    finally:
        if not was_up:
            kind.down()


def write_pictures(rows: Iterable[Comparison], folder: Path) -> list[Path]:
    """Draw the rows of real nodes and those of pretended ones, and return the files."""
    rows = list(rows)
    pictures = {
        "peers-nodes": ("Start and recovery on three real nodes", [row for row in rows if row.name in on_nodes.NAMES]),
        "peers-scale": ("Until all pods run, pretended nodes", [row for row in rows if at_scale.parse_name(row.name)]),
    }
    written = []
    for name, (title, shown) in pictures.items():
        if shown:
            written.append(folder / f"{name}.svg")
            written[-1].write_text(draw(title, shown))
    return written


if __name__ == "__main__":
    typer.run(main)
