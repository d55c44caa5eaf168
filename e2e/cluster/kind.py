"""The same cluster on kind, for machines with a Docker engine."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from e2e.cluster import gpu
from e2e.cluster.binaries import binary
from e2e.cluster.errors import ClusterError
from e2e.cluster.kubectl import Kubectl
from e2e.cluster.node import labels
from e2e.cluster.state import PUBLISHED_KUBECONFIG, ClusterSpec, cluster_dir, make_shared_folder

BACKEND = "kind"
NAME = "everstep"
SHARED_FOLDER_IN_NODES = "/var/lib/everstep-cluster/shared"


class KindCluster:
    """A cluster of Docker containers, with the same labels and pretended GPUs as the local one."""

    @staticmethod
    def possible() -> bool:
        docker = shutil.which("docker")
        if docker is None:
            return False
        return subprocess.run([docker, "info"], capture_output=True, check=False).returncode == 0

    @property
    def kubeconfig(self) -> Path:
        return PUBLISHED_KUBECONFIG

    def up(self, nodes: int | None = None, gpus: int | None = None) -> None:
        shape = ClusterSpec(BACKEND, nodes or ClusterSpec.nodes, ClusterSpec.gpus if gpus is None else gpus)
        if self.is_up():
            return
        self.down()
        shape.save(cluster_dir())
        self.kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        lines = ["kind: Cluster", "apiVersion: kind.x-k8s.io/v1alpha4", "nodes:", "- role: control-plane"]
        mount = f"  - {{hostPath: {make_shared_folder()}, containerPath: {SHARED_FOLDER_IN_NODES}}}"
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as configuration:
            configuration.write("\n".join([*lines, *["- role: worker", "  extraMounts:", mount] * shape.nodes, ""]))
            configuration.flush()
            wait = ["--wait", "180s", "--kubeconfig", str(self.kubeconfig)]
            _run(str(binary("kind")), "create", "cluster", "--name", NAME, "--config", configuration.name, *wait)
        kubectl = Kubectl(self.kubeconfig)
        for index, node in enumerate(self._workers(), start=1):
            pairs = [f"{key}={value}" for key, value in labels(index, shape.nodes).items()]
            kubectl.run("label", "node", node, "--overwrite", *pairs)
            gpu.pretend(kubectl, node, shape.gpus)

    def down(self) -> None:
        _run(str(binary("kind")), "delete", "cluster", "--name", NAME)
        PUBLISHED_KUBECONFIG.unlink(missing_ok=True)
        shutil.rmtree(cluster_dir(), ignore_errors=True)

    def is_up(self) -> bool:
        if NAME not in _run(str(binary("kind")), "get", "clusters").split() or not self.kubeconfig.exists():
            return False
        try:
            return Kubectl(self.kubeconfig, timeout=10).run("get", "--raw", "/readyz") == "ok"
        except ClusterError:
            return False

    def load_images(self, archives: Mapping[str, Path], keys: Mapping[str, str] | None = None) -> None:
        for archive in archives.values():
            _run(str(binary("kind")), "load", "image-archive", str(archive), "--name", NAME)

    def kill_node(self, name: str) -> None:
        _run("docker", "kill", name)

    def freeze_node(self, name: str) -> None:
        _run("docker", "pause", name)

    def thaw_node(self, name: str) -> None:
        _run("docker", "unpause", name)

    def partition_node(self, name: str) -> None:
        # Taking the link down would lose its routes.
        for chain, direction in (("INPUT", "-i"), ("OUTPUT", "-o"), ("FORWARD", "-i"), ("FORWARD", "-o")):
            _run("docker", "exec", name, "iptables", "-I", chain, direction, "eth0", "-j", "DROP")

    def heal_node(self, name: str) -> None:
        for chain, direction in (("INPUT", "-i"), ("OUTPUT", "-o"), ("FORWARD", "-i"), ("FORWARD", "-o")):
            _run("docker", "exec", name, "iptables", "-D", chain, direction, "eth0", "-j", "DROP")

    def restart_node(self, name: str) -> None:
        _run("docker", "restart", name)
        kubectl = Kubectl(self.kubeconfig)
        kubectl.run("wait", "--for=condition=Ready", f"node/{name}", "--timeout=60s")
        shape = ClusterSpec.load(cluster_dir())
        gpu.pretend(kubectl, name, shape.gpus if shape else ClusterSpec.gpus)

    def restart_kubelet(self, name: str) -> None:
        """systemd starts it again."""
        _run("docker", "exec", name, "pkill", "-KILL", "kubelet")

    def restart_apiserver(self, away: float = 0.0) -> None:
        """kubelet starts the static pod again by itself, as long as its manifest is there."""
        node, manifest = f"{NAME}-control-plane", "/etc/kubernetes/manifests/kube-apiserver.yaml"
        if away:
            _run("docker", "exec", node, "mv", manifest, "/root/")
        _run("docker", "exec", node, "pkill", "-KILL", "kube-apiserver")
        if away:
            time.sleep(away)
            _run("docker", "exec", node, "mv", "/root/kube-apiserver.yaml", manifest)

    def _workers(self) -> list[str]:
        nodes = Kubectl(self.kubeconfig).items("nodes", "-l", "!node-role.kubernetes.io/control-plane")
        return sorted(node["metadata"]["name"] for node in nodes)


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ClusterError(f"{' '.join(command[:4])}: {result.stderr.strip()[-2000:]}")
    return result.stdout
