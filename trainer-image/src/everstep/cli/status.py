"""`everstep status`: how a job does, at a glance or live."""

from __future__ import annotations

from datetime import UTC
from typing import Annotated

import typer


def status(
    job: Annotated[str, typer.Argument(help="Name of the TrainingJob.")],
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help="Default: the context's own.")] = None,
    watch: Annotated[
        bool | None,
        typer.Option("--watch/--once", "-w", help="Refresh until the job has finished. Default: on a terminal."),
    ] = None,
    context: Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.")] = None,
) -> None:
    """Show phase, progress, checkpoints, restarts, the last failure and the time in each phase."""
    import time
    from datetime import datetime

    from everstep.cli.cluster import FINISHED_PHASES, ClusterClient, ClusterUnavailableError, Outage
    from everstep.cli.errors import CliError
    from everstep.cli.report import render_status
    from everstep.cli.terminal import make_stdout

    cluster = ClusterClient(context, namespace)
    console = make_stdout()
    found = cluster.existing_job(job)
    if not (console.is_terminal if watch is None else watch):
        console.print(render_status(found, datetime.now(UTC)))
        return

    from rich.live import Live

    outage = Outage()
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        try:
            while True:
                live.update(render_status(found, datetime.now(UTC)), refresh=True)
                if found.get("status", {}).get("phase") in FINISHED_PHASES:
                    return
                time.sleep(1)
                try:
                    again = cluster.job(job)
                except ClusterUnavailableError as error:
                    outage.endure(error)
                    continue
                outage.end()
                if again is None:
                    raise CliError(f"{job} was deleted")
                found = again
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
