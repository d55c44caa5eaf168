"""Dataclasses with tensors that blocks hand to each other and that a model returns."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from everstep.pipeline import PlanOptions, pipeline  # noqa: E402
from everstep.pipeline.frontend.check import run_stages  # noqa: E402
from everstep.pipeline.frontend.record import Untraceable  # noqa: E402
from everstep.pipeline.frontend.split import split_model  # noqa: E402
from everstep.pipeline.frontend.trace import trace_model  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

X = torch.linspace(-1.0, 1.0, 32, dtype=torch.float64).view(8, 4)


@dataclasses.dataclass
class Features:
    last: Any
    scale: float = 2.0


@dataclasses.dataclass(frozen=True)
class Output:
    logits: Any
    features: Any = None
    extra: Any = None

    def __post_init__(self) -> None:
        assert self.logits.shape[-1] == 3

    @property
    def total(self) -> Any:
        return self.logits.square().mean() + self.features.last.mean() * self.features.scale


@dataclasses.dataclass
class Handed:
    x: Any
    means: list[Any] = dataclasses.field(default_factory=list)


class Registered:
    def __init__(self, logits: Any) -> None:
        self.logits = logits

    @property
    def total(self) -> Any:
        return self.logits.square().mean()


pytree.register_pytree_node(Registered, lambda each: ([each.logits], None), lambda parts, _: Registered(*parts))


class Part(nn.Module):  # type: ignore[misc]
    def __init__(self, *, by_data: bool) -> None:
        super().__init__()
        self.layer, self.by_data = nn.Linear(4, 4), by_data

    def forward(self, handed: Handed) -> Handed:
        x = self.layer(handed.x).tanh()
        if self.by_data and bool((x > 1e9).any()):
            x = x * 2
        return Handed(x, [*handed.means, x.mean(1)])


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self, *, by_data: bool = False, kind: type = Output) -> None:
        super().__init__()
        self.first, self.one, self.two = nn.Linear(4, 4), Part(by_data=by_data), Part(by_data=by_data)
        self.last, self.kind = nn.Linear(4, 3), kind
        self.double()

    def forward(self, x: Any) -> Any:
        handed = self.two(self.one(Handed(self.first(x))))
        logits = self.last(handed.x) + sum(handed.means)[:, None]
        return Output(logits, Features(handed.x)) if self.kind is Output else self.kind(logits)


def _train(rank: int, by_data: bool, kind: type) -> list[tuple[float, float, list[str]]]:
    torch.manual_seed(0)
    model = Model(by_data=by_data, kind=kind)
    alone, found = copy.deepcopy(model), []
    plan = PlanOptions(stage_of={"one": 0, "two": 1})
    run = pipeline(model, X, lambda output, _: output.total, targets=X, microbatches=2, plan=plan)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (run, alone)]
    with run:
        for _ in range(2):
            for each in optimizers:
                each.zero_grad()
            result, loss = run.step(X, X), alone(X).total
            loss.backward()
            for each in optimizers:
                each.step()
            evaluated = run.evaluate(X[:4], X[:4])
            found.append((float(result.loss), float(loss), [type(each).__name__ for each in evaluated.outputs]))
    return found


@pytest.mark.parametrize("by_data", [False, True], ids=["opened", "as it is"])
def test_a_model_whose_blocks_hand_on_a_dataclass_and_that_returns_one_trains_as_in_one_process(by_data: bool) -> None:
    first, last = ranks.run(2, _train, by_data, Output)
    for result, loss, kinds in last:
        assert result == pytest.approx(loss, rel=1e-12)
        assert set(kinds) == {"Output"}
    assert [each[0] for each in first] == [each[0] for each in last]


def test_a_model_returns_an_object_of_a_class_that_torch_knows_as_a_structure() -> None:
    for result, loss, kinds in ranks.run(2, _train, False, Registered)[1]:
        assert result == pytest.approx(loss, rel=1e-12)
        assert set(kinds) == {"Registered"}


def test_what_is_no_field_of_a_dataclass_would_be_lost_so_that_it_is_refused() -> None:
    @dataclasses.dataclass
    class More:
        logits: Any

        def __post_init__(self) -> None:
            self.other = self.logits * 2

    with pytest.raises(Untraceable, match="returns a More"):
        split_model(trace_model(Model(kind=More), X), {"last": 1})


def test_a_block_that_changes_the_dataclass_it_is_given_is_refused_where_it_runs_as_it_is() -> None:
    class Changing(Part):
        def forward(self, handed: Handed) -> Handed:
            handed.x = super().forward(handed).x
            return handed

    for by_data in (False, True):
        model = Model()
        model.one = Changing(by_data=by_data).double()
        if by_data:
            with pytest.raises(Untraceable, match="it changes"):
                trace_model(model, X)
        else:
            stages = split_model(trace_model(model, X), {"one": 1, "last": 2})
            assert torch.equal(run_stages(stages, {"x": X}).logits, model(X).logits)


def test_a_dataclass_without_tensors_stays_one_value() -> None:
    @dataclasses.dataclass
    class Setting:
        power: int

    class Choosing(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Any, setting: Any) -> Any:
            return self.layer(x) * setting.power

    trace_model(Choosing().double(), {"x": X, "setting": Setting(2)})
    assert pytree.tree_leaves(Setting(2)) == [Setting(2)]
