"""Modules that torch.compile has to do with: each is one node, since only a whole one runs compiled."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch import nn

COMPILED = "it is compiled"


def is_compiled(module: nn.Module) -> bool:
    """Return whether a call of the module runs compiled: by `torch.compile(module)`, `module.compile()`, or a compiled
    `forward`."""
    by_method = module._compiled_call_impl is not None
    return hasattr(module, "_orig_mod") or by_method or hasattr(module.forward, "_torchdynamo_orig_callable")


def disable_compilation() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which what is compiled runs as it was written.

    A trace looks into it so, and a comparison neither compiles it for modes that no step has, nor takes from the number
    of times that it may be compiled anew.
    """
    if "torch._dynamo" not in sys.modules:  # it takes seconds to import, and nothing can have been compiled without
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return context
