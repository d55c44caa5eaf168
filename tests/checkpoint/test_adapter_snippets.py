"""The code that the page shows for other frameworks runs as it stands there, is killed, and goes on bit for bit."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.test_adapters import KILLED, SAVED, STEPS, kill_when_stored, weights  # noqa: E402
from tests.checkpoint.test_snippets import snippets  # noqa: E402

pytestmark = pytest.mark.torch

BATCH = 8  # as Hugging Face's Trainer has it by default
SIZE = BATCH * (SAVED + 1)  # the save is in the middle of an epoch: at its end Lightning counts that epoch twice


class Killing(nn.Module):  # type: ignore[misc]  # torch is not where types are checked
    """Passes a batch on, and ends the process in the middle of a step once an earlier one is stored."""

    def __init__(self, store: Path, kill: int | None) -> None:
        super().__init__()
        self.store, self.kill, self.count = store, kill, 0

    def forward(self, batch: Any) -> Any:
        self.count += 1
        if self.count == self.kill:
            kill_when_stored(self.store, SAVED)
        return batch


def hugging_face(store: Path, kill: int | None) -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (SIZE, 8))]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    model.transformer.drop = nn.Sequential(Killing(store, kill), model.transformer.drop)
    quiet = partial(TrainingArguments, use_cpu=True, disable_tqdm=True, report_to=[])
    return {"Trainer": Trainer, "TrainingArguments": quiet, "model": model, "data": data}


def lightning(store: Path, kill: int | None) -> dict[str, Any]:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import TensorDataset
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Module(LightningModule):  # type: ignore[misc]  # lightning is not where types are checked
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(Killing(store, kill), nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

        def training_step(self, batch: Any, number: int) -> Any:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    torch.manual_seed(0)
    data = StatefulDataLoader(TensorDataset(torch.rand(SIZE, 4)), batch_size=BATCH, shuffle=True)
    quiet = partial(Trainer, max_steps=STEPS, accelerator="cpu", logger=False, enable_progress_bar=False)
    return {"Trainer": quiet, "ModelCheckpoint": ModelCheckpoint, "model": Module(), "data": data}


def run_snippet(rank: int, title: str, folder: Path, kill: int | None = None) -> dict[str, Any]:
    """Run the code of a section of the page in a folder, which saves more often there, and return the weights."""
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    build = {"Hugging Face": hugging_face, "Lightning": lightning}[title]
    names = build(folder / "store", kill)
    (snippet,) = snippets(title)
    exec(snippet.replace("s3://bucket/run", str(folder / "store")).replace("steps=500", f"steps={SAVED}"), names)
    return weights(names["model"])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("title", ["Hugging Face", "Lightning"])
def test_the_snippet_of_a_framework_goes_on_after_a_kill_bit_for_bit(title: str, tmp_path: Path) -> None:
    (straight,) = ranks.run(1, run_snippet, title, tmp_path / "straight")
    ranks.run(1, run_snippet, title, tmp_path / "run", KILLED, dies=[0])
    (resumed,) = ranks.run(1, run_snippet, title, tmp_path / "run")
    assert ranks.same(straight, resumed)
    assert len(list((tmp_path / "run" / "store" / "manifests").iterdir())) > 1
