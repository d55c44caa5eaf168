"""No distribution of ours: the command runs once per node and is, or brings, its own launcher (`torchrun train.py`)."""

from __future__ import annotations

from everstep.agent.ranks.container_contract import build_torchrun_variables
from everstep.agent.ranks.placement import RankPlacement
from everstep.agent.wire.generation_layout import GenerationLayout


def place_ranks(layout: GenerationLayout) -> list[RankPlacement]:
    return [RankPlacement(layout.node_index, 0, layout.nodes, 1)]


def make_variables(layout: GenerationLayout, rank: int) -> dict[str, str]:
    return build_torchrun_variables(
        num_nodes=layout.nodes,
        node_rank=layout.node_index,
        procs_per_node=layout.procs_per_node,
        master_addr=layout.master_addr,
        master_port=layout.master_port,
    )
