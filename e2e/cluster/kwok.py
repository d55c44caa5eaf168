"""Pretended nodes beside the real ones: pods bound to them run nowhere and cost nothing.

They are tainted, so that only what tolerates the taint is measured on them, and labelled ``type=kwok``.
"""

from __future__ import annotations

import json
from pathlib import Path

from e2e.cluster.binaries import binary
from e2e.cluster.gpu import RESOURCE
from e2e.cluster.kubectl import Kubectl, Object, is_ready
from e2e.cluster.local import LocalCluster
from e2e.cluster.node import capacity_type
from e2e.cluster.waiting import until

NAME = "kwok"
LABEL = ("type", "kwok")
SELECTOR = "=".join(LABEL)
TAINT = {"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}
CONFIG = Path(__file__).parent / "config" / "kwok.yaml"
POD_CIDR = "10.210.0.0/16"


def node_object(index: int, count: int, gpus: int) -> Object:
    """Return a pretended node with 32 cores and 256 GiB."""
    resources = {"cpu": "32", "memory": "256Gi", "pods": "110", RESOURCE: str(gpus)}
    labels = {
        LABEL[0]: LABEL[1],
        "kubernetes.io/hostname": f"kwok-{index}",
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "everstep.dev/capacity-type": capacity_type(index, count),
        "topology.kubernetes.io/zone": f"zone-{'abc'[index % 3]}",
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": f"kwok-{index}", "labels": labels, "annotations": {"kwok.x-k8s.io/node": "fake"}},
        "spec": {"taints": [TAINT]},
        "status": {"capacity": resources, "allocatable": resources},
    }


def up(cluster: LocalCluster, count: int) -> None:
    """Have exactly ``count`` pretended nodes, all Ready."""
    if cluster.processes.find(NAME) is None:
        # A user of its own, so that the audit log can tell its endless writes from those that are measured.
        kubeconfig = cluster.control.user_kubeconfig("system:kwok", "system:masters")
        command: list[str | Path] = [binary(NAME), "--kubeconfig", kubeconfig, "--config", CONFIG, "--cidr", POD_CIDR]
        command += ["--manage-nodes-with-label-selector", SELECTOR, "--node-lease-duration-seconds", "40"]
        command += ["--node-ip", "10.200.1.1", "-v", "WARN"]
        cluster.processes.start(NAME, command, cluster.folder / f"{NAME}.log")
    wanted = {f"kwok-{index}" for index in range(1, count + 1)}
    present = {node["metadata"]["name"] for node in _nodes(cluster.kubectl)}
    objects = [node_object(index, count, cluster.shape.gpus) for index in range(1, count + 1)]
    new = [node for node in objects if node["metadata"]["name"] not in present]
    if new:
        document = {"apiVersion": "v1", "kind": "List", "items": new}
        cluster.kubectl.run("create", "-f", "-", stdin=json.dumps(document))
    _remove(cluster.kubectl, present - wanted)
    timeout = 90 + count / 10
    until(lambda: sum(map(is_ready, _nodes(cluster.kubectl))) == count, f"{count} pretended nodes are Ready", timeout)


def down(cluster: LocalCluster) -> None:
    """Remove all pretended nodes, their pods, and KWOK."""
    _remove(cluster.kubectl, {node["metadata"]["name"] for node in _nodes(cluster.kubectl)})
    cluster.processes.stop([NAME])


def _nodes(kubectl: Kubectl) -> list[Object]:
    return kubectl.items("nodes", "-l", SELECTOR)


def _remove(kubectl: Kubectl, names: set[str]) -> None:
    """Nodes first, so that nothing new lands on them; then the pods, which nobody would ever call ended."""
    if not names:
        return
    kubectl.run("delete", "node", "--wait=false", *sorted(names))
    pods = [pod for pod in kubectl.items("pods", "-A") if pod["spec"].get("nodeName") in names]
    if pods:
        document = json.dumps({"apiVersion": "v1", "kind": "List", "items": pods})
        at_once = ["--grace-period=0", "--force", "--wait=false", "--ignore-not-found"]
        kubectl.run("delete", *at_once, "-f", "-", stdin=document)
