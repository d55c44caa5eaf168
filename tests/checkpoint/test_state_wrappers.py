"""Wrappers of a model, and what is trained beside it: each comes back, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn  # noqa: E402

from everstep.checkpoint.errors import CheckpointError  # noqa: E402
from everstep.checkpoint.state.flat import flatten_objects  # noqa: E402
from everstep.checkpoint.state.kinds import StateMismatch  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

WRAPPERS: dict[str, Any] = {
    "bare": lambda model: model,
    "compiled": torch.compile,
    "DDP": DistributedDataParallel,
    "compiled DDP": lambda model: torch.compile(DistributedDataParallel(model)),
    "DDP of compiled": lambda model: DistributedDataParallel(torch.compile(model)),
}


def made(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.rand(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def saved_in_one_and_restored_in_each(rank: int, folder: Path, wrapper: str) -> list[str]:
    """Names of the wrappers in which something differs from the bare model that was trained."""
    bare, optimizer = made(1)
    expected = flatten_objects({"model": bare, "optimizer": optimizer}, rank=0)
    store = PosixStore(folder / "store")
    ranks.save(store, ranks.key(10), {"model": WRAPPERS[wrapper](bare), "optimizer": optimizer})
    wrong = []
    for name, wrap in WRAPPERS.items():
        model, own = made(2)
        ranks.restore(store, folder / "memory" / name.replace(" ", "-"), {"model": wrap(model), "optimizer": own})
        found = flatten_objects({"model": model, "optimizer": own}, rank=0)
        if found.values != expected.values or not ranks.same(found.tensors, expected.tensors):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("wrapper", list(WRAPPERS))
def test_a_model_comes_back_whatever_wraps_it_and_in_which_order(tmp_path: Path, wrapper: str) -> None:
    assert ranks.run(2, saved_in_one_and_restored_in_each, tmp_path, wrapper) == [[], []]


def test_an_average_of_a_model_comes_back(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        model, _ = made(seed)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for _ in range(seed):
            average.update_parameters(model)
        return {"model": model, "ema": average}

    before, after = make(1), make(2)
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(10), before)
    ranks.restore(tmp_path / "store", tmp_path / "memory", after)
    assert ranks.same(flatten_objects(after, rank=0).tensors, flatten_objects(before, rank=0).tensors)
    assert int(after["ema"].n_averaged) == 1


class Pair(nn.Module):  # type: ignore[misc]
    """Its own methods, which take no more than they need, make a dictionary for each of its models, and take that."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 2), nn.BatchNorm1d(2)

    def state_dict(self) -> dict[str, Any]:
        return {"one": self.one.state_dict(), "other": self.other.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.one.load_state_dict(state["one"])
        self.other.load_state_dict(state["other"])


class OwnLoading(nn.Linear):  # type: ignore[misc]
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)


@pytest.mark.parametrize("make", [Pair, lambda: OwnLoading(3, 2)], ids=["nested", "flat"])
def test_a_module_whose_own_method_takes_a_state_and_nothing_else_gets_it(make: Any, tmp_path: Path) -> None:
    before, after = make(), make()
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(10), {"model": before})
    ranks.restore(tmp_path / "store", tmp_path / "memory", {"model": after})
    assert all(map(torch.equal, before.parameters(), after.parameters()))


def test_scalers_and_schedulers_come_back(tmp_path: Path) -> None:
    def make(steps: int) -> dict[str, Any]:
        _, optimizer = made(1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**steps)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [3])
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        return {"optimizer": optimizer, "scaler": scaler, "scheduler": scheduler}

    before, after = make(5), make(0)
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(10), before)
    ranks.restore(tmp_path / "store", tmp_path / "memory", after)
    for each in (before, after):
        each["optimizer"].step()
        each["scheduler"].step()
    assert after["scheduler"].get_last_lr() == before["scheduler"].get_last_lr()
    assert after["scaler"].state_dict() == before["scaler"].state_dict()


class OwnCosine(torch.optim.lr_scheduler.CosineAnnealingLR):  # type: ignore[misc,name-defined]
    """A script's own variant."""


class OwnRule(torch.optim.lr_scheduler.LRScheduler):  # type: ignore[misc,name-defined]
    def get_lr(self) -> Any:
        return [0.5]


class Wrapped:
    """As other libraries wrap schedulers."""

    def __init__(self, inner: Any) -> None:
        self.scheduler = inner
        self.state_dict = inner.state_dict
        self.load_state_dict = inner.load_state_dict


def scheduler_of(kind: str, optimizer: Any = None) -> Any:
    every = torch.optim.lr_scheduler
    optimizer = optimizer or made(1)[1]
    if kind.startswith(("sequential", "chained")):
        inner = [scheduler_of(each, optimizer) for each in kind.split()[1:]]
        milestones = list(range(2, len(inner) + 1))
        return (
            every.ChainedScheduler(inner)
            if kind.startswith("chained")
            else every.SequentialLR(optimizer, inner, milestones)
        )
    found: dict[str, Callable[[], Any]] = {
        "step": lambda: every.StepLR(optimizer, 3),
        "cosine": lambda: every.CosineAnnealingLR(optimizer, 10),
        "own-cosine": lambda: OwnCosine(optimizer, 10),
        "own-rule": lambda: OwnRule(optimizer),
        "wrapped-step": lambda: Wrapped(every.StepLR(optimizer, 3)),
        "plateau": lambda: every.ReduceLROnPlateau(optimizer),
        "scaler": lambda: torch.amp.GradScaler("cpu"),
    }
    return found[kind]()


@pytest.mark.parametrize(
    ("saved", "other", "names"),
    [
        ("step", "cosine", ("StepLR", "CosineAnnealingLR")),
        ("cosine", "step", ("CosineAnnealingLR", "StepLR")),
        ("cosine", "own-rule", ("CosineAnnealingLR", "OwnRule")),
        ("plateau", "wrapped-step", ("ReduceLROnPlateau", "StepLR")),
        ("scaler", "step", ("GradScaler", "StepLR")),
        ("sequential step cosine", "sequential cosine step", ("StepLR", "CosineAnnealingLR")),
        ("chained step cosine", "chained step step", ("CosineAnnealingLR", "StepLR")),
        ("chained step cosine", "sequential step cosine", ("ChainedScheduler", "SequentialLR")),
        ("chained step cosine", "chained step cosine step", ("2 schedulers", "3 here")),
    ],
)
def test_a_scheduler_of_another_kind_is_refused_with_both_names(
    saved: str, other: str, names: tuple[str, str], tmp_path: Path
) -> None:
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(10), {"scheduler": scheduler_of(saved)})
    given = scheduler_of(other)
    before = repr(given.state_dict())
    with pytest.raises(StateMismatch, match=rf"scheduler.* {names[0]}|{names[0]} in the checkpoint") as refused:
        ranks.restore(tmp_path / "store", tmp_path / "memory", {"scheduler": given})
    assert all(each in str(refused.value) for each in (*names, "leave it out of restore() and name it in track()"))
    assert repr(given.state_dict()) == before


@pytest.mark.parametrize(
    ("saved", "other"),
    [("cosine", "own-cosine"), ("wrapped-step", "step"), ("step", "wrapped-step"), ("own-rule", "own-rule")],
)
def test_a_scheduler_of_the_same_kind_comes_back_whatever_wraps_it(saved: str, other: str, tmp_path: Path) -> None:
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(10), {"scheduler": scheduler_of(saved)})
    given = scheduler_of(other)
    ranks.restore(tmp_path / "store", tmp_path / "memory", {"scheduler": given})
    assert not [key for key in given.state_dict() if key.startswith("%")]


class LowRank(nn.Module):  # type: ignore[misc]
    """As adapters of low rank are: the weight is frozen, two small ones are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 1, bias=False), nn.Linear(1, 4, bias=False)

    def forward(self, x: Any) -> Any:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("only_trained", [False, True], ids=["all in the optimizer", "trained ones in the optimizer"])
def test_frozen_weights_come_back_with_those_that_are_trained(tmp_path: Path, only_trained: bool) -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = LowRank()
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad or not only_trained])
        model(torch.rand(2, 4)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    before, after = make(1), make(2)
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(10), before)
    ranks.restore(tmp_path / "store", tmp_path / "memory", after)
    assert ranks.same(flatten_objects(after, rank=0).tensors, flatten_objects(before, rank=0).tensors)


def test_a_quantized_tensor_is_refused_with_advice() -> None:
    with pytest.raises(CheckpointError, match=r"state\.q is a tensor that is quantized; save its int_repr"):
        flatten_objects({"state": {"q": torch.quantize_per_tensor(torch.rand(4), 0.1, 0, torch.qint8)}}, rank=0)


def test_a_masked_tensor_is_refused_since_its_mask_would_be_lost() -> None:
    masked = torch.masked.MaskedTensor(torch.rand(3), torch.tensor([True, False, True]))
    with pytest.raises(CheckpointError, match=r"state\.m is a MaskedTensor"):
        flatten_objects({"state": {"m": masked}}, rank=0)


class Choosy:
    """Takes no state."""

    def state_dict(self) -> dict[str, int]:
        return {"at": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise RuntimeError(f"at {state['at']} is nowhere")


def test_what_an_object_raises_when_it_is_loaded_names_the_object(tmp_path: Path) -> None:
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(10), {"choosy": Choosy()})
    with pytest.raises(RuntimeError, match="at 1 is nowhere") as raised:
        ranks.restore(tmp_path / "store", tmp_path / "memory", {"choosy": Choosy()})
    assert raised.value.__notes__ == [f"raised while choosy took in what {ranks.key(10)} has of it"]


@pytest.mark.parametrize(("before", "now"), [(False, True), (True, False), (False, False)])
def test_a_scaler_that_is_switched_on_or_off_between_runs_stays_as_the_script_made_it(
    before: bool, now: bool, tmp_path: Path
) -> None:
    weights = {"weights": torch.arange(3.0)}
    saved = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=before)
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(10), {"scaler": saved, "state": weights})
    scaler, state = torch.amp.GradScaler("cpu", init_scale=32.0, enabled=now), {"weights": torch.zeros(3)}
    expected = scaler.state_dict()
    restored = ranks.restore(tmp_path / "store", tmp_path / "memory", {"scaler": scaler, "state": state})
    assert scaler.state_dict() == expected
    assert restored.kept == (("scaler",) if now else ())
    assert ranks.same(state, weights)
