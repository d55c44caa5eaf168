"""Pipelines: a model cut into stages, run by a schedule that was proven before, with the result of one process.

`everstep.pipeline.pipeline(model, example, loss, …)` is what a script needs, `stage(i)` places modules by hand.
Here belong the graph, the schedules, the partition, the engine and its front end; no launching, no cluster. Importing
this package imports neither torch nor numpy: plans are made and drawn without them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.pipeline.engine.options import EngineOptions as EngineOptions
    from everstep.pipeline.frontend.placement import stage as stage
    from everstep.pipeline.module import Pipeline as Pipeline
    from everstep.pipeline.options import LayoutOptions as LayoutOptions
    from everstep.pipeline.options import PlanOptions as PlanOptions
    from everstep.pipeline.session import pipeline as pipeline

__all__ = ["EngineOptions", "LayoutOptions", "Pipeline", "PlanOptions", "pipeline", "stage"]

_WHERE = {
    "EngineOptions": "engine.options",
    "LayoutOptions": "options",
    "Pipeline": "module",
    "PlanOptions": "options",
    "pipeline": "session",
    "stage": "frontend.placement",
}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
