"""Changes of objects between two saves are in the second save; a plan that no longer fits is detected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.checkpoint.save import planning  # noqa: E402
from everstep.checkpoint.state.flat import flatten_objects  # noqa: E402
from everstep.checkpoint.state.staging import Host  # noqa: E402
from everstep.coordination.group import RankGroup  # noqa: E402

pytestmark = pytest.mark.torch


class Run:
    """The objects of a script: a model, an optimizer that has not made its state yet, and a nested value."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.extra: dict[str, Any] = {"ema": {"deep": [torch.zeros(3)]}, "note": "a", "count": (1, 2)}

    def step(self) -> None:
        self.model(torch.ones(5, 4)).sum().backward()
        self.optimizer.step()

    def objects(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer, "extra": self.extra}

    def expected(self) -> dict[str, Any]:
        """The tensors by name, found without any of the code under test."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        known = {id(param): name for name, param in self.model.named_parameters()}
        for param, state in self.optimizer.state.items():
            found.update({f"optimizer.state.{known[id(param)]}.{key}": value for key, value in state.items()})
        for key, value in self.extra["ema"].items():
            found.update({f"extra.ema.{key}.[{i}]": each for i, each in enumerate(value)})
        return found


def swap_data(run: Run) -> None:
    run.model[0].weight.data = torch.full((3, 4), 7.0)


def move_a_moment(run: Run) -> None:
    state = run.optimizer.state[run.model[0].bias]
    state["exp_avg"] = state["exp_avg"].clone() + 1


def freeze(run: Run) -> None:
    run.model[0].weight.requires_grad_(False)


def set_a_buffer(run: Run) -> None:
    run.model[1].running_mean = torch.full((3,), 5.0)


def resize(run: Run) -> None:
    run.extra["ema"]["deep"][0].resize_(5).fill_(2.0)


def other_dtype(run: Run) -> None:
    run.model[2].weight.data = run.model[2].weight.data.to(torch.bfloat16)


def remove_a_parameter(run: Run) -> None:
    group = run.optimizer.param_groups[0]
    run.optimizer.state.pop(run.model[2].bias)
    group["params"] = [each for each in group["params"] if each is not run.model[2].bias]
    run.model[2].bias = None


def replace_a_module(run: Run) -> None:
    run.model[2] = nn.Linear(3, 4)
    run.optimizer = torch.optim.AdamW(run.model.parameters())
    run.step()


def grow_a_container(run: Run) -> None:
    run.extra["ema"]["deep"].append(torch.ones(2))


def replace_a_container(run: Run) -> None:
    run.extra["ema"] = {"other": [torch.ones(3)]}


SAME = [Run.step, swap_data, move_a_moment, freeze, set_a_buffer]
OTHER = [resize, other_dtype, remove_a_parameter, replace_a_module, grow_a_container, replace_a_container]


def saved(plan: planning.WritePlan, tensors: Any) -> dict[str, Any]:
    targets = [torch.empty(box.sizes, dtype=getattr(torch, box.dtype)) for box in plan.boxes]
    Host().copy(targets, plan.sources(tensors))
    return {box.tensor: target for box, target in zip(plan.boxes, targets, strict=True)}


@pytest.mark.parametrize("change", [*SAME, *OTHER], ids=lambda change: change.__name__)
def test_a_save_takes_what_is_there_now(change: Callable[[Run], None]) -> None:
    run = Run()
    run.step()
    plan = planning.make_save_plan(lambda: flatten_objects(run.objects(), rank=0), 0, RankGroup(None))
    change(run)
    flat = flatten_objects(run.objects(), rank=0)
    assert (planning.compute_signature(flat.tensors) != plan.signature) == (change in OTHER)
    if change in OTHER:
        plan = planning.make_save_plan(lambda: flat, 0, RankGroup(None))
    expected, found = run.expected(), saved(plan, flat.tensors)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_state_that_an_optimizer_makes_later_is_another_layout_and_values_are_those_of_now() -> None:
    run = Run()
    plan = planning.make_save_plan(lambda: flatten_objects(run.objects(), rank=0), 0, RankGroup(None))
    run.step()
    run.extra.update(note="b", count=(1, 2, 3))
    flat = flatten_objects(run.objects(), rank=0)
    assert planning.compute_signature(flat.tensors) != plan.signature
    assert flat.tensors.keys() == run.expected().keys()
    assert (flat.values["extra.note"], flat.values["extra.count"]) == ("b", {"tuple": [1, 2, 3]})
