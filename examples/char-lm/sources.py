"""The training data: the sources of Python's own standard library, as characters."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor


def corpus() -> tuple[Tensor, Tensor]:
    """All but every tenth file of the standard library to learn from, and the rest to test with."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))

    def text(chosen: list[Path]) -> Tensor:
        content = "\f".join(file.read_text(encoding="utf-8") for file in chosen)
        return torch.tensor(list(content.encode("ascii", errors="ignore")), dtype=torch.long)

    return text([file for i, file in enumerate(files) if i % 10]), text(files[::10])


def batch(text: Tensor, size: int, context: int, seed: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """`size` sequences and what follows each of their characters, drawn by the seed alone."""
    generator = torch.Generator().manual_seed(hash(seed))
    starts = torch.randint(len(text) - context - 1, (size, 1), generator=generator)
    window = text[starts + torch.arange(context + 1)]
    return window[:, :-1], window[:, 1:]
