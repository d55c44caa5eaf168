"""Other callbacks, searches and files of weights beside an adapter cost no training and lose no file."""

from __future__ import annotations

import copy
import importlib.util
import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("lightning") is None or importlib.util.find_spec("transformers") is None:
    pytest.skip("lightning or transformers is not installed", allow_module_level=True)

from everstep.checkpoint.adapters.published import Published  # noqa: E402
from everstep.checkpoint.catalog.candidates import list_candidates  # noqa: E402
from everstep.checkpoint.errors import CheckpointError  # noqa: E402
from everstep.checkpoint.events import CheckpointEvent  # noqa: E402
from everstep.checkpoint.save.outcomes import SaveFailed  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch


def saved_steps(store: Path) -> list[int]:
    return [key.step for key in list_candidates(PosixStore(store))]


# ---- Hugging Face


def train_with_notes(rank: int, store: Path, output: Path, is_first: bool) -> tuple[str | None, list[str]]:
    """Train beside a callback that writes a file of its own into each folder; the restored path, and what is in it."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from everstep.checkpoint.adapters.huggingface import EverstepCallback

    class Notes(TrainerCallback):  # type: ignore[misc]  # transformers is not where types are checked
        def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            (output / f"checkpoint-{state.global_step}" / "notes").write_text(str(state.global_step))

    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (40, 8))]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    arguments = TrainingArguments(
        str(output), num_train_epochs=2, save_strategy="epoch", eval_strategy="epoch", load_best_model_at_end=True,
        save_total_limit=1, per_device_train_batch_size=10, use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    ckpt = EverstepCallback(store, output)
    callbacks = [ckpt, Notes()] if is_first else [Notes(), ckpt]
    Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8], callbacks=callbacks).train()
    shutil.rmtree(output)
    path = ckpt.path()
    return path, sorted(each.name for each in Path(path or ".").iterdir())


@pytest.mark.parametrize("is_first", [True, False])
def test_what_another_callback_puts_into_a_folder_comes_back_wherever_it_stands(is_first: bool, tmp_path: Path) -> None:
    path, names = ranks.run(1, train_with_notes, tmp_path / "store", tmp_path / "out", is_first)[0]
    assert path == str(tmp_path / "out" / "checkpoint-8")
    assert {"notes", "trainer_state.json"} <= set(names)
    assert saved_steps(tmp_path / "store") == [8, 4]


def save_elsewhere(rank: int, folder: Path) -> str:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from everstep.checkpoint.adapters.huggingface import EverstepCallback

    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    arguments = TrainingArguments(str(folder / "out"), use_cpu=True, report_to=[])
    (folder / "link").symlink_to("out")
    Trainer(model, arguments, callbacks=[EverstepCallback(folder / "store", folder / "x" / ".." / "link")])
    with pytest.raises(CheckpointError) as caught:
        Trainer(model, arguments, callbacks=[EverstepCallback(folder / "store", folder / "other")])
    return str(caught.value)


def test_a_callback_of_another_folder_than_the_trainer_s_is_rejected_when_the_trainer_is_made(tmp_path: Path) -> None:
    (said,) = ranks.run(1, save_elsewhere, tmp_path)
    assert f"saves into {tmp_path / 'out'}" in said
    assert f"into {tmp_path / 'other'}: give both the same folder" in said


def test_a_last_folder_that_is_not_there_is_an_error_at_the_end(tmp_path: Path) -> None:
    published = Published(tmp_path / "store")
    (tmp_path / "1").mkdir()
    published.publish(tmp_path / "1", 1)
    published.publish(tmp_path / "2", 2)
    with pytest.raises(SaveFailed, match="step 2 was not published"):
        published.finish()
    published.publish(tmp_path / "2", 2)
    (tmp_path / "3").mkdir()
    published.publish(tmp_path / "3", 3)
    published.finish()  # the last one is stored


def train_again_after_an_error(rank: int, store: Path, output: Path) -> tuple[bool, list[str]]:
    """Two trainings of one Trainer, of which the first ends with an error and the second is interrupted, both after the
    save of step 2; whether the restored folder has the weights of the second one, and all keys.
    """
    import threading

    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from everstep.checkpoint.adapters.huggingface import EverstepCallback

    weights: list[Any] = []

    class EndsAtThree(TrainerCallback):  # type: ignore[misc]  # transformers is not where types are checked
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == 2:
                weights.append(model.transformer.wte.weight.detach().clone())
            if state.global_step == 3:
                assert stored.wait(60)
                raise RuntimeError("no memory")

    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (40, 8))]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    arguments = TrainingArguments(
        str(output), max_steps=8, save_steps=2, per_device_train_batch_size=4, use_cpu=True, report_to=[],
        disable_tqdm=True,
    )  # fmt: skip
    ckpt, stored = EverstepCallback(store, output), threading.Event()
    ckpt.on("saved", lambda event: stored.set())
    ckpt.on("skipped", lambda event: stored.set())
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[ckpt, EndsAtThree()])
    for _ in range(2):
        stored.clear()
        with pytest.raises(RuntimeError, match="no memory"):
            trainer.train()
    shutil.rmtree(output / "checkpoint-2")
    path = ckpt.path()
    assert path == str(output / "checkpoint-2")
    found = GPT2LMHeadModel.from_pretrained(path).transformer.wte.weight
    assert not torch.equal(weights[0], weights[1])
    return torch.equal(found, weights[1]), [str(key) for key in list_candidates(PosixStore(store))]


def test_a_training_that_begins_after_one_that_failed_saves_its_own_steps(tmp_path: Path) -> None:
    is_newest, keys = ranks.run(1, train_again_after_an_error, tmp_path / "store", tmp_path / "out")[0]
    assert is_newest
    assert len(keys) == 2


def train_until_sigterm(rank: int, store: Path, output: Path) -> str | None:
    """Two trainings: the second one hears of SIGTERM in step 7, and saves what it can; the path to go on from."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_jit_checkpoint import JITCheckpointCallback

    from everstep.checkpoint.adapters.huggingface import EverstepCallback

    class IsToldInStep(TrainerCallback):  # type: ignore[misc]  # transformers is not where types are checked
        def __init__(self, step: int) -> None:
            self.step = step

        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == self.step - 1:  # what the signal's handler does after some seconds
                (jit,) = (
                    each for each in trainer.callback_handler.callbacks if isinstance(each, JITCheckpointCallback)
                )
                jit.jit_manager.is_checkpoint_requested = True

    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (40, 8))]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    arguments = TrainingArguments(
        str(output), max_steps=8, save_steps=4, eval_steps=4, eval_strategy="steps", load_best_model_at_end=True,
        save_total_limit=1, per_device_train_batch_size=4, use_cpu=True, report_to=[], disable_tqdm=True,
        enable_jit_checkpoint=True,
    )  # fmt: skip
    for step in (3, 7):
        ckpt = EverstepCallback(store, output)
        trainer = Trainer(
            model, arguments, train_dataset=data, eval_dataset=data[:8], callbacks=[ckpt, IsToldInStep(step)]
        )
        trainer.train(resume_from_checkpoint=ckpt.path())
    shutil.rmtree(output)
    return ckpt.path()


def test_what_the_trainer_saves_on_sigterm_is_published(tmp_path: Path) -> None:
    paths = ranks.run(1, train_until_sigterm, tmp_path / "store", tmp_path / "out")
    assert paths == [str(tmp_path / "out" / "checkpoint-6")]
    assert saved_steps(tmp_path / "store") == [6, 4, 2]


@pytest.mark.parametrize(
    ("step", "epoch", "warns"), [(25, 2.5, True), (20, 2.0, False), (10, 1.5, False), (0, 0, False)]
)
def test_a_training_that_has_made_its_last_step_within_an_epoch_warns_of_one_more(
    step: int, epoch: float, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from everstep.checkpoint.adapters.huggingface import EverstepCallback

    state = SimpleNamespace(
        global_step=step, max_steps=max(step, 20), epoch=epoch, is_world_process_zero=True, trial_params=None
    )
    arguments = SimpleNamespace(output_dir=str(tmp_path / "out"))
    EverstepCallback(tmp_path / "store", tmp_path / "out").on_train_begin(arguments, state, None)
    assert ("makes one more each time" in caplog.text) == warns


def train_a_trial(rank: int, store: Path, output: Path) -> None:
    """A training, and trials that save as those of hyperparameter_search() do, whose libraries are not installed here:
    in a folder of their own, with what the Trainer notes of a trial."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from everstep.checkpoint.adapters.huggingface import EverstepCallback

    class TrialTrainer(Trainer):  # type: ignore[misc]  # transformers is not where types are checked
        run = ""

        def _get_output_dir(self, trial: object) -> str:
            return str(output / self.run)

    class NotesTrial(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if trainer.run:
                state.is_hyper_param_search, state.trial_params = True, {"seed": 1}

    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (40, 8))]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    arguments = TrainingArguments(
        str(output), max_steps=4, save_steps=2, per_device_train_batch_size=4, use_cpu=True, report_to=[],
        disable_tqdm=True,
    )  # fmt: skip
    callbacks = [EverstepCallback(store, output), NotesTrial()]
    trainer = TrialTrainer(model, arguments, train_dataset=data, callbacks=callbacks)
    trainer.train()
    trainer.run = "run-0"
    trainer.train()
    shutil.rmtree(output / "checkpoint-4")
    trainer.run = "run-1"
    trainer.train()  # no folder of these names is in the place of those that are published
    assert (output / "run-1" / "checkpoint-4").is_dir()

    trainer.run = ""
    trainer.args.max_steps = 6
    trainer.train(resume_from_checkpoint=str(output / "run-1" / "checkpoint-4"))
    assert trainer.state.is_hyper_param_search, "it comes with the folder"

    trainer.args.output_dir = str(output / "other")
    with pytest.raises(CheckpointError, match="give both the same folder"):
        trainer.train()


def test_trials_of_a_search_are_not_published_and_who_goes_on_from_one_is(tmp_path: Path) -> None:
    ranks.run(1, train_a_trial, tmp_path / "store", tmp_path / "out")
    keys = list_candidates(PosixStore(tmp_path / "store"))
    assert [key.step for key in keys] == [6, 4, 2]
    assert len({key.attempt for key in keys if key.step <= 4}) == 1


# ---- Lightning


def note_event(event: CheckpointEvent) -> None:
    Path(os.environ["NOTED"]).write_text(str(event.key and event.key.step))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda ckpt: pickle.loads(pickle.dumps(ckpt))])
def test_a_plugin_that_lightning_copies_for_another_process_publishes_there(
    copied: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from everstep.checkpoint.adapters.lightning import EverstepCheckpointIO

    monkeypatch.setenv("NOTED", str(tmp_path / "noted"))
    ckpt = EverstepCheckpointIO(tmp_path / "store", tmp_path / "out")
    ckpt.on("saved", note_event)
    ckpt.save_checkpoint({"global_step": 1, "state_dict": {}, "optimizer_states": []}, tmp_path / "out" / "1.ckpt")
    other = copied(ckpt)
    ckpt.teardown()
    other.save_checkpoint({"global_step": 2, "state_dict": {}, "optimizer_states": []}, tmp_path / "out" / "2.ckpt")
    other.teardown()
    assert saved_steps(tmp_path / "store") == [2, 1]
    assert (tmp_path / "noted").read_text() == "2"


def train_lightning(
    rank: int, store: Path, output: Path, stop: int, kind: str, kill: int | None = None
) -> tuple[int, int]:
    """Train until `stop`, or until an error after `kill` steps; the steps of its beginning and its end."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.tuner import Tuner
    from torch.utils.data import DataLoader, TensorDataset

    from everstep.checkpoint.adapters.lightning import EverstepCheckpointIO, Generators

    class Module(LightningModule):  # type: ignore[misc]  # lightning is not where types are checked
        def __init__(self) -> None:
            super().__init__()
            self.net, self.lr = torch.nn.Linear(4, 1), 0.01

        def training_step(self, batch: Any, number: int) -> Any:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=self.lr)

    class Steps(Callback):  # type: ignore[misc]
        began = -1

        def on_train_start(self, trainer: Any, *others: Any) -> None:
            self.began = trainer.global_step

        def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
            if trainer.global_step == kill:
                raise RuntimeError("killed")

    ckpt, steps, model = EverstepCheckpointIO(store, output), Steps(), Module()
    callbacks = [Generators(), ModelCheckpoint(output / "whole", every_n_train_steps=4, save_top_k=-1), steps]
    if kind == "weights":
        weights = ModelCheckpoint(output / "weights", every_n_train_steps=1, save_weights_only=True, save_top_k=-1)
        callbacks.insert(0, weights)
    data = DataLoader(TensorDataset(torch.rand(400, 4)), batch_size=4)
    trainer = Trainer(
        max_steps=stop, plugins=[ckpt], callbacks=callbacks, accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=output,
    )  # fmt: skip
    if kind == "search":
        Tuner(trainer).lr_find(model, data, num_training=5)
    if kill is None:
        trainer.fit(model, data, ckpt_path=ckpt.path())
    else:
        with pytest.raises(RuntimeError, match="killed"):
            trainer.fit(model, data, ckpt_path=ckpt.path())
    if kind == "weights":
        trainer.save_checkpoint(output / "final.ckpt", weights_only=True)
        assert torch.load(output / "final.ckpt")["global_step"] == trainer.global_step
    return steps.began, trainer.global_step


@pytest.mark.parametrize("kind", ["weights", "search"])
def test_a_run_goes_on_from_its_last_whole_save_whatever_else_lightning_has_written(kind: str, tmp_path: Path) -> None:
    where = tmp_path / "store", tmp_path / "out"
    assert ranks.run(1, train_lightning, *where, 20, kind, 10) == [(0, 10)]
    assert max(saved_steps(where[0])) == 8
    assert ranks.run(1, train_lightning, *where, 20, kind) == [(8, 20)]
    assert set(saved_steps(where[0])) <= {4, 8, 12, 16, 20}
