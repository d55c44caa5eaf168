"""A saved state fits where it is restored: the same kind of optimizer, the same ties, containers of their kinds."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.checkpoint.errors import CheckpointError  # noqa: E402
from everstep.checkpoint.restore.restorer import Restored  # noqa: E402
from everstep.checkpoint.state.flat import flatten_objects  # noqa: E402
from everstep.checkpoint.state.kinds import StateMismatch  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch


def moved(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> Restored:
    """Saves the one and restores it into the other."""
    ranks.save(PosixStore(folder / "store"), ranks.key(10), before)
    return ranks.restore(folder / "store", folder / "memory", after)


def trained(make: Any, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 3)
    optimizer = make(model.parameters())
    model(torch.rand(2, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


class OwnAdamW(torch.optim.AdamW):  # type: ignore[misc,name-defined]
    """A script's own variant."""


class Wrapper(torch.optim.Optimizer):  # type: ignore[misc,name-defined]
    """As frameworks wrap optimizers: all that counts is the one within."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.defaults = optimizer.defaults

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "AdamW subclass": lambda params: OwnAdamW(params, lr=0.1),
    "AdamW wrapped": lambda params: Wrapper(torch.optim.AdamW(params, lr=0.1)),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD wrapped": lambda params: Wrapper(torch.optim.SGD(params, lr=0.1)),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.1),
}


@pytest.mark.parametrize("ours", ["AdamW foreach", "AdamW fused", "AdamW subclass", "AdamW wrapped"])
def test_variants_of_one_optimizer_load_each_other(tmp_path: Path, ours: str) -> None:
    for number, (one, other) in enumerate([("AdamW", ours), (ours, "AdamW")]):
        before, after = trained(OPTIMIZERS[one], 1), trained(OPTIMIZERS[other], 2)
        kept = after["optimizer"].param_groups[0]["fused"]
        moved(tmp_path / str(number), before, after)
        for param, own in zip(before["model"].parameters(), after["model"].parameters(), strict=True):
            for name, value in before["optimizer"].state[param].items():
                assert torch.equal(after["optimizer"].state[own][name], value)
        assert after["optimizer"].param_groups[0]["fused"] == kept, "how a step is computed is this process's own"


@pytest.mark.parametrize(
    ("saved", "ours"), [("AdamW", "SGD"), ("SGD", "AdamW"), ("AdamW wrapped", "SGD wrapped"), ("RMSprop", "NAdam")]
)
def test_the_state_of_another_optimizer_is_refused_with_both_names(tmp_path: Path, saved: str, ours: str) -> None:
    after = trained(OPTIMIZERS[ours], 2)
    weight = after["model"].weight.detach().clone()
    names = [name.split()[0] for name in (saved, ours)]
    with pytest.raises(
        StateMismatch, match=rf"optimizer is a \S+\.{names[0]} in the checkpoint, a \S+\.{names[1]} here"
    ):
        moved(tmp_path, trained(OPTIMIZERS[saved], 1), after)
    assert torch.equal(after["model"].weight, weight)


def test_a_learning_rate_that_is_a_tensor_comes_back(tmp_path: Path) -> None:
    before, after = (trained(lambda p, lr=lr: torch.optim.SGD(p, lr=torch.tensor(lr))) for lr in (0.25, 0.5))
    live = after["optimizer"].param_groups[0]["lr"]
    moved(tmp_path, before, after)
    assert after["optimizer"].param_groups[0]["lr"] is live
    assert float(live) == 0.25


class Tied(nn.Module):  # type: ignore[misc]
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def with_adam(model: Any) -> dict[str, Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for number, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, 1.0 + number)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_tied_weights_come_back_tied_with_their_optimizer(tmp_path: Path) -> None:
    before, after = with_adam(Tied(tied=True)), with_adam(Tied(tied=True))
    moved(tmp_path, before, after)
    assert torch.equal(after["model"].head.weight, before["model"].embed.weight)
    assert after["model"].head.weight is after["model"].embed.weight
    states = [each["optimizer"].state[each["model"].embed.weight]["exp_avg"] for each in (before, after)]
    assert torch.equal(*states)


def test_tied_weights_load_into_untied_ones(tmp_path: Path) -> None:
    before, after = Tied(tied=True), Tied(tied=False)
    moved(tmp_path, {"model": before}, {"model": after})
    assert torch.equal(after.head.weight, before.embed.weight)
    assert torch.equal(after.embed.weight, before.embed.weight)


def test_an_optimizer_of_tied_weights_does_not_fit_untied_ones(tmp_path: Path) -> None:
    with pytest.raises(StateMismatch, match=r"optimizer\.param_groups\.head\.weight is not in the checkpoint"):
        moved(tmp_path, with_adam(Tied(tied=True)), with_adam(Tied(tied=False)))


def test_untied_weights_do_not_load_into_tied_ones_unless_they_are_equal(tmp_path: Path) -> None:
    before, after = Tied(tied=False), Tied(tied=True)
    kept = after.embed.weight.detach().clone()
    with pytest.raises(StateMismatch, match=r"model\.embed\.weight and model\.head\.weight are one tensor here"):
        moved(tmp_path / "differ", {"model": before}, {"model": after})
    assert torch.equal(after.embed.weight, kept)
    with torch.no_grad():
        before.head.weight.copy_(before.embed.weight)
    moved(tmp_path / "equal", {"model": before}, {"model": after})
    assert torch.equal(after.embed.weight, before.embed.weight)


class Settings(MutableMapping[str, Any]):
    """A script's own mapping."""

    def __init__(self, **content: Any) -> None:
        self.content = content

    def __getitem__(self, key: str) -> Any:
        return self.content[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.content[key] = value

    def __delitem__(self, key: str) -> None:
        del self.content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


@pytest.mark.parametrize("make", [dict, OrderedDict, Settings, lambda **content: defaultdict(list, content)])
def test_a_key_that_the_checkpoint_does_not_have_keeps_its_value_and_is_named(tmp_path: Path, make: Any) -> None:
    state = make(epoch=0, patience=5)
    kind, same = type(state), state
    restored = moved(tmp_path, {"state": make(epoch=3, best=0.5)}, {"state": state})
    assert dict(state) == {"epoch": 3, "patience": 5, "best": 0.5}
    assert restored.kept == ("state.patience",)
    assert restored.values["state"] is same
    assert type(state) is kind


def test_what_lies_deeper_in_a_dictionary_is_data_and_comes_back_as_it_was(tmp_path: Path) -> None:
    seen = {"a": 9, "c": 9}
    state: dict[str, Any] = {"seen": seen, "list": [1, 2, 3]}
    moved(tmp_path, {"state": {"seen": {"a": 1, "b": 2}, "list": [4]}}, {"state": state})
    assert state == {"seen": {"a": 1, "b": 2}, "list": [4]}
    assert state["seen"] is seen


def test_containers_keep_their_kinds_and_their_order(tmp_path: Path) -> None:
    def make(*, filled: bool) -> dict[str, Any]:
        some = filled * 3
        return {
            "plain": {"b": some, "a": some},
            "ordered": OrderedDict(b=some, a=some),
            "tensors": OrderedDict(b=torch.full((2,), float(some)), a=torch.zeros(2)),
            "count": Counter("aab" * filled),
            "lists": defaultdict(list, {"x": [1]} if filled else {}),
            "own": defaultdict(lambda: 7, {"x": 1} if filled else {}),
            "empty": OrderedDict(),
        }

    state, expected = make(filled=False), make(filled=True)
    moved(tmp_path, {"state": make(filled=True)}, {"state": state})
    for name, value in expected.items():
        assert type(state[name]) is type(value), name
        assert list(state[name]) == list(value), name
        if name != "tensors":
            assert state[name] == value, name
    assert state["lists"]["new"] == []
    assert state["own"]["new"] == 7


def test_an_object_gets_a_state_with_containers_of_their_kinds(tmp_path: Path) -> None:
    class Average:
        def __init__(self, value: float) -> None:
            self.shadow = OrderedDict(b=torch.full((2,), value), a=torch.full((2,), value))

        def state_dict(self) -> dict[str, Any]:
            return {"shadow": self.shadow, "seen": OrderedDict(z=1, a=2)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert list(state["seen"].items()) == [("z", 1), ("a", 2)]
            assert type(state["shadow"]) is OrderedDict
            assert list(state["shadow"]) == ["b", "a"]
            self.shadow = state["shadow"]

    after = Average(0.0)
    moved(tmp_path, {"ema": Average(3.0)}, {"ema": after})
    assert torch.equal(after.shadow["b"], torch.full((2,), 3.0))


def test_a_dictionary_of_the_script_comes_back_in_the_order_in_which_it_was_saved(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        return {"a": 1, "b": {"p": 1, "q": [{"y": 1, "x": 2}]}, "c": torch.ones(1)}

    saved, resumed = make(), make() | {"new": 0}
    for each, key in ((saved, "a"), (saved["b"], "p"), (saved["b"]["q"][0], "y")):
        each[key] = each.pop(key)
    inner = resumed["b"]
    moved(tmp_path, {"state": saved}, {"state": resumed})
    assert list(resumed) == ["b", "c", "a", "new"]
    assert resumed["b"] is inner
    assert list(inner) == ["q", "p"]
    assert list(inner["q"][0]) == ["x", "y"]


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_an_optimizer_within_a_list_or_dictionary_is_refused_with_what_to_do(allow_pickle: bool) -> None:
    """Pickled, it came back with parameters of its own, and the model was not trained any more."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for value in ([optimizer], {"a": optimizer}, [scheduler]):
        with pytest.raises(CheckpointError, match=r"cannot be saved inside of another value: give each a name"):
            flatten_objects({"all": value}, rank=0, allow_pickle=allow_pickle)


class OfGenerator:
    """An object as the message about a generator asks for."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["state"])


def test_a_generator_is_refused_with_what_follows_it(tmp_path: Path) -> None:
    """A script that gave the tensor of get_state() would draw the first numbers again."""
    before, after = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    with pytest.raises(CheckpointError, match=r"object of your own whose state_dict\(\) .*get_state\(\)"):
        flatten_objects({"generator": before}, rank=0)
    torch.rand(3, generator=before)
    moved(tmp_path, {"generator": OfGenerator(before)}, {"generator": OfGenerator(after)})
    assert torch.equal(torch.rand(3, generator=before), torch.rand(3, generator=after))
