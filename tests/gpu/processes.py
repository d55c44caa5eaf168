"""Processes of these tests: children of one server that has imported torch, and has never used a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

from tests.checkpoint.forked import forkserver


def start_ranks(work: Callable[..., None], args: tuple[Any, ...], count: int) -> None:
    """Run `work(rank, *args)` in so many processes, and raise what the first that fails has raised."""
    forkserver()  # tells the server what to import
    mp.start_processes(work, args, nprocs=count, join=True, start_method="forkserver")
