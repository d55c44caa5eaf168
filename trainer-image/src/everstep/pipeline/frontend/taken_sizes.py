"""Sizes that an operation takes for numbers, as `linspace` and recurrent layers do: torch then makes its result of the
example's size, from which the model's code would go on with the example's number, whatever a batch has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

from everstep.pipeline.frontend.record import FIXES_SIZES, SizesFixed
from everstep.pipeline.frontend.sizes import Sizes, evaluate_size, symbols_of

Growth = Callable[[Any], Any]  # of the steps by which a size is larger, which may be fewer than none
_STEPS = range(1, 9)  # by which a size is tried larger than the example's
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


def run_operation(name: str, func: Callable[..., Any], given: Any) -> Any:
    """Run an operation on tensors without data.

    A recurrent one takes any length, but torch has it go through that of the example, step by step, which would be a
    number from then on. So it is run with small numbers in the place of all sizes, and its results have the sizes from
    which theirs come.

    Args:
        name: The operation's.
        func: The operation.
        given: Its arguments and its named arguments.
    """
    args, kwargs = given
    if name not in _RECURRENT:
        return func(*args, **kwargs)
    leaves, spec = pytree.tree_flatten(given)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    sizes: list[Any] = [size for leaf in tensors for size in leaf.shape if isinstance(size, torch.SymInt)]
    widths: list[Any] = [leaf.shape[-1] for leaf in tensors if leaf.dim() > 1]  # those of the weights, and numbers
    features = {width.node.expr: int(width) for width in widths if isinstance(width, torch.SymInt)}
    known = {size.node.expr: size for size in sizes if size.node.expr.free_symbols and size.node.expr not in features}
    small = features | {expr: number for number, expr in enumerate(known, 2)}

    def run(numbers: Mapping[Any, int]) -> list[Any]:
        args, kwargs = pytree.tree_unflatten([_make_number(leaf, {}, numbers) for leaf in leaves], spec)
        return list(func(*args, **kwargs))

    try:
        results, grown = run(small), {expr: run({**small, expr: small[expr] + 1}) for expr in known}
    except Exception:
        return func(*args, **kwargs)  # which says what is wrong, or takes no other size

    def restore(at: int, like: Any) -> Any:
        shape = list(like.shape)
        for expr, found in grown.items():
            shape = [
                size if then == now else known[expr]
                for size, now, then in zip(shape, like.shape, found[at].shape, strict=True)
            ]
        return _make_like(like, shape)

    return tuple(restore(at, like) for at, like in enumerate(results))


def restore_sizes(sizes: Sizes, func: Callable[..., Any], given: Any, result: Any, path: str) -> Any:
    """Return the result of an operation with sizes that follow from those that it was given as SymInt.

    It is run once more for each, with numbers: a dimension that grows with the size follows from it.

    Args:
        sizes: Of the trace.
        func: The operation, which draws nothing and changes nothing that it is given.
        given: Its arguments and its named arguments.
        result: That of tensors without data, in some dimensions of which may be the example's number.
        path: The module whose code calls it.

    Raises:
        SizesFixed: If nobody knows how it grows, or the result is more than a new tensor.
    """
    leaves, spec = pytree.tree_flatten(given)
    given_sizes: list[Any] = [leaf for leaf in leaves if isinstance(leaf, torch.SymInt)]
    taken = {leaf.node.expr: leaf for leaf in given_sizes if leaf.node.expr.free_symbols}  # others are numbers by now
    made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    own: dict[tuple[int, int], Any] = {
        (at, dim): size for at, leaf in enumerate(made) for dim, size in enumerate(leaf.shape)
    }
    own = {place: size for place, size in own.items() if type(size) is int or size.node.expr not in taken}
    if not sizes.took_number or not taken or not own:
        return result
    hints = sizes.hints(sizes.hint)
    hints_of = {expr: evaluate_size(expr, hints) for expr in taken}

    def run(more: Mapping[Any, int]) -> list[list[int]]:
        numbers = {expr: hints_of[expr] + step for expr, step in more.items()}
        args, kwargs = pytree.tree_unflatten([_make_number(leaf, hints, numbers) for leaf in leaves], spec)
        found = pytree.tree_leaves(func(*args, **kwargs))
        return [list(leaf.shape) for leaf in found if isinstance(leaf, torch.Tensor)]

    try:
        usual = run({})
        grown = {expr: [run({expr: step}) for step in _STEPS] for expr in taken}
        all_grown = run(dict.fromkeys(taken, _STEPS[-1]))
    except Exception:
        return result  # it takes no other size, and says so when it runs

    def is_followed(size: Any, at: int, dim: int) -> bool:
        """Tell whether torch knows how a size grows, as not of what it computes from a number (48 // height)."""
        if type(size) is int:
            return False
        steps = [
            ({expr: step}, found) for expr, each in grown.items() for step, found in zip(_STEPS, each, strict=True)
        ]
        for more, found in [*steps, (dict.fromkeys(taken, _STEPS[-1]), all_grown)]:
            known = {expr: sympy.Integer(hints_of[expr] + step) for expr, step in more.items()}
            if evaluate_size(size.node.expr.xreplace(known), hints) != found[at][dim]:
                return False
        return True

    growth = dict[tuple[int, int], dict[Any, Growth]]()
    for at, dim in (place for place, size in own.items() if not is_followed(size, *place)):
        more = {expr: [found[at][dim] - usual[at][dim] for found in each] for expr, each in grown.items()}
        by = {expr: _fit_growth(each) for expr, each in more.items() if any(each)}
        if None in by.values() or all_grown[at][dim] - usual[at][dim] != sum(each[-1] for each in more.values()):
            raise SizesFixed(path, FIXES_SIZES)
        if type(size := own[at, dim]) is not int:
            if not symbols_of([size.node.expr]) <= symbols_of(taken):
                raise SizesFixed(path, FIXES_SIZES)
        elif not by:
            continue
        growth[at, dim] = {expr: fit for expr, fit in by.items() if fit is not None}
    if not growth:
        return result
    lasting = {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, torch.Tensor)}
    if any(leaf.untyped_storage()._cdata in lasting for leaf in made):
        raise SizesFixed(path, FIXES_SIZES)

    def restore(at: int, leaf: Any) -> Any:
        def grow(dim: int, by: Mapping[Any, Growth]) -> Any:
            return sum((fit(taken[expr] - hints_of[expr]) for expr, fit in by.items()), usual[at][dim])

        places = [(at, dim) for dim in range(leaf.dim())]
        shape = [grow(place[1], growth[place]) if place in growth else leaf.shape[place[1]] for place in places]
        return _make_like(leaf, shape)

    counts = iter(range(len(made)))
    return pytree.tree_map(lambda leaf: restore(next(counts), leaf) if isinstance(leaf, torch.Tensor) else leaf, result)


def _make_like(like: Any, shape: Sequence[Any]) -> Any:
    """Return a tensor without data of another shape, of which a gradient can be asked as of the other."""
    made = like.new_empty(shape)
    return made.requires_grad_().clone() if like.requires_grad else made


def _fit_growth(more: Sequence[int]) -> Growth | None:
    """Return how a size grows by the steps of another, from what it has grown by after each of `_STEPS`: as a multiple,
    a half or a quarter, or the number of pairs; None if it is none of these."""
    bend = more[1] - 2 * more[0]

    def grow_as(parts: int, times: int, start: int) -> Growth:
        return lambda step: (times * step + start) // parts

    fits: list[Growth] = [lambda step: more[0] * step + bend * step * (step - 1) // 2]
    for parts in (2, 4):
        fits += [grow_as(parts, parts * more[-1] // len(more), start) for start in range(parts)]
    return next((fit for fit in fits if list(map(fit, _STEPS)) == list(more)), None)


def _make_number(leaf: Any, hints: Mapping[Any, int], numbers: Mapping[Any, int]) -> Any:
    """Return a leaf with numbers in the place of sizes: those given, or those of the hints for their symbols. A tensor
    has no data either way."""
    if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
        expr = leaf.node.expr
        return numbers[expr] if expr in numbers else evaluate_size(expr, hints)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape = [_make_number(size, hints, numbers) for size in leaf.shape]
    return torch.empty(shape, dtype=leaf.dtype, device=leaf.device, requires_grad=leaf.requires_grad)
