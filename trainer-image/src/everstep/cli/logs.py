"""`everstep logs`: all ranks of all pods of a job, merged."""

from __future__ import annotations

from typing import Annotated

import typer


def logs(
    job: Annotated[str, typer.Argument(help="Name of the TrainingJob.")],
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help="Default: the context's own.")] = None,
    rank: Annotated[int | None, typer.Option("--rank", "-r", min=0, help="Only this rank.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the logs until the job has finished.")] = False,
    previous: Annotated[
        bool, typer.Option("--previous", "-p", help="Last lines of the rank that failed last.")
    ] = False,
    context: Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.")] = None,
) -> None:
    """Show the logs of all ranks, ordered by time.

    Pods that are replaced while following are picked up; a lost pod's log is lost with it, but the tail of what
    failed last stays in the job's status: --previous shows it.
    """
    from everstep.cli import tail
    from everstep.cli.cluster import ClusterClient
    from everstep.cli.errors import CliError
    from everstep.cli.lines import rank_filter
    from everstep.cli.terminal import format_log_line, make_stdout

    cluster = ClusterClient(context, namespace)
    found = cluster.existing_job(job)
    console = make_stdout()
    if previous:
        failure = found.get("status", {}).get("lastFailure")
        if not failure:
            raise CliError(f"{job} has no failure so far: leave out --previous")
        if rank is not None and failure.get("rank") != rank:
            raise CliError(f"the last failure was not that of rank {rank}: see everstep status {job}")
        for line in tail.list_failure_lines(failure):
            console.print(format_log_line(line))
        return
    rank = rank_filter(found, rank)
    lines = tail.follow_lines(cluster, job, rank) if follow else tail.read_past_lines(cluster, job, rank)
    try:
        for line in lines:
            console.print(format_log_line(line))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
