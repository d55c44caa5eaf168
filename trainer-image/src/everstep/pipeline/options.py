"""Define what a script may say of a pipeline beyond the usual keywords: where it runs, and how it is planned."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from everstep.pipeline.plan import OPTIMIZER_FACTOR

if TYPE_CHECKING:
    import torch
    from torch import nn

    from everstep.pipeline.frontend.materialise import Source
    from everstep.pipeline.planning import Objective

Costs = Literal["measured", "counted"]


@dataclass(frozen=True)
class LayoutOptions:
    """The options of where a pipeline runs: on which processes and devices, with which batch and which weights.

    Attributes:
        data_parallel: The number of replicas of the pipeline; None for the processes that `stages` leaves over.
        global_batch: The samples of a step of all replicas together; None for as many as the example has for each.
        placement: How ranks are numbered over the processes: `cluster`, `spread`, or an order of the letters D, P, T.
        device: The device of this process; None for that of the example.
        weights: The weights of a model that was built without any: a state dictionary, or a function of names. None for
            what its modules' initialisers draw, seeded.
    """

    data_parallel: int | None = None
    global_batch: int | None = None
    placement: str = "cluster"
    device: torch.device | str | None = None
    weights: Source | None = field(default=None, repr=False)


@dataclass(frozen=True)
class PlanOptions:
    """The options of how a model is cut into stages, and of the plan that says so.

    Where `optimize`, `file` and `source` are None, a TrainingJob says them, if there is one.

    Attributes:
        optimize: What the plan is best for: `speed`, which is the default, or `memory`.
        memory_weight: The weight of memory in the objective, from 0 to 1; None for that of `optimize`.
        memory: The bytes that a rank may take for parameters, gradients, optimizer and activations; None for what its
            device has.
        optimizer_factor: The bytes of gradients and optimizer for each byte of parameters.
        file: The file, on the first process, where the plan is kept between runs.
        source: `file` if the file must be there, else `profile`: the plan is made where the file has none that fits.
        costs: `measured` on the devices, or `counted` for what no device here can measure.
        stage_of: The stages of modules or nodes, by hand.
        blocks: A chain of modules to cut between, for a model that cannot be traced.
        check: Whether the stages are compared with the whole model before training, if its weights are here.
    """

    optimize: Objective | None = None
    memory_weight: float | None = None
    memory: int | None = None
    optimizer_factor: float = OPTIMIZER_FACTOR
    file: str | os.PathLike[str] | None = None
    source: Literal["profile", "file"] | None = None
    costs: Costs = "measured"
    stage_of: Mapping[str, int] | None = None
    blocks: Sequence[str | nn.Module] | None = None
    check: bool = True

    def describe(self) -> dict[str, Any]:
        """Return what all processes must say alike, by the names of the fields; the file is the first one's alone."""
        return {name: value for name, value in vars(self).items() if name != "file"} | {
            "blocks": None if self.blocks is None else len(self.blocks)
        }
