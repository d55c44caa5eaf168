"""The cluster at a glance."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from e2e.cluster.backend import Cluster
from e2e.cluster.errors import ClusterError
from e2e.cluster.gpu import RESOURCE
from e2e.cluster.kubectl import Kubectl, Object, is_ready
from e2e.cluster.local import LocalCluster
from e2e.cluster.state import ClusterSpec, cluster_dir


def show(cluster: Cluster) -> None:
    """Print tables of nodes and processes."""
    # In a pipe there is no width to fit into.
    console = Console() if sys.stdout.isatty() else Console(width=140)
    if isinstance(cluster, LocalCluster) and ClusterSpec.load(cluster_dir()) is None:
        console.print("no cluster is up")
        return
    console.print(f"kubeconfig: {cluster.kubeconfig}")
    try:
        console.print(_nodes(Kubectl(cluster.kubeconfig, timeout=10).items("nodes")))
    except ClusterError as error:
        console.print(f"the API server is unavailable: {error}")
    if isinstance(cluster, LocalCluster):
        console.print(_processes(cluster))


def _nodes(nodes: list[Object]) -> Table:
    table = Table("node", "ready", "address", "capacity", "zone", "GPUs", "kubelet", "runtime")
    for node in nodes:
        labels, found = node["metadata"]["labels"], node["status"]
        addresses = [entry["address"] for entry in found.get("addresses", []) if entry["type"] == "InternalIP"]
        table.add_row(
            node["metadata"]["name"],
            "yes" if is_ready(node) else "no",
            ", ".join(addresses),
            labels.get("everstep.dev/capacity-type", ""),
            labels.get("topology.kubernetes.io/zone", ""),
            found.get("allocatable", {}).get(RESOURCE, "0"),
            found.get("nodeInfo", {}).get("kubeletVersion", ""),
            found.get("nodeInfo", {}).get("containerRuntimeVersion", ""),
        )
    return table


def _processes(cluster: LocalCluster) -> Table:
    table = Table("process", "pid", "state")
    for process in cluster.processes.all():
        table.add_row(process.name, str(process.pid), "running" if process.alive else "ended")
    for node in cluster.nodes:
        if node.is_disturbed:
            table.add_row(node.name, "", "frozen, cut off or switched off")
    return table
