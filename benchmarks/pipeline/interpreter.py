"""Row `interpreter`: what the engine takes for itself, per action, where stages compute nothing."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.interval import REPEATS, Interval

MOST = 100.0  # microseconds
MICROBATCHES = 64


def row() -> Interval:
    """Two ranks in one process, of which one runs at a time: what both do, messages too, over the number of actions.

    The ways of a message through memory, and handing over from one rank to the other, are in it.
    """
    import torch
    from torch import nn

    from benchmarks.pipeline.chain import ChainStage, loss
    from everstep.pipeline.engine.engine import Engine
    from everstep.pipeline.engine.options import EngineOptions
    from everstep.pipeline.graph import Stage, make_chain_graph
    from everstep.pipeline.schedules import lower_schedule, make_schedule
    from tests.pipeline.inprocess import Fabric, InProcess

    torch.set_num_threads(1)
    graph = make_chain_graph([Stage()] * 2, 4)
    schedule = lower_schedule(make_schedule("1f1b", 2, 2, MICROBATCHES), graph)
    batch = torch.ones(MICROBATCHES, 1)

    class Scale(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(1))

        def forward(self, x: Any) -> Any:
            return x * self.factor

    result = Interval("interpreter", "µs", MOST, absolute=True)
    samples: list[float] = []

    def rank(transport: InProcess) -> None:
        stage = ChainStage(transport.rank, 2, Scale())
        engine = Engine({transport.rank: stage}, schedule, graph, transport, loss, EngineOptions(broadcast=False))
        mine = ({"x": batch}, None) if transport.rank == 0 else (None, batch)
        for number in range(REPEATS + 1):
            began = time.perf_counter()
            engine.step(*mine)
            if transport.rank == 1 and number:
                samples.append((time.perf_counter() - began) / sum(map(len, schedule.ranks)) * 1e6)

    Fabric(2).run(rank)
    result.samples["ours"] = samples
    return result
