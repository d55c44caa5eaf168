"""Rows `bubble-*` and `vs-torch-*`: a step of equal stages against its closed form, and against torch's pipelines.

The closed form is what the simulator says, which meets all of them, of each stage's times of a forward and of the parts
of a backward in the same run: both ranks compute theirs at once and in the schedule's order, without a message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from typing import Any

from benchmarks.interval import Interval
from benchmarks.pipeline.chain import ChainWork, engine, loss
from benchmarks.pipeline.ranks import alternate, run
from everstep.pipeline.schedules import Action, ActionKind

SCHEDULES = ("simple", "1f1b", "interleaved", "zb-h1", "zb-v")
ROUNDS = 15
BUBBLE = 1.05
TORCH = 1.03


def rows(wanted: Collection[str]) -> Iterator[Interval]:
    for name in SCHEDULES:
        kinds = [kind for kind in ("bubble", "vs-torch") if {kind, f"{kind}-{name}"} & set(wanted)]
        if not kinds:
            continue
        samples = run(2, measured, ChainWork(name), "vs-torch" in kinds)[0]
        if "bubble" in kinds:
            row = Interval(f"bubble-{name}", "s", BUBBLE)
            row.samples = {"ours": samples["ours"], "floor": samples["closed"], "work": samples["work"]}
            yield row
        if "vs-torch" in kinds:
            row = Interval(f"vs-torch-{name}", "s", TORCH)
            row.samples = {"ours": samples["ours"], "floor": samples["torch"]}
            yield row


def measured(rank: int, work: ChainWork, with_torch: bool) -> dict[str, list[float]]:
    """Return the seconds of steps, on one of the ranks."""
    from everstep.pipeline.graph import Stage, make_chain_graph
    from everstep.pipeline.schedules import simulate_schedule
    from everstep.pipeline.transport.gloo import ProcessGroups
    from everstep.pipeline.transport.grid import make_grid

    own = work.order.stages_of(rank)
    modules = {stage: work.module(stage) for stage in own}
    ours = engine(work, ProcessGroups(make_grid(work.ranks, work.ranks)), modules)
    batch = work.batch()
    first, last = 0 in own, work.stages - 1 in own
    alone = _Alone(work, rank, {stage: work.module(stage) for stage in own})
    arms: dict[str, Callable[[], object]] = {
        "ours": lambda: ours.step({"x": batch} if first else None, batch if last else None),
        "work": alone.step,
    }
    if with_torch:
        others = {stage: work.module(stage) for stage in own}
        arms["torch"] = theirs(work, others, batch, first, last)
    samples = alternate(arms, ROUNDS).wall
    if with_torch:
        _same_gradients(modules, others)
    samples["closed"] = []
    for times in _of_all(alone.times[1:]):
        graph = make_chain_graph([Stage(*each) for each in times])
        samples["closed"].append(simulate_schedule(work.order, graph).makespan)
    return samples


class _Alone:
    """The computations of this rank in the order of its schedule, each timed, without the other rank: what they need of
    it is there from the start."""

    def __init__(self, work: ChainWork, rank: int, modules: dict[int, Any]) -> None:
        from benchmarks.pipeline.chain import ChainStage
        from everstep.pipeline.engine.stage import StageRunner

        #: Of each round and stage, 0 for those of the other rank: seconds of one micro-batch.
        self.times: list[list[tuple[float, float, float]]] = []
        self._work, self._actions = work, work.order.ranks[rank]
        self._parts = work.batch().split(work.rows)
        self._stages = {
            index: StageRunner(
                index,
                ChainStage(index, work.stages, module),
                {f"v{index - 1}": True} if index else {},
                {f"v{index}": True} if index < work.stages - 1 else {},
                lambda microbatch, again: nullcontext(),
                self._loss if index == work.stages - 1 else None,
                recompute=False,
            )
            for index, module in modules.items()
        }

    def _loss(self, microbatch: int, output: Any) -> Any:
        from everstep.pipeline.engine.losses import compute_loss

        return compute_loss(loss, output, self._parts[microbatch], self._work.rows, None)

    def step(self) -> None:
        """One round."""
        spent: dict[tuple[int, str], list[float]] = {}
        for action in self._actions:
            began = time.perf_counter()
            self._do(action)
            spent.setdefault((action.stage, action.kind), []).append(time.perf_counter() - began)
        mean = {key: sum(each) / len(each) for key, each in spent.items()}
        self.times.append(
            [
                (
                    mean.get((index, "F"), 0.0),
                    mean.get((index, "B"), mean.get((index, "I"), 0.0)),
                    mean.get((index, "W"), 0.0),
                )
                for index in range(self._work.stages)
            ]
        )

    def _do(self, action: Action) -> None:
        from everstep.pipeline.engine.nested import value_of

        stage, part = self._stages[action.stage], self._parts[action.microbatch]
        if action.kind is ActionKind.FORWARD:
            value = value_of("x", part.detach().requires_grad_())[0]
            stage.forward(action.microbatch, dict.fromkeys(stage.edges, value), {"x": part}, train=True)
        elif action.kind is ActionKind.WEIGHT_GRAD:
            stage.weight_grad(action.microbatch)
        else:
            given = {f"v{action.stage}": [part]} if action.stage < self._work.stages - 1 else {}
            backward = stage.backward if action.kind is ActionKind.BACKWARD else stage.input_grad
            backward(action.microbatch, given, 1.0)


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


def theirs(work: ChainWork, modules: dict[int, Any], batch: Any, first: bool, last: bool) -> Callable[[], object]:
    """Make a step of torch.distributed.pipelining with the same stages in the same schedule."""
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
