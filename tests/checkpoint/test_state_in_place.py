"""Values that a script holds get their content back in place: whoever else holds them goes on with them."""

from __future__ import annotations

import collections
import fractions
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.errors import CheckpointError  # noqa: E402
from tests.checkpoint.sessions import session  # noqa: E402
from tests.checkpoint.test_state_fit import moved  # noqa: E402

pytestmark = pytest.mark.torch


def made(value: float) -> dict[str, Any]:
    return {
        "array": np.full(300, value),
        "bytes": bytearray([int(value)] * 3000),
        "set": {value},
        "tuple": (torch.full((3,), value), torch.full((2, 2), value)),
        "list": [torch.full((2,), value), {"deep": torch.full((4,), value)}, value],
        "dict": {"parameter": nn.Parameter(torch.full((2,), value)), "deep": {"array": np.full(3, value)}},
    }


def test_each_kind_of_container_gets_its_content_back_in_place(tmp_path: Path) -> None:
    live = made(2.0)
    held = dict(live)
    parameter, deep, listed = live["dict"]["parameter"], live["dict"]["deep"], live["list"][1]["deep"]
    moved(tmp_path, made(7.0), live)
    assert (live["array"] == 7.0).all()
    assert live["bytes"] == bytearray([7] * 3000)
    assert live["set"] == {7.0}
    assert all((each == 7.0).all() for each in live["tuple"])
    assert live["list"][2] == 7.0
    assert all(live[name] is held[name] for name in live)
    assert live["dict"]["parameter"] is parameter
    assert parameter.requires_grad
    assert (parameter == 7.0).all()
    assert (deep["array"] == 7.0).all()
    assert (listed == 7.0).all()


def test_a_parameter_in_a_dictionary_goes_on_with_its_optimizer(tmp_path: Path) -> None:
    def start() -> tuple[dict[str, Any], Any]:
        extra = {"sigma": nn.Parameter(torch.ones(2))}
        return extra, torch.optim.SGD(list(extra.values()), lr=0.1, momentum=0.9)

    def train(extra: dict[str, Any], optimizer: Any, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (extra["sigma"] ** 2).sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    extra, optimizer = start()
    straight = train(extra, optimizer, 6)
    extra, optimizer = start()
    train(extra, optimizer, 3)
    fresh, of_fresh = start()
    moved(tmp_path, {"extra": extra, "optimizer": optimizer}, {"extra": fresh, "optimizer": of_fresh})
    assert train(fresh, of_fresh, 3) == straight[3:]


@pytest.mark.parametrize("value", [(torch.ones(2), 3), frozenset({1}), ()], ids=["tuple", "frozenset", "empty"])
def test_a_value_that_could_not_be_given_back_is_refused_at_the_start(tmp_path: Path, value: Any) -> None:
    with session(tmp_path) as ckpt, pytest.raises(CheckpointError, match="stays what it is now"):
        ckpt.track(value=value)


def read_only_array() -> Any:
    array = np.ones(3)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "value",
    [np.int64(3), read_only_array(), torch.float32, collections.deque([1.0]), fractions.Fraction(1, 3)],
    ids=["a number of NumPy", "a read-only array", "a type", "a deque", "a fraction"],
)
def test_what_can_be_saved_and_could_not_take_in_what_was_saved_is_refused_at_the_start(
    tmp_path: Path, value: Any
) -> None:
    options = everstep.StorageOptions(allow_pickle=True)
    with everstep.checkpointer(tmp_path / "store", storage=options) as ckpt:
        with pytest.raises(CheckpointError, match="stays what it is now"):
            ckpt.track(value=value)
        ckpt.track(state={"value": value})


def test_what_needs_a_pickle_gets_its_content_in_place_or_is_told_to_be_another_object(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a script that appends to its deque, or draws from its generator, would go on with a new one without a word,
    and save the old content for ever."""

    def start() -> tuple[Any, ...]:
        recent, draws, when = collections.deque([0.5], maxlen=3), random.Random(0), fractions.Fraction(1, 2)
        return recent, draws, {"recent": recent, "deep": {"draws": draws, "when": when}}

    options = everstep.StorageOptions(allow_pickle=True)
    recent, draws, state = start()
    with everstep.checkpointer(tmp_path / "store", storage=options) as ckpt:
        ckpt.track(state=state)
        recent.extend([1.0, 2.0, 3.0])
        state["deep"]["when"], first = fractions.Fraction(3, 2), draws.random()
        ckpt.save(1)
    recent, draws, state = start()
    with everstep.checkpointer(tmp_path / "store", storage=options) as ckpt:
        ckpt.restore(state=state)
    assert list(recent) == [1.0, 2.0, 3.0]
    assert state["recent"] is recent
    assert draws.random() == first, "it is as the script has made it"
    assert state["deep"]["draws"].random() != first
    assert state["deep"]["when"] == fractions.Fraction(3, 2)
    (told,) = [record.getMessage() for record in caplog.records if "another" in record.getMessage()]
    assert told.startswith("state holds another random.Random than before restore(): read it from there")


class Recent(collections.deque[float]):
    """Counts what it has seen, as a replay buffer does."""

    seen = 0


class Losses(list[float]):
    best = 0.0


class Book(dict[str, float]):
    step = 0


class Shown(dict[str, Any]):
    """Has its keys as attributes too."""

    deep: list[float]

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


def test_a_container_of_a_class_of_its_own_gets_its_attributes_back_too(tmp_path: Path) -> None:
    """Else its content would be that of the checkpoint, and its counters those of the script's start."""

    def start() -> tuple[Recent, Losses, Book, Book, Shown]:
        return Recent(maxlen=2), Losses(), Book(), Book(), Shown(deep=[0.0])

    def name(made: tuple[Any, ...]) -> dict[str, Any]:
        recent, losses, nested, book, shown = made
        return {"state": {"recent": recent, "losses": losses, "nested": [nested, {"shown": shown}]}, "book": book}

    options = everstep.StorageOptions(allow_pickle=True)
    recent, losses, nested, book, shown = made = start()
    with everstep.checkpointer(tmp_path / "store", storage=options) as ckpt:
        ckpt.track(**name(made))
        recent.extend([1.0, 2.0, 3.0])
        recent.seen = 3
        losses.append(0.5)
        losses.best = 0.5
        nested.step = book.step = 7
        shown.deep[0] = 4.0
        ckpt.save(1)
    recent, losses, nested, book, shown = made = start()
    held = shown.deep
    with everstep.checkpointer(tmp_path / "store", storage=options) as ckpt:
        ckpt.restore(**name(made))
    assert (list(recent), recent.seen) == ([2.0, 3.0], 3)
    assert (losses, losses.best) == ([0.5], 0.5)
    assert (nested.step, book.step) == (7, 7)
    assert shown.deep is shown["deep"] is held
    assert held == [4.0]


def test_a_copy_of_the_state_of_an_object_is_refused_in_its_place(tmp_path: Path) -> None:
    """A restore would fill the copy, and the training would go on with a new optimizer without a word."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    schedulers = torch.optim.lr_scheduler
    objects: list[Any] = [
        optimizer,
        schedulers.CosineAnnealingLR(optimizer, 5),
        schedulers.ReduceLROnPlateau(optimizer),
        schedulers.SequentialLR(optimizer, [schedulers.LinearLR(optimizer), schedulers.LinearLR(optimizer)], [2]),
        schedulers.ChainedScheduler([schedulers.LinearLR(optimizer)], optimizer=optimizer),
        torch.amp.GradScaler("cpu"),
    ]
    with session(tmp_path) as ckpt:
        for each in objects:
            with pytest.raises(CheckpointError, match=r"a copy, .* Give the object itself"):
                ckpt.restore(model=model, its=each.state_dict())
            ckpt.restore(model=model, its=each)
        ckpt.restore(model=model.state_dict())  # its tensors are those of the model


def test_an_array_of_another_size_is_no_silent_restore(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot take in what was saved"):
        moved(tmp_path, {"array": np.ones(4)}, {"array": np.ones(5)})


def test_a_state_that_grows_is_saved_at_every_step(tmp_path: Path) -> None:
    """LBFGS keeps one more pair of tensors after each step."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, history_size=20)
    x, y = torch.rand(8, 3), torch.rand(8, 1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        return loss

    with session(tmp_path, every_steps=1, policy="wait", keep_last=20) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        for step in range(1, 7):
            optimizer.step(closure)
            ckpt.step(step)
        ckpt.wait()
        metrics = ckpt.metrics()
    assert (metrics["saved"], metrics["failed"]) == (6, 0)


def test_a_run_that_starts_over_in_an_attempt_that_has_saved_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with session(tmp_path, attempt=(1, 1)) as ckpt:
        ckpt.track(model=model)
        ckpt.save(5)
    with session(tmp_path, attempt=(1, 1)) as ckpt:
        ckpt.start_over(model=model)
        with pytest.raises(CheckpointError, match=r"the run starts over, and attempt .* has saved step 5 already"):
            ckpt.save(1)
