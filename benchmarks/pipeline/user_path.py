"""Rows `vs-torch-user-path` and `vs-torch-user-path-cpu`: what a script writes, beside torch.distributed.pipelining.

A transformer with dropout goes through `pipeline()` with all defaults that cost something in a step (heartbeats, random
numbers that do not depend on the cut), with the stages, the schedule and the optimizer that torch's has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from benchmarks.interval import Interval
from benchmarks.pipeline.ranks import alternate, run

TARGET = 1.02
ROUNDS = 400  # single steps differ by a tenth: of 60, the interval is as wide as what is asked
WORDS, WIDTH, LAYERS, TOKENS = 2048, 256, 6, 64
MICROBATCHES, SAMPLES, DROPOUT = 8, 2, 0.1
KINDS = ("user-path", "user-path-cpu")


def rows(wanted: Collection[str]) -> Iterator[Interval]:
    kinds = [kind for kind in KINDS if {"vs-torch", f"vs-torch-{kind}"} & set(wanted)]
    if not kinds:
        return
    found = run(2, measured)[0]
    for kind in kinds:
        row = Interval(f"vs-torch-{kind}", "s", TARGET)
        row.samples = found[kind]
        yield row


def measured(rank: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of steps of both, by the clock and of processor time."""
    import torch

    from benchmarks.pipeline.models import Gpt, mean_over_words, text
    from everstep.pipeline import PlanOptions, pipeline

    torch.manual_seed(0)
    inputs, targets = text(WORDS, TOKENS)(SAMPLES * MICROBATCHES)
    ids = inputs["ids"]
    model = Gpt(WORDS, WIDTH, LAYERS, DROPOUT)
    other = theirs(rank, model, ids, targets)
    with pipeline(
        model,
        ids,
        mean_over_words,
        stages=2,
        microbatches=MICROBATCHES,
        schedule="1f1b",
        plan=PlanOptions(stage_of=_cut()),
    ) as run_:
        optimizer = torch.optim.AdamW(run_.groups(), lr=1e-4)

        def ours() -> None:
            run_.step(ids, targets)
            optimizer.step()

        times = alternate({"ours": ours, "floor": other}, ROUNDS)
        return {"user-path": times.wall, "user-path-cpu": times.processor}


def _cut() -> dict[str, int]:
    return {"embed": 0, **{f"h.{i}": int(i >= LAYERS // 2) for i in range(LAYERS)}, "norm": 1, "head": 1}


def theirs(rank: int, model: Any, ids: Any, targets: Any) -> Callable[[], None]:
    """Make a step of torch.distributed.pipelining with a copy of the same modules in the same stages."""
    import copy

    import torch
    from torch import nn
    from torch.distributed import pipelining

    from benchmarks.pipeline.models import mean_over_words

    model = copy.deepcopy(model)
    first = [model.embed, *model.h[: LAYERS // 2]]
    part = nn.Sequential(*([*model.h[LAYERS // 2 :], model.norm, model.head] if rank else first))
    stage = pipelining.PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, MICROBATCHES, loss_fn=mean_over_words)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        schedule.step(*(() if rank else (ids,)), **({"target": targets} if rank else {}), return_outputs=False)
        optimizer.step()

    return step
