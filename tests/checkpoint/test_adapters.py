"""Trainings by other frameworks are killed, their newest local folder is torn, and they go on bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from everstep.checkpoint.adapters import published  # noqa: E402
from everstep.checkpoint.adapters.published import Published  # noqa: E402
from everstep.checkpoint.catalog.candidates import list_candidates  # noqa: E402
from everstep.checkpoint.catalog.verification import VerifiedCheckpoints  # noqa: E402
from everstep.checkpoint.errors import CheckpointError  # noqa: E402
from everstep.checkpoint.restore.restorer import NoGoodCheckpoint  # noqa: E402
from everstep.checkpoint.retention.pruning import prune_by_hand  # noqa: E402
from everstep.checkpoint.save.outcomes import SaveFailed  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.long_sweeps import only_in_long_sweeps  # noqa: E402

pytestmark = pytest.mark.torch

STEPS, SAVED, KILLED = 12, 4, 6


def weights(model: Any) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def kill_when_stored(store: Path, step: int) -> None:
    """As kill -9 does, once a step is in the store: it is stored beside training."""
    until = time.monotonic() + 90
    while all(key.step != step for key in list_candidates(PosixStore(store))):
        assert time.monotonic() < until, f"step {step} is not stored"
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def hugging_face(rank: int, store: Path, output: Path, kill: int | None = None) -> tuple[dict[str, Any], list[int]]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from everstep.checkpoint.adapters.huggingface import EverstepCallback

    class Killed(TrainerCallback):  # type: ignore[misc]  # transformers is not where types are checked
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.steps.append(state.global_step)
            if state.global_step == kill:
                kill_when_stored(store, SAVED)

    torch.manual_seed(0)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (40, 8))]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    arguments = TrainingArguments(
        str(output), max_steps=STEPS, save_steps=SAVED, per_device_train_batch_size=4, use_cpu=True, report_to=[],
        disable_tqdm=True, seed=1,
    )  # fmt: skip
    ckpt, killed = EverstepCallback(store, output), Killed()
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[ckpt, killed])
    trainer.train(resume_from_checkpoint=ckpt.path())
    return weights(model), killed.steps


def lightning(rank: int, store: Path, output: Path, kill: int | None = None) -> tuple[dict[str, Any], list[int]]:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch import nn
    from torch.utils.data import TensorDataset
    from torchdata.stateful_dataloader import StatefulDataLoader

    from everstep.checkpoint.adapters.lightning import EverstepCheckpointIO, Generators

    class Module(LightningModule):  # type: ignore[misc]  # lightning is not where types are checked
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

        def training_step(self, batch: Any, number: int) -> Any:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]  # at the end of each epoch

    class Killed(Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
            self.steps.append(trainer.global_step)
            if trainer.global_step == kill:
                kill_when_stored(store, SAVED)

    torch.manual_seed(0)
    model, killed, ckpt = Module(), Killed(), EverstepCheckpointIO(store, output)
    # The save is in the middle of the first epoch, the kill in the second.
    data = StatefulDataLoader(TensorDataset(torch.rand(40, 4)), batch_size=8, shuffle=True)
    saves = ModelCheckpoint(output, every_n_train_steps=SAVED, save_top_k=-1)
    trainer = Trainer(
        max_steps=STEPS, plugins=[ckpt], callbacks=[saves, Generators(), killed], accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=output,
    )  # fmt: skip
    trainer.fit(model, data, ckpt_path=ckpt.path())
    return weights(model), killed.steps


@pytest.mark.parametrize(
    ("framework", "local"),
    [
        (hugging_face, "gone"),
        (lightning, "torn"),
        *only_in_long_sweeps((hugging_face, "torn"), (lightning, "gone")),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(framework: Any, local: str, tmp_path: Path) -> None:
    straight, _ = ranks.run(1, framework, tmp_path / "straight", tmp_path / "out-straight")[0]
    ranks.run(1, framework, tmp_path / "store", tmp_path / "out", KILLED, dies=[0])
    if local == "gone":
        shutil.rmtree(tmp_path / "out")
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file():
            os.truncate(path, path.stat().st_size // 2)
    resumed, steps = ranks.run(1, framework, tmp_path / "store", tmp_path / "out")[0]
    assert steps == list(range(SAVED + 1, STEPS + 1))
    assert ranks.same(straight, resumed)


def with_best(rank: int, store: Path, output: Path, kill: int | None = None) -> tuple[dict[str, Any], str]:
    """A training whose step 4 is the best, and whose model it takes at its end."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from everstep.checkpoint.adapters.huggingface import EverstepCallback

    class Killed(TrainerCallback):  # type: ignore[misc]  # transformers is not where types are checked
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == kill:
                kill_when_stored(store, 2 * SAVED)

    class BestAtFour(Trainer):  # type: ignore[misc]
        def evaluate(self, *given: Any, **more: Any) -> dict[str, float]:
            return {"eval_loss": float(self.state.global_step)}

    torch.manual_seed(0)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (40, 8))]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    arguments = TrainingArguments(
        str(output), max_steps=STEPS, save_steps=SAVED, eval_steps=SAVED, eval_strategy="steps", use_cpu=True, seed=1,
        load_best_model_at_end=True, save_total_limit=1, per_device_train_batch_size=4, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    ckpt = EverstepCallback(store, output, keep_last=1)
    trainer = BestAtFour(model, arguments, train_dataset=data, eval_dataset=data, callbacks=[ckpt, Killed()])
    trainer.train(resume_from_checkpoint=ckpt.path())
    return weights(model), str(trainer.state.best_model_checkpoint)


def test_a_run_that_takes_its_best_model_takes_it_on_a_machine_without_its_folders_too(tmp_path: Path) -> None:
    straight, _ = ranks.run(1, with_best, tmp_path / "straight", tmp_path / "out-straight")[0]
    ranks.run(1, with_best, tmp_path / "store", tmp_path / "out", 2 * SAVED + 2, dies=[0])
    shutil.rmtree(tmp_path / "out")
    resumed, best = ranks.run(1, with_best, tmp_path / "store", tmp_path / "elsewhere")[0]
    assert best == str(tmp_path / "elsewhere" / f"checkpoint-{SAVED}")
    assert ranks.same(straight, resumed)
    kept = {key.step for key in list_candidates(PosixStore(tmp_path / "store"))}
    assert kept == {SAVED, STEPS}, "the newest, and the best although keep_last=1"


def test_what_a_folder_needs_stays_as_long_as_it_and_comes_back_with_it(tmp_path: Path) -> None:
    published = Published(tmp_path / "store", keep_last=1)
    for step, needed in ((1, None), (2, 1), (3, 1)):
        out = write(tmp_path / f"out-{step}", str(step))
        published.publish(out, step, needed=None if needed is None else (tmp_path / f"out-{needed}", needed))
        published.finish()
    assert [key.step for key in list_candidates(published.store)] == [3, 1]
    found = VerifiedCheckpoints(published.store, believe_marks=False)
    assert prune_by_hand(found, keep_last=1, dry_run=True).planned == ()
    assert prune_by_hand(found, keep_last=1).done.removed == ()

    def into(key: Any) -> Path:
        return tmp_path / f"back-{key.step}"

    assert published.newest(into, needed_step=lambda path: 1) == tmp_path / "back-3"
    assert (tmp_path / "back-1" / "model").read_text() == "1"
    published.publish(write(tmp_path / "out-4", "4"), 4)
    published.finish()
    assert [key.step for key in list_candidates(published.store)] == [4], "nothing needs step 1 any more"
    with pytest.raises(NoGoodCheckpoint, match="cannot be gone on from without step 1, the best one, which is not in"):
        published.newest(into, needed_step=lambda path: 1)


def test_a_folder_whose_best_one_is_damaged_is_passed_over(tmp_path: Path) -> None:
    published, why = Published(tmp_path / "store"), []
    published.on("fell_back", lambda event: why.append(event.why))
    for step in (1, 2, 3):
        needed = (tmp_path / "out-2", 2) if step == 3 else None
        published.publish(write(tmp_path / f"out-{step}", str(step)), step, needed=needed)
        published.finish()
    (part,) = (tmp_path / "store").glob(f"{list_candidates(published.store)[1].data_prefix}*.part")
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    needs = {"3": 2, "1": None}
    found = published.newest(
        lambda key: tmp_path / f"back-{key.step}", needed_step=lambda path: needs[(path / "model").read_text()]
    )
    assert found == tmp_path / "back-1"
    assert "without step 2, the best one, which is not good" in why[0]


def test_ranks_of_one_node_with_a_folder_each_all_get_theirs(tmp_path: Path) -> None:
    published = Published(tmp_path / "store")
    published.publish(write(tmp_path / "out", "1"), 1)
    published.finish()
    assert ranks.run(2, newest_in_its_own_folder, tmp_path / "store", tmp_path) == ["1", "1"]


def newest_in_its_own_folder(rank: int, store: Path, folder: Path) -> str:
    found = Published(store).newest(lambda key: folder / f"back-{rank}")
    assert found is not None
    return (found / "model").read_text()


def write(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model").write_text(text)
    return folder


def test_a_bad_folder_is_passed_over_by_all_ranks(tmp_path: Path) -> None:
    published = Published(tmp_path / "store")
    assert published.newest(lambda key: tmp_path / "none") is None
    for step in (1, 2):
        published.publish(write(tmp_path / f"out-{step}", str(step)), step)
        published.finish()
    newest, older = list_candidates(published.store)
    (part,) = (tmp_path / "store").glob(f"{newest.data_prefix}*.part")
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    assert ranks.run(2, newest_of, tmp_path / "store", tmp_path / "restored") == ["1", "1"]
    next((tmp_path / "store").glob(f"{older.data_prefix}*.part")).unlink()
    with pytest.raises(NoGoodCheckpoint):
        published.newest(lambda key: tmp_path / "none")


def newest_of(rank: int, store: Path, into: Path) -> str:
    found = Published(store).newest(lambda key: into)
    assert found is not None
    return (found / "model").read_text()


def test_an_adapter_without_a_store_takes_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_CHECKPOINT", json.dumps({"store": str(tmp_path / "job"), "keep_last": 7}))
    job = Published(None)
    assert (job.store.url, job._keep_last) == (str(tmp_path / "job"), 7)
    own = Published(tmp_path / "own", keep_last=2)
    assert (own.store.url, own._keep_last) == (str(tmp_path / "own"), 2)


def test_a_store_that_refuses_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "store").write_text("a file where the folder should be")
    published, failures = Published(tmp_path / "store"), []
    published.on("failed", lambda event: failures.append(event.details["step"]))
    published.publish(write(tmp_path / "out", "1"), 1)
    with pytest.raises(SaveFailed, match="step 1 was not published"):
        published.finish()
    assert failures == [1]
    assert "step 1 was not published" in caplog.text


def test_what_a_network_mount_shows_late_is_waited_for(tmp_path: Path) -> None:
    assert ranks.run(2, see_late, tmp_path) == [["rng_0", "share_0", "share_1"], ["rng_1", "share_1"]]


def see_late(rank: int, folder: Path) -> list[str]:
    path = folder / str(rank)
    path.mkdir()
    for name in (f"share_{rank}", f"rng_{rank}"):
        (path / name).write_text("x")
    if rank == 0:
        threading.Timer(0.3, (path / "share_1").write_text, ("x",)).start()
    Published(folder / "store").see(path, own="rng_*")
    return sorted(each.name for each in path.iterdir())


def test_shares_of_a_state_in_folders_that_nodes_do_not_share_are_refused_on_all_ranks(tmp_path: Path) -> None:
    said = ranks.run(2, save_shares, tmp_path)
    assert all("rank 1 has written" in why and "checkpoint-4/state/__1_0.distcp" in why for why in said), said
    assert not (tmp_path / "store").exists()


def save_shares(rank: int, folder: Path) -> str:
    from everstep.checkpoint.adapters.huggingface import EverstepCallback

    published._STALE = 0.0
    out = folder / f"out-{rank}"
    for name in (f"state/__{rank}_0.distcp", f"rng_state_{rank}.pth"):
        (out / "checkpoint-4" / name).parent.mkdir(parents=True, exist_ok=True)
        (out / "checkpoint-4" / name).write_text("x")
    state = SimpleNamespace(global_step=4, is_world_process_zero=rank == 0)
    try:
        EverstepCallback(folder / "store", out).on_save(None, state, None)
    except CheckpointError as error:
        return str(error)
    return "published"
