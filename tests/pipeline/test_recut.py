"""A model that was cut before is cut again: it goes on from what was trained, on whatever process that was."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline import EngineOptions, LayoutOptions, PlanOptions, pipeline  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.pipeline.models import squares  # noqa: E402

pytestmark = pytest.mark.torch

X = torch.linspace(-1.0, 1.0, 24, dtype=torch.float64).view(6, 4)
BATCHES = [(X + step, X.flip(0) * step) for step in range(6)]


class Net(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.norm, self.two, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 1.5))  # of the model's own code
        self.double()

    def forward(self, x: Any) -> Any:
        return self.head(self.two(self.norm(self.one(x)).tanh() * self.scale).tanh())


def _sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _train(run: Any, batches: Any) -> list[float]:
    optimizer, losses = _sgd(run.groups()), []
    for x, y in batches:
        losses.append(run.step(x, y).loss)
        optimizer.step()
    return losses


def _in_one_process(model: nn.Module, *cuts: Any) -> list[float]:
    losses = []
    for batches in cuts:
        optimizer = _sgd(model.parameters())
        for x, y in batches:
            optimizer.zero_grad()
            total, count = squares(model(x), y)
            (total / count).backward()
            losses.append(float(total.detach() / count))
            optimizer.step()
    return losses


def _cut(model: nn.Module, stage_of: dict[str, int], weights: Any = None) -> Any:
    plan = PlanOptions(stage_of=stage_of, costs="counted")
    return pipeline(
        model,
        X,
        squares,
        microbatches=1,
        plan=plan,
        layout=LayoutOptions(weights=weights),
        engine=EngineOptions(heartbeat=None),
    )


def _cut_elsewhere(rank: int, without_data: bool) -> Any:
    model = Net()
    state = {name: each.clone() for name, each in model.state_dict().items()}
    if without_data:
        with torch.device("meta"):
            model = Net()
    made, losses = [], []
    for stage_of, batches in (({"head": 1}, BATCHES[:2]), ({"two": 1}, BATCHES[2:4]), ({"norm": 1}, BATCHES[4:])):
        with _cut(model, stage_of, state) as run:
            losses += _train(run, batches)
            made.append({name: each.detach().clone() for name, each in run.state_dict().items() if "extra" not in name})
    return losses, made[-1]


@pytest.mark.parametrize("without_data", [False, True])
def test_a_model_that_is_cut_again_elsewhere_goes_on_from_what_was_trained(without_data: bool) -> None:
    whole = Net()
    expected = _in_one_process(whole, BATCHES[:2], BATCHES[2:4], BATCHES[4:])
    state = whole.state_dict()
    found: dict[str, Any] = {}
    for losses, part in ranks.run(2, _cut_elsewhere, without_data):
        assert losses == pytest.approx(expected, rel=1e-10)
        found |= part
    assert found.keys() >= state.keys()
    for name, each in state.items():
        assert torch.allclose(found[name].double(), each.double(), rtol=1e-10, atol=1e-12), name


def _keep_both(rank: int) -> Any:
    model, losses = Net(), []
    one = _cut(model, {"head": 1})
    losses += _train(one, BATCHES[:1])
    other = _cut(model, {"head": 1})  # as for another choice of an argument
    losses += [*_train(other, BATCHES[1:2]), *_train(one, BATCHES[2:3])]
    moved = _cut(model, {"two": 1})
    losses += _train(moved, BATCHES[3:4])
    said = []
    for do in (one.step, other.step, other.evaluate):
        with pytest.raises(PipelineError) as caught:
            do(X, X)
        said.append(str(caught.value))
    for run in (one, other, moved):
        run.close()
    return losses, said


def test_pipelines_of_one_model_are_used_by_turns_until_one_of_them_takes_weights_elsewhere() -> None:
    expected = _in_one_process(Net(), *([each] for each in BATCHES[:4]))
    for losses, said in ranks.run(2, _keep_both):
        assert losses == pytest.approx(expected, rel=1e-10)
        for each in said:
            assert "the pipeline was closed: the model was cut again" in each
            assert "give both the same stage_of=" in each


def _replace_head(rank: int) -> list[float]:
    model, losses = Net(), []
    with _cut(model, {"head": 1}) as run:
        losses += _train(run, BATCHES[:2])
    torch.manual_seed(1)
    model.head = nn.Linear(4, 4).double()
    with _cut(model, {"two": 1}) as run:
        return losses + _train(run, BATCHES[2:4])


def test_what_a_script_has_put_in_place_of_a_module_since_is_what_counts() -> None:
    whole = Net()
    expected = _in_one_process(whole, BATCHES[:2])
    torch.manual_seed(1)
    whole.head = nn.Linear(4, 4).double()
    expected += _in_one_process(whole, BATCHES[2:4])
    for losses in ranks.run(2, _replace_head):
        assert losses == pytest.approx(expected, rel=1e-10)


def _set_where_it_runs(rank: int, without_data: bool) -> Any:
    model = Net()
    state = {name: each.clone() for name, each in model.state_dict().items()}
    if without_data:
        with torch.device("meta"):
            model = Net()
    with _cut(model, {"two": 1}, state) as run:
        losses = _train(run, BATCHES[:2])
        run.eval()
        losses.append(run.evaluate(*BATCHES[2]).loss)
        for name, each in run.named_parameters():
            each.requires_grad_(not name.startswith("two"))
    with _cut(model, {"head": 1}, state) as run:
        modes, learns = [each.training for each in model.modules()], [each.requires_grad for each in model.parameters()]
        run.train()
        return [*losses, *_train(run, BATCHES[3:])], modes, learns


@pytest.mark.parametrize("without_data", [False, True])
def test_modes_and_frozen_weights_that_a_script_has_set_in_a_pipeline_are_those_of_the_next_cut(
    without_data: bool,
) -> None:
    whole = Net()
    expected = _in_one_process(whole, BATCHES[:2])
    whole.eval()
    total, count = squares(whole(BATCHES[2][0]), BATCHES[2][1])
    whole.train().two.requires_grad_(False)
    expected += [float(total.detach() / count), *_in_one_process(whole, BATCHES[3:])]
    for losses, modes, learns in ranks.run(2, _set_where_it_runs, without_data):
        assert losses == pytest.approx(expected, rel=1e-10)
        assert not any(modes)
        assert learns == [each.requires_grad for each in whole.parameters()]


class Tables(nn.Module):  # type: ignore[misc]
    """Keeps what its first call makes for a length, in one of the ways in which modules do."""

    table: Any

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.count, self.tables, self.eps = kind, 0, dict[int, Any](), 0.5
        self.layer = nn.Linear(4, 4).double()
        if kind == "buffer":
            self.register_buffer("table", None, persistent=False)
        elif kind == "attribute":
            self.table = None

    def forward(self, x: Any) -> Any:
        if self.kind == "dictionary":
            if x.shape[1] not in self.tables:
                self.tables[x.shape[1]] = torch.arange(x.shape[1], dtype=x.dtype)
            return self.layer(x) + self.tables[x.shape[1]] * self.eps
        if self.count < x.shape[1]:
            table = torch.arange(x.shape[1], dtype=x.dtype)
            self.count = x.shape[1]
            if self.kind in ("buffer", "no buffer yet"):
                self.register_buffer("table", table, persistent=False)
            else:
                self.table = table
        return self.layer(x) + self.table[: x.shape[1]] * self.eps


def _cut_with_tables(rank: int, kind: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(Tables(kind), nn.Tanh(), Tables(kind), nn.Tanh(), Tables(kind))
    losses: list[float] = []
    for stage_of in ({"2": 1}, {"2": 0, "4": 1}):
        with _cut(model, stage_of) as run:
            losses += _train(run, BATCHES[:2])
    if rank == 1:
        model[2].eps = 0.25
    with pytest.raises(PipelineError, match=r"do not agree on attribute 'eps' of module '2': 0.5 on rank 0, 0.25"):
        _cut(model, {"2": 1})
    return losses


@pytest.mark.parametrize("kind", ["attribute", "buffer", "no buffer yet", "dictionary"])
def test_a_model_whose_modules_have_made_tables_in_their_stages_is_cut_again(kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Tables(kind), nn.Tanh(), Tables(kind), nn.Tanh(), Tables(kind))
    expected = pytest.approx(_in_one_process(model, BATCHES[:2], BATCHES[:2]), rel=1e-10)
    assert ranks.run(2, _cut_with_tables, kind) == [expected, expected]
