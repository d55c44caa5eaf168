"""Small models with a part that each test says, and their example."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

X = {"x": torch.ones(3, 4)}


class Net(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Two layers with something between them, which each test says."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.one, self.two, self.between = nn.Linear(4, 4), nn.Linear(4, 4), between

    def forward(self, x: Any) -> Any:
        return self.two(self.between(self.one(x)))


class Block(nn.Module):  # type: ignore[misc]
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)
