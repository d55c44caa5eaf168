"""``python -m e2e.cluster VERB``."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from e2e.cluster import backend, kwok, status
from e2e.cluster.controlplane_flags import ClientLimits

app = typer.Typer(
    help="A real Kubernetes cluster on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
node_app = typer.Typer(help="Break nodes on purpose.", no_args_is_help=True)
apiserver_app = typer.Typer(help="Break the API server on purpose.", no_args_is_help=True)
controllers_app = typer.Typer(help="Controller-manager and scheduler.", no_args_is_help=True)
kwok_app = typer.Typer(help="Pretended nodes for measurements of scale.", no_args_is_help=True)
app.add_typer(node_app, name="node")
app.add_typer(apiserver_app, name="apiserver")
app.add_typer(controllers_app, name="controllers")
app.add_typer(kwok_app, name="kwok")


def _timed(what: str, action: Callable[[], None]) -> None:
    started = time.monotonic()
    action()
    typer.echo(f"{what} in {time.monotonic() - started:.1f} s")


@app.command()
def up(
    nodes: Annotated[int | None, typer.Option(help="How many nodes; 3 for a new cluster.")] = None,
    gpus: Annotated[int | None, typer.Option(help="Pretended GPUs of each node; 4 for a new cluster.")] = None,
) -> None:
    """Start the cluster, or bring back what is missing of it."""
    cluster = backend.choose()
    _timed("up", lambda: cluster.up(nodes, gpus))
    typer.echo(f"export KUBECONFIG={cluster.kubeconfig}")


@app.command()
def down() -> None:
    """Remove the cluster and every trace of it."""
    _timed("down", lambda: backend.choose().down())


@app.command("status")
def show_status() -> None:
    """Nodes, processes, versions."""
    status.show(backend.choose())


@app.command()
def load(
    archives: Annotated[list[str], typer.Argument(help="NAME=ARCHIVE, such as everstep/trainer:0.1.0=trainer.tar")],
) -> None:
    """Give images to all nodes, present and future."""
    named = {}
    for argument in archives:
        name, equals, archive = argument.partition("=")
        if not equals:
            raise typer.BadParameter(f"{argument}: expected NAME=ARCHIVE")
        named[name] = Path(archive).resolve()
    _timed("loaded", lambda: backend.choose().load_images(named))


@node_app.command("kill")
def node_kill(name: str) -> None:
    """Cut a node's power."""
    _timed(f"{name} killed", lambda: backend.faulty().kill_node(name))


@node_app.command("freeze")
def node_freeze(name: str) -> None:
    """Stop every process of a node."""
    _timed(f"{name} frozen", lambda: backend.faulty().freeze_node(name))


@node_app.command("thaw")
def node_thaw(name: str) -> None:
    """Let a frozen node go on."""
    _timed(f"{name} thawed", lambda: backend.faulty().thaw_node(name))


@node_app.command("partition")
def node_partition(name: str) -> None:
    """Cut a node off the network."""
    _timed(f"{name} cut off", lambda: backend.faulty().partition_node(name))


@node_app.command("heal")
def node_heal(name: str) -> None:
    """Connect a node again."""
    _timed(f"{name} connected", lambda: backend.faulty().heal_node(name))


@node_app.command("restart")
def node_restart(name: str) -> None:
    """Switch a node off and on; returns when it is Ready."""
    _timed(f"{name} restarted", lambda: backend.faulty().restart_node(name))


@apiserver_app.command("restart")
def apiserver_restart() -> None:
    """Kill the API server and start it again."""
    _timed("API server restarted", lambda: backend.faulty().restart_apiserver())


@controllers_app.command("restart")
def controllers_restart(
    qps: Annotated[int | None, typer.Option(help="Requests a second; default: each component's own.")] = None,
    burst: Annotated[int | None, typer.Option(help="Burst above it.")] = None,
) -> None:
    """Restart controller-manager and scheduler, with other client limits for a measurement."""
    limits = ClientLimits(qps, burst)
    _timed("controllers restarted", lambda: backend.local_cluster().restart_controllers(limits))


@kwok_app.command("up")
def kwok_up(nodes: Annotated[int, typer.Option(help="How many pretended nodes.")] = 100) -> None:
    """Add pretended nodes, tainted and labelled, beside the real ones."""
    _timed(f"{nodes} pretended nodes", lambda: kwok.up(backend.local_cluster(), nodes))


@kwok_app.command("down")
def kwok_down() -> None:
    """Remove the pretended nodes and what ran on them."""
    _timed("pretended nodes removed", lambda: kwok.down(backend.local_cluster()))
