"""Checkpoints go to other libraries and come back: each round trip is read by the foreign library itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.errors import CheckpointError  # noqa: E402
from everstep.checkpoint.exchange import exporting, importing  # noqa: E402
from everstep.checkpoint.restore.restorer import NoGoodCheckpoint  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.sessions import session  # noqa: E402

pytestmark = pytest.mark.torch


def odd() -> dict[str, Any]:
    torch.manual_seed(3)
    return {
        "a.weight": torch.rand(3, 5), "a.short": torch.rand(7).bfloat16(), "b.empty": torch.empty(0, 4),
        "b.scalar": torch.tensor(4), "b.mask": torch.tensor([True, False]),
    }  # fmt: skip


class Odd(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__()
        for name, tensor in state.items():
            head, _, rest = name.partition(".")
            if head not in dict(self.named_children()):
                self.add_module(head, nn.Module())
            getattr(self, head).register_buffer(rest, tensor)


def network(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def trained(seed: int = 0) -> dict[str, Any]:
    model = network(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.rand(5, 6)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def save(folder: Path, **objects: Any) -> Path:
    ranks.save(PosixStore(folder), ranks.key(1), objects)
    return folder


def restored(folder: Path, **objects: Any) -> dict[str, Any]:
    with session(folder.parent) as ckpt:
        assert ckpt.store.url == str(folder)
        ckpt.restore(**objects)
    return objects


def same(one: Any, other: Any) -> bool:
    return ranks.same(dict(one), dict(other)) and all(each.dtype is other[name].dtype for name, each in one.items())


def test_safetensors_reads_what_is_exported_and_it_is_imported_again(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    store = save(tmp_path / "one" / "store", model=Odd(odd()))
    key = exporting.export_safetensors(store, tmp_path / "x.safetensors")
    assert key.step == 1
    assert same(load_file(tmp_path / "x.safetensors"), odd())
    with pytest.raises(CheckpointError, match="is there already"):
        exporting.export_safetensors(store, tmp_path / "x.safetensors")
    exporting.export_safetensors(
        store, tmp_path / "x.safetensors", replace=True, rename={"a.": "c."}, cast=torch.float16
    )
    again = load_file(tmp_path / "x.safetensors")
    assert again["c.weight"].dtype is torch.float16
    exporting.export_safetensors(store, tmp_path / "folder", max_shard_bytes=50)
    assert len(list((tmp_path / "folder").glob("model-*-of-*.safetensors"))) > 1
    importing.import_safetensors(tmp_path / "folder", tmp_path / "two" / "store", step=5)
    fresh = Odd({name: torch.zeros_like(each) for name, each in odd().items()})
    assert same(restored(tmp_path / "two" / "store", model=fresh)["model"].state_dict(), odd())
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".everstep")]


@pytest.mark.parametrize("limit", [exporting.SHARD_BYTES, 1000])
def test_transformers_reads_what_is_exported(limit: int, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1)  # its head and embedding are tied
    torch.manual_seed(1)
    model = GPT2LMHeadModel(config).to(torch.bfloat16)
    config.save_pretrained(tmp_path / "config")
    store = save(tmp_path / "store", model=model)
    exporting.export_safetensors(
        store, tmp_path / "out", config=tmp_path / "config" / "config.json", max_shard_bytes=limit
    )
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() == (limit == 1000)
    found, report = GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True, dtype=torch.bfloat16)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert same(found.state_dict(), model.state_dict())
    assert found.lm_head.weight is found.transformer.wte.weight


def test_dcp_loads_what_is_exported_and_it_is_imported_again(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    objects = trained()
    store = save(tmp_path / "one" / "store", **objects)
    exporting.export_dcp(store, tmp_path / "dcp")
    other = trained(seed=1)
    model, optimizer = get_state_dict(other["model"], other["optimizer"])
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(
        other["model"], other["optimizer"], model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    check_alike(other, objects)
    importing.import_dcp(tmp_path / "dcp", tmp_path / "two" / "store", step=9)
    check_alike(restored(tmp_path / "two" / "store", **trained(seed=2)), objects)


def test_what_dcp_does_not_hold_as_it_is_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = save(tmp_path / "store", misc={5: 1, "n": {2: torch.ones(1)}, "e": {}, "c": Counter("aab")}, **trained())
    exporting.export_dcp(store, tmp_path / "dcp")
    (said,) = [each.message for each in caplog.records if "DCP" in each.message]
    for named in (
        "misc.5 (the key 5 becomes text)",
        "misc.n.2 (the key 2 becomes text)",
        "misc.e (an empty dictionary is left out)",
        "misc.c (a Counter becomes a dict)",
    ):
        assert named in said
    assert said.count(";") == 3, "of a model and its optimizer nothing changes"
    importing.import_dcp(tmp_path / "dcp", tmp_path / "back")
    assert everstep.load(tmp_path / "back", only="misc*")["misc"] == {
        "5": 1, "n": {"2": torch.ones(1)}, "c": {"a": 2, "b": 1},
    }  # fmt: skip
    store = save(tmp_path / "two", misc={5: 1, "5": 2})
    with pytest.raises(CheckpointError, match="misc has the keys 5 and '5', which are one in a folder of DCP"):
        exporting.export_dcp(store, tmp_path / "dcp2")
    assert not (tmp_path / "dcp2").exists()


def test_an_optimizer_without_state_goes_to_dcp_and_comes_back(tmp_path: Path) -> None:
    model = network()
    save(tmp_path / "one", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    exporting.export_dcp(tmp_path / "one", tmp_path / "dcp")
    importing.import_dcp(tmp_path / "dcp", tmp_path / "two" / "store", step=9)
    other = network(1)
    found = restored(tmp_path / "two" / "store", model=other, optimizer=torch.optim.SGD(other.parameters(), lr=0.1))
    assert found["optimizer"].param_groups[0]["lr"] == 0.5


def test_dcp_loads_what_is_exported_onto_ranks_that_shard(tmp_path: Path) -> None:
    exporting.export_dcp(save(tmp_path / "store", **trained()), tmp_path / "dcp", only="model.*")
    assert ranks.run(2, load_sharded_by_dcp, tmp_path / "dcp", tmp_path / "store") == [True, True]


def load_sharded_by_dcp(rank: int, folder: Path, store: Path) -> bool:
    model = sharded(network(1))
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    found = {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in model.state_dict().items()}
    return same(found, everstep.load(store, only="model")["model"])


def check_alike(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert same(ours["model"].state_dict(), theirs["model"].state_dict())
    one, other = (each["optimizer"].state_dict() for each in (ours, theirs))
    for number, state in other["state"].items():
        assert ranks.same(one["state"][number], state)
    assert one["param_groups"][0]["lr"] == other["param_groups"][0]["lr"] == 0.125


def test_a_damaged_checkpoint_is_neither_exported_nor_told_shapes_of(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    store = PosixStore(tmp_path / "store")
    for generation in (1, 2, 3):
        ranks.save(store, ranks.key(1, generation), {"model": network(generation)})
    bad, flipped = (tmp_path / "store" / ranks.key(1, generation).part_name(0) for generation in (3, 2))
    bad.unlink()
    data = bytearray(flipped.read_bytes())
    data[4096] ^= 1
    flipped.write_bytes(data)
    assert everstep.load(store.url, map_location="meta").key == ranks.key(1, 2), "whose files are all there"
    for step in (None, 1):
        key = exporting.export_safetensors(store.url, tmp_path / "out", step=step, max_shard_bytes=50, replace=True)
        assert key == ranks.key(1, 1)
        found = {
            name: each for file in (tmp_path / "out").glob("*.safetensors") for name, each in load_file(file).items()
        }
        assert same(found, network(1).state_dict())
    with pytest.raises(NoGoodCheckpoint):
        exporting.export_safetensors(store.url, tmp_path / "x.safetensors", step=ranks.key(1, 2))
    assert {each.name for each in tmp_path.iterdir()} == {"store", "out"}


def test_an_export_leaves_a_link_and_replaces_what_it_leads_to(tmp_path: Path) -> None:
    store = save(tmp_path / "store", model=network())
    (tmp_path / "large").mkdir()
    (tmp_path / "out").symlink_to("large")
    exporting.export_safetensors(store, tmp_path / "out", replace=True)
    assert (tmp_path / "out").is_symlink()
    assert {each.name for each in tmp_path.iterdir()} == {"store", "large", "out"}
    assert (tmp_path / "large" / "model.safetensors").exists()


@pytest.mark.parametrize("export", [exporting.export_safetensors, exporting.export_dcp])
def test_a_store_is_never_replaced_by_its_export(export: Any, tmp_path: Path) -> None:
    store = save(tmp_path / "run" / "store", model=network())
    for place in ("run", "run/store"):
        with pytest.raises(CheckpointError, match="would be replaced, and holds the store"):
            export(store, tmp_path / place, replace=True)
    assert same(everstep.load(store)["model"], network().state_dict())


def test_what_is_no_tensor_is_named_where_a_format_holds_tensors_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for array in (np.zeros(500), np.zeros(3), bytes(2000)):
        store = save(tmp_path / f"{len(array)}", misc={"x": torch.ones(3), "array": array, "s": "text"})
        with pytest.raises(CheckpointError, match=r"misc holds more than tensors by their names \('array', 's'\)"):
            exporting.export_safetensors(store, tmp_path / "out", name="misc")
    assert not (tmp_path / "out").exists()
    store = save(tmp_path / "plain", misc={"x": torch.ones(3), "s": "text"})
    exporting.export_safetensors(store, tmp_path / "out", name="misc")
    assert "['s'] of misc are plain values" in caplog.text


@pytest.mark.parametrize("dtype", ["complex128", "float4_e2m1fn_x2"])
def test_a_type_that_a_format_does_not_hold_is_named(dtype: str, tmp_path: Path) -> None:
    tensor = torch.zeros(16, dtype=torch.uint8).view(getattr(torch, dtype))
    store = save(tmp_path / "store", model=Odd({"a.odd": tensor, "a.plain": torch.ones(2)}))
    with pytest.raises(
        CheckpointError, match=rf"a\.odd has the type {dtype}, which safetensors does not hold: leave it"
    ):
        exporting.export_safetensors(store, tmp_path / "x.safetensors")
    exporting.export_safetensors(store, tmp_path / "x.safetensors", rename=lambda name: None if "odd" in name else name)


def test_a_tensor_that_a_checkpoint_does_not_hold_is_named(tmp_path: Path) -> None:
    torch.save({"a": torch.eye(2).to_sparse()}, tmp_path / "sparse.pt")
    with pytest.raises(CheckpointError, match=r"model\.a is a sparse_coo tensor of float32"):
        importing.import_torch(tmp_path / "sparse.pt", tmp_path / "store")
    torch.save({"a": torch.ones(2, dtype=torch.complex64).conj()}, tmp_path / "conj.pt")
    importing.import_torch(tmp_path / "conj.pt", tmp_path / "store")
    assert same(everstep.load(tmp_path / "store")["model"], {"a": torch.ones(2, dtype=torch.complex64)})


def test_what_dcp_has_saved_from_ranks_that_shard_is_imported(tmp_path: Path) -> None:
    ranks.run(2, save_sharded_by_dcp, tmp_path / "dcp")
    importing.import_dcp(tmp_path / "dcp", tmp_path / "run" / "store")
    found = restored(tmp_path / "run" / "store", model=network(1))["model"]
    assert same(found.state_dict(), network().state_dict())


def save_sharded_by_dcp(rank: int, folder: Path) -> None:
    dcp.save({"model": sharded(network()).state_dict()}, checkpoint_id=folder)


def sharded(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    return model


def test_what_ranks_that_shard_have_saved_is_exported_whole(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    ranks.run(2, save_sharded, tmp_path / "store")
    exporting.export_safetensors(tmp_path / "store", tmp_path / "x.safetensors")
    assert same(load_file(tmp_path / "x.safetensors"), network().state_dict())


def save_sharded(rank: int, folder: Path) -> None:
    ranks.save(PosixStore(folder), ranks.key(1), {"model": sharded(network())})


@pytest.mark.parametrize("named", [True, False])
def test_what_torch_has_saved_is_imported(named: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.named_parameters() if named else model.parameters(), lr=0.125)
    model(torch.rand(5, 6)).sum().backward()
    optimizer.step()
    content = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "epoch": 3}
    torch.save(content, tmp_path / "x.pt")
    store = tmp_path / "run" / "store"
    importing.import_torch(tmp_path / "x.pt", store, step=300, metadata={"from": "x.pt"})
    other = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    objects = {"model": other, "optimizer": torch.optim.AdamW(other.parameters(), lr=0.5)}
    check_alike(restored(store, **objects), {"model": model, "optimizer": optimizer})
    loaded = everstep.load(store)
    assert (loaded.step, loaded["epoch"], loaded.metadata) == (300, 3, {"from": "x.pt"})
    torch.save(loaded["model"], tmp_path / "back.pt")
    assert same(torch.load(tmp_path / "back.pt", weights_only=True), model.state_dict())


def test_a_plain_state_dictionary_is_imported_under_a_name(tmp_path: Path) -> None:
    torch.save(network().state_dict(), tmp_path / "x.pt")
    importing.import_torch(tmp_path / "x.pt", tmp_path / "run" / "store", name="net")
    assert same(everstep.load(tmp_path / "run" / "store")["net"], network().state_dict())
    importing.import_torch(tmp_path / "x.pt", tmp_path / "run" / "store", step=2, name="net")
    assert [each.step for each in everstep.list_checkpoints(tmp_path / "run" / "store")] == [2, 0]


class TwoShapes(nn.Module):  # type: ignore[misc]
    """Its weights have one shape, and so have its biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x).tanh())


def decayed(names_given: bool = False) -> tuple[Any, Any, list[str]]:
    """A model and an optimizer that decays its weights only, which it was given in an order of their own."""
    model = TwoShapes()
    named = sorted(model.named_parameters(), key=lambda pair: (pair[1].dim(), pair[0]), reverse=True)
    groups = [[each for each in named if (each[1].dim() == 2) is has_decay] for has_decay in (True, False)]
    given = [
        {"params": group if names_given else [param for _, param in group], "weight_decay": decay}
        for group, decay in zip(groups, (0.1, 0.0), strict=True)
    ]
    optimizer = torch.optim.AdamW(given)
    model(torch.rand(4, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer, [name for name, _ in named]


def is_imported(store: Path, model: Any, optimizer: Any) -> bool:
    """Tell whether each parameter of a model has the same state in a store as in its own optimizer."""
    loaded = everstep.load(store)["optimizer"]
    return all(
        torch.equal(loaded["state"][name]["exp_avg"], optimizer.state[param]["exp_avg"])
        for name, param in model.named_parameters()
    )


@pytest.mark.parametrize("how", ["torch", "dcp"])
def test_an_optimizer_of_groups_without_names_is_imported_by_the_order_that_is_given(how: str, tmp_path: Path) -> None:
    model, optimizer, order = decayed()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    file, store = tmp_path / "file", tmp_path / "store"
    if how == "dcp":
        dcp.save(state, checkpoint_id=file, no_dist=True)
    else:
        torch.save(state, file)
    read: Any = importing.import_dcp if how == "dcp" else importing.import_torch
    with pytest.raises(CheckpointError, match=r"4 parameters have numbers, and they are in 2 groups.*optimizer_order="):
        read(file, store)
    with pytest.raises(CheckpointError, match=r"parameter 0 cannot be first.bias, which has the shape \[3\]"):
        read(file, store, optimizer_order=sorted(order))
    with pytest.raises(CheckpointError, match=r"no model in it has a parameter called x"):
        read(file, store, optimizer_order=[*order[:3], "x"])
    with pytest.raises(CheckpointError, match=r"of 4 parameters, and 3 different names"):
        read(file, store, optimizer_order=order[:3])
    assert not store.exists()
    read(file, tmp_path / "weights", only="model.*")
    read(file, store, optimizer_order={"optimizer": order})
    assert is_imported(store, model, optimizer)


def test_numbers_are_imported_only_where_they_can_mean_one_thing(tmp_path: Path) -> None:
    model, optimizer, _ = decayed(names_given=True)
    assert "param_names" in optimizer.state_dict()["param_groups"][0]
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "named.pt")
    importing.import_torch(tmp_path / "named.pt", tmp_path / "named")
    assert is_imported(tmp_path / "named", model, optimizer)

    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "one.pt")
    importing.import_torch(tmp_path / "one.pt", tmp_path / "one")
    assert is_imported(tmp_path / "one", model, optimizer)
    torch.save({"critic": {f"net.{name}": each for name, each in state["model"].items()}, **state}, tmp_path / "two.pt")
    with pytest.raises(CheckpointError, match=r"2 models in it have tensors of their shapes"):
        importing.import_torch(tmp_path / "two.pt", tmp_path / "two")
    torch.save({"average": state["model"], **state}, tmp_path / "averaged.pt")
    importing.import_torch(tmp_path / "averaged.pt", tmp_path / "averaged")
    assert is_imported(tmp_path / "averaged", model, optimizer)


def test_what_cannot_be_imported_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = network()
    optimizer = trained()["optimizer"]
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "numbered.pt")
    with pytest.raises(CheckpointError, match="parameters have numbers, and the model has 9 tensors"):
        importing.import_torch(tmp_path / "numbered.pt", tmp_path / "store")
    torch.save(model, tmp_path / "pickled.pt")
    with pytest.raises(CheckpointError, match="weights_only"):
        importing.import_torch(tmp_path / "pickled.pt", tmp_path / "store")
    (tmp_path / "hello.pt").write_text("hello")
    with pytest.raises(CheckpointError, match="weights_only"):
        importing.import_torch(tmp_path / "hello.pt", tmp_path / "store")
    with pytest.raises(CheckpointError, match="is no file of safetensors"):
        importing.import_safetensors(tmp_path / "hello.pt", tmp_path / "store")
    itself: dict[str, Any] = {}
    itself["state"] = itself
    torch.save(itself, tmp_path / "itself.pt")
    with pytest.raises(CheckpointError, match="holds itself"):
        importing.import_torch(tmp_path / "itself.pt", tmp_path / "store")
    torch.save({"a": torch.empty(2, device="meta")}, tmp_path / "meta.pt")
    with pytest.raises(CheckpointError, match=r"model\.a is on the meta device"):
        importing.import_torch(tmp_path / "meta.pt", tmp_path / "store")
    with pytest.raises(CheckpointError, match=r"no file \.metadata"):
        importing.import_dcp(tmp_path, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_sizes_are_read_as_people_write_them() -> None:
    assert exporting.parse_size("5GB") == 5 * 10**9
    assert exporting.parse_size("1.5 MB") == 1_500_000
    with pytest.raises(ValueError, match="is no size"):
        exporting.parse_size("large")
