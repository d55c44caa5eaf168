"""Check before training that the stages are the model."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from everstep.pipeline.engine.nested import map_tensors, tensors_of
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.frontend.arguments import Arguments
from everstep.pipeline.frontend.autocast import casting_to
from everstep.pipeline.frontend.check import compare_gradients
from everstep.pipeline.frontend.stages import StageModule
from everstep.pipeline.frontend.trace import Traced
from everstep.pipeline.frontend.tree import Tree
from everstep.pipeline.repeatable_modes import CopiedDropout, repeatable_training

_log = logging.getLogger("everstep.pipeline")

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}


def compare_stages(
    model: nn.Module,
    found: Traced | Tree,
    parts: Sequence[StageModule],
    batch: Mapping[str, Any],
    autocast: torch.dtype | None = None,
) -> str:
    """Compares the stages with the model, where that has weights here, under the `autocast` of the steps. There is
    nothing to tell: else it is refused."""
    tensors = [*model.parameters(), *model.buffers(), *tensors_of(dict(batch))]
    if any(each.device.type == "meta" for each in tensors) or not Arguments(model).fits(batch):
        return ""
    batch = map_tensors(dict(batch), lambda tensor: tensor.to(tensors[0].device))
    types = [each.dtype for each in tensors] + ([] if autocast is None else [autocast])
    tolerance = max(_TOLERANCE.get(each, 0.0) for each in types)
    modules = {each for whole in (model, *(part.module for part in parts)) for each in whole.modules()}
    flags = {each: each.training for each in modules}
    # Dropout draws in the order of the stages, in the engine by names: what is compared must draw nothing.
    quiet = not isinstance(found, Traced) or found.both
    # What code does that no trace follows is not known.
    has_hooks = (
        isinstance(found, Tree)
        or any(part.listens for part in parts)
        or any(call.opaque for call in found.record.root.all_calls())
    )

    def compare() -> None:
        with casting_to(autocast, tensors[0].device.type):
            compare_gradients(model, parts, batch, _project_output, tolerance=tolerance, has_hooks=has_hooks)

    try:
        for each in modules if quiet else ():
            each.training = False
        try:
            compare()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not quiet:
                raise
            if "inplace operation" in str(error):
                with contextlib.suppress(RuntimeError), CopiedDropout():
                    compare()
                    return ""
            # In evaluation some code makes no graph, or frees it: torch.autograd.grad(…, create_graph=self.training).
            _log.info("the stages are compared in training, not in evaluation: %s", error)
            for each, flag in flags.items():
                each.training = flag
            with repeatable_training(nn.ModuleList([model, *(part.module for part in parts)])):
                compare()
    except torch.OutOfMemoryError:
        _log.warning("the stages were not compared with the model: there is not enough memory for both")
    except PipelineError as error:
        if isinstance(found, Tree):
            raise PipelineError(
                f"{error}; it is cut between its blocks ({', '.join(found.blocks[:4])}, …), each of which is called "
                "with what the one before gave, and what else its forward does is left out: move that into the blocks"
            ) from error
        raise
    except Exception as error:
        if Arguments(model).fits_by_name(batch):
            raise
        # It is given what the first of the blocks takes, and may take something else.
        _log.warning("the stages were not compared with the model: %s: %s", type(error).__name__, error)
    finally:
        for each, flag in flags.items():
            each.training = flag
    return ""


def _project_output(output: Any) -> Any:
    """A number to which every element of a result contributes in its own way."""
    total = torch.zeros((), device="cpu")
    for each in tensors_of(output):
        if each.requires_grad:
            row = each.reshape(-1).float() if each.dtype in (torch.float16, torch.bfloat16) else each.reshape(-1)
            total = total.to(row) + (row * torch.cos(torch.arange(len(row), device=row.device))).sum()
    return total
