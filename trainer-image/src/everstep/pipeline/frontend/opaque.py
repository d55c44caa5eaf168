"""Infer the outputs of an opaque module by running a copy of it on random numbers, with two batches of different
sizes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from everstep.pipeline.frontend.sizes import Sizes, evaluate_size

_SAMPLES = (2, 3)
WHOLE_NUMBERS = (0, 1)  # the first is an index into anything; a length, as of a packed sequence, is never 0


class Failed(Exception):
    """It cannot be run alone, or its results do not follow a rule; the message says what happened."""


def infer_outputs(
    module: nn.Module, inputs: Any, sizes: Sizes, fake: Any, device: Any
) -> tuple[Any, list[int], list[str]]:
    """The module's result as tensors without data, which of the tensors in `inputs` (args, kwargs) it changes, and
    which of its parameters and buffers, by name.

    The module itself is left as it is.
    """
    leaves, spec = pytree.tree_flatten(inputs)
    shapes = [sizes.shape(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    runs = []
    with _disable_current_modes(), torch.enable_grad(), torch.random.fork_rng():
        own = _with_data(module)
        before_all = {name: (each, each._version, each.detach().clone()) for name, each in _named_weights(own)}
        for samples in _SAMPLES:
            given, before, result = _run_on_random_numbers(own, leaves, spec, shapes, sizes.hints(samples))
            after = [leaf._version if isinstance(leaf, torch.Tensor) else 0 for leaf in given]
            changed = [index for index, version in enumerate(before) if version != after[index]]
            runs.append((pytree.tree_flatten(result), changed))
        held = dict(_named_weights(own))
        written = [name for name, known in before_all.items() if _was_written(held.get(name), *known)]
    ((one, one_spec), changed), ((other, other_spec), _) = runs
    if one_spec != other_spec:
        raise Failed("the structure of its result depends on the data")
    result = [_generalise_shape(a, b, leaves, shapes, sizes, fake, device) for a, b in zip(one, other, strict=True)]
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    return pytree.tree_unflatten(result, one_spec), [tensors.index(index) for index in changed], written


def _run_on_random_numbers(
    module: nn.Module, leaves: list[Any], spec: Any, shapes: list[Any], hints: dict[Any, int]
) -> tuple[list[Any], list[int], Any]:
    """Return what the module was given, the versions of that before it ran, and its result."""
    failed: Exception | None = None
    for whole in WHOLE_NUMBERS:
        given = [_make_random_leaf(leaf, shape, hints, whole) for leaf, shape in zip(leaves, shapes, strict=True)]
        before = [leaf._version if isinstance(leaf, torch.Tensor) else 0 for leaf in given]
        args, kwargs = pytree.tree_unflatten(given, spec)
        try:
            return given, before, module(*args, **kwargs)
        except Exception as error:
            failed = failed or error
    raise Failed(f"it fails on random numbers ({type(failed).__name__}: {failed})") from failed


def _named_weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _was_written(now: Any, tensor: torch.Tensor, version: int, values: torch.Tensor) -> bool:
    """Tell whether a tensor was changed, or replaced. By its values too: writes through `.data` have no version."""
    if now is not tensor or tensor._version != version:
        return True
    return tensor.layout is torch.strided and not torch.equal(tensor, values)


def _with_data(module: nn.Module) -> nn.Module:
    """A copy, on the processor if the module has no data yet."""
    try:
        own = copy.deepcopy(module)
    except Exception as error:
        raise Failed(f"it cannot be copied ({type(error).__name__}: {error})") from error
    for each in own.modules():
        both: tuple[dict[str, Any], ...] = (each._parameters, each._buffers)
        for held in both:
            for name, tensor in held.items():
                if tensor is not None and tensor.device.type == "meta":
                    data = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
                    if data.is_floating_point():
                        data.normal_(std=0.02)
                    held[name] = nn.Parameter(data, tensor.requires_grad) if held is each._parameters else data
    return own


def _make_random_leaf(leaf: Any, shape: Any, hints: dict[Any, int], whole: int) -> Any:
    if isinstance(leaf, torch.SymInt):
        return int(evaluate_size(leaf.node.expr, hints))
    if not isinstance(leaf, torch.Tensor):
        return leaf
    concrete = [evaluate_size(size, hints) for size in shape]
    if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
        made = torch.randn(concrete, dtype=leaf.dtype, device=leaf.device)
        # Not a leaf, as no value is: the module may change it in place.
        return made.requires_grad_().clone() if leaf.requires_grad else made
    return torch.full(concrete, whole, dtype=leaf.dtype, device=leaf.device)


def _generalise_shape(
    one: Any, other: Any, given: list[Any], shapes: list[Any], sizes: Sizes, fake: Any, device: Any
) -> Any:
    """A tensor of the shape that gives these two for the two numbers of samples."""
    if not isinstance(one, torch.Tensor):
        if isinstance(one, int | float | bool | str | type(None)) and one == other:
            return one
        raise Failed("it gives numbers that depend on the data")
    symbols = _sizes_of(given, shapes)
    shape = []
    for small, large in zip(one.shape, other.shape, strict=True):
        per_sample = large - small
        if per_sample:
            shape.append(sizes.batch_size * per_sample + (small - _SAMPLES[0] * per_sample))
        else:
            shape.append(symbols.get(int(small), int(small)))
    with fake:
        made = torch.empty(shape, dtype=one.dtype, device=device if one.device.type == "cpu" else one.device)
        # A leaf could not be changed in place afterwards, as a result can.
        return made.requires_grad_().clone() if one.requires_grad else made


def _sizes_of(given: list[Any], shapes: list[Any]) -> dict[int, Any]:
    """The sizes of the inputs that may change, by what they are in the example."""
    found: dict[int, Any] = {}
    for leaf, shape in zip(given, shapes, strict=True):
        if shape is not None:
            for size, symbolic in zip(leaf.shape, shape, strict=True):
                if not isinstance(symbolic, int) and isinstance(size, torch.SymInt):
                    found.setdefault(_get_hint(size), size)
    return found


def _get_hint(size: torch.SymInt) -> int:
    hint: Any = size.node.hint
    return int(hint)
