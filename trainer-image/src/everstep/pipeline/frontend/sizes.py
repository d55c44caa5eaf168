"""Sizes that may change from batch to batch: symbols while a model is traced, numbers when a stage runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from everstep.pipeline.errors import PipelineError

Shape = tuple[Any, ...]  # of ints and sympy expressions
_MOST_PARTS = 300  # of an expression: some operations on longer ones take seconds, each

# Operations whose results are more or fewer, or larger or smaller, by what torch finds of the sizes that it is given.
_SQUEEZING = {"squeeze", "squeeze_"}
_SHAPING = {
    *("getitem", "setitem", "narrow", "split", "split_with_sizes", "tensor_split", "hsplit", "vsplit", "dsplit"),
    *("chunk", "unsafe_chunk", "unsafe_split", "unbind", "iter", "unfold"),
}


class SizesNotFollowed(BaseException):
    """A model's code gives a size to an operation that takes it for a number, and nobody knows what of its result grows
    with it, or computes sizes whose expressions grow so long that a trace would take hours: it is to be traced with the
    example's numbers in the place of all sizes but that of the samples."""


@dataclass(frozen=True)
class SymbolSource:
    """The place where a stage finds a symbol: dimension `dim` of a tensor, whose size is `factor` · symbol +
    `offset`."""

    symbol: Any
    tensor: Any
    dim: int
    factor: int = 1
    offset: int = 0


class _Env(ShapeEnv):  # type: ignore[misc]  # torch is not where types are checked
    """An environment that does not look for the line of code that a symbol comes from, which nobody is shown: to tell
    that line from its own, torch would import the whole of torch.export, a second of processor time."""

    asked: list[Any]
    known: set[Any]
    are_too_long = False
    holds_for: set[Any] | None = None  # symbols that do not become numbers yet
    held: list[Any]  # the equations by which they would

    def _get_user_frame(self) -> None:
        return None

    def _hold_or_guard(self, expr: Any) -> None:
        if self.holds_for and isinstance(expr, sympy.Eq) and expr.lhs in self.holds_for and expr.rhs.is_Integer:
            self.held.append(expr)
        else:
            super()._maybe_guard_rel(expr)

    _maybe_guard_rel: Any = _hold_or_guard  # to torch's types, a function that keeps its answers, which are none

    def forget(self, condition: Any) -> int:
        """Know no more of a condition, which was assumed, that it holds; return by how many the guards are fewer."""
        before = len(self.guards)
        self.guards[:] = [guard for guard in self.guards if guard.expr != condition]
        for each, _ in self.get_implications(condition):
            self.axioms.pop(each, None)
        for cached in (ShapeEnv._inner_evaluate_expr, ShapeEnv._maybe_evaluate_static, ShapeEnv.get_axioms):
            cached.cache_clear()  # which are made for conditions that hold for ever
        return before - len(self.guards)

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as torch does, and keep in `asked` what was known already, of which there is no guard: each module
        asks for itself, and another stage may have asked before."""
        if orig_expr not in self.known:
            self.known.add(orig_expr)
            parts = sympy.preorder_traversal(orig_expr)
            self.are_too_long = self.are_too_long or next(islice(parts, _MOST_PARTS, None), None) is not None
        before = len(self.guards)
        found = super().evaluate_expr(orig_expr, *args, **kwargs)
        if len(self.guards) == before and getattr(orig_expr, "free_symbols", None):
            is_condition = isinstance(found, bool) or getattr(found, "is_Boolean", False)
            holds = orig_expr if found else sympy.Not(orig_expr)
            self.asked.append(holds if is_condition else sympy.Eq(orig_expr, found))
        return found


class Sizes:
    """The symbols of one trace. `batch`: that of the samples; its value while tracing is a prime that nothing else has,
    so that no code takes another size for it. `made`: of sizes that only the module which makes a tensor knows, in the
    order in which they came up, with `made_hints` for values where they are to be others; `guessed`: those that depend
    on data, and are none without `guesses`. `are_numbers`: whether arguments have the example's sizes, but for that of
    the samples; `samples`: a number in the place of the symbol of the samples."""

    def __init__(
        self,
        taken: Iterable[int],
        *,
        guesses: bool = True,
        made_hints: Mapping[int, int] | None = None,
        are_numbers: bool = False,
        samples: int | None = None,
    ) -> None:
        self.env = _Env(
            allow_scalar_outputs=False,
            allow_dynamic_output_shape_ops=False,
            specialize_zero_one=False,
            duck_shape=False,
        )
        self.env.asked, self.env.known, self.env.held, self.are_numbers = [], set(), [], are_numbers
        others = set(taken)
        self.hint = samples or next(prime for prime in sympy.primerange(7, 10_000) if prime not in others)
        self._count = 0
        self.guesses, self.made, self.guessed = guesses, list[Any](), set[Any]()
        self._made_hints = made_hints or {}
        self.assumed: list[Any] = []  # by torch itself, where it decides on the sizes or the number of results
        self.took_number = False  # the last operation, of a size, without an assumption
        self._has_samples = samples is not None
        symbol = None if self._has_samples else self.symbol(self.hint)
        self.batch_size: Any = self.hint if symbol is None else symbol
        self.batch: Any = sympy.Integer(self.hint) if symbol is None else symbol.node.expr
        self._seen = 0

    def symbol(self, hint: int) -> Any:
        """A new torch.SymInt with a symbol of its own."""
        self._count += 1
        source = ConstantSource(f"size{self._count}")
        made = self.env.create_symbol(
            hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None, do_not_specialize_zero_one=True
        )
        return self.env.create_symintnode(made, hint=hint, source=source)

    def made_symbol(self, hint: int, *, is_guessed: bool = False) -> Any:
        """A new torch.SymInt for a size that only the module which makes a tensor knows."""
        found = self.symbol(self._made_hints.get(len(self.made), hint))
        self.made.append(found.node.expr)
        if is_guessed:
            self.guessed.add(found.node.expr)
        return found

    def simplify(self, expr: Any) -> Any:
        """Simplify an expression by what was found out since: sizes that turned out equal, or fixed."""
        found = self.env.simplify(expr)
        return int(found) if getattr(found, "is_Integer", False) else found

    def shape(self, tensor: Any) -> Shape:
        return tuple(
            self.simplify(size.node.expr) if isinstance(size, torch.SymInt) else int(size) for size in tensor.shape
        )

    def new_conditions(self, name: str = "", given: Sequence[Any] = ()) -> list[Any]:
        """Return the conditions that had to be assumed since the last call.

        Args:
            name: The operation of torch that had to, if it was one.
            given: The tensors that it was given.
        """
        found = [guard.expr for guard in self.env.guards[self._seen :]]
        self._seen, asked, self.env.asked = len(self.env.guards), self.env.asked, []
        self.took_number = False
        if name in _SQUEEZING:  # others may have assumed the same before
            sizes = [size.node.expr for size in given[0].shape if isinstance(size, torch.SymInt)]
            self.assumed += [sympy.Ne(size, 1) for size in sizes]
        elif name in _SHAPING or "_pool" in name:
            self.assumed += found
        else:
            self.took_number = any(isinstance(each, sympy.Eq) for each in [*found, *asked])
        return found if name else list(dict.fromkeys([*found, *asked]))

    def hold(self, given: Iterable[Any]) -> None:
        """Let sizes stay symbols that the next operation takes for numbers, until `release`.

        Args:
            given: What the operation is given.
        """
        exprs = {leaf.node.expr for leaf in given if isinstance(leaf, torch.SymInt)}
        self.env.holds_for = {expr for expr in exprs if expr.is_Symbol and expr != self.batch}

    def release(self, *, as_numbers: bool) -> None:
        """End `hold`.

        Args:
            as_numbers: Whether sizes that were taken for numbers are these from now on.
        """
        held, self.env.held, self.env.holds_for = self.env.held, [], None
        for equation in held:
            if as_numbers:
                self.env._maybe_guard_rel(equation)
            else:
                self._seen -= self.env.forget(equation)

    def find_made_places(self, tensors: Iterable[Any]) -> dict[Any, list[tuple[int, int]]]:
        """Return where the sizes in `made` are, those too that have become others since: numbers of tensors, and of
        dimensions."""
        found: dict[Any, list[tuple[int, int]]] = {}
        for index, tensor in enumerate(tensors if self.made else ()):
            for dim, size in enumerate(tensor.shape):
                if isinstance(size, torch.SymInt) and size.node._expr in self.made:
                    found.setdefault(size.node._expr, []).append((index, dim))
        return found

    def batch_is_fixed(self) -> bool:
        return not self._has_samples and isinstance(self.simplify(self.batch), int)

    def refuse_long(self) -> None:
        """Raise SizesNotFollowed if torch was asked for an expression that is too long to go on with."""
        if self.env.are_too_long and not self.are_numbers:
            raise SizesNotFollowed

    def count_fixed(self) -> int:
        """Return how many symbols have become numbers, or others."""
        return len(self.env.replacements)

    def are_fixed_by(self, conditions: Iterable[Any]) -> bool:
        """Tell whether a symbol in these conditions has become a number, or another one."""
        return any(self.simplify(symbol) != symbol for symbol in symbols_of(conditions))

    def hints(self, samples: int) -> dict[Any, int]:
        """Return the values of the symbols in the example, if it had `samples` samples."""
        values = {symbol: int(value) for symbol, value in self._backed().items()}
        values[self.batch] = samples
        return values

    def _backed(self) -> Mapping[Any, Any]:
        found: Mapping[Any, Any] = getattr(self.env, "backed_var_to_val", None) or self.env.var_to_val
        return found


def evaluate_size(expr: Any, values: Mapping[Any, int]) -> Any:
    """A number, or a boolean, from an expression and its symbols' values."""
    if isinstance(expr, int | float | bool):
        return expr
    found = expr.xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()})
    if found.is_Boolean or found in (sympy.true, sympy.false):
        return bool(found)
    return int(found) if found.is_integer else float(found)


def is_broken(condition: Any, values: Mapping[Any, int]) -> bool:
    """Tell whether a condition on sizes does not hold, as far as it can be computed."""
    try:
        return evaluate_size(condition, values) is False
    except (ArithmeticError, AssertionError, TypeError, ValueError):  # as of a remainder by a size that becomes 0
        return False


def symbols_of(exprs: Iterable[Any]) -> set[Any]:
    return {symbol for expr in exprs if hasattr(expr, "free_symbols") for symbol in expr.free_symbols}


def find_places(wanted: Iterable[Any], tensors: Mapping[Any, Shape]) -> list[SymbolSource]:
    """Find a place where each symbol can be read off; raise PipelineError if one cannot."""
    found = []
    for symbol in sorted(wanted, key=str):
        place = _find_place(symbol, tensors)
        if place is None:
            raise PipelineError(
                f"a stage needs the size {symbol}, but none of its values shows it: cut elsewhere, or place the "
                "operations that need it with the stage that knows it"
            )
        found.append(place)
    return found


def find_made_places(
    wanted: Iterable[Any], known: Mapping[Any, Shape], made: Iterable[Mapping[Any, Shape]]
) -> dict[int, list[SymbolSource]]:
    """Find where the symbols show that nothing shows which a stage is given, by the numbers of its steps.

    Args:
        wanted: The symbols.
        known: The shapes of what the stage is given.
        made: Of each step, the shapes of what it gives of which only it knows sizes.
    """
    found, waiting = dict[int, list[SymbolSource]](), {each for each in wanted if not are_sizes_visible([each], known)}
    for number, shapes in enumerate(made if waiting else ()):
        if shown := {each for each in waiting if are_sizes_visible([each], shapes)}:
            found[number] = find_places(shown, shapes)
            waiting -= shown
    return found


def are_sizes_visible(symbols: Iterable[Any], tensors: Mapping[Any, Shape]) -> bool:
    """Tell whether all symbols can be read off these tensors."""
    return all(_find_place(symbol, tensors) is not None for symbol in symbols)


def _find_place(symbol: Any, tensors: Mapping[Any, Shape]) -> SymbolSource | None:
    linear = None
    for name, shape in tensors.items():
        for dim, size in enumerate(shape):
            if size == symbol:
                return SymbolSource(symbol, name, dim)
            if linear is None and getattr(size, "free_symbols", None) == {symbol}:
                factor, offset = _fit_line(size, symbol)
                if factor:
                    linear = SymbolSource(symbol, name, dim, factor, offset)
    return linear


def _fit_line(size: Any, symbol: Any) -> tuple[int, int]:
    """factor and offset of a size that is linear in its symbol; (0, 0) of any other."""
    try:
        factor, offset = sympy.diff(size, symbol), size.subs(symbol, 0)
    except ZeroDivisionError:  # as of what is padded to a multiple
        return 0, 0
    return (int(factor), int(offset)) if factor.is_Integer and offset.is_Integer else (0, 0)


def solve_sizes(found: Sequence[SymbolSource], shapes: Mapping[Any, Sequence[int]]) -> dict[Any, int]:
    """The symbols' values; PipelineError if a size is none of this model's."""
    values = {}
    for place in found:
        size = shapes[place.tensor][place.dim] - place.offset
        if size % place.factor:
            raise PipelineError(f"dimension {place.dim} of {place.tensor} is {size + place.offset}, which cannot be")
        values[place.symbol] = size // place.factor
    return values


def collect_sizes(tensors: Iterable[Any]) -> set[int]:
    """All sizes that these tensors have."""
    return {size for tensor in tensors for size in tensor.shape}
