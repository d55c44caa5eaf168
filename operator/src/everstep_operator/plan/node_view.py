"""A Node as plans see it. `parse_node` is the only place that looks at a raw one.

Kubelets write the status of their nodes again and again, with images, addresses and times of no interest here: what
is kept must change only when a plan could.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep_operator.plan.node_capacity import NodeCapacity, parse_node_capacity
from everstep_operator.plan.node_signals import DEFAULT_RULES, NodeSignal, Rules, is_spot, read_signal
from everstep_operator.plan.out_of_service import has_returned

ZONE_LABEL = "topology.kubernetes.io/zone"


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node, as far as it matters to pods that are on it, and whether more could be."""

    name: str
    ready: bool = True
    not_ready_because: str = ""  # reason of the Ready condition: KubeletNotReady, NodeStatusUnknown …
    signal: NodeSignal | None = None  # of its end, a drain, or a fault
    spot: bool = False  # its provider may reclaim it at any time
    deleting: bool = False
    gone_since: float | None = None  # when the operator found that there is no such Node any more (its own clock)
    # Of nodes under silent agents: since when their kubelet has not renewed the Lease, once that is long enough.
    silent_since: float | None = None
    unrenewed: bool = False  # or nearly so: it counts where many are silent at once
    renewed_at: float | None = None  # when it was last seen to be renewed, since its Lease is read
    dead_since: float | None = None  # what `node_loss` made of it
    held: str = ""  # why it is not taken for dead all the same
    zone: str = ""
    returned: bool = False  # it bears the operator's out-of-service taint, and its kubelet has reported since
    capacity: NodeCapacity | None = field(default=None, compare=False)  # no concern of the jobs that are on it already

    @property
    def lost_since(self) -> float | None:
        """Return since when nothing runs there for us any more, as far as anybody can know."""
        return self.gone_since if self.gone_since is not None else self.dead_since


def parse_node(raw: Mapping[str, Any], rules: Rules = DEFAULT_RULES) -> NodeView:
    """Sort out one Node as the API server gives it, its signals by `rules`. Never raises on odd values."""
    meta: Mapping[str, Any] = raw.get("metadata") or {}
    labels: Mapping[str, Any] = meta.get("labels") or {}
    conditions = (raw.get("status") or {}).get("conditions") or ()
    condition: Mapping[str, Any] = next((c for c in conditions if c.get("type") == "Ready"), {})
    ready = condition.get("status") == "True"
    return NodeView(
        name=str(meta.get("name") or ""),
        ready=ready,
        not_ready_because="" if ready else str(condition.get("reason") or "NoStatus")[:128],
        signal=read_signal(raw, rules),
        spot=is_spot(labels),
        deleting=meta.get("deletionTimestamp") is not None,
        zone=str(labels.get(ZONE_LABEL) or ""),
        returned=has_returned(raw),
        capacity=parse_node_capacity(raw),
    )
