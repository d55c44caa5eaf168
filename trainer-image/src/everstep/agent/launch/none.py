"""No distribution of ours: the command runs once per node and is, or brings, its own launcher (`torchrun train.py`)."""

from __future__ import annotations

from everstep.agent.contract import torchrun_variables
from everstep.agent.events import Layout

from . import Placement


def placements(layout: Layout) -> list[Placement]:
    return [Placement(layout.node_index, 0, layout.nodes, 1)]


def variables(layout: Layout) -> dict[str, str]:
    return torchrun_variables(
        num_nodes=layout.nodes,
        node_rank=layout.node_index,
        procs_per_node=layout.procs_per_node,
        master_addr=layout.master_addr,
        master_port=layout.master_port,
    )
