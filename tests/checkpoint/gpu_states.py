"""States on pretended GPUs: a slot of memory, and a parameter that has been trained."""

from __future__ import annotations

from typing import Any

import torch

from tests.checkpoint.pretended_cuda import on_gpu


def slot(size: int = 1 << 12) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def trained(kind: Any = torch.optim.SGD, **options: Any) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    """A parameter on a GPU whose optimizer has made one step; each step takes one off."""
    param = torch.nn.Parameter(on_gpu(torch.zeros(4)))
    param.grad = on_gpu(torch.ones(4))
    optimizer = kind([param], lr=1.0, foreach=False, **options)
    optimizer.step()
    return param, optimizer
