"""Activation checkpointing: modules are marked, and the stages that have them do their forward again."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn

_marked: weakref.WeakSet[Any] = weakref.WeakSet()


def set_activation_checkpointing(
    module: nn.Module, preserve_rng_state: bool = True, pack_args_as_tuple: bool = False, strategy: str = "each"
) -> None:
    """Trade memory of `module` for time: the stages that have a part of it keep their inputs only.

    `strategy` (each, contiguous, group_2 …) is checked and changes nothing: what is done again is a stage. Random
    numbers are always the same ones.
    """
    if strategy not in ("each", "contiguous") and not (strategy.startswith("group_") and strategy[6:].isdigit()):
        raise ValueError(f"strategy is {strategy!r}: it must be each, contiguous, or group_2, group_3 …")
    _marked.add(module)


def checkpoint(module: nn.Module, *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
    """Call `module`, whose stage keeps its inputs only."""
    if isinstance(module, nn.Module):
        _marked.add(module)
    return module(*args, **kwargs)


def checkpoint_sequential(
    sequential: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """Mark and call a Sequential with `input`; see `set_activation_checkpointing`."""
    set_activation_checkpointing(sequential, strategy=strategy)
    return sequential(*input) if pack_args_as_tuple and isinstance(input, Sequence) else sequential(input)


def list_marked_modules(model: nn.Module) -> list[str]:
    """Return the names of marked modules of a model."""
    return [name for name, module in model.named_modules() if module in _marked]
