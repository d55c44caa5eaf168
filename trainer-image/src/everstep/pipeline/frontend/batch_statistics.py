"""Tell which layers keep running statistics as torch's batch normalisation does: the engine puts those together.

A layer with a forward of its own may do anything with its buffers. Many copy torch's, to add an activation to it. They
are told from those that normalise by their statistics in training, or by parts of a batch, by what they do.
"""

from __future__ import annotations

import copy
import math
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

_BatchNorm = nn.modules.batchnorm._BatchNorm
# The numbers of dimensions of what a layer may take: each is tried with channels behind the samples and at the end.
_DIMENSIONS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}
_ANY = (2, 3, 4, 5)  # of a layer that is none of these classes
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
# Elements with which a layer is tried, and the most samples: one that takes parts of a batch may take large ones.
_ELEMENTS, _SAMPLES = 1 << 17, 4096

# Running means and variances, and how many batches they are of: a layer may begin to use them after some thousands.
_STARTS = ((0.5, 0), (2.0, 1_000_000))

# The types in which a layer is tried, with the absolute tolerance: a layer that casts to float32 fails in double.
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-5}

# What every module keeps of its hooks.
_HOOKS = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict) and "_hooks" in name)

_tried: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()

Effect = tuple[Any, dict[str, Any]]  # what a forward returns, and the buffers after it


def are_statistics_put_together(module: nn.Module) -> bool:
    """Tell whether the engine puts a module's running statistics together over all micro-batches.

    It does for batch normalisation with torch's own forward, and with another one that writes what torch's would, and
    does not compute from what was there before.
    """
    if not (isinstance(module, _BatchNorm) and isinstance(module.running_mean, torch.Tensor)):
        return False
    if not has_own_forward(module):
        return True
    if module not in _tried:
        is_of_class = "forward" not in vars(module)  # what a script puts in its place is not tried
        _tried[module] = is_of_class and any(_keeps_them_as_torch_does(module, dtype) for dtype in _TOLERANCES)
    return _tried[module]


def has_own_forward(module: nn.Module) -> bool:
    """Tell whether batch normalisation runs another forward than torch's, compiled or not."""
    forward = getattr(module.forward, "_torchdynamo_orig_callable", module.forward)
    return getattr(forward, "__func__", forward) is not _BatchNorm.forward


def _keeps_them_as_torch_does(module: Any, dtype: torch.dtype) -> bool:
    dimensions = next((counts for kind, counts in _DIMENSIONS.items() if isinstance(module, kind)), _ANY)
    if not module.track_running_stats:
        return False
    # While a model is recorded, what is done here is none of it.
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.random.fork_rng(devices=[]):
        found = [
            [_does_as_torch(module, count, place, dtype) for place in sorted({1, count - 1})] for count in dimensions
        ]
    # One that reshapes what it is given takes channels in both places, and does as torch with those in its own.
    return any(True in each for each in found) and all(True in each or False not in each for each in found)


def _does_as_torch(module: Any, dimensions: int, place: int, dtype: torch.dtype) -> bool | None:
    """Tell whether a layer keeps its statistics as torch's does, of a tensor that has its channels in this place; None
    if it does not take such a tensor, as most do that have their channels last."""
    features = module.num_features
    sizes = [size for size in range(2, 6) if size != features][: dimensions - 2]
    samples = max(64, min(_SAMPLES, _ELEMENTS // (features * math.prod(sizes))))
    sizes.insert(place - 1, features)
    x = torch.randn((samples, *sizes), dtype=dtype, device="cpu", generator=torch.Generator().manual_seed(0))
    x[: samples // 8] = 0  # as padding, which a layer may leave out
    try:
        for momentum in (1.0, 0.25):
            own = [_find_effect(module, type(module).forward, x, momentum, *start) for start in _STARTS]
            for start, (result, buffers) in zip(_STARTS, own, strict=True):
                _, wanted = _find_effect(module, _BatchNorm.forward, x.movedim(place, 1), momentum, *start)
                if not torch.equal(result, own[0][0]) or not _are_close(buffers, wanted, _TOLERANCES[dtype]):
                    return False
    except Exception:  # whatever it is, it is not what torch's would do
        return None
    return True


def _find_effect(module: Any, forward: Any, x: torch.Tensor, momentum: float, start: float, batches: int) -> Effect:
    """Call a forward on a copy of a module in training, whose statistics are all `start` before, of `batches`."""
    torch.default_generator.manual_seed(0)  # and not those of GPUs, which nobody gives their state back
    layer = _copy_without_hooks(module).to_empty(device="cpu").to(x.dtype).train()
    with torch.no_grad():
        for each in (*layer.parameters(), *layer.buffers()):
            each.fill_(1)
        for name, value in zip(STATISTICS, (start, start, batches), strict=True):
            layer._buffers[name].fill_(value)
        layer.momentum = momentum
        result = forward(layer, x.clone())
    return result, dict(layer.named_buffers())


def _copy_without_hooks(module: Any) -> Any:
    """Return a copy of a layer: its hooks may hold the whole model, or what cannot be copied, and are not tried."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        memo.update((id(hooks), type(hooks)()) for name, hooks in vars(part).items() if name in _HOOKS)
    return copy.deepcopy(module, memo)


def _are_close(found: dict[str, Any], wanted: dict[str, Any], absolute: float) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.allclose(each, wanted[name], rtol=1e-5, atol=absolute) for name, each in found.items()
    )
