"""everstep: distributed training on any Kubernetes cluster that never loses a step.

`everstep.progress(step, total=…, loss=…)` reports a step; `everstep.checkpointer(store, …)` saves and restores a run.
Everything else is in the submodules; importing this package imports nothing but the standard library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.checkpoint.session import Checkpointer as checkpointer
    from everstep.progress import progress as progress

__all__ = ["checkpointer", "progress"]


def __getattr__(name: str) -> Any:
    # Lazily, since the agent carries this file but not the library.
    if name == "progress":
        from importlib import import_module

        return import_module("everstep.progress")
    if name == "checkpointer":
        from importlib import import_module

        return import_module("everstep.checkpoint.session").Checkpointer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
