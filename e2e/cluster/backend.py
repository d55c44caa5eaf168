"""Chooses the kind of cluster that this machine can run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from e2e.cluster import kind, local
from e2e.cluster.errors import ClusterError, NoBackendError
from e2e.cluster.external import ExternalCluster
from e2e.cluster.kind import KindCluster
from e2e.cluster.local import LocalCluster
from e2e.cluster.state import ClusterSpec, cluster_dir


class Cluster(Protocol):
    """A cluster of any kind, with what each of them can do."""

    @property
    def kubeconfig(self) -> Path: ...
    def up(self, nodes: int | None = None, gpus: int | None = None) -> None: ...
    def down(self) -> None: ...
    def is_up(self) -> bool: ...
    def load_images(self, archives: Mapping[str, Path], keys: Mapping[str, str] | None = None) -> None: ...


class FaultyCluster(Cluster, Protocol):
    """A cluster whose parts may be broken on purpose."""

    def kill_node(self, name: str) -> None: ...
    def freeze_node(self, name: str) -> None: ...
    def thaw_node(self, name: str) -> None: ...
    def partition_node(self, name: str) -> None: ...
    def heal_node(self, name: str) -> None: ...
    def restart_node(self, name: str) -> None: ...
    def restart_kubelet(self, name: str) -> None: ...
    def restart_apiserver(self, away: float = 0.0) -> None: ...


def choose() -> Cluster:
    """Return the cluster that is up, else the best kind that this machine can run: yours, kind, local."""
    if ExternalCluster.wanted():
        return ExternalCluster()
    shape = ClusterSpec.load(cluster_dir())
    if shape is not None:
        return KindCluster() if shape.backend == kind.BACKEND else LocalCluster()
    if KindCluster.possible():
        return KindCluster()
    if LocalCluster.possible():
        return LocalCluster()
    raise NoBackendError(
        "No cluster is possible here: a local one needs root, kind needs a Docker engine that answers."
    )


def faulty() -> FaultyCluster:
    """Return the chosen cluster, if its nodes are ours to break."""
    cluster = choose()
    if isinstance(cluster, ExternalCluster):
        raise ClusterError("the nodes of a cluster of yours are not broken on purpose")
    assert isinstance(cluster, KindCluster | LocalCluster)
    return cluster


def local_cluster() -> LocalCluster:
    """Return the local cluster, for what only it can do."""
    cluster = choose()
    if not isinstance(cluster, LocalCluster):
        raise ClusterError(f"this needs the {local.BACKEND} cluster")
    return cluster
