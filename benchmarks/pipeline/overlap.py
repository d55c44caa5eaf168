"""Row `overlap`: how long a step waits for gradients that are reduced over replicas while its last backward runs.

The floor is the same step with reductions that begin after that backward. What is timed is from the end of the last
backward to the end of the step. Two replicas of one stage on gloo, whose reductions take at least what a link of
`BANDWIDTH` would need for them: only what a step waits for matters here, so no kernel has to shape one.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from benchmarks.interval import Interval
from benchmarks.pipeline.chain import ChainStage, ChainWork, loss
from benchmarks.pipeline.ranks import alternate, run

BANDWIDTH = 1e9  # bytes per second, in each direction
ROUNDS = 11
MOST = 0.5


def row() -> Interval:
    """Seconds of waiting; whole steps as `step` and `step-after`."""
    result = Interval("overlap", "s", MOST)
    result.samples = run(2, measured, ChainWork("1f1b", ranks=1, microbatches=2, width=2048, rows=64, layers=8))[0]
    return result


def measured(rank: int, work: ChainWork) -> dict[str, list[float]]:
    """Seconds of each round, on one of the replicas."""
    from everstep.pipeline.engine.engine import Engine
    from everstep.pipeline.engine.options import EngineOptions
    from everstep.pipeline.schedules import lower_schedule
    from everstep.pipeline.transport.gloo import ProcessGroups
    from everstep.pipeline.transport.grid import make_grid

    stages: Any = {0: ChainStage(0, 1, work.module(0))}
    link: Any = Linked(ProcessGroups(make_grid(2, 1)))
    engine = Engine(stages, lower_schedule(work.order, work.graph), work.graph, link, loss, EngineOptions())
    stage: Any = engine._stages[0]
    batch, reduction = work.batch(), engine.parameters.reduction
    listen, backward = reduction.listen, stage.backward
    waits: dict[str, list[float]] = {"ours": [], "floor": []}
    ended = 0.0

    def timed(*args: Any) -> Any:
        nonlocal ended
        found = backward(*args)
        ended = time.perf_counter()
        return found

    def step(arm: str) -> None:
        reduction.listen = listen if arm == "ours" else _after  # type: ignore[method-assign]
        engine.step({"x": batch}, batch)
        waits[arm].append(time.perf_counter() - ended)

    stage.backward = timed
    whole = alternate({"step": lambda: step("ours"), "step-after": lambda: step("floor")}, ROUNDS).wall
    return whole | {arm: each[1:] for arm, each in waits.items()}  # the first round only warms


def _after(stage: int, nodes: Any) -> AbstractContextManager[None]:
    return nullcontext()


class Linked:
    """A transport between two replicas, whose reductions go one after the other over one link."""

    def __init__(self, transport: Any) -> None:
        self._transport, self._free = transport, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def all_reduce(self, tensor: Any, group: Any) -> _Reducing:
        """See Transport. Of two processes, each sends as many bytes as the tensor has."""
        self._free = max(self._free, time.perf_counter()) + tensor.nbytes / BANDWIDTH
        return _Reducing(self._transport.all_reduce(tensor, group), self._free)


class _Reducing:
    def __init__(self, work: Any, end: float) -> None:
        self._work, self._end = work, end

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._end - time.perf_counter()))
