"""Files that Lightning writes to one path again and again are published as they were at each save."""

from __future__ import annotations

import importlib.util
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("lightning") is None:  # its import changes the environment of all tests
    pytest.skip("lightning is not installed", allow_module_level=True)

from everstep.checkpoint.catalog.candidates import list_candidates  # noqa: E402
from everstep.checkpoint.errors import CheckpointError  # noqa: E402
from everstep.checkpoint.publish import folder  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from everstep.data import Sampler  # noqa: E402

pytestmark = pytest.mark.torch


def test_a_file_that_is_written_again_while_it_waits_is_stored_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from everstep.checkpoint.adapters.lightning import EverstepCheckpointIO

    is_written_again = threading.Event()
    save_folder = folder.save_folder

    def wait_and_save(*args: Any, **options: Any) -> Any:
        assert is_written_again.wait(120)
        return save_folder(*args, **options)

    monkeypatch.setattr(folder, "save_folder", wait_and_save)
    # What it comes to where `out` is on another file system than temporary files: the file is written in place.
    monkeypatch.setattr(shutil, "move", shutil.copyfile)
    ckpt = EverstepCheckpointIO(tmp_path / "store", tmp_path / "out")
    last = tmp_path / "out" / "last.ckpt"
    for step in (1, 2, 3):
        ckpt.save_checkpoint({"global_step": step, "weights": torch.full((1000,), float(step))}, last)
        assert torch.load(last)["global_step"] == step, "and it is there for others as Lightning leaves it"
    is_written_again.set()
    ckpt.teardown()
    store = PosixStore(tmp_path / "store")
    keys = list_candidates(store)
    assert [key.step for key in keys] == [3, 1], "the second gave way to the third"
    for key in keys:
        folder.restore_folder(store, tmp_path / str(key.step), step=key)
        found = torch.load(tmp_path / str(key.step) / "lightning.ckpt")
        assert (found["global_step"], found["weights"].unique().tolist()) == (key.step, [key.step])
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.is_file()) == ["last.ckpt"]


@pytest.mark.parametrize(("stop", "warns"), [(None, True), (40, False)])
def test_a_loader_of_which_lightning_would_leave_a_batch_out_is_told_of(
    stop: int | None, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset

    from everstep.checkpoint.adapters.lightning import Generators

    data = RandomDataset(32, 48)
    sampler = Sampler(len(data), global_batch=4, seed=1, stop=stop)
    loader = stateful_dataloader.StatefulDataLoader(data, batch_sampler=sampler)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(accelerator="cpu", max_steps=2, callbacks=[Generators()], default_root_dir=tmp_path, **quiet)
    trainer.fit(BoringModel(), loader)
    assert ("leaves one batch out" in caplog.text) is warns


def test_a_strategy_that_writes_its_own_files_is_rejected_when_the_training_begins(tmp_path: Path) -> None:
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

    from everstep.checkpoint.adapters.lightning import EverstepCheckpointIO, Generators

    def begin(strategy: Any, plugin: Any, stage: str = "fit") -> None:
        trainer = Trainer(strategy=strategy, plugins=[plugin], accelerator="cpu", devices=1, logger=False)
        Generators().setup(trainer, None, stage)

    ckpt = EverstepCheckpointIO(tmp_path / "store", tmp_path / "out")
    with pytest.raises(CheckpointError, match="ModelParallelStrategy writes and reads checkpoints by itself"):
        begin(ModelParallelStrategy(1, 1), ckpt)
    begin(ModelParallelStrategy(1, 1), ckpt, "test")
    begin(ModelParallelStrategy(1, 1), TorchCheckpointIO())
    begin(DDPStrategy(), ckpt)
    begin(SingleDeviceStrategy(torch.device("cpu")), ckpt)
