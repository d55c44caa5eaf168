"""`everstep run`: a manifest on this machine, with the agent that would run it on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def run(
    file: Annotated[Path, typer.Option("--file", "-f", help="Manifest with one TrainingJob; '-' is standard input.")],
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Number of nodes instead of numNodes.")] = None,
    procs: Annotated[
        int | None, typer.Option("--procs", min=1, help="Ranks per node instead of numProcPerNode.")
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option("--base", help="Folder of each node's /opt/ml and of checkpoints. Default: temporary."),
    ] = None,
    new: Annotated[
        bool, typer.Option("--new", help="Begin anew, though an earlier run was interrupted and left checkpoints.")
    ] = False,
    maps: Annotated[
        list[str] | None,
        typer.Option("--map", help="FOLDER_OF_THE_IMAGE=FOLDER, for paths in the command. Repeatable."),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option("--python", help="Interpreter of commands that begin with python. Default: as in a shell."),
    ] = None,
) -> None:
    """Run a TrainingJob on this machine, with processes as nodes.

    Exits with the job's exit code. Ctrl-C stops the ranks with their grace period; a second Ctrl-C kills them. The
    command runs without a container, with the programs and packages of this machine. A path of the image that does not
    exist here is searched under --map, then by its name beside the manifest.
    """
    from everstep.cli.laptop import LocalRun
    from everstep.cli.manifests import load_job
    from everstep.cli.prepare import prepare_local_job

    job = load_job(file)
    prepared = prepare_local_job(job, file, nodes=nodes, procs=procs, maps=maps or [], python=python)
    raise typer.Exit(LocalRun(prepared, base, anew=new).run())
