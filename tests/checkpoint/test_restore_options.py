"""restore(step=…, strict=False, rename=…, cast=…): all ranks alike, and training goes on as a later attempt."""

from __future__ import annotations

import os
import shutil
import signal
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.catalog.candidates import list_candidates  # noqa: E402
from everstep.checkpoint.catalog.selection import NoSuchStep  # noqa: E402
from everstep.checkpoint.errors import CheckpointError  # noqa: E402
from everstep.checkpoint.restore import restorer  # noqa: E402
from everstep.checkpoint.state.kinds import StateMismatch  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from everstep.checkpoint.writer import control  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.sessions import Model, session, steps_in, train  # noqa: E402

pytestmark = pytest.mark.torch


def run(folder: Path, until: int, step: int | None = None, **options: Any) -> tuple[int, int]:
    """Return the step at which a run began, and that of the checkpoint from which the next run would begin."""
    model = Model()
    with session(folder, **{"keep_last": 9, "policy": "wait", **options}) as ckpt:
        start = ckpt.restore(step=step, model=model).step
        train(ckpt, model, until)
    newest = Model()
    with session(folder, keep_last=9) as ckpt:
        return start, ckpt.restore(model=newest).step


def test_training_goes_on_from_an_older_step_and_what_it_saves_is_the_newest(tmp_path: Path) -> None:
    assert run(tmp_path, 30) == (0, 30)
    assert run(tmp_path, 20, step=10) == (10, 20), "step 30 of the older attempt is no newer"
    assert steps_in(tmp_path) == [10, 20, 20, 30], "and is kept as any other"


def test_a_step_that_is_not_there_is_an_error_that_lists_those_that_are(tmp_path: Path) -> None:
    run(tmp_path, 20)
    with session(tmp_path) as ckpt, pytest.raises(NoSuchStep, match=r"step 15 in .*; there are 10, 20"):
        ckpt.restore(step=15, model=Model())
    with session(tmp_path / "empty") as ckpt, pytest.raises(NoSuchStep, match="there are none at all"):
        ckpt.restore(step=15, model=Model())


def test_what_is_saved_into_a_store_that_went_back_is_newer_than_what_memory_has(tmp_path: Path) -> None:
    model = Model()
    ckpt = session(tmp_path, attempt=(0, 5))
    ckpt.track(model=model)
    train(ckpt, model, 10)
    ckpt.wait()
    link = control.WriterLink.connect(tmp_path / "memory")
    os.kill(link.pid, signal.SIGKILL)
    link.close()
    ckpt.close(wait=False)
    for kind in ("manifests", "attempts", "data"):  # as a backup of the first moment has them
        shutil.rmtree(tmp_path / "store" / kind)
    with session(tmp_path) as ckpt:
        assert ckpt.restore(model=model).step == 10
        train(ckpt, model, 20)
    newest = next(iter(list_candidates(PosixStore(tmp_path / "store"))))
    assert (newest.attempt.generation, newest.step) == (6, 20)


def test_an_attempt_does_not_go_on_behind_what_it_has_saved_itself(tmp_path: Path) -> None:
    run(tmp_path, 20, attempt=(1, 1))
    model = Model()
    with session(tmp_path, attempt=(1, 1)) as ckpt:
        ckpt.restore(step=10, model=model)
        with pytest.raises(CheckpointError, match=r"attempt .* has saved step 20 already"):
            ckpt.save(11)
    assert run(tmp_path, 20, step=10, attempt=(1, 2)) == (10, 20)


@pytest.mark.parametrize("name", ["step", "strict", "rename"])
def test_an_object_that_is_called_as_an_option_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    """A module called strict, or rename, was neither saved nor restored, without a word."""
    given: dict[str, Any] = {name: nn.Linear(2, 2)}
    with session(tmp_path) as ckpt, pytest.raises(TypeError, match=f"{name}= is .*, not a Linear: an object that is"):
        ckpt.restore(**given)


def network(*widths: int, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(one, two) for one, two in pairwise(widths)))


def test_all_ranks_take_what_there_is_under_other_names_and_types(tmp_path: Path) -> None:
    before = network(4, 6, 2)
    ranks.save(PosixStore(tmp_path / "store"), ranks.key(7), {"backbone": before})
    for missing, unexpected, weight in ranks.run(2, restore_in_another, tmp_path):
        assert missing == ["model.2.bias", "model.2.weight", "optimizer"]
        assert unexpected == ["model.1.bias", "model.1.weight"]
        assert torch.equal(weight, before[0].weight.bfloat16())


def restore_in_another(rank: int, folder: Path) -> tuple[list[str], list[str], Any]:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 6), nn.Identity(), nn.Linear(6, 3)).bfloat16()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {"rename": {"backbone.": "model."}, "cast": True}
    with session(folder) as ckpt:
        with pytest.raises(StateMismatch, match="is not in the checkpoint"):
            ckpt.restore(model=model, optimizer=optimizer, **options)
        restored = ckpt.restore(model=model, optimizer=optimizer, strict=False, **options)
    weight = model.state_dict()["0.weight"].full_tensor()
    return list(restored.missing), list(restored.unexpected), weight


@pytest.mark.parametrize("is_function", [True, False])
def test_names_are_mapped_without_what_a_checkpoint_says_of_itself(is_function: bool, tmp_path: Path) -> None:
    """A function hears of no names but those of objects, and no object gets more."""
    with session(tmp_path, attempt=(1, 1)) as ckpt:
        ckpt.restore(model={"weight": torch.ones(2), "lr": 1.0})
        ckpt.save(1, metadata={"loss": 0.5})
    heard: list[str] = []

    def rename(name: str) -> str:
        heard.append(name)
        first, rest = name.split(".", 1)
        return f"net.{first}.{rest}"

    found: dict[str, Any] = {"model": {"weight": torch.zeros(2), "lr": 0.0}}
    with session(tmp_path) as ckpt:
        restored = ckpt.restore(net=found, rename=rename if is_function else {"": "net."})
    assert (restored.step, restored.metadata) == (1, {"loss": 0.5})
    assert found["model"]["lr"] == 1.0
    assert found.keys() == {"model", "rank"}
    assert all("." in each for each in heard)


def test_arrays_are_found_under_another_name(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    with session(tmp_path) as ckpt:
        ckpt.restore(old={"array": np.arange(5000.0), "more": 3})
        ckpt.save(1)
    found: dict[str, Any] = {"array": np.zeros(5000), "more": 0}
    with session(tmp_path) as ckpt:
        ckpt.restore(new=found, rename={"old.": "new."})
    assert found["more"] == 3
    assert (found["array"] == np.arange(5000.0)).all()


def test_a_prefix_with_nothing_in_its_place_leaves_names_out_wherever_a_checkpoint_is_read(tmp_path: Path) -> None:
    with session(tmp_path) as ckpt:
        ckpt.restore(model=nn.Linear(2, 2), other={"kept": 1})
        ckpt.save(1)
    rename: dict[str, str | None] = {"model.weight": None, "other.": None}
    assert set(everstep.load(tmp_path / "store", only=["model", "other"], rename=rename)) == {"model"}
    for load_into in (partial(everstep.load_into, str(tmp_path / "store")), session(tmp_path).restore):
        model = nn.Linear(2, 2)
        before = model.weight.clone()
        assert load_into(model=model, rename=rename, strict=False).missing == ("model.weight",)
        assert torch.equal(model.weight, before)


CASTS = {torch.float32: torch.float64, torch.float16: torch.float32}

# What rank 0 and rank 1 give, and what is said of it; nothing where it is the same.
GIVEN: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"step": 10}, "step=None on rank 0 and step=10 on rank 1"),
    ({"step": 10}, {"step": 20}, "step=10 on rank 0 and step=20 on rank 1"),
    ({}, {"strict": False}, "strict=True on rank 0 and strict=False on rank 1"),
    ({"cast": True}, {}, "cast=True on rank 0 and cast=None on rank 1"),
    ({}, {"rename": {"a.": "b."}}, "rename=None on rank 0 and rename={'a.': 'b.'} on rank 1"),
    (
        {"rename": {f"layer.{i}.": "" for i in range(99)}},
        {"rename": {f"layer.{i}.": "" for i in range(98)}},
        "rename=a mapping of 99 prefixes (",
    ),
    ({"rename": str}, {"rename": {}}, "rename=a function on rank 0 and rename={} on rank 1"),
    ({"rename": {"a.": "b.", "c.": None}}, {"rename": {"c.": None, "a.": "b."}}, ""),
    ({"cast": CASTS}, {"cast": dict(reversed(CASTS.items()))}, ""),
    ({"step": 10}, {"step": 10}, ""),
]


def test_ranks_that_ask_for_different_things_are_told_so_and_nothing_is_touched(tmp_path: Path) -> None:
    run(tmp_path, 20)
    for found in ranks.run(2, restore_as_given, tmp_path):
        assert len(found) == len(GIVEN) + 1
        for (_, _, said), (error, steps) in zip(GIVEN, found[:-1], strict=True):
            assert said in error
            assert ("no object was touched" in error) == bool(said)
            assert steps == ((0, 20) if said else (steps[1], steps[1])), "and the same session restores after that"
        assert "allow_pickle=False on rank 0 and allow_pickle=True on rank 1" in found[-1][0]


def restore_as_given(rank: int, folder: Path) -> list[tuple[str, tuple[int, int]]]:
    found = []
    for first, second, _ in GIVEN:
        options, model, error = (first, second)[rank], Model(), ""
        with session(folder) as ckpt:
            try:
                ckpt.restore(model=model, **options)
            except CheckpointError as caught:
                error = str(caught)
            before = model.at
            if error:
                ckpt.restore(model=model)
        found.append((error, (before, model.at)))
    with session(folder, allow_pickle=rank == 1) as ckpt, pytest.raises(CheckpointError) as raised:
        ckpt.restore(model=Model())
    return [*found, (str(raised.value), (0, 0))]


def test_an_option_that_one_rank_alone_gets_wrong_is_an_error_of_all(tmp_path: Path) -> None:
    for error in ranks.run(2, restore_with_a_wrong_step, tmp_path):
        assert "step= is the number of a step" in error


def restore_with_a_wrong_step(rank: int, folder: Path) -> str:
    with session(folder) as ckpt, pytest.raises((TypeError, CheckpointError)) as raised:
        ckpt.restore(model=Model(), step="10" if rank else 10)  # type: ignore[arg-type]
    return str(raised.value)


def trained(dtype: Any, steps: int) -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = nn.Linear(5, 7).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 5, dtype=dtype)).sum().backward()
        optimizer.step()
    return model, optimizer


def test_slots_that_a_writer_removes_while_a_restore_looks_at_them_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does whose run has just ended: what it had is in the store."""
    model, _ = trained(torch.float32, 0)
    with session(tmp_path) as ckpt:
        ckpt.track(model=model)
        ckpt.save(3)

    def vanish(*_: Any, **__: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory", "slots")

    monkeypatch.setattr(restorer, "make_proposal", vanish)
    with session(tmp_path) as ckpt:
        assert ckpt.restore(model=model).step == 3


@pytest.mark.parametrize("how", ["restore", "load_into"])
@pytest.mark.parametrize("cast", ["as the object", "by a mapping"])
@pytest.mark.parametrize(("saved", "here"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_an_optimizer_without_state_gets_it_in_the_type_of_its_parameters(
    saved: str, here: str, cast: str, how: str, tmp_path: Path
) -> None:
    old, new = getattr(torch, saved), getattr(torch, here)
    model, optimizer = trained(old, 3)
    with session(tmp_path) as ckpt:
        ckpt.track(model=model, optimizer=optimizer)
        ckpt.save(3)
    casts = True if cast == "as the object" else {old: new}
    other, fresh_one = trained(new, 0)
    if how == "restore":
        with session(tmp_path) as ckpt:
            ckpt.restore(model=other, optimizer=fresh_one, cast=casts)
    else:
        everstep.load_into(tmp_path / "store", model=other, optimizer=fresh_one, cast=casts)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        ours, given = fresh_one.state[mine], optimizer.state[theirs]
        assert ours["step"].dtype is torch.float32
        assert ours["step"] == given["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(ours[name], given[name].to(new))
    other(torch.ones(2, 5, dtype=new)).sum().backward()
    fresh_one.step()


@pytest.mark.parametrize(
    ("cast", "said"),
    [
        ("bf16", r"not 'bf16': give torch\.bfloat16"),
        ("bfloat16", r"not 'bfloat16': give torch\.bfloat16"),
        ("torch.bfloat16", r"not 'torch\.bfloat16': give torch\.bfloat16"),
        ("half precision", "not 'half precision'$"),
        ({"model.*": torch.bfloat16}, r"not 'model\.\*' in a mapping"),
        ({torch.float32: "bf16"}, r"not 'bf16' in a mapping: give torch\.bfloat16"),
        ({torch.float32: None}, "not None in a mapping"),
        (float, "not <class 'float'>"),
        (1, "not 1$"),
    ],
)
def test_a_cast_that_is_no_type_is_refused_with_what_is_meant(cast: Any, said: str, tmp_path: Path) -> None:
    run(tmp_path, 10)
    store, model = str(tmp_path / "store"), Model()
    accepted = r"cast= is True, a type of torch, or a mapping .*as cast=torch\.bfloat16.*"
    with pytest.raises(TypeError, match=accepted + said):
        everstep.load(store, cast=cast)
    with pytest.raises(TypeError, match=accepted + said):
        everstep.load_into(store, model=model, cast=cast)
    with session(tmp_path) as ckpt, pytest.raises(TypeError, match=accepted + said):
        ckpt.restore(model=model, cast=cast)
    assert model.at == 0
