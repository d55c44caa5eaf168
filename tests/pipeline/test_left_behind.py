"""A loss that reads what a forward leaves behind is refused wherever the cut falls."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline import PlanOptions, pipeline  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend.trace import trace_model  # noqa: E402
from everstep.pipeline.left_behind import LossUses, WatchedLoss, check_left_behind, check_second_forward  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

X = torch.linspace(-1.0, 1.0, 32, dtype=torch.float64).view(8, 4)
KINDS = ("zero", "none", "list", "training", "returned")


class Experts(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Two layers with a balance of their gates, which is left where `kind` says."""

    def __init__(self, kind: str, elsewhere: list[Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.gate, self.two, self.head = (nn.Linear(4, 4).double() for _ in range(4))
        self.kind, self.elsewhere = kind, ([] if elsewhere is None else elsewhere,)
        self.aux_loss = torch.zeros((), dtype=torch.float64) if kind == "zero" else None
        self.balances: list[Any] = [torch.zeros(())]

    def forward(self, x: Any) -> Any:
        x = self.one(x).tanh()
        gates = self.gate(x).softmax(-1)
        balance = gates.square().mean()
        if self.kind == "list":
            self.balances[0] = balance
        elif self.kind == "elsewhere":
            self.elsewhere[0][:] = [balance]
        elif self.kind != "training" or self.training:
            self.aux_loss = balance
        found = self.head(self.two(x * gates).tanh())
        return (found, balance) if self.kind == "returned" else found

    @property
    def balance(self) -> Any:
        return self.balances[0] if self.kind == "list" else self.aux_loss


def loss_of(model: Experts) -> Callable[[Any, Any], Any]:
    def loss(output: Any, targets: Any) -> Any:
        if model.kind == "returned":
            return (output[0] - targets).square().mean() + output[1]
        aux = model.elsewhere[0][0] if model.kind == "elsewhere" else model.balance
        return (output - targets).square().mean() + aux

    return loss


def look(model: nn.Module, loss: Any) -> None:
    before = {name: each.clone() for name, each in model.state_dict().items()}
    state = torch.get_rng_state()
    try:
        assert check_left_behind(model, trace_model(model, X).left, {"x": X}, X, loss, None, frozenset()) == LossUses(
            values=ANY
        )
    finally:
        assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", [each for each in KINDS if each != "returned"])
def test_an_attribute_that_forward_sets_and_the_loss_reads_is_named(kind: str) -> None:
    name = "balances" if kind == "list" else "aux_loss"
    model = Experts(kind)
    with pytest.raises(PipelineError, match=rf"reads the attribute '{name}' of the model \(Experts\).*return it"):
        look(model, loss_of(model))
    assert model.balance is None or not model.balance.requires_grad


def test_what_is_left_outside_of_modules_shows_in_the_value() -> None:
    model = Experts("elsewhere", [])
    with pytest.raises(PipelineError, match="after the forward of another batch: it reads something that forward"):
        look(model, loss_of(model))
    acts: dict[str, Any] = {}
    model = Experts("returned")
    model.two.register_forward_hook(lambda module, given, found: acts.update(two=found))
    with pytest.raises(PipelineError, match="a dictionary that hooks fill"):
        look(model, lambda output, targets: (output[0] - targets).square().mean() + acts["two"].square().mean())


def test_losses_of_what_is_returned_pass_and_so_do_those_that_draw_or_count_themselves() -> None:
    look(Experts("returned"), loss_of(Experts("returned")))
    model = Experts("zero")  # which leaves something, that nobody reads
    look(model, lambda output, targets: (output - targets).square().mean() * model.head.out_features)
    look(model, lambda output, targets: (output - targets + torch.rand(output.shape)).square().mean())
    calls = itertools.count(1)
    look(model, lambda output, targets: (output - targets).square().mean() * next(calls))


def test_without_an_example_of_targets_the_first_call_in_training_is_watched() -> None:
    model = Experts("zero")
    loss = WatchedLoss(loss_of(model), model, trace_model(model, X).left)
    with torch.no_grad():
        loss(model(X), X)
    with pytest.raises(PipelineError, match="reads the attribute 'aux_loss'"):
        loss(model(X), X)


def _train(rank: int, kind: str, head: int, with_targets: bool) -> str:
    model = Experts(kind)
    options: dict[str, Any] = {"targets": X} if with_targets else {}
    try:
        plan = PlanOptions(stage_of={"head": head, "two": 1}, costs="counted")
        with pipeline(model, X, loss_of(model), plan=plan, **options) as run:
            return f"{run.step(X, X).loss:.10f}"
    except PipelineError as error:
        return str(error)
    except Exception as error:  # of a rank that hears of it
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_refuse_it_before_anything_else_calls_the_loss(kind: str) -> None:
    one, other = ranks.run(2, _train, kind, 1, True)
    assert one == other
    if kind == "returned":
        model = Experts(kind)
        assert one == f"{float(loss_of(model)(model(X), X).detach()):.10f}"
    else:
        assert "which forward sets: the loss runs on the last stage" in one


def test_a_step_without_an_example_of_targets_ends_on_all_ranks_with_the_reason() -> None:
    for said in ranks.run(2, _train, "zero", 1, False):
        assert "the loss reads the attribute 'aux_loss'" in said


class Keeping(nn.Module):  # type: ignore[misc]
    """Keeps a state, a table for each length, or what it finds in its first batch; there are no modules in it."""

    mean: Any

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.tables: dict[Any, Any] = {}
        self.state = torch.zeros(4, dtype=torch.float64) if kind == "state" else None
        self.generator = torch.Generator()
        if kind == "first batch, in a buffer":
            self.register_buffer("mean", None)
        else:
            self.mean = None

    def forward(self, x: Any) -> Any:
        if self.kind == "noise":
            return x + torch.rand(x.shape, dtype=x.dtype, generator=self.generator)
        if self.kind == "tables":
            length = x.shape[1]
            if length not in self.tables:
                self.tables[length] = torch.arange(length, dtype=x.dtype).sin()
            return x + self.tables[length]
        if self.kind.startswith("first batch"):
            if self.mean is None:
                self.mean = x.detach().mean(0)
            return x - self.mean
        if self.state is not None:
            x = x + self.state
        self.state = x.mean(0).detach()
        return x


def _keeping(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4).double(), Keeping(kind), nn.Tanh(), nn.Linear(4, 4).double())


@pytest.mark.parametrize("kind", ["state", "none at first"])
def test_a_state_that_goes_from_call_to_call_is_refused(kind: str) -> None:
    model = _keeping(kind)
    before = model[1].state
    with pytest.raises(PipelineError, match=r"called again with the same arguments.* 6 times a batch.*as an argument"):
        check_second_forward(model, {"input": X}, frozenset(), 6)
    assert model[1].state is before


@pytest.mark.parametrize("kind", ["first batch", "first batch, in a buffer"])
def test_what_the_first_call_computes_from_its_samples_and_keeps_is_refused(kind: str) -> None:
    model = _keeping(kind)
    with pytest.raises(PipelineError, match=r"after a first call with other samples.* 6 times a batch.*from a whole"):
        check_second_forward(model, {"input": X}, frozenset(), 6)
    assert model[1].mean is None


def test_a_table_that_the_first_call_makes_passes_and_so_does_a_generator_of_a_module() -> None:
    for model in (_keeping("tables"), _keeping("noise"), nn.Sequential(nn.Linear(4, 4).double(), nn.Dropout(0.5))):
        assert check_second_forward(model, {"input": X}, frozenset(), 6) == ""


def _train_with_tables(rank: int) -> list[float]:
    model = _keeping("tables")
    plan = PlanOptions(stage_of={"3": 1}, costs="counted")
    with pipeline(model, X, torch.nn.functional.mse_loss, targets=X, plan=plan) as run:
        return [run.step(X, X).loss, run.step(-X, X).loss]


def test_counted_costs_leave_no_table_without_data() -> None:
    model = _keeping("tables")
    expected = [float(nn.functional.mse_loss(model(each), X).detach()) for each in (X, -X)]
    for losses in ranks.run(2, _train_with_tables):
        assert losses == pytest.approx(expected, rel=1e-10)
