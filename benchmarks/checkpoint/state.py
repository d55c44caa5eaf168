"""The state that is saved: a model and its optimizer, as a script would give them."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def made(size: int, layers: int = 48) -> dict[str, object]:
    """Return a model with AdamW, its moments there; `size` bytes in all."""
    model = model_of(size, layers)["model"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def model_of(size: int, layers: int = 48) -> dict[str, torch.nn.Module]:
    """Return the model alone, of a third of `size`."""
    width = 1024
    rows = max(1, size // 3 // 4 // layers // width)
    torch.manual_seed(1)
    return {"model": torch.nn.ModuleList(torch.nn.Linear(width, rows) for _ in range(layers))}


def started(objects: Mapping[str, object]) -> dict[str, object]:
    """Return the same model as a script has it when it begins: with an optimizer that has no state yet."""
    model = objects["model"]
    assert isinstance(model, torch.nn.Module)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-4)}


def tensors(objects: dict[str, object]) -> list[torch.Tensor]:
    """Return all tensors of the state."""
    model, optimizer = objects["model"], objects["optimizer"]
    assert isinstance(model, torch.nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    found = [parameter.detach() for parameter in model.parameters()]
    for slots in optimizer.state.values():
        found += [each for each in slots.values() if isinstance(each, torch.Tensor)]
    return found
