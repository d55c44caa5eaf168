"""From nothing to a trained model: `make demo`.

Brings the cluster up, installs the chart, applies an example with kubectl, shows its progress and tells where the time
went. On a machine that cannot have a cluster the same manifest runs as local processes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from e2e import demo_steps, deploy
from e2e.cluster import backend
from e2e.cluster.errors import NoBackendError
from e2e.demo_steps import Track
from e2e.harness import FINISHED, Cluster, Object, phase

EXAMPLE = Path("examples/digits/trainingjob.yaml")
NAMESPACE = "default"
NAME = "digits"
# From the cluster's start to the end of the job, and to everstep's start.
JOB_SECONDS = 100
CLUSTER_SECONDS = 30
console = Console(highlight=False)


class Stopwatch:
    """Named spans of wall time, in the order in which they ended."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        console.print(f"[bold]{what}[/bold] …")
        started = time.monotonic()
        yield
        self.spans.append((what, time.monotonic() - started))

    def table(self) -> Table:
        table = Table(title="Where the time went")
        table.add_column("step")
        table.add_column("seconds", justify="right")
        for what, seconds in self.spans:
            table.add_row(what, f"{seconds:.1f}")
        table.add_row("total", f"{sum(seconds for _, seconds in self.spans):.1f}", style="bold")
        return table


def main(
    only_cluster: Annotated[bool, typer.Option(help="Stop when everstep is installed.")] = False,
) -> None:
    """Train the digits example on a cluster on this machine."""
    watch = Stopwatch()
    try:
        running = backend.choose()
    except NoBackendError as reason:
        console.print(f"{reason} Running the same job as local processes instead.")
        raise typer.Exit(local()) from None
    prepare(running, watch, JOB_SECONDS if not only_cluster else CLUSTER_SECONDS)
    with watch("cluster"):
        running.up()
    with watch("helm upgrade --install everstep"):
        cluster = deploy.connect(running)
        deploy.install(cluster)
    if only_cluster:
        console.print(f"export KUBECONFIG={running.kubeconfig}")
        return
    with watch("apply → trained"):
        cluster.kubectl("delete", "-f", str(EXAMPLE), "-n", NAMESPACE, "--ignore-not-found", "--timeout=60s")
        console.print(f"$ kubectl apply -f {EXAMPLE}")
        console.print(cluster.kubectl("apply", "-n", NAMESPACE, "-f", str(EXAMPLE)).strip())
        job = follow(cluster)
    console.print("$ kubectl get tj")
    console.print(cluster.kubectl("get", "tj", "-n", NAMESPACE).strip())
    console.print(watch.table())
    timings(job)
    output = cluster.all_logs(NAMESPACE, NAME)
    console.print("\n".join(line for line in output.splitlines() if "accuracy" in line), markup=False)
    if phase(job) != "Succeeded":
        console.print(cluster.explain(NAMESPACE, NAME))
        raise typer.Exit(1)


def prepare(running: backend.Cluster, watch: Stopwatch, afterwards: int) -> None:
    """Build and load what is missing, after saying what that is and what it costs."""
    compiled = Track("programs", demo_steps.program_steps(deploy.programs(running)))
    built = Track("images", demo_steps.image_steps(deploy.missing_images(running, deploy.DEMO_IMAGES)))
    cost = demo_steps.announce(console, (compiled, built), afterwards, deploy.missing_packages(running))
    wrong = demo_steps.missing_disk(cost)
    if compiled.steps and shutil.which("go") is None:
        wrong = "The cluster's programs must be compiled and there is no `go` in PATH: install Go 1.24 or newer."
    if wrong:
        console.print(wrong, style="red")
        raise typer.Exit(1)

    def done(part: str) -> None:
        for track in (compiled, built):
            track.finish(part, time.monotonic())

    with (
        watch("images (built where they changed, loaded where they are missing)"),
        demo_steps.bars(console, (compiled, built)),
    ):
        deploy.load(running, deploy.DEMO_IMAGES, done)


def follow(cluster: Cluster) -> Object:
    """Show the job's status as it changes, until it is finished."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    seen = ""
    with Progress(*columns, console=console, transient=not console.is_terminal) as bar:
        task = bar.add_task("Pending", total=None, rate="")
        while True:
            job = cluster.job(NAMESPACE, NAME) or {}
            status = job.get("status", {})
            progress = status.get("progress", {})
            bar.update(
                task,
                description=f"{phase(job) or 'Pending'} {status.get('readyNodes', 0)}/{status.get('nodes', 0)} nodes",
                total=progress.get("totalSteps"),
                completed=progress.get("step", 0),
                rate=f"{progress.get('stepsPerSecond', 0):.1f} steps/s" if progress else "",
            )
            if phase(job) != seen:
                seen = phase(job)
                bar.console.print(f"  {seen}")
            if seen in FINISHED:
                return job
            time.sleep(0.2)


def timings(job: Object) -> None:
    """The operator's own account of the job's life."""
    found = job.get("status", {}).get("timings", {})
    table = Table(title="status.timings")
    table.add_column("phase")
    table.add_column("seconds", justify="right")
    for name, seconds in found.items():
        table.add_row(name, str(seconds))
    console.print(table)


def local() -> int:
    """Run the same manifest, without any cluster: its ranks need here what the trainer image has."""
    python = Path("build/local/bin/python").absolute()
    if not python.exists():
        uv = os.environ.get("UV", "uv")
        subprocess.run([uv, "venv", "--quiet", str(python.parents[1])], check=True)
        packages = ["-e", ".[trainer]", "scikit-learn"]
        subprocess.run([uv, "pip", "install", "--quiet", "--python", str(python), *packages], check=True)
    # The manifest says `python`: the ranks' must be this one.
    environment = os.environ | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    command = [str(python), "-m", "everstep.cli", "run", "-f", str(EXAMPLE)]
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    typer.run(main)
