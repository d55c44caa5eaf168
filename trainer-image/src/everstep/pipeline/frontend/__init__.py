"""An ordinary module becomes stages: its edges are found, its original modules stay what executes.

Here belong tracing, cutting over the module tree, stages as modules, and making their weights; no schedule, no
communication, no engine.
"""

from __future__ import annotations

from everstep.pipeline.frontend.placement import stage
from everstep.pipeline.frontend.split import split_model
from everstep.pipeline.frontend.stages import StageModule
from everstep.pipeline.frontend.trace import Traced, trace_model
from everstep.pipeline.frontend.tree import Tree, build_tree

__all__ = ["StageModule", "Traced", "Tree", "build_tree", "split_model", "stage", "trace_model"]
