"""Autocast around all of a model: a trace holds for the types that it was made with.

Code such as `scores.to(query.dtype)` and `if torch.is_autocast_enabled()` is written down as it went. So the model is
traced, measured and compared under the autocast of its steps, and a step under another one is rejected.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from everstep.pipeline.errors import PipelineError

_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def casting_to(dtype: torch.dtype | None, kind: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context of autocast to this type on devices of this kind; one that changes nothing for None."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(kind, dtype)


def autocast_of(precision: str, kind: str) -> torch.dtype | None:
    """Return the type to which steps cast: by `precision`, or by the autocast that the script is in; None without."""
    if precision in _PRECISIONS:
        return _PRECISIONS[precision]
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def refuse_other_autocast(traced: torch.dtype | None, precision: str, kind: str) -> None:
    """Check that a step casts to the type with which the model was traced.

    Raises:
        PipelineError: If the script is in another autocast than at the call of pipeline().
    """
    now = autocast_of(precision, kind)
    if now != traced:
        raise PipelineError(
            f"the step is {_describe_autocast(now)}, but pipeline() was called {_describe_autocast(traced)}, and what "
            "forward reads of types is part of the trace: give EngineOptions(precision='bf16') and leave autocast out, "
            "or enter the same autocast around pipeline() and around each step and evaluation"
        )


def _describe_autocast(dtype: torch.dtype | None) -> str:
    return "outside of torch.autocast" if dtype is None else f"inside torch.autocast with {dtype}"
