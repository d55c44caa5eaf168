"""Pretended GPUs: an extended resource written into the node's status, which kubelet keeps.

kubelet forgets it when it starts without a device plugin's checkpoint, so it is written again after each start.
"""

from __future__ import annotations

import json

from e2e.cluster.errors import ClusterError
from e2e.cluster.kubectl import Kubectl, Object
from e2e.cluster.waiting import until

RESOURCE = "nvidia.com/gpu"


def has(node: Object, count: int) -> bool:
    allocatable = node.get("status", {}).get("allocatable", {})
    return int(allocatable.get(RESOURCE, "0")) == count


def pretend(kubectl: Kubectl, node: str, count: int) -> None:
    """Give a node ``count`` GPUs; return when the scheduler can use them."""
    quantity = {RESOURCE: str(count)}
    patch = json.dumps({"status": {"capacity": quantity, "allocatable": quantity}})

    def written() -> bool:
        try:
            kubectl.run("patch", "node", node, "--subresource=status", "--type=merge", "-p", patch)
        except ClusterError:  # a status write of kubelet's came first, or the API server is not back yet
            return False
        return True

    until(written, f"{node} has {count} {RESOURCE}", 30)
