"""An optimizer knows parameters of no module by their place: their state comes back to the same ones, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import everstep  # noqa: E402
from everstep.checkpoint.state.kinds import StateMismatch  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

HOLDERS: dict[str, Any] = {
    "dictionary": lambda params: dict(sorted(params.items())),
    "nested": lambda params: {"outer": [dict(sorted(params.items()))]},
    "tensors": None,
}


class Engine:
    """An object that is no module; its optimizer is given names."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params

    def state_dict(self) -> dict[str, Any]:
        return {name: param.detach() for name, param in self.params.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            self.params[name].detach().copy_(value)


def make(order: str, holder: str) -> dict[str, Any]:
    """Parameters of one shape, given to an optimizer in this order, each with a momentum of its own."""
    params = {name: torch.nn.Parameter(torch.full((3,), float(ord(name)))) for name in order}
    given: Any = list(params.values()) if holder != "engine" else list(params.items())
    optimizer = torch.optim.SGD(given, lr=0.0, momentum=0.9)
    if holder == "tensors":
        return {**params, "optimizer": optimizer}
    if holder == "engine":
        return {"engine": Engine(params), "optimizer": optimizer}
    return {"held": HOLDERS[holder](params), "optimizer": optimizer}


def train(objects: dict[str, Any]) -> dict[str, Any]:
    """Give each parameter its own value as momentum."""
    for group in objects["optimizer"].param_groups:
        for param in group["params"]:
            param.grad = param.detach().clone()
    objects["optimizer"].step()
    return objects


def find_momenta(objects: dict[str, Any]) -> list[tuple[float, float]]:
    optimizer = objects["optimizer"]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [(float(each.detach()[0]), float(optimizer.state[each]["momentum_buffer"][0])) for each in params]


def restore(tmp_path: Path, objects: dict[str, Any], *, is_session: bool) -> None:
    if is_session:
        ranks.restore(tmp_path / "store", tmp_path / "memory", objects)
    else:
        everstep.load_into(tmp_path / "store", **objects)


@pytest.mark.parametrize("holder", [*HOLDERS, "engine"])
def test_another_order_of_parameters_of_no_module_is_refused_with_both_names(holder: str, tmp_path: Path) -> None:
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(1), train(make("abc", holder)))
    again = make("abc", holder)
    ranks.restore(tmp_path / "store", tmp_path / "memory", again)
    assert find_momenta(again) == [(float(ord(each)),) * 2 for each in "abc"]
    for is_session in (True, False):
        other = make("acb", holder)
        with pytest.raises(StateMismatch, match=r"parameter #1 was \S*b when saved, and is \S*c here: give optimizer"):
            restore(tmp_path, other, is_session=is_session)
        assert not other["optimizer"].state, "nothing was touched"


def test_parameters_that_have_other_names_now_are_restored_as_rename_says(tmp_path: Path) -> None:
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(1), train(make("ab", "dictionary")))
    objects = make("ab", "dictionary")
    everstep.load_into(
        tmp_path / "store", rename={"held.": "new."}, new=objects["held"], optimizer=objects["optimizer"]
    )
    assert find_momenta(objects) == [(97.0, 97.0), (98.0, 98.0)]


def test_a_loaded_optimizer_has_only_what_torch_knows(tmp_path: Path) -> None:
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(1), train(make("ab", "dictionary")))
    assert everstep.load(tmp_path / "store")["optimizer"].keys() == {"state", "param_groups"}
