"""Rows `bubble-*` and `vs-torch-*`: a step of equal stages against its closed form, and against torch's pipelines.

The closed form is what the simulator says, which meets all of them, of each stage's times of a forward and of both
halves of a backward in the same run: both ranks compute theirs at once, without a message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from typing import Any

from benchmarks.checkpoint.rows import Interval
from benchmarks.pipeline.chain import Work, engine, loss
from benchmarks.pipeline.ranks import alternate, run

SCHEDULES = ("simple", "1f1b", "interleaved", "zb-h1", "zb-v")
ROUNDS = 15
BUBBLE = 1.05
TORCH = 1.03


def rows(wanted: Collection[str]) -> Iterator[Interval]:
    for name in SCHEDULES:
        kinds = [kind for kind in ("bubble", "vs-torch") if {kind, f"{kind}-{name}"} & set(wanted)]
        if not kinds:
            continue
        samples = run(2, measured, Work(name), "vs-torch" in kinds)[0]
        if "bubble" in kinds:
            row = Interval(f"bubble-{name}", "s", BUBBLE)
            row.samples = {"ours": samples["ours"], "floor": samples["closed"], "work": samples["work"]}
            yield row
        if "vs-torch" in kinds:
            row = Interval(f"vs-torch-{name}", "s", TORCH)
            row.samples = {"ours": samples["ours"], "floor": samples["torch"]}
            yield row


def measured(rank: int, work: Work, with_torch: bool) -> dict[str, list[float]]:
    """Seconds of steps, on one of the ranks."""
    from everstep.pipeline.graph import Stage, chain
    from everstep.pipeline.schedules import simulate
    from everstep.pipeline.transport.gloo import ProcessGroups
    from everstep.pipeline.transport.grid import grid

    own = work.order.stages_of(rank)
    modules = {stage: work.module(stage) for stage in own}
    ours = engine(work, ProcessGroups(grid(work.ranks, work.ranks)), modules)
    batch = work.batch()
    first, last = 0 in own, work.stages - 1 in own
    parts = _Parts(work, {stage: work.module(stage) for stage in own}, split="zb" in work.schedule)
    arms: dict[str, Callable[[], object]] = {
        "ours": lambda: ours.step({"x": batch} if first else None, batch if last else None),
        "work": parts.all,
    }
    if with_torch:
        others = {stage: work.module(stage) for stage in own}
        arms["torch"] = theirs(work, others, batch, first, last)
    samples = alternate(arms, ROUNDS)
    if with_torch:
        _same_gradients(modules, others)
    samples["closed"] = []
    for times in _of_all(parts.times[1:]):
        graph = chain([Stage(*each) for each in times])
        samples["closed"].append(simulate(work.order, graph).makespan)
    return samples


class _Parts:
    """The work of this rank alone: all micro-batches of its stages, one after the other, each part timed."""

    def __init__(self, work: Work, modules: dict[int, Any], *, split: bool) -> None:
        from benchmarks.pipeline.chain import Part
        from everstep.pipeline.engine.stage import Stage

        #: Of each round and stage, 0 for those of the other rank: seconds of one micro-batch.
        self.times: list[list[tuple[float, float, float]]] = []
        self._split, self._work, self._batch = split, work, work.batch()[: work.rows]
        self._stages = {
            index: Stage(
                index,
                Part(index, work.stages, module),
                {f"v{index - 1}": True} if index else {},
                {f"v{index}": True} if index < work.stages - 1 else {},
                lambda microbatch, again: nullcontext(),
                self._loss if index == work.stages - 1 else None,
                recompute=False,
            )
            for index, module in modules.items()
        }

    def _loss(self, microbatch: int, output: Any) -> Any:
        from everstep.pipeline.engine.losses import evaluate

        return evaluate(loss, output, self._batch, self._work.rows, None)

    def all(self) -> None:
        """One round."""
        times = [(0.0, 0.0, 0.0)] * self._work.stages
        for index, stage in self._stages.items():
            given = {f"v{index}": [self._batch]} if index < self._work.stages - 1 else {}
            spent = [self._one(stage, microbatch, given) for microbatch in range(self._work.microbatches)]
            forward, back, late = (sum(each) / len(spent) for each in zip(*spent, strict=True))
            times[index] = forward, back, late
        self.times.append(times)

    def _one(self, stage: Any, microbatch: int, given: dict[str, Any]) -> tuple[float, float, float]:
        from everstep.pipeline.engine.nested import value_of

        value = value_of("x", self._batch.detach().requires_grad_())[0]
        began = time.perf_counter()
        stage.forward(microbatch, dict.fromkeys(stage.edges, value), {"x": self._batch}, train=True)
        between = time.perf_counter()
        if self._split:
            stage.input_grad(microbatch, given, 1.0)
        else:
            stage.backward(microbatch, given, 1.0)
        after = time.perf_counter()
        if self._split:
            stage.weight_grad(microbatch)
        return between - began, after - between, time.perf_counter() - after


def _same_gradients(ours: dict[int, Any], others: dict[int, Any]) -> None:
    """Both arms have done the same work."""
    import torch

    for stage, module in ours.items():
        for one, other in zip(module.parameters(), others[stage].parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-6)


def _of_all(times: list[list[tuple[float, float, float]]]) -> list[list[tuple[float, float, float]]]:
    """With the stages of all ranks."""
    import torch
    import torch.distributed as dist

    total = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(total)
    found: list[list[tuple[float, float, float]]] = total.tolist()
    return found


def theirs(work: Work, modules: dict[int, Any], batch: Any, first: bool, last: bool) -> Callable[[], object]:
    """A step of torch.distributed.pipelining with the same stages in the same schedule."""
    import torch
    from torch.distributed import pipelining as pp

    stages = [pp.PipelineStage(module, index, work.stages, torch.device("cpu")) for index, module in modules.items()]
    kinds = {
        "simple": pp.ScheduleGPipe,
        "1f1b": pp.Schedule1F1B,
        "interleaved": pp.ScheduleInterleaved1F1B,
        "zb-h1": pp.ScheduleInterleavedZeroBubble,
        "zb-v": pp.ScheduleZBVZeroBubble,
    }
    own = stages[0] if work.schedule in ("simple", "1f1b") else stages
    schedule = kinds[work.schedule](own, work.microbatches, loss_fn=loss)

    def step() -> None:
        for module in modules.values():
            module.zero_grad(set_to_none=True)
        inputs = (batch,) if first else ()
        schedule.step(*inputs, **({"target": batch} if last else {}), return_outputs=False)

    return step
