"""torch.distributed: the agent starts every rank itself; `init_process_group()` reads the variables."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.agent.ranks.container_contract import build_torchrun_variables
from everstep.agent.ranks.placement import RankPlacement
from everstep.agent.wire.generation_layout import GenerationLayout

_LAUNCHERS = frozenset(("torchrun", "torch.distributed.run", "torch.distributed.launch"))


def place_ranks(layout: GenerationLayout) -> list[RankPlacement]:
    procs = layout.procs_per_node
    return [
        RankPlacement(layout.node_index * procs + local, local, layout.nodes * procs, procs) for local in range(procs)
    ]


def make_variables(layout: GenerationLayout, rank: int) -> dict[str, str]:
    # Several ranks that each start a thread per CPU are slower than one: torchrun's own default.
    threads = {"OMP_NUM_THREADS": "1"} if layout.procs_per_node > 1 else {}
    ranks = layout.nodes * layout.procs_per_node
    if ranks == 1:
        return threads
    # A `torchrun` in the place of a rank would otherwise know of no other one: each would train by itself, and all of
    # them would succeed.
    group = build_torchrun_variables(
        num_nodes=ranks,
        node_rank=rank,
        procs_per_node=1,
        master_addr=layout.master_addr,
        master_port=layout.master_port,
    )
    return {**threads, **group}


def advise_on_launcher(command: Sequence[str], layout: GenerationLayout) -> str | None:
    """Return a line for the log where a launcher of ranks stands in the place of several ranks of a node."""
    words = {*command[:1], *(word for option, word in zip(command, command[1:]) if option == "-m")}
    names = {word.rpartition("/")[2] for word in words} & _LAUNCHERS
    if layout.procs_per_node == 1 or not names:
        return None
    return (
        f"everstep: {min(names)} starts ranks itself, and {layout.procs_per_node} of it run on this node: write "
        "distribution: {none: {}} for one in each pod, or the script itself in the place of it"
    )
