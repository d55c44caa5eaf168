"""Assigns modules to stages, and builds modules without data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from everstep.compat.smdistributed.modelparallel.torch.refused import raise_not_offered
from everstep.compat.smdistributed.modelparallel.torch.state import current_state
from everstep.pipeline.frontend.materialise import without_weights
from everstep.pipeline.frontend.placement import place, stage


@contextlib.contextmanager
def partition(i: int) -> Iterator[None]:
    """Build modules in stage `i`; the innermost context counts. Ignored with auto_partition."""
    if current_state().config.auto_partition:
        yield
        return
    _check_stage(i)
    with stage(i):
        yield


def set_partition(module: nn.Module, i: int) -> None:
    """Put `module` and all in it in stage `i`. Ignored with auto_partition."""
    if not current_state().config.auto_partition:
        _check_stage(i)
        place(module, i)


@contextlib.contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Build models without data until each process has only its own stages."""
    if enabled:
        with without_weights():
            yield
    else:
        yield


@contextlib.contextmanager
def model_creation(tensor_parallelism: bool = False, dtype: Any = None, **config: Any) -> Iterator[None]:
    """Build the model inside this context, with parameters of type `dtype`, and without data if
    delayed_parameter_initialization is set.

    With fp16 or bf16 in the configuration they are of the default type, whatever `dtype` says: they are what the
    optimizer changes; computations are in less precision by themselves.
    """
    if tensor_parallelism:
        raise_not_offered("tensor_parallelism")
    before = torch.get_default_dtype()
    low = current_state().config.half or current_state().config.bf16
    torch.set_default_dtype(before if dtype is None or (low and dtype in (torch.float16, torch.bfloat16)) else dtype)
    try:
        with delay_param_initialization(current_state().config.delayed_parameter_initialization):
            yield
    finally:
        torch.set_default_dtype(before)


def _check_stage(i: int) -> None:
    stages = current_state().config.pipeline_parallel_degree
    if not 0 <= i < stages:
        raise ValueError(f"partition {i}: there are {stages}, numbered from 0")
