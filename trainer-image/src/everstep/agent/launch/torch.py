"""torch.distributed: the agent starts every rank itself; `init_process_group()` reads the variables."""

from __future__ import annotations

from everstep.agent.ranks.placement import RankPlacement
from everstep.agent.wire.generation_layout import GenerationLayout


def place_ranks(layout: GenerationLayout) -> list[RankPlacement]:
    procs = layout.procs_per_node
    return [
        RankPlacement(layout.node_index * procs + local, local, layout.nodes * procs, procs) for local in range(procs)
    ]


def make_variables(layout: GenerationLayout) -> dict[str, str]:
    # Several ranks that each start a thread per CPU are slower than one: torchrun's own default.
    return {"OMP_NUM_THREADS": "1"} if layout.procs_per_node > 1 else {}
