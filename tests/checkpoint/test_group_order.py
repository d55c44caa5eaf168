"""A scheduler has numbers by the place of an optimizer's group: they come back to the same groups, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.state.kinds import StateMismatch  # noqa: E402
from everstep.checkpoint.state.optimizers import OptimizerObject  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

every = torch.optim.lr_scheduler


class Wrapped:
    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def state_dict(self) -> Any:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.scheduler.load_state_dict(state)


class OwnSchedule:
    """A scheduler that is none of torch's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.rates = [group["lr"] for group in optimizer.param_groups]

    def state_dict(self) -> Any:
        return {"rates": self.rates}

    def load_state_dict(self, state: Any) -> None:
        self.rates = state["rates"]


SCHEDULERS: dict[str, Any] = {
    "lambda": lambda optimizer: every.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "plateau": lambda optimizer: every.ReduceLROnPlateau(
        optimizer, min_lr=[group["lr"] / 10 for group in optimizer.param_groups]
    ),
    "sequential": lambda optimizer: every.SequentialLR(
        optimizer, [every.ConstantLR(optimizer), every.ExponentialLR(optimizer, 0.9)], [2]
    ),
    "chained": lambda optimizer: every.ChainedScheduler([every.ConstantLR(optimizer)]),
    "wrapped": lambda optimizer: Wrapped(every.StepLR(optimizer, 1)),
    "own": OwnSchedule,
}  # fmt: skip


def make(order: str, scheduler: str = "") -> dict[str, Any]:
    """A model of three layers, each of which has a learning rate of its own, in groups of this order."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    rates = {"a": 0.01, "b": 0.1, "c": 1.0}
    groups = [{"params": [*model[each].parameters()], "lr": rates[each]} for each in order]
    optimizer = torch.optim.SGD(groups, lr=9.0)
    objects = {"model": model, "optimizer": optimizer}
    return {**objects, "scheduler": SCHEDULERS[scheduler](optimizer)} if scheduler else objects


def restore(tmp_path: Path, objects: dict[str, Any]) -> None:
    ranks.restore(tmp_path / "store", tmp_path / "memory", objects)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_scheduler_is_refused_where_groups_are_in_another_order(scheduler: str, tmp_path: Path) -> None:
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(1), make("abc", scheduler))
    restore(tmp_path, make("abc", scheduler))
    given = make("acb", scheduler)
    before = repr([each.state_dict() for each in given.values()])
    with pytest.raises(StateMismatch) as refused:
        restore(tmp_path, given)
    assert "scheduler has a number for each group of optimizer by its place" in str(refused.value)
    assert "the group of c.weight was number 2 of 3 when saved, and is 1 of 3" in str(refused.value)
    assert "build the groups in the order in which they were saved, or leave scheduler out" in str(refused.value)
    assert repr([each.state_dict() for each in given.values()]) == before, "nothing is touched"


def test_groups_in_another_order_have_their_own_options_where_no_scheduler_comes_back(tmp_path: Path) -> None:
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(1), make("abc", "lambda"))
    given = make("cab")
    for group in given["optimizer"].param_groups:
        group["lr"] = 5.0
    restore(tmp_path, given)
    assert [group["lr"] for group in given["optimizer"].param_groups] == [1.0, 0.01, 0.1]


def test_a_checkpoint_that_does_not_say_the_order_is_taken_as_before(tmp_path: Path) -> None:
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(1), make("abc", "lambda"))
    given = make("cab", "lambda")
    with pytest.raises(StateMismatch, match="build the groups in the order"):
        everstep.load_into(tmp_path / "store", **given)
    everstep.load_into(tmp_path / "store", rename=lambda name: None if ".places." in name else name, **given)
    assert given["scheduler"].base_lrs == [0.01, 0.1, 1.0]


class Counted(list[Any]):
    """Counts how often all of it is looked at."""

    looks = 0

    def __iter__(self) -> Iterator[Any]:
        self.looks += 1
        return super().__iter__()


def test_each_parameter_may_have_a_group_of_its_own() -> None:
    """As with layers that learn at rates of their own: a save of thousands holds up training for each of them once."""

    def count_looks(groups: int) -> int:
        params = [nn.Parameter(torch.zeros(1)) for _ in range(groups)]
        kind = OptimizerObject("optimizer", torch.optim.SGD([{"params": [each]} for each in params]), {}, "rank.0")
        counted = kind.params = Counted(kind.params)
        assert sum(".positions." in name for name, _ in kind.leaves()) == groups
        return counted.looks

    assert count_looks(30) == count_looks(3)
