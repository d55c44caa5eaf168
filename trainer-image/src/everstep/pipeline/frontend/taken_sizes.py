"""Sizes that an operation takes for numbers, as `linspace` and recurrent layers do: torch then makes its result of the
example's size, from which the model's code would go on with the example's number, whatever a batch has."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

from everstep.pipeline.frontend.pooling import is_pooling, run_pooling
from everstep.pipeline.frontend.record import FIXES_SIZES, SizesFixed
from everstep.pipeline.frontend.sizes import Sizes, SizesNotFollowed, evaluate_size, symbols_of
from everstep.pipeline.frontend.stand_ins import make_like, make_number

Growth = Callable[[Any], Any]  # of the steps by which a size is larger, which may be fewer than none
Steps = dict[Any, int]  # by which sizes are larger than the example's, by their expressions
_STEPS = range(1, 9)  # that are tried
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


def run_operation(sizes: Sizes, name: str, func: Callable[..., Any], given: Any, path: str) -> Any:
    """Run an operation on tensors without data, and hold the sizes that it is given until `restore_sizes` or a release.

    A recurrent one takes any length, but torch has it go through that of the example, step by step, which would be a
    number from then on. So it is run with small numbers in the place of all sizes, and its results have the sizes from
    which theirs come.

    Args:
        sizes: Of the trace.
        name: The operation's.
        func: The operation.
        given: Its arguments and its named arguments.
        path: The module whose code calls it.

    Raises:
        SizesFixed, SizesNotFollowed: If a recurrent operation takes no other sizes than the example's.
    """
    args, kwargs = given
    sizes.hold(pytree.tree_leaves(given))
    if is_pooling(name):
        return run_pooling(name, func, given)
    if name not in _RECURRENT:
        return func(*args, **kwargs)
    # What is not packed has three dimensions, and the last argument tells which of them is the length.
    dim = int(args[-1]) if args[0].dim() == 3 and not kwargs else None
    if dim is None or symbols_of([_find_expr(args[0].shape[dim])]):
        return _run_recurrent(sizes, func, given, path)
    length = int(args[0].shape[dim])
    first, *rest = _run_recurrent(sizes, func, ((args[0].narrow(dim, 0, min(length, 2)), *args[1:]), kwargs), path)
    return (make_like(first, [*first.shape[:dim], length, *first.shape[dim + 1 :]]), *rest)


def _run_recurrent(sizes: Sizes, func: Callable[..., Any], given: Any, path: str) -> tuple[Any, ...]:
    leaves, spec = pytree.tree_flatten(given)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    lengths: list[Any] = [size for leaf in tensors for size in leaf.shape if isinstance(size, torch.SymInt)]
    widths: list[Any] = [leaf.shape[-1] for leaf in tensors if leaf.dim() > 1]  # those of the weights, and numbers
    features = {width.node.expr: int(width) for width in widths if isinstance(width, torch.SymInt)}
    known = {size.node.expr: size for size in lengths if size.node.expr.free_symbols and size.node.expr not in features}
    small = features | {expr: number for number, expr in enumerate(known, 2)}

    def run(numbers: Mapping[Any, int]) -> list[Any]:
        args, kwargs = pytree.tree_unflatten([make_number(leaf, numbers) for leaf in leaves], spec)
        return list(func(*args, **kwargs))

    try:
        results, grown = run(small), {expr: run({**small, expr: small[expr] + 1}) for expr in known}
    except Exception as error:
        args, kwargs = given
        result = func(*args, **kwargs)  # which says what is wrong
        if any(not expr.is_Symbol for expr in known):
            raise _stop_following(sizes, path) from error
        return tuple(result)

    def restore(at: int, like: Any) -> Any:
        shape = list(like.shape)
        for expr, found in grown.items():
            shape = [
                size if then == now else known[expr]
                for size, now, then in zip(shape, like.shape, found[at].shape, strict=True)
            ]
        return make_like(like, shape)

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
        SizesFixed, SizesNotFollowed: If nobody knows how it grows, or the result is more than a new tensor.
    """
    leaves = pytree.tree_leaves(given)
    given_sizes: list[Any] = [leaf for leaf in leaves if isinstance(leaf, torch.SymInt)]
    taken = {leaf.node.expr: leaf for leaf in given_sizes if leaf.node.expr.free_symbols}  # others are numbers by now
    made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    own = {(at, dim): _find_expr(size) for at, leaf in enumerate(made) for dim, size in enumerate(leaf.shape)}
    own = {place: expr for place, expr in own.items() if expr not in taken}
    if not sizes.took_number or not taken or not own:
        return result
    hints = sizes.hints(sizes.hint)
    more = {expr: leaf - evaluate_size(expr, hints) for expr, leaf in taken.items()}
    try:
        trials = _try_larger(func, given, taken, hints)
    except Exception:
        if _grows_as_made(func, given, made, hints):
            return result
        return _keep_result(sizes, taken, result, path)
    shapes, changed = [list(leaf.shape) for leaf in made], False
    for (at, dim), expr in own.items():
        seen = [(steps, found[at][dim]) for steps, found in trials]
        if all(_evaluate_larger(expr, steps, hints) == size for steps, size in seen):
            continue
        growth = _find_growth(seen)
        if growth is None or not symbols_of([expr]) <= symbols_of(taken):
            return _keep_result(sizes, taken, result, path)
        shapes[at][dim], changed = sum((grow(more[each]) for each, grow in growth.items()), seen[0][1]), True
    lasting = {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, torch.Tensor)}
    if changed and any(leaf.untyped_storage()._cdata in lasting for leaf in made):
        return _keep_result(sizes, taken, result, path)
    sizes.release(as_numbers=False)
    if not changed:
        return result
    restored = map(make_like, made, shapes)
    return pytree.tree_map(lambda leaf: next(restored) if isinstance(leaf, torch.Tensor) else leaf, result)


def _keep_result(sizes: Sizes, taken: Mapping[Any, Any], result: Any, path: str) -> Any:
    """Return a result as it is, if the sizes that its operation has taken are numbers from now on."""
    sizes.release(as_numbers=True)
    if any(leaf.node.expr.free_symbols for leaf in taken.values()):
        raise _stop_following(sizes, path)
    return result


def _stop_following(sizes: Sizes, path: str) -> SizesFixed | SizesNotFollowed:
    """Return the error of a size that is taken for a number: its module is run as it is, or if that is the whole model,
    all sizes are numbers."""
    return SizesFixed(path, FIXES_SIZES) if path or sizes.are_numbers else SizesNotFollowed()


def _find_expr(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _try_larger(
    func: Callable[..., Any], given: Any, exprs: Collection[Any], hints: Mapping[Any, int]
) -> list[tuple[Steps, list[Sequence[int]]]]:
    """Return the shapes of what an operation makes with the example's sizes, with each of these larger by some steps,
    and with all of them larger."""
    leaves, spec = pytree.tree_flatten(given)
    several = [dict.fromkeys(exprs, _STEPS[-1])] if len(exprs) > 1 else []
    found = list[tuple[Steps, list[Sequence[int]]]]()
    for steps in [Steps(), *({expr: step} for expr in exprs for step in _STEPS), *several]:
        numbers = {expr: evaluate_size(expr, hints) + step for expr, step in steps.items()}
        args, kwargs = pytree.tree_unflatten([make_number(leaf, numbers) for leaf in leaves], spec)
        made = pytree.tree_leaves(func(*args, **kwargs))
        found.append((steps, [tuple(leaf.shape) for leaf in made if isinstance(leaf, torch.Tensor)]))
    return found


def _grows_as_made(func: Callable[..., Any], given: Any, made: Sequence[Any], hints: Mapping[Any, int]) -> bool:
    """Tell whether what an operation has made has the right sizes for each larger batch that it takes: one that it does
    not take, it rejects when it runs."""
    leaves, spec = pytree.tree_flatten(given)
    shapes = [leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)]
    found = (_find_expr(size) for size in [*leaves, *itertools.chain.from_iterable(shapes)])
    exprs = {expr for expr in found if symbols_of([expr])}
    for steps in _STEPS:
        larger = {symbol: hint + steps for symbol, hint in hints.items()}
        numbers = {expr: evaluate_size(expr, larger) for expr in exprs}
        args, kwargs = pytree.tree_unflatten([make_number(leaf, numbers) for leaf in leaves], spec)
        try:
            results = pytree.tree_leaves(func(*args, **kwargs))
        except Exception:  # noqa: S112 - it may take another
            continue
        has = [tuple(leaf.shape) for leaf in results if isinstance(leaf, torch.Tensor)]
        if has != [tuple(evaluate_size(_find_expr(size), larger) for size in leaf.shape) for leaf in made]:
            return False
    return True


def _evaluate_larger(expr: Any, steps: Steps, hints: Mapping[Any, int]) -> Any:
    """Return what torch takes a size for where others are larger by these steps: it does not know of what it has
    computed from a number of the example (48 // height) that it grows."""
    if isinstance(expr, int):
        return expr
    larger = {each: sympy.Integer(evaluate_size(each, hints) + step) for each, step in steps.items()}
    return evaluate_size(expr.xreplace(larger), hints)


def _find_growth(seen: Sequence[tuple[Steps, int]]) -> dict[Any, Growth] | None:
    """Return how a size grows with each of others, if it grows with several as with each alone."""
    usual, exprs = seen[0][1], list(dict.fromkeys(expr for steps, _ in seen for expr in steps))
    alone = {expr: [size - usual for steps, size in seen if steps.keys() == {expr}] for expr in exprs}
    fits = {expr: _fit_growth(each) for expr, each in alone.items()}
    found = {expr: fit for expr, fit in fits.items() if fit is not None}
    if len(found) < len(fits):
        return None
    are_right = (size - usual == sum(found[expr](step) for expr, step in steps.items()) for steps, size in seen)
    return found if all(are_right) else None


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
