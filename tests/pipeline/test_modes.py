"""A module's own `train` keeps parts of it in another mode, or changes weights: it is called when the script does."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.pipeline import EngineOptions, PlanOptions, pipeline  # noqa: E402
from everstep.pipeline.frontend import split_model, trace_model  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.pipeline.grouping import group_options  # noqa: E402

pytestmark = pytest.mark.torch

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Frozen(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """A backbone whose batch normalisation always evaluates, as detectors have it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), Scaled()

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.eval()
        self.last.eval()
        return self

    def forward(self, x: Any) -> Any:
        return self.last(self.second(self.norm(self.first(x))))


class Scaled(nn.Module):  # type: ignore[misc]
    """Has its own code beside its module, so that a cut may open it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.layer(x).tanh() * (2.0 if self.training else 3.0)


class Adapted(nn.Linear):  # type: ignore[misc]
    """Merges its adapter when it is to evaluate, as loralib does."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.adapter, self.merged = nn.Parameter(torch.eye(4)), False

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += -self.adapter if mode else self.adapter
            self.merged = not mode
        return self

    def forward(self, x: Any) -> Any:
        return super().forward(x) if self.merged else super().forward(x) + x @ self.adapter.t()


def model(middle: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), middle(), nn.Linear(4, 4)).double().train()


def squared(output: Any, target: Any) -> Any:
    return (output - target).square().mean()


def _trained(rank: int) -> list[dict[str, Any]]:
    found = []
    cases: tuple[tuple[type[nn.Module], dict[str, Any]], ...] = (
        (Frozen, {"stage_of": {"1.second": 1}, "schedule": "1f1b"}),
        (Frozen, {"stage_of": {"1.norm": 1, "1.second": 2, "1.last.layer": 2, "2": 3}, "schedule": "interleaved"}),
        (Adapted, {"stage_of": {"1": 1}, "schedule": "1f1b"}),
    )
    for middle, how in cases:
        with pipeline(
            model(middle),
            X,
            squared,
            targets=X,
            microbatches=2,
            **group_options(costs="counted", heartbeat=None, **how),
        ) as run:
            for again in (False, True):
                if again:
                    run.eval()
                    run.evaluate(X, X)
                    run.train()
                run.step(X, X)
            part = {name: each.detach() for name, each in (*run.named_parameters(), *run.named_buffers())}
            found.append(part | {f"{name}.grad": each.grad for name, each in run.named_parameters()})
    return found


def test_a_train_method_of_a_module_is_called_as_in_one_process_wherever_it_is_cut() -> None:
    for middle, one, other in zip((Frozen, Frozen, Adapted), *ranks.run(2, _trained), strict=True):
        alone = model(middle)
        alone.eval()
        alone.train()
        squared(alone(X), X).backward()
        for name, each in alone.named_parameters():
            found = (one | other)[f"{name}.grad"]
            assert found is not None, name
            torch.testing.assert_close(found, each.grad, rtol=1e-9, atol=1e-12, msg=name)
        for name, each in alone.state_dict().items():
            torch.testing.assert_close((one | other)[name], each, rtol=1e-12, atol=1e-12, msg=name)


def _set_by_hand(rank: int) -> float:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Linear(4, 4)).double().train()
    with pipeline(
        plain,
        X,
        squared,
        schedule="interleaved",
        microbatches=2,
        plan=PlanOptions(stage_of={"1.layer": 1, "1:mul": 2, "2": 3}, costs="counted"),
        engine=EngineOptions(heartbeat=None),
    ) as run:
        for name, each in run.named_modules():
            if name.startswith("1"):
                each.eval()
        return float(run.step(X, X).loss)


def test_a_mode_that_is_set_by_hand_holds_in_all_stages_of_a_process() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Linear(4, 4)).double().train()
    plain[1].eval()
    expected = squared(plain(X), X).item()
    assert ranks.run(2, _set_by_hand) == [pytest.approx(expected, rel=1e-12)] * 2


class Noise(nn.Module):  # type: ignore[misc]
    """Gives in evaluation the very tensor that it is given, as dropped paths and noise do."""

    def forward(self, x: Any) -> Any:
        return x + torch.randn_like(x) if self.training else x


class Denoising(nn.Module):  # type: ignore[misc]
    """Computes with what was made noisy, and with the argument itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.noise, self.first, self.second = nn.Sequential(Noise(), nn.Identity()), nn.Linear(4, 4), nn.Linear(4, 4)
        self.double()

    def forward(self, x: Any) -> Any:
        return self.second(self.first(self.noise(x)).tanh() - 2 * x), x


class Bypassed(nn.Module):  # type: ignore[misc]
    """Leaves out in evaluation what a module has made, by code around it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4).double()

    def forward(self, x: Any) -> Any:
        found = self.first(x)
        return found if self.training else x


class Keeps(nn.Module):  # type: ignore[misc]
    """Keeps what it has dropped from, as hooks that capture hidden states do."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.layer = nn.Dropout(0.5), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        self.kept = self.drop(x)
        return self.layer(self.kept).tanh()


class ManyDropouts(nn.Module):  # type: ignore[misc]
    """Drops from one value several times, computes with that itself after it, and returns it and its argument."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.drops = nn.ModuleList([nn.Dropout(0.5), nn.Dropout(0.1)])
        self.first, self.second, self.head = Keeps(), Keeps(), nn.Linear(4, 4)
        self.double()

    def forward(self, x: Any) -> Any:
        hidden = self.drops[0](x) * self.first(x) + self.drops[1](x) * self.first.kept - x
        found = sum(self.head(drop(hidden)) for drop in self.drops) + self.second(hidden) * self.second.kept
        return found + nn.functional.dropout(self.head.weight, 0.5, self.training)[0] * self.head.weight[1], hidden, x


@pytest.mark.parametrize("kind", [Denoising, ManyDropouts])
def test_a_module_that_hands_on_an_argument_in_evaluation_is_cut_for_both_modes(kind: Any) -> None:
    model = kind().train()
    found = trace_model(model, {"x": X})
    assert found.both
    order = [node.name for node in found.graph.nodes]
    model.eval()
    for cut in range(1, len(order)):
        first, second = split_model(found, {name: int(at >= cut) for at, name in enumerate(order)})
        for stage in (first, second):
            stage.module.eval()
        given = {"input:x": X, **first({"input:x": X})}
        result = second({name: given[name] for name in second.inputs})["output"]
        for one, other in zip(result, model(X), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


class ChangesDropped(nn.Module):  # type: ignore[misc]
    """Changes in place, in evaluation, also what it has dropped from."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(4, 4).double(), nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        hidden = self.first(x)
        dropped = self.drop(hidden)
        dropped[:, 0] = 0
        return dropped + hidden


def test_code_that_leaves_a_result_out_in_evaluation_is_not_taken_for_a_module_that_hands_on() -> None:
    assert not trace_model(Bypassed().train(), {"x": X}).both


def test_what_dropout_hands_on_in_evaluation_is_another_value_where_it_is_changed_in_place() -> None:
    assert not trace_model(ChangesDropped().train(), {"x": X}).both
