"""Tell temporary taints from lasting ones: the temporary ones mark nodes that are started, serviced or removed.

A node that is started or serviced takes pods again within minutes; a node that is removed is replaced by one like it,
or is not in the cluster much longer. All other taints say what a node is for, and keep pods that do not tolerate them
away for good.
"""

from __future__ import annotations

from everstep_operator.plan.node_signals import SIGNAL_TAINTS

_DOMAINS = (
    "node.kubernetes.io/",  # conditions of the node, cordons
    "node.cloudprovider.kubernetes.io/",  # until the cloud provider has initialized it, and while it is shut down
    "readiness.k8s.io/",  # Node Readiness Controller
    "aws-node-termination-handler/",
    # By these prefixes Cluster Autoscaler is told that a taint passes.
    "startup-taint.cluster-autoscaler.kubernetes.io/",
    "status-taint.cluster-autoscaler.kubernetes.io/",
    "ignore-taint.cluster-autoscaler.kubernetes.io/",
)
_KEYS = SIGNAL_TAINTS | {"karpenter.sh/unregistered", "karpenter.sh/disruption"}
# Network plugins, CSI drivers and others name the taint that they remove after their own domain.
_NAMES = ("not-ready", "uninitialized", "startup")


def is_temporary(key: str) -> bool:
    """Tell whether a taint of this key passes, or its node does."""
    return key in _KEYS or key.startswith(_DOMAINS) or key.endswith(_NAMES)
