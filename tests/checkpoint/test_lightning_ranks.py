"""Lightning on two ranks is killed within an epoch, and each rank goes on with its next samples, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.test_adapters import KILLED, SAVED, STEPS, kill_when_stored, weights  # noqa: E402
from tests.long_sweeps import only_in_long_sweeps  # noqa: E402

pytestmark = pytest.mark.torch

SIZE, SHARE = 40, 4  # five steps of two ranks are an epoch: the save is in the first one, the kill in the second

Seen = tuple[dict[str, Any], dict[int, list[int]]]


def loader(kind: str, data: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    from everstep.data import Sampler

    if kind == "Sampler":
        return StatefulDataLoader(data, batch_sampler=Sampler(SIZE, global_batch=2 * SHARE, seed=3, stop=STEPS))
    return StatefulDataLoader(data, batch_size=SHARE, sampler=StatefulDistributedSampler(data, seed=3))


def train(rank: int, kind: str, store: Path, output: Path, kill: int | None = None) -> Seen:
    """Return the weights, and which samples this rank has had at each step."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch import nn
    from torch.utils.data import TensorDataset

    from everstep.checkpoint.adapters.lightning import EverstepCheckpointIO, Generators

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")

    class Module(LightningModule):  # type: ignore[misc]  # lightning is not where types are checked
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

        def training_step(self, batch: Any, number: int) -> Any:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    class Watch(Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.samples: dict[int, list[int]] = {}

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
            self.samples[trainer.global_step] = batch[1].tolist()
            if trainer.global_step == kill:
                kill_when_stored(store, SAVED)

    torch.manual_seed(0)
    data = TensorDataset(torch.rand(SIZE, 4), torch.arange(SIZE))
    model, watch, ckpt = Module(), Watch(), EverstepCheckpointIO(store, output)
    torch.manual_seed(rank)
    saves = ModelCheckpoint(output, every_n_train_steps=SAVED, save_top_k=-1)
    trainer = Trainer(
        max_steps=STEPS, plugins=[ckpt], callbacks=[saves, Generators(), watch], accelerator="cpu", devices=2,
        strategy="ddp", use_distributed_sampler=False, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=output,
    )  # fmt: skip
    trainer.fit(model, loader(kind, data), ckpt_path=ckpt.path())
    return weights(model), watch.samples


@pytest.mark.parametrize("kind", ["Sampler", *only_in_long_sweeps("StatefulDistributedSampler")])
def test_each_rank_goes_on_with_the_samples_that_come_next(kind: str, tmp_path: Path) -> None:
    straight = ranks.run(2, train, kind, tmp_path / "straight", tmp_path / "out-straight")
    ranks.run(2, train, kind, tmp_path / "store", tmp_path / "out", KILLED, dies=[0, 1])
    resumed = ranks.run(2, train, kind, tmp_path / "store", tmp_path / "out")
    for (whole, samples), (again, more) in zip(straight, resumed, strict=True):
        assert sorted(samples) == list(range(1, STEPS + 1))
        assert more == {step: each for step, each in samples.items() if step > SAVED}
        assert ranks.same(whole, again)
    first = [sample for _, samples in straight for step in range(1, 6) for sample in samples[step]]
    assert sorted(first) == list(range(SIZE)), "an epoch has each sample once"
