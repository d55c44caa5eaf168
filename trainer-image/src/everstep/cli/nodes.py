"""`everstep nodes`: nodes on which jobs have failed, as the operator has them on record."""

from __future__ import annotations

from typing import Annotated

import typer

DEFAULT_NAMESPACE = "everstep-system"


def nodes(
    clear: Annotated[
        list[str] | None,
        typer.Option("--clear", metavar="NODE", help="Remove the failures on record of this node. Repeatable."),
    ] = None,
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the operator.")] = DEFAULT_NAMESPACE,
    context: Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig.")] = None,
) -> None:
    """List nodes on which jobs have failed, and clear their records.

    New pods avoid a node after two failures of their namespace or of two namespaces, or one of a GPU, for a day (the
    chart's nodeFailureWindowSeconds): at most a quarter of all nodes, and one in any case.
    """
    from datetime import UTC, datetime

    from everstep.cli.cluster import ClusterClient
    from everstep.cli.errors import CliError
    from everstep.cli.report import make_node_table
    from everstep.cli.terminal import make_stderr, make_stdout
    from everstep_operator.plan.node_failures import parse_record

    cluster = ClusterClient(context, namespace)
    data = cluster.read_node_failures()
    unknown = sorted({*(clear or ())} - data.keys())
    if unknown:
        raise CliError(f"nothing is on record of {', '.join(unknown)}")
    if clear:
        cluster.clear_node_failures(clear)
        for node in clear:
            make_stdout().print(f"{node} is removed from the record; new pods may use it again within a minute")
        return
    found = parse_record(data, since=0.0)
    if found:
        make_stdout().print(make_node_table(found, datetime.now(UTC)))
    else:
        make_stderr().print("No job has failed for reasons of a node.")
