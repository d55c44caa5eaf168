"""One thing that a state holds in several places is one again when it comes back, and all is in its order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import everstep
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.exchange.importing import import_torch
from everstep.checkpoint.format.descriptions import KIND
from everstep.checkpoint.state import aliases
from everstep.checkpoint.state.flat import Flat, flatten_objects
from everstep.checkpoint.state.kinds import StateMismatch
from everstep.checkpoint.state.memory import get_local_tensor
from everstep.checkpoint.store.posix import PosixStore
from tests.checkpoint import ranks

pytestmark = pytest.mark.torch

State = dict[str, Any]
Begin = Callable[[list[State], torch.Tensor], State]


def one_counter(states: list[State], like: torch.Tensor) -> State:
    """All parameters count in one tensor, which most optimizers call their step."""
    return {"step": states[0]["step"] if states else torch.zeros(())}


def one_list(states: list[State], like: torch.Tensor) -> State:
    return {"counts": states[0]["counts"] if states else [torch.zeros(1), torch.zeros(1)]}


def two_names(states: list[State], like: torch.Tensor) -> State:
    average = torch.zeros_like(like)
    return {"average": average, "nested": {"same": (average,)}, "alone": torch.zeros_like(like)}


def sharded(states: list[State], like: torch.Tensor) -> State:
    """Two names for what is sharded as its parameter, and a table of constants that all have."""
    average = torch.zeros_like(like)
    return {"z": average, "a": average, "table": states[0]["table"] if states else torch.arange(4.0)}


def in_an_order(states: list[State], like: torch.Tensor) -> State:
    """Summed in its own order: large ones cancel out before the small one is added, or after it is lost."""
    terms = {"z": torch.full_like(like, 1e7), "y": torch.full_like(like, -1e7), "a": torch.full_like(like, 0.1)}
    return {"terms": OrderedDict(terms), "more": {}, "begin": torch.zeros_like(like)}


class Summing(torch.optim.Optimizer):  # type: ignore[misc]
    """Adds a little to each tensor of its state, as often as it finds it, and goes by the sum of all."""

    def __init__(self, params: Any, begin: Begin) -> None:
        super().__init__(params, {"lr": 0.01})
        self.begin = begin

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:
        for param in (each for group in self.param_groups for each in group["params"]):
            if not self.state[param]:
                others = [each for each in self.state.values() if each]
                self.state[param].update(self.begin(others, param))
            move = get_local_tensor(param.grad).clone()
            for each in leaves_of(self.state[param]):
                each.add_(0.25)
                move += get_local_tensor(each).sum() if each.shape != param.shape else get_local_tensor(each)
            get_local_tensor(param).sub_(move, alpha=0.01)


def leaves_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    children = value.values() if isinstance(value, dict) else value
    return [leaf for child in children for leaf in leaves_of(child)]


def make(begin: Begin) -> tuple[nn.Module, Summing]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    if ranks.world_size() > 1:
        fully_shard(model)
    return model, Summing(model.parameters(), begin)


def train(rank: int, folder: Path, begin: Begin, first: int, last: int, again: bool = False) -> list[Any]:
    """Trains, saves and says what the parameters and the state are; `again`: restores once more, in place."""
    model, optimizer = make(begin)
    objects: dict[str, object] = {"model": model, "optimizer": optimizer}
    for _ in range(1 + again if first else 0):
        assert ranks.restore(folder, folder / "memory", objects).step == first
    for step in range(first, last):
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(3, 4, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    ranks.save(PosixStore(folder), ranks.key(last), objects)
    states = [optimizer.state[each] for each in model.parameters()]
    return [get_local_tensor(each.detach()).tolist() for each in (*model.parameters(), *leaves_of(states))] + [
        [(key, type(each).__name__) for key, each in own.items()] for own in states
    ]


BEGINNINGS = [one_counter, one_list, two_names, sharded, in_an_order]


@pytest.mark.parametrize("begin", BEGINNINGS)
def test_a_run_goes_on_with_what_its_optimizer_shares_and_in_the_order_of_its_state(
    begin: Begin, tmp_path: Path
) -> None:
    straight = train(0, tmp_path / "straight", begin, 0, 5)
    train(0, tmp_path / "resumed", begin, 0, 3)
    assert train(0, tmp_path / "resumed", begin, 3, 5) == straight
    train(0, tmp_path / "in place", begin, 0, 3)
    assert train(0, tmp_path / "in place", begin, 3, 5, again=True) == straight


def train_all(rank: int, folder: Path, first: int, last: int) -> list[list[Any]]:
    begins = [one_counter, one_list, sharded, in_an_order]
    return [train(rank, folder / begin.__name__, begin, first, last, again=True) for begin in begins]


def test_ranks_of_fsdp_go_on_with_what_their_optimizers_share(tmp_path: Path) -> None:
    straight = ranks.run(2, train_all, tmp_path / "straight", 0, 5)
    ranks.run(2, train_all, tmp_path / "resumed", 0, 3)
    assert ranks.run(2, train_all, tmp_path / "resumed", 3, 5) == straight


def a_view(states: list[State], like: torch.Tensor) -> State:
    buffer = torch.zeros(8)
    return {"buffer": buffer, "window": buffer[2:4]}


def crossing(states: list[State], like: torch.Tensor) -> State:
    buffer = torch.zeros(4, 4)
    return {"rows": buffer[::2], "columns": buffer[:, 1]}


def side_by_side(states: list[State], like: torch.Tensor) -> State:
    """Columns of one storage, halves of another, and what is empty."""
    columns, halves = torch.zeros(4, 2), torch.zeros(6)
    return {"a": columns[:, 0], "b": columns[:, 1], "c": halves[:3], "d": halves[3:], "e": halves[:0], "f": halves[2:2]}


def stepped(begin: Begin) -> Summing:
    model, optimizer = make(begin)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def test_views_that_have_elements_in_common_are_refused_with_both_names_and_others_are_not() -> None:
    for begin, one, other in ((a_view, "buffer", "window"), (crossing, "rows", "columns")):
        with pytest.raises(CheckpointError, match=rf"optimizer.state.#0.{one} and optimizer.state.#0.{other} have"):
            flatten_objects({"optimizer": stepped(begin)}, rank=0)
    flatten_objects({"optimizer": stepped(side_by_side)}, rank=0)


def test_states_that_are_one_dictionary_are_refused_with_both_names() -> None:
    optimizer = stepped(one_counter)
    first, second, *_ = optimizer.param_groups[0]["params"]
    optimizer.state[second] = optimizer.state[first]
    with pytest.raises(CheckpointError, match=r"optimizer.state.#0 and optimizer.state.#1 are one dictionary"):
        flatten_objects({"optimizer": optimizer}, rank=0)


P = torch.optim


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: P.AdamW(p, lr=torch.tensor(1e-3), fused=True),
        lambda p: P.Adam(p, amsgrad=True, foreach=True),
        lambda p: P.SGD(p, lr=0.1, momentum=0.9),
        lambda p: P.NAdam(p),
        lambda p: P.RAdam(p),
        lambda p: P.ASGD(p),
        lambda p: P.Rprop(p),
        lambda p: P.Adadelta(p),
        lambda p: P.Adagrad(p),
        lambda p: P.RMSprop(p, centered=True, momentum=0.9),
        lambda p: P.Adamax(p),
        lambda p: P.Adafactor(p),
        lambda p: P.Muon([each for each in p if each.dim() == 2]),
        lambda p: P.LBFGS(p, lr=0.1, max_iter=3, history_size=3),
    ],
)
def test_no_optimizer_of_torch_is_refused(make_optimizer: Any) -> None:
    model = nn.Linear(3, 2)
    optimizer = make_optimizer(list(model.parameters()))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    values = flatten_objects({"model": model, "optimizer": optimizer}, rank=0).values
    assert not [name for name in values if name.startswith("optimizer.aliases.")]


def test_what_is_one_tensor_here_and_was_two_is_two_again(tmp_path: Path) -> None:
    def two(states: list[State], like: torch.Tensor) -> State:
        return {"average": torch.ones_like(like), "nested": {"same": (torch.full_like(like, 2.0),)}}

    saved, here = stepped(two), stepped(two_names)
    ranks.save(PosixStore(tmp_path), ranks.key(1), {"optimizer": saved})
    ranks.restore(tmp_path, tmp_path / "memory", {"optimizer": here})
    for own in here.state.values():
        assert [each.flatten()[0].item() for each in leaves_of(own)] == [1.25, 2.25]


class Keeps:
    """An object with a state_dict."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class WithExtra(nn.Module):  # type: ignore[misc]
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def nested() -> dict[str, Any]:
    tensor, listed = torch.ones(2), [1, torch.zeros(1)]
    return {"z": tensor, "a": {"y": tensor, "b": listed}, "again": listed, "plain": ([1, 2],), "odd": OrderedDict(q=1)}


def is_as_it_was(state: Any) -> None:
    assert state["z"] is state["a"]["y"]
    assert state["again"] is state["a"]["b"]
    assert list(state) == ["z", "a", "again", "plain", "odd"]
    assert list(state["a"]) == ["y", "b"]
    assert type(state["odd"]) is OrderedDict


def test_objects_values_and_extra_states_share_again_what_they_shared(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "store")
    ranks.save(store, ranks.key(1), {"object": Keeps(nested()), "value": nested(), "module": WithExtra(nested())})
    keeps, value, module = Keeps({}), dict[str, Any](), WithExtra({})
    ranks.restore(store, tmp_path / "memory", {"object": keeps, "value": value, "module": module})
    loaded = everstep.load(tmp_path / "store")
    for each in (keeps.state, value, module.extra, loaded["object"], loaded["value"], loaded["module"]["_extra_state"]):
        is_as_it_was(each)


def test_a_value_that_a_script_holds_stays_and_what_is_new_joins_it(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "store")
    tensor = torch.full((2,), 3.0)
    ranks.save(store, ranks.key(1), {"value": {"a": tensor, "b": tensor, "c": tensor}})
    held = torch.zeros(2)
    other = torch.zeros(2)
    value = {"b": held, "c": other}
    ranks.restore(store, tmp_path / "memory", {"value": value})
    assert value["b"] is held
    assert value["c"] is other
    assert value["a"] is held
    assert held.tolist() == other.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    "keys", [("a", "b"), (1, 2), ((0, 1), (1, 1)), (1.5, 2.5), (True, False), (None, b"x")], ids=repr
)
def test_two_values_do_not_load_into_what_is_one_tensor_here(tmp_path: Path, keys: tuple[Any, Any]) -> None:
    a, b = keys
    ranks.save(PosixStore(tmp_path), ranks.key(1), {"value": {a: torch.zeros(2), b: torch.ones(2)}})
    one = torch.full((2,), 5.0)
    with pytest.raises(StateMismatch, match=r"value\..* and value\..* are one tensor here and have different values"):
        ranks.restore(tmp_path, tmp_path / "memory", {"value": {a: one, b: one}})
    assert one.tolist() == [5.0, 5.0]


def test_a_loaded_and_an_imported_optimizer_have_order_and_sharing(tmp_path: Path) -> None:
    def both(states: list[State], like: torch.Tensor) -> State:
        return {**one_counter(states, like), **in_an_order(states, like), "empty": {}}

    optimizer = stepped(both)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "both.pt")
    import_torch(tmp_path / "both.pt", tmp_path / "store", step=1)
    states = everstep.load(tmp_path / "store")["optimizer"]["state"]
    assert len({id(each["step"]) for each in states.values()}) == 1
    for own in states.values():
        assert list(own) == ["step", "terms", "more", "begin", "empty"]
        assert list(own["terms"]) == ["z", "y", "a"]
        assert type(own["terms"]) is OrderedDict
    moved = everstep.load(tmp_path / "store", rename=lambda name: name.replace("0.", "first."))["optimizer"]["state"]
    assert list(moved["first.weight"]["terms"]) == ["z", "y", "a"]
    assert moved["first.bias"]["step"] is moved["1.weight"]["step"]


def test_a_checkpoint_that_does_not_say_what_was_shared_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_before(*args: Any, **kwargs: Any) -> Flat:
        flat = flatten_objects(*args, **kwargs)
        values = {name: each for name, each in flat.values.items() if not (name.endswith(KIND) and name.count(".") > 1)}
        return Flat(flat.tensors, values, flat.bulk, flat.elsewhere)

    monkeypatch.setattr(ranks, "flatten_objects", as_before)
    saved = stepped(two_names)
    ranks.save(PosixStore(tmp_path), ranks.key(1), {"optimizer": saved})
    fresh, here = make(two_names)[1], stepped(two_names)
    for each in (fresh, here):
        ranks.restore(tmp_path, tmp_path / "memory", {"optimizer": each})
        for own, was in zip(each.state.values(), saved.state.values(), strict=True):
            assert own["average"].tolist() == was["average"].tolist()
            assert own["nested"]["same"][0].tolist() == was["average"].tolist()


def test_tensors_that_are_apart_are_not_compared_whatever_their_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each save asks, in the training thread."""
    compared = 0
    of = aliases._Span.of

    def counting(*args: Any) -> Any:
        nonlocal compared
        compared += 1
        return of(*args)

    monkeypatch.setattr(aliases._Span, "of", counting)
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3) for _ in range(4))).to(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    assert aliases.find_aliases(dict(model.named_parameters())).groups == []
    assert compared == 0
    rows = torch.zeros(4, 4).t()
    assert len(aliases.find_aliases({"a": rows, "b": rows, "c": rows[1:]}).groups) == 1
    assert compared == 3
