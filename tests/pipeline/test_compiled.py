"""A pipeline of compiled modules computes what one process computes with them, dropout and statistics included."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from everstep.pipeline.behind_results import find_parameters_behind_results
from everstep.pipeline.engine.stage import why_not_split
from everstep.pipeline.frontend.split import node_modules, split_model
from everstep.pipeline.frontend.trace import trace_model
from everstep.pipeline.frontend.tree import build_tree
from everstep.pipeline.profile_counted import count_costs
from tests.pipeline.compiled import COMPILED
from tests.pipeline.training import Setting, alone, apart, piped

pytestmark = pytest.mark.torch


def assert_trains_as_one_process(case: str) -> None:
    torch.set_num_threads(1)
    torch.compiler.reset()  # each case may be compiled as often as torch allows for one
    setting = Setting(case, by_hand=False, samples=8, microbatches=2)  # statistics of two samples are but rounding
    assert apart(piped(setting), alone(setting)) < 1e-10


@pytest.mark.parametrize(
    "case", ["gpt-wrapped-aot_eager", "gpt-in-place-eager", "gpt-forwards-eager", "halves-aot_eager"]
)
def test_compiled_parts_train_as_in_one_process(case: str) -> None:
    assert_trains_as_one_process(case)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("clang")), reason="inductor needs a compiler")
@pytest.mark.parametrize("case", COMPILED)
def test_parts_compiled_by_any_backend_train_as_in_one_process(case: str) -> None:
    assert_trains_as_one_process(case)


def test_a_compiled_module_is_one_node_with_a_full_backward() -> None:
    for way in ("in-place", "forwards"):
        case = COMPILED[f"gpt-{way}-eager"]
        found = trace_model(case.build(), case.example().inputs)
        assert {found.leaves[f"h.{index}"] for index in range(len(found.model.h))} == {"it is compiled"}
        first, second = split_model(found, {"h.1": 1})
        assert why_not_split(first) == "h.0 is compiled"
        assert why_not_split(second) == "h.1 is compiled"


def test_a_compiled_sequence_is_one_block_of_a_chain() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inner.compile(backend="eager")
    assert build_tree(nn.Sequential(nn.Linear(2, 2), inner)).blocks == ("0", "1")


def test_a_compiled_function_in_a_split_backward_gives_the_gradients_of_a_whole_one() -> None:
    from everstep.pipeline.engine.split import input_grad

    product = torch.compile(lambda one, other: (one @ other).tanh(), backend="aot_eager")
    x, a, b = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    wanted = torch.autograd.grad((product(x @ b, a) @ b).sum(), [x, a, b])
    made = product(x @ b, a) @ b
    (found,), rest = input_grad([made], [torch.ones_like(made)], [x])
    rest.weight_grad()
    for one, other in zip([found, a.grad, b.grad], wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_modules_compiled_in_place_are_given_back_as_they_were() -> None:
    from everstep.pipeline.engine.rng import Random

    model: Any = COMPILED["gpt-in-place-eager"].build()
    before = [block._compiled_call_impl for block in model.h]
    random = Random(dict(model.named_modules()), torch.device("cpu"), 0)
    assert all(block._compiled_call_impl is not call for block, call in zip(model.h, before, strict=True))
    random.close()
    assert [block._compiled_call_impl for block in model.h] == before


def test_what_is_compiled_is_counted_as_it_was_written() -> None:
    """A kernel would take the null pointers of tensors without data for their memory, and end the process."""
    called: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        def run_compiled(*inputs: Any) -> Any:
            called.extend(inputs)
            return graph(*inputs)

        return run_compiled

    def count(compiles: bool) -> Any:
        model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
        if compiles:
            model[0].compile(backend=backend)
            model[1] = torch.compile(model[1], backend=backend)
        found = trace_model(model, {"input": torch.randn(3, 2)})
        profile = count_costs(found.graph, node_modules(found), {"input": torch.randn(3, 2)})
        return [node.forward for node in profile.graph.nodes]

    assert count(compiles=True) == count(compiles=False)
    assert not called


class Heads(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Two results of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return self.one(x), self.other(x)


def test_parameters_in_compiled_code_with_several_results_are_not_said_to_be_behind_one() -> None:
    """Its backward gives zeros to what is behind a result that nobody uses, where code as it was written gives none."""
    given = {"input": torch.randn(3, 2)}
    found = []
    for compiled in ((), ("0",), ("1",)):
        model = nn.Sequential(nn.Linear(2, 2), Heads())
        for name in compiled:
            model.get_submodule(name).compile(backend="eager")
        found.append(find_parameters_behind_results(model, trace_model(model, given), given, (), None))
    known = {"1.one.weight": (0,), "1.one.bias": (0,), "1.other.weight": (1,), "1.other.bias": (1,)}
    assert found == [known, known, {}]
