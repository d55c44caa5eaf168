"""A cluster that someone else runs, named by KUBECONFIG."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.cluster.kubectl import Kubectl

SWITCH = "EVERSTEP_USE_KUBECONFIG"


class ExternalCluster:
    """Used as it is: never started, never stopped, no image is loaded, no node is harmed."""

    @staticmethod
    def wanted() -> bool:
        return os.environ.get(SWITCH) == "1"

    @property
    def kubeconfig(self) -> Path:
        return Path(os.environ.get("KUBECONFIG") or Path.home() / ".kube" / "config")

    def up(self, nodes: int | None = None, gpus: int | None = None) -> None:
        if not self.is_up():
            raise ClusterError(f"{SWITCH}=1, but the cluster of {self.kubeconfig} does not answer")

    def down(self) -> None:
        print(f"{self.kubeconfig} is not ours to take down; nothing done")

    def is_up(self) -> bool:
        try:
            return Kubectl(self.kubeconfig, timeout=10).run("get", "--raw", "/readyz") == "ok"
        except ClusterError:
            return False

    def load_images(self, archives: Mapping[str, Path], keys: Mapping[str, str] | None = None) -> None:
        raise ClusterError("images for a cluster of yours have to be pushed to a registry that it can reach")
