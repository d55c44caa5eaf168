"""A module knows of which version its state is, wherever a checkpoint is read: it brings no new state up to date."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.errors import CheckpointError  # noqa: E402
from everstep.checkpoint.exchange import importing  # noqa: E402
from everstep.checkpoint.state.kinds import StateMismatch  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.listing import Listing  # noqa: E402

pytestmark = pytest.mark.torch


class Turned(nn.Module):  # type: ignore[misc]
    """A module of version 2; version 1 had twice its weight."""

    _version = 2

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size, size))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *more: Any) -> None:
        if (metadata.get("version") or 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2
        super()._load_from_state_dict(state, prefix, metadata, *more)


class Hooked(nn.Module):  # type: ignore[misc]
    """The same by hooks, which say the version in words of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 3))
        self._register_state_dict_hook(self._say)
        self._register_load_state_dict_pre_hook(self._change)

    @staticmethod
    def _say(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        metadata["layout"] = "new"

    def _change(self, state: Any, prefix: str, metadata: Any, *more: Any) -> None:
        weight = state.pop(f"{prefix}weight")
        state[f"{prefix}weight"] = weight if metadata.get("layout") == "new" else weight / 2


class Root(Turned):
    """A module of version 2 that contains other modules with versions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hooked, self.norm = Turned(), Hooked(), nn.BatchNorm1d(3)
        self.plain = nn.ModuleDict({"a/b": Turned(2)})


class Wrapper:
    """A script's own object, which holds a model's state in its own."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 3, "nets": [self.model.state_dict()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["nets"][0])


def made(seed: int, wrap: Callable[[Any], Any] = lambda model: model) -> Any:
    torch.manual_seed(seed)
    return wrap(Root())


def save(folder: Path, **objects: object) -> dict[str, Any]:
    ranks.save(PosixStore(folder), ranks.key(1), objects)
    return {name: deepcopy(each) for name, each in objects.items()}


def checkpointed(model: Any) -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.first = checkpoint_wrapper(model.first)
    return model


def compiled(model: Any) -> Any:
    return torch.compile(model)


WRAPPERS = [lambda model: model, checkpointed, compiled]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_model_loads_what_was_saved_and_no_version_before(wrap: Any, tmp_path: Path) -> None:
    saved = made(1, wrap)
    save(tmp_path, model=saved, wrapper=Wrapper(made(2)))
    state = {name: each.clone() for name, each in made(1).state_dict().items()}
    loaded = everstep.load(tmp_path)
    other = made(3)
    other.load_state_dict(loaded["model"])
    assert ranks.same(dict(other.state_dict()), state)
    other.load_state_dict(loaded["wrapper"]["nets"][0])
    assert ranks.same(dict(other.state_dict()), dict(made(2).state_dict()))
    for _ in range(2):  # the second time from the memory of this node
        filled, wrapper = made(4, wrap), Wrapper(made(5))
        everstep.load_into(tmp_path, model=filled, wrapper=wrapper)
        ranks.restore(tmp_path, tmp_path / "memory", {"model": filled, "wrapper": wrapper})
        for name, each in state.items():
            assert torch.equal(dict(plain_state(filled))[name], each), name
        assert ranks.same(dict(wrapper.model.state_dict()), dict(made(2).state_dict()))


def plain_state(model: Any) -> dict[str, Any]:
    plain = {"_orig_mod.", "_checkpoint_wrapped_module."}
    found = dict(model.state_dict())
    for piece in plain:
        found = {name.replace(piece, ""): each for name, each in found.items()}
    return found


def test_an_older_state_is_brought_up_to_date_as_torch_does_it(tmp_path: Path) -> None:
    class Older(Root):
        _version = 1

    torch.manual_seed(1)
    older = Older()
    save(tmp_path, model=older)
    by_torch = made(2)
    by_torch.load_state_dict(older.state_dict())
    assert torch.equal(by_torch.weight, older.weight / 2)
    for how in ("load", "into", "restore"):
        other = made(3)
        if how == "load":
            other.load_state_dict(everstep.load(tmp_path)["model"])
        elif how == "into":
            everstep.load_into(tmp_path, model=other)
        else:
            ranks.restore(tmp_path, tmp_path / "memory", {"model": other})
        assert ranks.same(dict(other.state_dict()), dict(by_torch.state_dict())), how


@pytest.mark.parametrize("rename", [{"model.first.": "net.top."}, lambda name: name.replace("model.first", "net.top")])
def test_a_version_goes_with_its_module_to_another_name(rename: Any, tmp_path: Path) -> None:
    save(tmp_path, model=made(1))
    net = nn.ModuleDict({"top": Turned()})
    net.load_state_dict(everstep.load(tmp_path, only="model.first.*", rename=rename)["net"])
    assert torch.equal(net["top"].weight, made(1).first.weight)


def test_files_of_torch_keep_the_versions_both_ways(tmp_path: Path) -> None:
    torch.save({"model": made(1).state_dict()}, tmp_path / "x.pt")
    importing.import_torch(tmp_path / "x.pt", tmp_path / "store")
    other = made(2)
    other.load_state_dict(everstep.load(tmp_path / "store")["model"])
    assert ranks.same(dict(other.state_dict()), dict(made(1).state_dict()))
    torch.save(everstep.load(tmp_path / "store")["model"], tmp_path / "y.pt")
    back = torch.load(tmp_path / "y.pt", weights_only=True)
    assert back._metadata["first"] == {"version": 2}
    assert back._metadata["hooked"]["layout"] == "new"
    assert back._metadata["plain"] == {"version": 1}


def test_ranks_that_wrap_and_shard_restore_each_others(tmp_path: Path) -> None:
    assert all(ranks.run(2, save_wrapped, tmp_path))


def wrapped(model: Any, how: str) -> Any:
    if how == "ddp":
        return DDP(model)
    return fully_shard(model) if how == "fsdp" else model


def save_wrapped(rank: int, folder: Path) -> bool:
    expected = {name: each.clone() for name, each in made(1).state_dict().items()}
    for one in ("plain", "ddp", "fsdp"):
        ranks.save(PosixStore(folder / one), ranks.key(1), {"model": wrapped(made(1), one)})
        for other in ("plain", "ddp", "fsdp"):
            model = wrapped(made(2), other)
            ranks.restore(folder / one, folder / "memory" / one / other, {"model": model})
            state = {name.removeprefix("module."): each for name, each in model.state_dict().items()}
            for name, each in state.items():
                whole = each.full_tensor() if hasattr(each, "full_tensor") else each
                assert torch.equal(whole, expected[name]), (one, other, name)
        loaded = everstep.load(folder / one)["model"]
        assert all(loaded._metadata[path] == {"version": 2} for path in ("", "first", "norm"))
    return True


class Sized(nn.Module):  # type: ignore[misc]
    """Learns its size from data, as observers of each channel do; what it kept of them is a tensor."""

    def __init__(self, size: int = 0) -> None:
        super().__init__()
        self.register_buffer("highest", torch.arange(float(size)))
        self.kept = torch.arange(size)

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state.clone()

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        self.highest.resize_(state[f"{prefix}highest"].shape)
        super()._load_from_state_dict(state, prefix, *more)


@pytest.mark.parametrize("how", ["restore", "into"])
def test_a_module_that_takes_another_size_gets_it(how: str, tmp_path: Path) -> None:
    save(tmp_path, model=nn.ModuleList([Sized(5), nn.Linear(2, 2)]), whole=Sized(4))
    other, whole = nn.ModuleList([Sized(), nn.Linear(2, 2)]), Sized()
    if how == "into":
        everstep.load_into(tmp_path, model=other, whole=whole)
    else:
        ranks.restore(tmp_path, tmp_path / "memory", {"model": other, "whole": whole})
    assert other[0].highest.tolist() == other[0].kept.tolist() == [0, 1, 2, 3, 4]
    assert whole.highest.tolist() == whole.kept.tolist() == [0, 1, 2, 3]
    with pytest.raises(StateMismatch, match="has shape"):
        everstep.load_into(tmp_path, model=nn.ModuleList([Sized(), nn.Linear(3, 2)]))


def test_observers_of_each_channel_come_back(tmp_path: Path) -> None:
    from torch.ao.quantization.observer import PerChannelMinMaxObserver

    observer = PerChannelMinMaxObserver()
    observer(torch.rand(4, 3))
    save(tmp_path, model=nn.Sequential(observer))
    fresh = nn.Sequential(PerChannelMinMaxObserver())
    ranks.restore(tmp_path, tmp_path / "memory", {"model": fresh})
    assert torch.equal(fresh[0].min_val, observer.min_val)
    other = nn.Sequential(PerChannelMinMaxObserver())
    other.load_state_dict(everstep.load(tmp_path)["model"])
    assert torch.equal(other[0].max_val, observer.max_val)


def test_a_list_of_tensors_that_a_module_says_is_one_in_what_is_loaded(tmp_path: Path) -> None:
    model = nn.ModuleDict({"one": Listing(), "other": Listing()})
    model["one"].seen = [torch.ones(2), torch.zeros(3)]
    save(tmp_path, model=model, metric=model["one"])
    fresh, metric = nn.ModuleDict({"one": Listing(), "other": Listing()}), Listing()
    fresh.load_state_dict(everstep.load(tmp_path)["model"])
    metric.load_state_dict(everstep.load(tmp_path)["metric"])
    assert [each.tolist() for each in fresh["one"].seen] == [[1, 1], [0, 0, 0]]
    assert [each.tolist() for each in metric.seen] == [[1, 1], [0, 0, 0]]
    assert fresh["other"].seen == []


def test_a_checkpoint_that_does_not_say_versions_is_taken_for_one_of_the_module_as_it_is(tmp_path: Path) -> None:
    plain = dict(made(1).state_dict())  # without what state_dict() says of modules
    torch.save({"model": plain}, tmp_path / "x.pt")
    importing.import_torch(tmp_path / "x.pt", tmp_path / "store")
    other = made(2)
    everstep.load_into(tmp_path / "store", model=other)
    assert torch.equal(other.weight, made(1).weight)
    assert not hasattr(everstep.load(tmp_path / "store")["model"], "_metadata")


class Packed(nn.Module):  # type: ignore[misc]
    """Says beside its weight what it keeps in plain attributes, as 4-bit weights do, and takes none of it back."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 3))
        self.table = torch.rand(4)
        self.scale = scale

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}table"] = self.table
        destination[f"{prefix}scale"] = torch.tensor([self.scale])


@pytest.mark.parametrize("scale", [2.0, float("nan")])
def test_what_a_module_says_and_does_not_take_back_is_as_it_was_or_an_error(tmp_path: Path, scale: float) -> None:
    saved = nn.Sequential(Packed(scale))
    save(tmp_path, model=saved)
    alike = nn.Sequential(Packed(scale))
    everstep.load_into(tmp_path, model=alike)
    assert torch.equal(alike[0].table, saved[0].table)
    assert torch.equal(alike[0].weight, saved[0].weight)
    with pytest.raises(CheckpointError, match=r"model\.0\.scale is made by the module's state_dict\(\)"):
        everstep.load_into(tmp_path, model=nn.Sequential(Packed(3.0)))
