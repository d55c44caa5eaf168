"""Infer the outputs of an opaque module by running a copy of it on random numbers, with batches of different sizes."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from everstep.pipeline.frontend.sizes import Sizes, evaluate_size, symbols_of

_SAMPLES = (2, 3)
# What numbers are beside those of a normal distribution, since a module may choose by their sum or their largest.
_OTHER_FRACTIONS: tuple[Callable[[Any], Any], ...] = (torch.abs, lambda drawn: -drawn.abs(), lambda drawn: 8 * drawn)


class Failed(Exception):
    """It cannot be run alone, or its results do not follow a rule; the message says what happened."""


def infer_outputs(
    module: nn.Module, inputs: Any, sizes: Sizes, fake: Any, device: Any
) -> tuple[Any, list[int], list[str], bool]:
    """The module's result as tensors without data, which of the tensors in `inputs` (args, kwargs) it changes, and
    which of its parameters and buffers, by name; and whether the sizes of its result may depend on more than sizes.

    The module itself is left as it is.
    """
    leaves, spec = pytree.tree_flatten(inputs)
    shapes = [sizes.shape(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    hints, runs = [sizes.hints(samples) for samples in _SAMPLES], []
    with _disable_current_modes(), torch.enable_grad(), torch.random.fork_rng():
        torch.manual_seed(0)  # all processes find the same, whatever their scripts have drawn
        own = _with_data(module)
        before_all = {name: (each, each._version, each.detach().clone()) for name, each in _named_weights(own)}
        for each in hints:
            given, before, result = _run_on_random_numbers(own, leaves, spec, shapes, each)
            after = [leaf._version if isinstance(leaf, torch.Tensor) else 0 for leaf in given]
            changed = [index for index, version in enumerate(before) if version != after[index]]
            runs.append((pytree.tree_flatten(result), changed))
        held = dict(_named_weights(own))
        written = [name for name, known in before_all.items() if _was_written(held.get(name), *known)]
        ((one, one_spec), changed), ((other, other_spec), _) = runs
        if one_spec != other_spec:
            raise Failed("the structure of its result depends on the data")
        rule, known = _SizeRule(sizes), list[Mapping[Any, int]]()
        for is_larger in (False, True):
            for varied in _vary_sizes(shapes, hints[0], sizes, is_larger=is_larger):
                with contextlib.suppress(Failed):
                    third, own_spec = pytree.tree_flatten(_run_on_random_numbers(own, leaves, spec, shapes, varied)[2])
                    if own_spec == one_spec and list(map(_count_dims, third)) == list(map(_count_dims, one)):
                        rule.varied.append(list(map(_get_shape, third)))
                        known.append(varied)
                        break
        rule.learn(leaves, shapes, [hints[0], *known])
        of_whole, of_fractions = _list_other_shapes(own, leaves, spec, shapes, hints[0], one_spec)
        rule.others = of_whole + of_fractions
        # One of whole numbers is the first run once more: alone it shows nothing.
        is_known = bool(of_fractions) and (len(of_whole) > 1 or not _list_counted(leaves))
        varies = not is_known or any(each != list(map(_get_shape, one)) for each in rule.others)
    result = [_generalise(place, a, b, rule, fake, device) for place, (a, b) in enumerate(zip(one, other, strict=True))]
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    return pytree.tree_unflatten(result, one_spec), [tensors.index(index) for index in changed], written, varies


def _run_on_random_numbers(
    module: nn.Module,
    leaves: list[Any],
    spec: Any,
    shapes: list[Any],
    hints: dict[Any, int],
    change: Callable[[Any], Any] = lambda drawn: drawn,
) -> tuple[list[Any], list[int], Any]:
    """Return what the module was given, the versions of that before it ran, and its result. `change` makes of numbers
    of a normal distribution those that it is given."""
    failed: Exception | None = None
    tried = list_whole_numbers([evaluate_size(size, hints) for size in shape or ()] for shape in shapes)
    for whole in tried if _list_counted(leaves) else tried[:1]:
        try:
            return _run_with(module, leaves, spec, shapes, hints, range(whole, whole + 1), change)
        except Failed:
            raise
        except Exception as error:
            failed = failed or error
    raise Failed(f"it fails on random numbers ({type(failed).__name__}: {failed})") from failed


def _run_with(
    module: nn.Module,
    leaves: list[Any],
    spec: Any,
    shapes: list[Any],
    hints: dict[Any, int],
    whole: range,
    change: Callable[[Any], Any] = lambda drawn: drawn,
) -> tuple[list[Any], list[int], Any]:
    given = [_make_random_leaf(leaf, shape, hints, whole, change) for leaf, shape in zip(leaves, shapes, strict=True)]
    before = [leaf._version if isinstance(leaf, torch.Tensor) else 0 for leaf in given]
    args, kwargs = pytree.tree_unflatten(given, spec)
    result = module(*args, **kwargs)
    held, own_spec = pytree.tree_flatten((args, kwargs))
    if own_spec != spec or not all(map(is_, held, given)):
        raise Failed("it changes a list or a dictionary that it is given, which others would not see: let it return it")
    return given, before, result


def _list_other_shapes(
    module: nn.Module, leaves: list[Any], spec: Any, shapes: list[Any], hints: dict[Any, int], structure: Any
) -> tuple[list[list[tuple[int, ...]]], list[list[tuple[int, ...]]]]:
    """The shapes of the result where whole numbers and masks are others, as the lengths of texts, and where numbers
    with fractions are, as scores."""
    tried = list_whole_numbers([evaluate_size(size, hints) for size in shape or ()] for shape in shapes)
    # Also such that differ from each other, as of words of which some are the same.
    whole = (range(1), range(max(tried), max(tried) + 1), range(1, 2), range(2), range(1, max(tried) + 1))
    of_whole, of_fractions = list[list[tuple[int, ...]]](), list[list[tuple[int, ...]]]()
    for each in dict.fromkeys(whole) if _can_be_varied(_list_counted(leaves)) else ():
        with contextlib.suppress(Exception):
            found, own = pytree.tree_flatten(_run_with(module, leaves, spec, shapes, hints, each)[2])
            of_whole += [list(map(_get_shape, found))] if own == structure else []
    for change in _OTHER_FRACTIONS:
        with contextlib.suppress(Exception):
            found, own = pytree.tree_flatten(_run_on_random_numbers(module, leaves, spec, shapes, hints, change)[2])
            of_fractions += [list(map(_get_shape, found))] if own == structure else []
    return of_whole, of_fractions


def _can_be_varied(counted: Collection[torch.Tensor]) -> bool:
    """Tell whether there are whole numbers, of which some can be tried that may be too large: not on a device, where
    such an index ends all that the process does there."""
    return bool(counted) and all(leaf.device.type == "cpu" for leaf in counted)


def _list_counted(leaves: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors of whole numbers, and masks."""
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not _has_fractions(leaf)]


def _has_fractions(leaf: Any) -> bool:
    return bool(leaf.dtype.is_floating_point or leaf.dtype.is_complex)


def list_whole_numbers(shapes: Iterable[Sequence[int]]) -> list[int]:
    """Return what whole numbers may be where nobody knows them, in the order in which a module is tried with them.

    The first is an index into anything. A length, as of a packed sequence, is never 0, and then all of what it is a
    length of, as of the longest text of a batch.

    Args:
        shapes: Those of the tensors that a module is given.
    """
    return list(dict.fromkeys([0, *sorted((int(size) for shape in shapes for size in shape[1:]), reverse=True), 1]))


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
        # A table that the trace made is one without data, of which torch itself warns when it is copied.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
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


def _make_random_leaf(leaf: Any, shape: Any, hints: dict[Any, int], whole: range, change: Callable[[Any], Any]) -> Any:
    if isinstance(leaf, torch.SymInt):
        return int(evaluate_size(leaf.node.expr, hints))
    if not isinstance(leaf, torch.Tensor):
        return leaf
    concrete = [evaluate_size(size, hints) for size in shape]
    if _has_fractions(leaf):
        made = change(torch.randn(concrete, dtype=leaf.dtype, device=leaf.device)).to(leaf.dtype)
        # Not a leaf, as no value is: the module may change it in place.
        return made.requires_grad_().clone() if leaf.requires_grad else made
    return torch.randint(whole.start, whole.stop, concrete, device=leaf.device).to(leaf.dtype)


def _vary_sizes(
    shapes: Iterable[Any], hints: Mapping[Any, int], sizes: Sizes, *, is_larger: bool
) -> Iterator[dict[Any, int]]:
    """Other values of the symbols, no two of which become the same number: about half of what they are, which no table
    is too short for, or more. Of all symbols, or, where a module does not take that, of all but one, or of one.

    None has a divisor in common with what it was, so that what is padded to a multiple is seen to be; and each becomes
    smaller or larger by another factor, so that a part of one is not taken for another one that is as large.
    """
    symbols = sorted(symbols_of(size for shape in shapes for size in shape or ()) - {sizes.batch}, key=str)
    choices = [symbols, *([each for each in symbols if each != one] for one in symbols), *([one] for one in symbols)]
    for chosen in {tuple(each): each for each in choices if each}.values():
        for are_apart in (True, False):  # or those together that are as large, as a text and its mask
            taken, varied, alike = set(hints.values()), dict(hints), dict[Any, int]()
            for number, symbol in enumerate(chosen):
                factor = 2 + number % 4 / 4 if is_larger else 1 / 2 + number % 4 / 8
                key = symbol if are_apart else hints[symbol]
                varied[symbol] = alike.setdefault(key, _choose_size(hints[symbol], factor, taken))
                taken.add(varied[symbol])
            if are_apart or len(alike) < len(chosen):
                yield {symbol: evaluate_size(sizes.simplify(symbol), varied) for symbol in hints}


def _choose_size(size: int, factor: float, taken: Collection[int]) -> int:
    """Return the size nearest to this many times `size` that is not taken and has no divisor in common with it."""
    around = int(size * factor)
    near = (each for distance in itertools.count() for each in (around + distance, around - distance))
    return next(each for each in near if each > 0 and each != size and each not in taken and math.gcd(each, size) == 1)


@dataclass
class _SizeRule:
    """A rule for the sizes of the result: each is a number, or a size that was given and may change, or one that only
    the module knows. Runs in which all sizes that were given were others tell them apart.

    Attributes:
        sizes: The symbols of the trace.
        varied: The shapes of the result in such runs.
        others: Those in runs with other numbers.
    """

    sizes: Sizes
    varied: list[list[tuple[int, ...]]] = field(default_factory=list)
    others: list[list[tuple[int, ...]]] = field(default_factory=list)
    _symbols: dict[tuple[int, ...], Any] = field(default_factory=dict)

    def learn(self, leaves: Iterable[Any], shapes: Iterable[Any], runs: Sequence[Mapping[Any, int]]) -> None:
        """Learn the sizes of what was given that may change, by what they were in the first run and in the others."""
        for leaf, shape in zip(leaves, shapes, strict=True):
            for size, symbolic in zip(leaf.shape, shape, strict=True) if shape is not None else ():
                # What the number of samples does not change is none of them, though it may be as large in one run.
                of_samples = self.sizes.batch in symbols_of([symbolic])
                if isinstance(size, torch.SymInt) and not isinstance(symbolic, int) and not of_samples:
                    found = tuple(int(evaluate_size(symbolic, each)) for each in runs)
                    self._symbols.setdefault(found, size)

    def find(self, place: int, dim: int, small: int, large: int) -> Any:
        """Return the size of a dimension of a tensor of the result, of which there are two for two numbers of
        samples."""
        per_sample = large - small
        rest = small - _SAMPLES[0] * per_sample
        sizes = (small, *(shapes[place][dim] for shapes in self.varied))
        found = {small, *(shapes[place][dim] for shapes in self.others if len(shapes[place]) > dim)}
        if len(found) > 1 and self.sizes.guesses:
            # No size that was given is as large, or what depends on it would be taken for what depends on that.
            return self.sizes.made_symbol(max(max(found) - 1, 2), is_guessed=True)
        if len(found) > 1:
            return self.sizes.made_symbol(max(small, 2))
        if not per_sample:
            if len(set(sizes)) > 1 and sizes not in self._symbols and (small > 1 or self.sizes.guesses):
                # A tensor that has a dimension of size 1 has none that may change.
                return self.sizes.made_symbol(max(small, 2), is_guessed=small < 2)
            return self._name(sizes)
        if self.varied and not any((size - rest) % _SAMPLES[0] for size in sizes):
            per_sample = self._name(tuple((size - rest) // _SAMPLES[0] for size in sizes))
        return self.sizes.batch_size * per_sample + rest

    def _name(self, sizes: tuple[int, ...]) -> Any:
        return sizes[0] if self.varied and len(set(sizes)) == 1 else self._symbols.get(sizes, sizes[0])


def _generalise(place: int, one: Any, other: Any, rule: _SizeRule, fake: Any, device: Any) -> Any:
    """A tensor of the shape that gives these two for the two numbers of samples."""
    if not isinstance(one, torch.Tensor):
        if isinstance(one, int | float | bool | str | type(None)) and one == other:
            return one
        raise Failed("it gives numbers that depend on the data")
    if one.dim() != other.dim():
        raise Failed("the number of dimensions of its result depends on the data")
    pairs = enumerate(zip(one.shape, other.shape, strict=True))
    shape = [rule.find(place, dim, int(small), int(large)) for dim, (small, large) in pairs]
    with fake:
        made = torch.empty(shape, dtype=one.dtype, device=device if one.device.type == "cpu" else one.device)
        # A leaf could not be changed in place afterwards, as a result can.
        return made.requires_grad_().clone() if one.requires_grad else made


def _get_shape(leaf: Any) -> tuple[int, ...]:
    return tuple(map(int, leaf.shape)) if isinstance(leaf, torch.Tensor) else ()


def _count_dims(leaf: Any) -> int:
    return leaf.dim() if isinstance(leaf, torch.Tensor) else -1
