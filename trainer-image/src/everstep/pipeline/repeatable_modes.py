"""The modes in which a model makes the same of a batch again and again: evaluation, and training without what draws."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from everstep.pipeline.frontend.modes import DIFFERS
from everstep.pipeline.frontend.trace import Traced
from everstep.pipeline.frontend.tree import Tree


def differs_in_training(found: Traced | Tree) -> bool:
    """Tell whether some code does more in training than what its modules do by their own flags, as far as is known."""
    if isinstance(found, Tree) or not found.both:
        return True
    return any(call.whole == DIFFERS for call in found.record.root.all_calls())


@contextlib.contextmanager
def repeatable_training(model: nn.Module) -> Iterator[None]:
    """Training as far as the model is in it, without dropout, and without statistics of a batch, which batch
    normalisation takes of each micro-batch."""
    flags = {each: each.training for each in model.modules()}
    try:
        for each in flags:
            if isinstance(each, nn.modules.dropout._DropoutNd | nn.modules.batchnorm._BatchNorm):
                each.training = False
        yield
    finally:
        for each, flag in flags.items():
            each.training = flag


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation, by the flags of all modules."""
    flags = {each: each.training for each in model.modules()}
    try:
        for each in flags:  # not by `eval`: one of a model's own may do more, which nothing would undo
            each.training = False
        yield
    finally:
        for each, flag in flags.items():
            each.training = flag


class CopiedDropout(TorchFunctionMode):  # type: ignore[misc]  # torch is not where types are checked
    """Has dropout give new tensors in evaluation, as it does in training: code that changes them in place would change
    what was dropped from, which may be needed for gradients."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.clone() if func in _DROPOUTS and args and result is args[0] else result


_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
