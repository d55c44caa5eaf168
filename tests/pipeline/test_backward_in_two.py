"""A backward in two parts gives the gradients of one, however parameters are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from everstep.pipeline.engine.split import input_grad  # noqa: E402

pytestmark = pytest.mark.torch

Use = Callable[[Any, Any, Any], Any]


def twice_side_by_side(x: Any, a: Any, b: Any) -> Any:
    return x @ a + (x @ a).tanh() @ b


def one_above_another(x: Any, a: Any, b: Any) -> Any:
    return ((x @ a).tanh() @ a).tanh() @ b


def made_of_others(x: Any, a: Any, b: Any) -> Any:
    made = (a @ b).exp()
    return (x * made.sum()).tanh() @ made + x @ made.tanh()


def beside_the_inputs(x: Any, a: Any, b: Any) -> Any:
    made = (a @ b).exp()
    return (x @ made).tanh().sum() + (made @ a).sum()


def without_the_inputs(x: Any, a: Any, b: Any) -> Any:
    return (a @ b).exp().sum()


def parts_of_one_result_one_after_another(x: Any, a: Any, b: Any) -> Any:
    state = x[0]
    for each in ((a @ b).tanh() @ a).unbind(0):  # as a recurrence reads words that its own stage has embedded
        state = (state * each).tanh()
    return state


class Counted(torch.autograd.Function):  # type: ignore[misc, name-defined]
    """A product whose backward is counted: in a custom function it may do more than give gradients."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, one: Any, other: Any) -> Any:
        ctx.save_for_backward(one, other)
        return one @ other

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, Any]:
        Counted.backwards += 1
        one, other = ctx.saved_tensors
        return gradient @ other.mT, one.mT @ gradient


def a_function_with_a_parameter(x: Any, a: Any, b: Any) -> Any:
    return Counted.apply((x @ b).tanh(), a).tanh() @ b


def a_function_twice_with_one_parameter(x: Any, a: Any, b: Any) -> Any:
    return Counted.apply(Counted.apply(x, a).tanh(), a) + x @ b


def a_function_of_what_a_function_makes_of_parameters(x: Any, a: Any, b: Any) -> Any:
    return Counted.apply(x, Counted.apply(a, b))


def a_function_under_two_results(x: Any, a: Any, b: Any) -> Any:
    made = Counted.apply(a, b)
    return Counted.apply(x, made).tanh(), made.exp()


@pytest.mark.parametrize(
    "use",
    [
        twice_side_by_side,
        one_above_another,
        made_of_others,
        beside_the_inputs,
        without_the_inputs,
        parts_of_one_result_one_after_another,
        a_function_with_a_parameter,
        a_function_twice_with_one_parameter,
        a_function_of_what_a_function_makes_of_parameters,
        a_function_under_two_results,
    ],
)
@pytest.mark.parametrize("roots", [1, 2])
def test_two_parts_are_the_whole(use: Use, roots: int) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    x, a, b = leaves

    def results() -> list[Any]:
        made = use(x, a, b)
        return [*(made if isinstance(made, tuple) else (made,)), *[(a * b).exp().sum()][: roots - 1]]

    sums = [result.sum() for result in results()]
    Counted.backwards = 0
    wanted = torch.autograd.grad(sum(sums), leaves, allow_unused=True)
    made = results()
    once, Counted.backwards = Counted.backwards, 0
    found, rest = input_grad(made, [torch.ones_like(result) for result in made], [x])
    assert a.grad is b.grad is None
    rest.weight_grad()
    for one, other in zip([*found, a.grad, b.grad], wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert Counted.backwards == once
