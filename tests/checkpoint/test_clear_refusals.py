"""A session refuses what cannot work where it is given, in words that name it, and takes what can."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch import nn  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.catalog.best import rank_by_metric  # noqa: E402
from everstep.checkpoint.errors import CheckpointError  # noqa: E402
from everstep.checkpoint.exchange.exporting import export_dcp, export_safetensors  # noqa: E402
from everstep.checkpoint.exchange.importing import import_torch  # noqa: E402
from everstep.checkpoint.format.keys import Attempt, Key  # noqa: E402
from everstep.checkpoint.publish.publisher import publish_folder  # noqa: E402
from everstep.checkpoint.state.kinds import StateMismatch  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.sessions import Model, session  # noqa: E402

pytestmark = pytest.mark.torch


def save(folder: Path, objects: dict[str, Any], step: int = 10) -> Path:
    ranks.save(PosixStore(folder / "store"), ranks.key(step), objects)
    return folder / "store"


def test_a_url_that_pathlib_has_cut_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run would save into a folder of its machine, and lose all of it with the machine."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"give it as text, s3://bucket/run/fold-1; .* give \./s3:/bucket/run/fold-1"):
        everstep.checkpointer(Path("s3://bucket/run") / "fold-1")
    assert everstep.checkpointer("./s3:/bucket/run").store.url == f"{tmp_path}/s3:/bucket/run"


def test_a_step_may_be_a_whole_number_of_numpy(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, {"x": {"at": step}}, step)
    state: dict[str, Any] = {}
    with session(tmp_path) as ckpt:
        whole: Any = np.int64(10)
        assert ckpt.restore(step=whole, x=state).step == 10
        assert state == {"at": 10}
        with pytest.raises(TypeError, match="step= is the number of a step"):
            ckpt.restore(step=torch.tensor(10), x=state)


def test_several_models_in_one_list_are_told_apart_by_the_script(tmp_path: Path) -> None:
    """A list of modules has the parts of one model, as the stages of a rank."""
    with session(tmp_path) as ckpt, pytest.raises(CheckpointError, match=r"models\.weight.* generator=\.\.\., critic="):
        ckpt.restore(models=[nn.Linear(2, 2), nn.Linear(2, 2)])


def test_objects_that_a_second_call_does_not_name_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with session(tmp_path) as ckpt:
        ckpt.restore(model=Model())
        ckpt.restore(model=Model(), more={"at": 1})
        assert "is not saved from here on" not in caplog.text
        ckpt.restore(more={"at": 1})
    assert "model, named by an earlier call, is not saved from here on" in caplog.text


# ---- places of a store


def test_a_store_in_a_file_of_another_one_is_rejected_when_the_session_begins(tmp_path: Path) -> None:
    with session(tmp_path) as ckpt:
        ckpt.restore(model=Model())
        ckpt.save(1)
    for inner in (tmp_path / "store" / "run", tmp_path / "store" / "run" / "deeper"):
        with pytest.raises(CheckpointError, match=f"run is a file, a part of the store {tmp_path / 'store'}"):
            everstep.checkpointer(inner)


def test_a_store_around_another_one_s_folder_is_rejected_when_the_session_begins(tmp_path: Path) -> None:
    (tmp_path / "store" / "run").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="run is a folder, maybe of another store"):
        session(tmp_path)


@pytest.mark.parametrize("is_memory", [False, True])
def test_a_path_that_is_no_text_is_rejected_when_the_session_begins(is_memory: bool, tmp_path: Path) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    memory = everstep.MemoryOptions(directory=odd if is_memory else tmp_path / "memory")
    with pytest.raises(CheckpointError, match="is not UTF-8"):
        everstep.checkpointer(tmp_path / "store" if is_memory else odd, memory=memory)


# ---- states of other objects


def scheduler() -> Any:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), 1)


class Own:
    def __init__(self) -> None:
        self.state: Any = {}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("make", [scheduler, Own])
def test_a_tensor_is_not_given_to_an_object_whose_state_is_a_dictionary(make: Any, tmp_path: Path) -> None:
    store, ours = save(tmp_path, {"x": torch.ones(3)}), make()
    before = dict(ours.state_dict())
    with pytest.raises(StateMismatch, match="x is a tensor in the checkpoint, and a "):
        ranks.restore(store, tmp_path / "memory", {"x": ours})
    with pytest.raises(StateMismatch, match="x is a tensor in the checkpoint, and a "):
        everstep.load_into(store, x=ours)
    assert ours.state_dict() == before


def test_an_object_whose_own_state_is_a_tensor_gets_it(tmp_path: Path) -> None:
    theirs, ours = Own(), Own()
    theirs.state, ours.state = torch.ones(3), torch.zeros(3)
    ranks.restore(save(tmp_path, {"x": theirs}), tmp_path / "memory", {"x": ours})
    assert torch.equal(ours.state, theirs.state)


@pytest.mark.parametrize("saved", [lambda: nn.Linear(2, 2), lambda: {"weight": torch.ones(2), "epoch": 3}])
def test_a_scheduler_is_not_given_a_state_without_any_key_of_its_own(saved: Any, tmp_path: Path) -> None:
    ours = scheduler()
    before = dict(vars(ours))
    with pytest.raises(StateMismatch, match="scheduler is a StepLR here, and has no key of its state"):
        ranks.restore(save(tmp_path, {"scheduler": saved()}), tmp_path / "memory", {"scheduler": ours})
    assert vars(ours) == before


# ---- names


def test_a_function_that_gives_a_name_that_is_no_text_is_told(tmp_path: Path) -> None:
    store = save(tmp_path, {"x": {"at": 1}})
    with pytest.raises(CheckpointError, match=r"rename= gives x\.at the name 5, a int"):
        everstep.load(store, rename=lambda name: 5)  # type: ignore[arg-type]


def test_a_part_of_a_list_is_not_loaded_alone(tmp_path: Path) -> None:
    store = save(tmp_path, {"x": {"list": [1, torch.ones(2), 3]}})
    with pytest.raises(CheckpointError, match="takes a part of what is whole or left out"):
        everstep.load(store, only="x.list.[[]1]")
    assert everstep.load(store, only="x.list")["x"]["list"][2] == 3


def test_a_whole_number_of_any_size_may_be_the_best() -> None:
    values = [10**400, 3, float("inf"), float("nan"), True, -(10**400), 0.5]
    noted = [(Key(Attempt(0, 1), step), {"m": value}) for step, value in enumerate(values)]
    assert [key.step for key in rank_by_metric(noted, "m", "max")] == [2, 0, 1, 6, 5]
    assert [key.step for key in rank_by_metric(noted, "m", "min")] == [5, 6, 1, 0, 2]


# ---- files of others


@pytest.mark.parametrize("export", [export_dcp, export_safetensors])
def test_an_export_below_a_file_is_told(export: Any, tmp_path: Path) -> None:
    store = save(tmp_path, {"model": nn.Linear(2, 2)})
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'file'}: File exists"):
        export(store, tmp_path / "file" / "out")


def test_a_folder_is_no_file_of_torch(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is a folder, and torch\.save"):
        import_torch(tmp_path, tmp_path / "store")


def test_a_number_that_is_no_step_is_told_with_the_folder(tmp_path: Path) -> None:
    (folder := tmp_path / "checkpoint-1234567890123").mkdir()
    with pytest.raises(CheckpointError, match="ends with a number of more than 12 digits"):
        publish_folder(PosixStore(tmp_path / "store"), folder)
