"""With loaders that read ahead, a resumed run takes the batches and draws the numbers that would have come next."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.format.keys import Attempt, Key  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from everstep.data import Sampler  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.sessions import session  # noqa: E402
from tests.long_sweeps import only_in_long_sweeps  # noqa: E402

pytestmark = pytest.mark.torch

KEY = Key(Attempt(0, 1), 5)
SIZE, BATCH = 24, 4
PER_EPOCH = SIZE // BATCH
SAVED, KILLED, STOP = PER_EPOCH + 2, PER_EPOCH + 4, 3 * PER_EPOCH  # saved and killed in the middle of the second epoch


class Numbers(Dataset):  # type: ignore[misc]  # torch is not where types are checked
    """Its items tell how often this copy of the dataset was asked, as one that buffers or augments would."""

    def __init__(self, size: int = 100) -> None:
        self.size = size
        self.asked = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return torch.tensor([index, self.asked])

    def state_dict(self) -> dict[str, int]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.asked = state["asked"]


class Augmented(Numbers):
    """Its items are changed by chance, with the generators of the process that makes them."""

    def __getitem__(self, index: int) -> Any:
        if torch.utils.data.get_worker_info() is None:
            return torch.tensor([index, random.random()]) + torch.rand(1)
        return torch.tensor([index, 0.0])  # what a worker drew is not saved


def test_beginning_a_loader_draws_no_numbers_that_a_model_would_draw() -> None:
    """Else dropout after a restart would differ: a DataLoader draws a number when it begins."""
    torch.manual_seed(1)
    expected = torch.rand(1)
    for workers in (0, 2):
        torch.manual_seed(1)
        trained(DataLoader(Numbers(), batch_sampler=Sampler(100, global_batch=4), num_workers=workers), 2)
        assert torch.equal(torch.rand(1), expected)


def test_what_a_script_draws_before_the_first_batch_is_drawn_once() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    batches = iter(DataLoader(Numbers(), batch_sampler=Sampler(100, global_batch=4)))
    first = torch.rand(1)
    next(batches)
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected)


def test_a_generator_that_the_loader_was_given_is_the_one_that_it_draws_from() -> None:
    own = torch.Generator().manual_seed(5)
    trained(DataLoader(Numbers(), batch_sampler=Sampler(100, global_batch=4), generator=own), 1)
    again = torch.Generator().manual_seed(5)
    torch.empty((), dtype=torch.int64).random_(generator=again)
    assert torch.equal(own.get_state(), again.get_state())


def test_workers_of_other_ranks_steps_and_seeds_draw_other_numbers() -> None:
    seeds = set()
    for seed, rank, step in [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 5)]:
        torch.manual_seed(seed)
        sampler = Sampler(100, global_batch=4, rank=rank, world=2)
        sampler.step = step
        seeds.add(iter(DataLoader(Numbers(), batch_sampler=sampler))._base_seed)
    assert len(seeds) == 4


def trained(batched: Any, steps: int) -> list[list[list[int]]]:
    batches = iter(batched)
    return [next(batches).tolist() for _ in range(steps)]


def indices(batches: list[list[list[int]]]) -> list[list[int]]:
    return [[index for index, _ in batch] for batch in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return [each for batch in batches for each in batch]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_loader_that_reads_ahead_goes_on_after_the_trained_step(workers: int, tmp_path: Path) -> None:
    expected = indices(trained(DataLoader(Numbers(), batch_sampler=Sampler(100, global_batch=4)), 10))
    sampler = Sampler(100, global_batch=4)
    first = trained(DataLoader(Numbers(), batch_sampler=sampler, num_workers=workers), 5)
    ranks.save(PosixStore(tmp_path), KEY, {"sampler": sampler})
    resumed = Sampler(100, global_batch=4)
    assert ranks.restore(tmp_path, tmp_path / "memory", {"sampler": resumed}).step == 5
    then = trained(DataLoader(Numbers(), batch_sampler=resumed, num_workers=workers), 5)
    assert indices(first + then) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_goes_on_with_the_state_of_its_workers(workers: int, tmp_path: Path) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> tuple[Sampler, Any]:
        sampler = Sampler(100, global_batch=4)
        return sampler, torchdata.StatefulDataLoader(Numbers(), batch_sampler=sampler, num_workers=workers)

    expected = trained(make()[1], 10)
    sampler, loader = make()
    first = trained(loader, 5)
    ranks.save(PosixStore(tmp_path), KEY, {"sampler": sampler, "loader": everstep.PerRank(loader)})
    sampler, loader = make()
    objects = {"sampler": sampler, "loader": everstep.PerRank(loader)}
    assert ranks.restore(tmp_path, tmp_path / "memory", objects).not_restored == ()
    assert first + trained(loader, 5) == expected


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("sampler", 0),
        ("stateful", 0),
        ("stateful-with-sampler", 2),
        ("stateful-with-generator", 0),
        ("stateful-with-both", 2),
        *only_in_long_sweeps(
            ("sampler", 2),
            ("stateful", 2),
            ("stateful-with-sampler", 0),
            ("stateful-with-generator", 2),
            ("stateful-with-both", 0),
        ),
    ],
)
def test_a_run_that_is_killed_within_an_epoch_goes_on_bit_for_bit(kind: str, workers: int, tmp_path: Path) -> None:
    if kind != "sampler":
        pytest.importorskip("torchdata.stateful_dataloader")
    straight = ranks.run(1, train, tmp_path / "straight", kind, workers)[0]
    ranks.run(1, train, tmp_path / "killed", kind, workers, True, dies=[0])
    resumed = ranks.run(1, train, tmp_path / "killed", kind, workers)[0]
    assert resumed == {step: each for step, each in straight.items() if step >= SAVED}
    assert len(straight) == STOP


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_with_another_global_batch_is_refused_and_its_sampler_goes_on_alone(
    workers: int, tmp_path: Path
) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    expected = flat(indices(trained(stateful(4, workers)[1], 11)))
    sampler, loader = stateful(4, workers)
    first = trained(loader, 5)
    ranks.save(PosixStore(tmp_path), KEY, {"sampler": sampler, "loader": everstep.PerRank(loader)})
    sampler, loader = stateful(8, workers)
    with pytest.raises(ValueError, match=r"saved with a global batch of 4, and has one of 8.*without the loader"):
        ranks.restore(tmp_path, tmp_path / "one", {"sampler": sampler, "loader": everstep.PerRank(loader)})
    sampler, loader = stateful(8, workers)
    ranks.restore(tmp_path, tmp_path / "two", {"sampler": sampler})
    assert flat(indices(first + trained(loader, 3))) == expected


@pytest.mark.parametrize("batch", [4, 8])
def test_at_another_number_of_ranks_the_sampler_goes_on_and_the_loader_begins_there(batch: int, tmp_path: Path) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    ranks.run(2, save_after_five_steps, tmp_path / "store")
    sampler, loader = stateful(batch)
    restored = ranks.restore(tmp_path / "store", tmp_path, {"sampler": sampler, "loader": everstep.PerRank(loader)})
    assert restored.not_restored == ("loader",)
    order = Sampler(100, global_batch=1)
    expected = [order.batch(step)[0] for step in range(20, 20 + 3 * batch)]
    assert flat(indices(trained(loader, 3))) == expected


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("is_missing", [False, True])
def test_a_session_lets_a_loader_that_is_not_restored_begin_at_its_sampler(
    is_missing: bool, workers: int, tmp_path: Path
) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    if is_missing:
        sampler, loader = stateful(4)
        trained(loader, 5)
        ranks.save(PosixStore(tmp_path / "store"), KEY, {"sampler": sampler})
    else:
        ranks.run(2, save_after_five_steps, tmp_path / "store")
    sampler, loader = stateful(4, workers)
    with session(tmp_path) as ckpt:
        assert ckpt.restore(strict=not is_missing, sampler=sampler, loader=everstep.PerRank(loader)).step == 5
        order = Sampler(100, global_batch=1)
        assert flat(indices(trained(loader, 3))) == [order.batch(step)[0] for step in range(20, 32)]


def stateful(batch: int, workers: int = 0) -> tuple[Sampler, Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    sampler = Sampler(100, global_batch=batch)
    return sampler, StatefulDataLoader(Numbers(), batch_sampler=sampler, num_workers=workers)


def save_after_five_steps(rank: int, folder: Path) -> None:
    sampler, loader = stateful(4)
    trained(loader, 5)
    ranks.save(PosixStore(folder), KEY, {"sampler": sampler, "loader": everstep.PerRank(loader)})


Seen = dict[int, tuple[str, list[Any]]]


def train(rank: int, folder: Path, kind: str, workers: int, is_killed: bool = False) -> Seen:
    """Train a model with dropout, and return each step's loss and batch, bit for bit."""
    torch.manual_seed(7)
    random.seed(7)
    model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    sampler = Sampler(SIZE, global_batch=BATCH, seed=3, stop=STOP)
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "sampler": sampler}
    loader: Any
    # In a rank of these tests a worker would be made by importing torch once more, for many seconds.
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    if kind == "sampler":
        loader = DataLoader(Augmented(SIZE), batch_sampler=sampler, **options)
    else:
        from torchdata.stateful_dataloader import StatefulDataLoader

        if kind in ("stateful", "stateful-with-generator"):
            options |= {"batch_size": BATCH, "shuffle": True}
        else:
            options["batch_sampler"] = sampler
        if kind in ("stateful-with-generator", "stateful-with-both"):
            options["generator"] = torch.Generator().manual_seed(11)
        loader = StatefulDataLoader(Augmented(SIZE), **options)
        objects["loader"] = everstep.PerRank(loader)
    seen: Seen = {}
    with everstep.checkpointer(
        folder / "store", every_steps=SAVED, policy="wait", memory=everstep.MemoryOptions(directory=folder / "memory")
    ) as ckpt:
        step = ckpt.restore(**objects).step
        while step < STOP:
            for batch in loader:
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen[step] = (loss.item().hex(), batch.tolist())
                step += 1
                ckpt.step(step)
                if is_killed and step == SAVED:
                    ckpt.wait()
                if is_killed and step == KILLED:
                    os.kill(os.getpid(), signal.SIGKILL)
    return seen


def test_gradients_that_are_added_up_over_parts_of_a_batch_go_on_bit_for_bit(tmp_path: Path) -> None:
    straight = add_up_gradients(tmp_path / "straight", STOP)
    killed = add_up_gradients(tmp_path / "killed", SAVED)
    assert killed | add_up_gradients(tmp_path / "killed", STOP) == straight
    assert len(straight) == STOP


def add_up_gradients(folder: Path, until: int) -> dict[int, list[str]]:
    """Train with two backward passes for each step, and return the losses of each step, bit for bit."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    sampler = Sampler(SIZE, global_batch=BATCH, seed=3, stop=until)
    losses: dict[int, list[str]] = {}
    with everstep.checkpointer(
        folder / "store", every_steps=SAVED, policy="wait", memory=everstep.MemoryOptions(directory=folder / "memory")
    ) as ckpt:
        step = ckpt.restore(model=model, optimizer=optimizer, sampler=sampler).step
        for batch in DataLoader(Numbers(SIZE), batch_sampler=sampler):
            losses[step] = []
            for part in batch[:, :1].float().split(BATCH // 2):
                loss = model(part).square().mean() / 2
                loss.backward()
                losses[step].append(loss.item().hex())
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            ckpt.step(step)
    return losses
