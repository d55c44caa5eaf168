"""Weights of other stages: what reads them is either right, or refused with their names; nothing takes stale copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline import EngineOptions, PlanOptions, pipeline  # noqa: E402
from everstep.pipeline.errors import PipelineError  # noqa: E402
from everstep.pipeline.frontend.split import split_model  # noqa: E402
from everstep.pipeline.frontend.trace import trace_model  # noqa: E402
from everstep.pipeline.unsupported import refuse_unsupported  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

X = torch.linspace(-1.0, 1.0, 32, dtype=torch.float64).view(8, 4)
BATCHES = [(X * (step + 1), X.flip(0) - step) for step in range(3)]


class Net(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Four layers, and normalisation; it may return what it takes from the first one."""

    def __init__(self, *, gives_norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.body, self.head = (
            nn.Linear(4, 4),
            nn.BatchNorm1d(4),
            nn.Linear(4, 4),
            nn.Linear(4, 4),
        )
        self.register_buffer("importance", torch.linspace(0.5, 2.0, 4))  # that nothing writes
        self.gives_norm = gives_norm
        self.double()

    def forward(self, x: Any) -> Any:
        found = self.head(self.body(self.norm(self.embed(x)).tanh()).tanh())
        return (found, self.embed.weight.detach().norm(), self.embed.bias) if self.gives_norm else found


def squared(output: Any, target: Any) -> Any:
    return (output - target).square().mean()


def _cut(model: nn.Module, loss: Any, targets: Any = None, **how: Any) -> Any:
    plan = PlanOptions(**{"stage_of": {"body": 1}, "costs": "counted", **how})
    options = EngineOptions(heartbeat=20.0)
    return pipeline(model, X, loss, targets=targets, microbatches=2, plan=plan, engine=options)


def _say(work: Callable[[], Any]) -> str:
    """Return the error, or the result."""
    try:
        return repr(work())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _make_losses(model: Any) -> dict[str, Any]:
    view, weights = model.embed.weight.detach(), tuple(model.parameters())
    return {
        "detached": lambda output, target: squared(output, target) / model.embed.weight.detach().norm(),
        "by data": lambda output, target: squared(output, target) * model.embed.weight.data.abs().mean(),
        "a number": lambda output, target: squared(output, target) * model.embed.bias.sum().item(),
        "regularised": lambda output, target: squared(output, target) + sum(each.square().sum() for each in weights),
        "a view from before": lambda output, target: squared(output, target) / view.norm(),
        "statistics": lambda output, target: squared(output / model.norm.running_var.sqrt(), target),
    }


def _refused(rank: int, with_targets: bool) -> dict[str, str]:
    said = {}
    for name in _make_losses(Net()):
        model = Net()
        loss = _make_losses(model)[name]

        def train(model: Any = model, loss: Any = loss) -> float:
            with _cut(model, loss, X if with_targets else None) as run:
                return float(run.step(*BATCHES[0]).loss)

        said[name] = _say(train)
    return said


@pytest.mark.parametrize("with_targets", [True, False])
def test_a_loss_that_reads_weights_of_other_stages_is_refused_with_their_names(with_targets: bool) -> None:
    here, there = ranks.run(2, _refused, with_targets)
    for name, words in here.items():
        if name == "statistics" and with_targets:  # which forward writes
            assert "reads something that forward stores" in words
            continue
        weight = {"statistics": "norm.running_var", "a number": "embed.bias"}.get(name, "embed.weight")
        for said in (words, there[name]):
            assert f"{weight!r} (of stage 0, on rank 0 of the pipeline)" in said, (name, said)
            assert "let forward return it" in said, (name, said)


def _right(rank: int) -> list[list[float]]:
    every = []
    for gives_norm in (False, True):
        model = Net(gives_norm=gives_norm)
        with _cut(model, _make_right_loss(model), X, stage_of={"head": 1}) as run:
            optimizer, losses = torch.optim.SGD(run.groups(), lr=0.1), []
            for x, y in BATCHES:
                losses.append(run.step(x, y).loss)
                optimizer.step()
        every.append(losses)
    return every


def _make_right_loss(model: Any) -> Any:
    def loss(output: Any, target: Any) -> Any:
        if model.gives_norm:
            output, norm, bias = output
            return squared(output * model.importance, target) / norm + bias.square().sum()
        return squared(output, target) * model.head.weight.detach().norm() + model.head.bias.abs().sum()

    return loss


def test_a_loss_of_weights_that_it_has_or_that_forward_returns_is_right() -> None:
    expected = []
    for gives_norm in (False, True):
        model, losses = Net(gives_norm=gives_norm), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in BATCHES:
            # Batch normalisation sees micro-batches, as in the pipeline.
            found = [
                _make_right_loss(model)(model(part), target)
                for part, target in zip(x.chunk(2), y.chunk(2), strict=True)
            ]
            loss = sum(found) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        expected.append(losses)
    for every in ranks.run(2, _right):
        for found, wanted in zip(every, expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-10)


def _uses(rank: int) -> dict[str, str]:
    model, said = Net(), {}
    average = {name: each.detach().clone() for name, each in model.named_parameters()}
    before = torch.optim.SGD(model.parameters(), lr=0.1)

    def average_all() -> None:
        for name, each in model.named_parameters():
            average[name].lerp_(each.detach(), 0.1)

    uses: dict[str, Callable[[], Any]] = {
        "average": average_all,
        "copy": lambda: copy.deepcopy(model),
        "copy of the pipeline": lambda: copy.deepcopy(run),
        "state": model.state_dict,
        "evaluation": lambda: model(X),
        "norm": lambda: torch.nn.utils.get_total_norm([each.data for each in model.parameters()]),
        "vector": lambda: torch.nn.utils.parameters_to_vector(model.parameters()),
        "functional": lambda: torch.func.functional_call(model, {"norm.bias": torch.zeros(4, dtype=X.dtype)}, X),
        "sizes": lambda: sum(each.numel() for each in model.parameters() if each.requires_grad),
        "shown": lambda: (str(model), [repr(each) for each in model.parameters()])[0][:4],
        "frozen": lambda: model.requires_grad_(True).training,
        "mode": lambda: model.train().training,
        "optimizer of all": lambda: (before.step(), before.zero_grad())[0],
        "own": lambda: next(float(each.detach().norm()) > 0 for each in run.parameters()),
    }
    with _cut(model, squared, X) as run:
        for name, use in uses.items():
            run.step(*BATCHES[0])
            said[name] = _say(use)
        said["loaded"] = _say(lambda: model.load_state_dict(Net().state_dict()))
        said["loaded, and read"] = _say(lambda: model.embed.weight.norm() + model.body.weight.norm())
    said["after the end"] = _say(lambda: model(X))
    said["loaded after it"] = _say(lambda: model.load_state_dict(Net().state_dict()))
    said["read after it"] = _say(lambda: model.eval()(X)[0, 0].item() == Net().eval()(X)[0, 0].item())
    return said


def test_a_script_that_takes_a_process_s_model_for_the_trained_one_is_told() -> None:
    here, there = ranks.run(2, _uses)
    plain = {
        "sizes": "68",
        "shown": "'Net('",
        "frozen": "True",
        "mode": "True",
        "optimizer of all": "None",
        "own": "True",
        "loaded": "<All keys matched successfully>",
        "loaded after it": "<All keys matched successfully>",
        "read after it": "True",
    }
    for said, foreign in ((here, "body"), (there, "embed")):
        for name, words in said.items():
            if name in plain:
                assert words == plain[name], (name, words)
            elif name == "copy of the pipeline":
                assert words.startswith("PipelineError: a pipeline cannot be copied"), words
            else:
                assert words.startswith("PipelineError: "), (name, words)
                assert f"reads parameter '{foreign}." in words, (name, words)
                assert "run.named_parameters()" in words


class Borrowing(nn.Module):  # type: ignore[misc]
    """Its head is scaled by what another module holds, which that module does not use; and by a view kept beside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = Tower()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.double()
        self.first_row = (self.tower.inner.one.weight.detach()[0],)

    def forward(self, x: Any) -> Any:
        x = self.body(self.tower(x)).tanh()
        return self.head(x) * self.tower.scale * self.tower.inner.shift.exp() + self.first_row[0]


class Tower(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = Inner(), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Any) -> Any:
        return self.inner(x).tanh()


class Inner(nn.Linear):  # type: ignore[misc]
    """A module that is never cut, with a weight that others use."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.one, self.shift = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))

    def forward(self, x: Any) -> Any:
        return self.one(super().forward(x))


def _borrowed(rank: int) -> Any:
    model = Borrowing()
    with _cut(model, squared, X, stage_of={"head": 1}) as run:
        optimizer, losses = torch.optim.SGD(run.groups(), lr=0.1), []
        for x, y in BATCHES:
            losses.append(run.step(x, y).loss)
            optimizer.step()
        return losses, {name: each.detach().clone() for name, each in run.named_parameters()}


def test_a_weight_that_another_stage_uses_than_its_module_is_one_weight() -> None:
    model, expected = Borrowing(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in BATCHES:
        optimizer.zero_grad()
        loss = squared(model(x), y)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses, weights in ranks.run(2, _borrowed):
        assert losses == pytest.approx(expected, rel=1e-10)
        for name, each in weights.items():  # also where two processes have it
            torch.testing.assert_close(each, model.get_parameter(name).detach(), rtol=1e-10, atol=1e-12, msg=name)


def test_a_module_is_not_in_a_stage_with_a_weight_that_only_others_use() -> None:
    one, other = split_model(trace_model(Borrowing(), X), {"head": 1})
    assert not one.has("tower.scale")
    assert other.has("tower.scale")


def test_two_parameters_in_the_same_memory_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(PipelineError, match=r"parameter '0\.weight' and parameter '1\.weight' are two tensors in the"):
        refuse_unsupported(model)
    model.requires_grad_(False)
    refuse_unsupported(model)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    refuse_unsupported(model)
    flat = torch.zeros(40)
    model[0].weight, model[0].bias = nn.Parameter(flat[:16].view(4, 4)), nn.Parameter(flat[16:20])
    refuse_unsupported(model)
    model[0].register_buffer("kept", model[0].weight.detach())
    with pytest.raises(PipelineError, match=r"buffer '0\.kept' and parameter '0\.weight'"):
        refuse_unsupported(model)


def _whole(rank: int) -> list[str]:
    from torch.nn.utils import clip_grad_norm_

    said = []
    with _cut(Net(), squared, X) as run:
        run.step(*BATCHES[0])
        optimizer = torch.optim.LBFGS(run.parameters())
        said.append(_say(lambda: clip_grad_norm_(run.parameters(), 1.0)))
        said.append(_say(lambda: optimizer.step(lambda: run.step(*BATCHES[0]).loss)))
        scaler, plain = torch.amp.GradScaler("cpu"), torch.optim.SGD(run.parameters(), lr=0.1)
        scaler.scale(torch.ones(()))
        said.append(_say(lambda: scaler.step(plain)))
        said.append(_say(lambda: torch.amp.GradScaler("cpu", enabled=False).step(plain)))
        other = nn.Linear(2, 2)
        other(torch.ones(1, 2)).sum().backward()
        said.append(_say(lambda: float(clip_grad_norm_(other.parameters(), 1.0)) > 0))
        said.append(_say(lambda: float(run.clip_grad_norm_(1.0)) > 0))
        parameters = list(run.parameters())
        # As Prodigy, SAM's own optimizer, LAMB of some libraries, and one that has the option and does not use it.
        for keys in ({"d": 1e-6, "d0": 1e-6}, {"rho": 0.05, "adaptive": False}, {"max_grad_norm": 1.0}):
            named = torch.optim.SGD([{"params": parameters, **keys}], lr=0.1)
            said.append(_say(named.step))
        said.append(_say(torch.optim.SGD([{"params": parameters, "max_grad_norm": None}], lr=0.0).step))
    said.append(_say(lambda: float(clip_grad_norm_(parameters, 1.0)) > 0))
    return said


def test_functions_that_compute_over_all_parameters_together_are_refused_on_a_part_of_them() -> None:
    for clipped, stepped, scaled, unscaled, other, own, *known, unused, after in ranks.run(2, _whole):
        assert "call run.clip_grad_norm_(max_norm) on all processes" in clipped
        assert stepped.startswith("PipelineError: LBFGS computes over all parameters together")
        assert "give EngineOptions(precision='fp16')" in scaled
        assert [unscaled, other, own, after, unused] == ["None", *["True"] * 3, "None"]
        for each, words in zip(
            known, ("estimates its step", "goes along the gradient", "clips by the norm"), strict=True
        ):
            assert each.startswith(f"PipelineError: SGD {words}")


def test_a_pipeline_on_one_process_is_the_whole_model() -> None:
    assert ranks.run(1, _alone) == [["True", "True"]]


def _lent(rank: int, weights: str) -> tuple[float, dict[str, Any]]:
    with _cut(Lending(weights), squared, X, stage_of={"head": 1}) as run:
        loss = run.step(*BATCHES[0]).loss
        return loss, {name: each.grad.clone() for name, each in run.named_parameters() if each.grad is not None}


class Lending(Net):
    """Calls one module with the parameters of another, or with what it makes of its own."""

    def __init__(self, weights: str) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, x: Any) -> Any:
        weights = dict(self.head.named_parameters())
        if self.weights == "its own":
            weights = {name: each * 2 for name, each in self.body.named_parameters()}
        found = torch.func.functional_call(self.body, weights, (self.embed(x).tanh(),))
        return self.head(self.body(found).tanh())


@pytest.mark.parametrize("weights", ["its own", "another's"])
def test_a_module_that_is_called_with_other_parameters_than_its_own_takes_them_in_a_pipeline_too(weights: str) -> None:
    model = Lending(weights)
    wanted = squared(model(BATCHES[0][0]), BATCHES[0][1])
    wanted.backward()
    for loss, gradients in ranks.run(2, _lent, weights):
        assert loss == pytest.approx(wanted.item(), rel=1e-10)
        for name, each in gradients.items():
            torch.testing.assert_close(each, model.get_parameter(name).grad, rtol=1e-10, atol=1e-12, msg=name)


def _alone(rank: int) -> list[str]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = Net()
    loss = _make_losses(model)["detached"]
    with _cut(model, loss, X, stage_of=None) as run:
        run.step(*BATCHES[0])
        said = [
            _say(lambda: float(torch.nn.utils.clip_grad_norm_(run.parameters(), 1.0)) > 0),
            _say(lambda: model(X).shape == X.shape),
        ]
    dist.destroy_process_group()
    return said
