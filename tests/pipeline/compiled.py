"""Models of which parts are compiled, in each of the ways that torch has for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.pipeline.architectures import Gpt
from tests.pipeline.models import CASES, Case

BACKENDS = ("eager", "aot_eager", "inductor")


def wrap_blocks(model: Any, backend: str) -> Any:
    """Compile each block by `torch.compile(module)`."""
    for index, block in enumerate(model.h):
        model.h[index] = torch.compile(block, backend=backend, fullgraph=True)
    return model


def compile_blocks_in_place(model: Any, backend: str) -> Any:
    """Compile each block by `module.compile()`."""
    for block in model.h:
        block.compile(backend=backend, fullgraph=True)
    return model


def compile_forwards(model: Any, backend: str) -> Any:
    """Compile the `forward` of each block."""
    for block in model.h:
        block.forward = torch.compile(block.forward, backend=backend)
    return model


class Half(nn.Sequential):  # type: ignore[misc]  # torch is not where types are checked
    """Layers that are compiled together: all that a stage has."""

    def __init__(self, first: int, backend: str) -> None:
        layers = (nn.Linear(first, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 5))
        super().__init__(torch.compile(nn.Sequential(*layers), backend=backend))


WAYS: dict[str, Callable[[Any, str], Any]] = {
    "wrapped": wrap_blocks,
    "in-place": compile_blocks_in_place,
    "forwards": compile_forwards,
}


def _gpt(way: str, backend: str) -> Case:
    like = CASES["gpt-dropout"]
    return Case(
        f"gpt-{way}-{backend}",
        lambda: WAYS[way](Gpt(depth=2, dropout=0.1), backend),
        like.batch,
        like.loss,
        per_microbatch=True,
    )


def _halves(backend: str) -> Case:
    like = CASES["mlp"]
    return Case(
        f"halves-{backend}",
        lambda: nn.Sequential(Half(12, backend), Half(5, backend)),
        lambda samples, seed: _named(like.batch(samples, seed)),
        like.loss,
        per_microbatch=True,
    )


def _named(batch: Any) -> Any:
    batch.inputs["input"] = batch.inputs.pop("x")  # the argument of nn.Sequential
    return batch


COMPILED: dict[str, Case] = {
    case.name: case for backend in BACKENDS for case in (*(_gpt(way, backend) for way in WAYS), _halves(backend))
}
