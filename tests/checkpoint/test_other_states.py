"""Optimizers whose state is not by parameters alone, or not plain: each continues as after torch.save of its state."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.errors import CheckpointError  # noqa: E402
from everstep.checkpoint.exchange import exporting, importing  # noqa: E402
from tests.checkpoint.sessions import session  # noqa: E402

pytestmark = pytest.mark.torch


class Counting(torch.optim.SGD):  # type: ignore[misc,name-defined]
    """Counts its steps under a text, as MADGRAD does, and keeps an average there whose parts are one tensor."""

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        count = self.state.setdefault("count", torch.tensor([0]))
        average = self.state.setdefault("average", {"fast": [torch.zeros(3)], ("of", 1): 0.5})
        count += 1
        average["fast"][0] += 1 / count
        average["of", 1] *= 0.5
        for group in self.param_groups:
            group["lr"] = float(1 / count + average["fast"][0][0] + average["of", 1])
        super().step(closure)


class Ahead(torch.optim.Optimizer):  # type: ignore[misc,name-defined]
    """Wraps an optimizer, as Lookahead does: its state has that of the other under a name."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.slow = [each.detach().clone() for group in inner.param_groups for each in group["params"]]
        super().__init__([each for group in inner.param_groups for each in group["params"]], {})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)
        for slow, param in zip(self.slow, self.param_groups[0]["params"], strict=True):
            param.copy_(slow.lerp_(param, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"slow": self.slow, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.slow = [each.clone() for each in state["slow"]]
        self.inner.load_state_dict(state["inner"])


class Norm(enum.StrEnum):
    ROWS = "rows"


class OfNorm(torch.optim.SGD):  # type: ignore[misc,name-defined]
    """Has an option that is saved as a pickle alone."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.param_groups[0]["norm"] = Norm.ROWS


MAKERS: dict[str, Callable[[Any], Any]] = {
    "state under a text": lambda params: Counting(params, lr=0.1, momentum=0.9),
    "another optimizer within": lambda params: Ahead(torch.optim.Adam(params)),
    "an option with a pickle": OfNorm,
}


def begin(make: Callable[[Any], Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return {"model": model, "optimizer": make(model.parameters())}


def train(model: Any, optimizer: Any, steps: int = 3) -> list[Any]:
    for _ in range(steps):
        model.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
    return [param.tolist() for param in model.parameters()]


@pytest.mark.parametrize("name", MAKERS)
def test_the_run_continues_bit_for_bit(name: str, tmp_path: Path) -> None:
    before, after = begin(MAKERS[name]), begin(MAKERS[name])
    with session(tmp_path, allow_pickle=True) as ckpt:
        ckpt.track(**before)
        train(**before)
        ckpt.save(1)
    with session(tmp_path, allow_pickle=True) as ckpt:
        ckpt.restore(**after)
    assert train(**before) == train(**after)


def test_an_option_that_needs_a_pickle_is_named_where_none_is_allowed(tmp_path: Path) -> None:
    with session(tmp_path) as ckpt, pytest.raises(CheckpointError, match=r"'norm'.*Norm"):
        ckpt.track(**begin(OfNorm))


@pytest.mark.parametrize("way", ["loaded", "torch", "dcp"])
def test_state_of_no_parameter_is_in_what_is_loaded_and_in_files_of_torch(way: str, tmp_path: Path) -> None:
    before, after = begin(MAKERS["state under a text"]), begin(MAKERS["state under a text"])
    train(**before)
    with session(tmp_path) as ckpt:
        ckpt.track(**before)
        ckpt.save(1)
    store = tmp_path / "store"
    if way == "torch":
        file = tmp_path / "file.pt"
        torch.save({name: each.state_dict() for name, each in before.items()}, file)
        importing.import_torch(file, store := tmp_path / "imported")
    if way == "dcp":
        exporting.export_dcp(store, tmp_path / "dcp")
        importing.import_dcp(tmp_path / "dcp", store := tmp_path / "imported")
    state = everstep.load(store)["optimizer"]["state"]
    assert state["count"].tolist() == [3]
    assert set(state) == {"count", "average", "weight", "bias"}
    if way != "dcp":  # which knows no keys but texts
        everstep.load_into(store, **after)
        assert train(**before) == train(**after)
