"""A stateful loader over an iterable dataset goes on where it was, or its save is refused where none can tell."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")

from torch.utils.data import IterableDataset, get_worker_info  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.errors import CheckpointError  # noqa: E402
from everstep.checkpoint.format.keys import Attempt, Key  # noqa: E402
from everstep.checkpoint.state.kinds import StateMismatch  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.sessions import session  # noqa: E402
from tests.long_sweeps import only_in_long_sweeps  # noqa: E402

pytestmark = pytest.mark.torch

SIZE, PER_EPOCH, EPOCHS = 16, 8, 3


class InGenerator(IterableDataset):  # type: ignore[misc]  # torch is not where types are checked
    """Goes back to its first item when a generator begins, unless it was restored: as torchdata's examples do."""

    def __init__(self, *, counts_epochs: bool = False) -> None:
        self.at, self.epoch = 0, 0
        self.is_restored = False
        self.counts_epochs = counts_epochs

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        if not self.is_restored:
            self.at = 0
        self.is_restored = False
        self.epoch += self.counts_epochs
        while self.at < SIZE:
            self.at += 1
            if (self.at - 1) % workers == first:
                yield torch.tensor(self.at - 1)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch, self.is_restored = state["at"], state["epoch"], True


class AtItsEnd(InGenerator):
    """Goes back to its first item when an epoch ends."""

    def __iter__(self) -> Iterator[Any]:
        self.is_restored = True
        yield from super().__iter__()
        self.at = 0
        self.epoch += 1


def make(kind: type[InGenerator], workers: int, is_persistent: bool) -> Any:
    return stateful_dataloader.StatefulDataLoader(
        kind(), batch_size=2, num_workers=workers, persistent_workers=is_persistent
    )


def train(loader: Any, batches: int) -> list[list[int]]:
    """Return this many batches of one epoch after the other; at the end of an epoch its end has been seen."""
    found: list[list[int]] = []
    while len(found) < batches:
        for batch in loader:
            found.append(batch.tolist())
            if len(found) == batches and batches % PER_EPOCH:
                break
    return found


def save_and_resume(loader: Any, resumed: Any, step: int, folder: Path) -> None:
    key = Key(Attempt(0, 1), step)
    ranks.save(PosixStore(folder), key, {"loader": everstep.PerRank(loader)})
    ranks.restore(folder, folder / "memory", {"loader": everstep.PerRank(resumed)})


@pytest.mark.parametrize("step", [7, 8, 15, *only_in_long_sweeps(1, 10, 16)])
@pytest.mark.parametrize(("workers", "is_persistent"), [(0, False), (1, True), (2, False), (2, True)])
@pytest.mark.parametrize("kind", [InGenerator, AtItsEnd])
def test_no_batch_is_lost_or_repeated(
    kind: type[InGenerator], workers: int, is_persistent: bool, step: int, tmp_path: Path
) -> None:
    one_epoch = train(make(kind, workers, is_persistent), PER_EPOCH)
    loader, resumed = (make(kind, workers, is_persistent) for _ in range(2))
    found = train(loader, step)
    save_and_resume(loader, resumed, step, tmp_path)
    for _ in range(EPOCHS - step // PER_EPOCH):
        found += [batch.tolist() for batch in resumed]
    assert found == one_epoch * EPOCHS


@pytest.mark.parametrize("kind", [InGenerator, AtItsEnd])
def test_a_save_is_refused_before_each_persistent_worker_has_given_a_batch_of_another_epoch(
    kind: type[InGenerator], tmp_path: Path
) -> None:
    loader = make(kind, 2, True)
    train(loader, PER_EPOCH + 1)
    with pytest.raises(CheckpointError, match=r"loader: a worker .*Save when 2 batches or more .*persistent_workers"):
        ranks.save(PosixStore(tmp_path), Key(Attempt(0, 1), 9), {"loader": everstep.PerRank(loader)})


def test_a_dataset_that_counts_an_epoch_twice_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def counting() -> Any:
        return stateful_dataloader.StatefulDataLoader(InGenerator(counts_epochs=True), batch_size=2)

    loader, resumed = counting(), counting()
    expected = train(loader, PER_EPOCH)
    with caplog.at_level(logging.WARNING, "everstep.checkpoint"):
        save_and_resume(loader, resumed, PER_EPOCH, tmp_path)
    assert "loader: its dataset was saved at the end of an epoch" in caplog.text
    assert train(resumed, PER_EPOCH) == expected


class Stateless(IterableDataset):  # type: ignore[misc]
    """Has no state: its loader skips what was trained."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        return map(torch.tensor, range(worker.id, SIZE, worker.num_workers) if worker else range(SIZE))


@pytest.mark.parametrize(("workers", "every"), [(0, 1), (2, 1), (2, 3)])
def test_a_dataset_without_a_state_goes_on_as_often_as_its_run_is_killed(
    workers: int, every: int, tmp_path: Path
) -> None:
    def make_stateless() -> Any:
        return stateful_dataloader.StatefulDataLoader(
            Stateless(), batch_size=2, num_workers=workers, snapshot_every_n_steps=every
        )

    expected = train(make_stateless(), PER_EPOCH) * 2
    loader, found = make_stateless(), []
    for kill, batches in enumerate((3, 0, 2, 3, 0, 1)):
        if batches:
            steps = iter(loader)
            found += [next(steps).tolist() for _ in range(batches)]
            assert len(found) != PER_EPOCH or next(steps, None) is None  # the end of the epoch is seen
        loader, killed = make_stateless(), loader
        save_and_resume(killed, loader, kill, tmp_path / str(kill))
    assert found + [batch.tolist() for batch in loader] == expected


def make_nodes(workers: int, seed: int | None = None) -> Any:
    """A loader of torchdata's nodes, which shuffles if it has a seed."""
    nodes = pytest.importorskip("torchdata.nodes")
    node = nodes.IterableWrapper(range(SIZE))
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        node = nodes.SamplerWrapper(stateful_dataloader.sampler.RandomSampler(range(SIZE), generator=generator))
    node = nodes.ParallelMapper(node, lambda each: each, num_workers=workers) if workers else node
    return nodes.Loader(nodes.Mapper(nodes.Batcher(node, 2), torch.tensor))


@pytest.mark.parametrize(("step", "seed"), [(0, 3), (1, 3), (7, 3), (1, None), (7, None), (8, None), (10, None)])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_nodes_goes_on_where_it_was(workers: int, step: int, seed: int | None, tmp_path: Path) -> None:
    loader, resumed = make_nodes(workers, seed), make_nodes(workers, seed)
    expected = train(make_nodes(workers, seed), PER_EPOCH * 2)
    with session(tmp_path) as ckpt:
        ckpt.restore(loader=everstep.PerRank(loader))
        found = train(loader, step) if step else []
        ckpt.save(step)
    with session(tmp_path) as ckpt:
        assert ckpt.restore(loader=everstep.PerRank(resumed)).step == step
        ckpt.save(step + 1)  # changes nothing
        for _ in range(2 - step // PER_EPOCH):
            found += [batch.tolist() for batch in resumed]
    assert found == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_nodes_that_began_anew_is_saved_where_it_is(workers: int, tmp_path: Path) -> None:
    loaders = [make_nodes(workers) for _ in range(3)]
    expected = train(make_nodes(workers), PER_EPOCH)
    train(loaders[0], PER_EPOCH)
    save_and_resume(loaders[0], loaders[1], PER_EPOCH, tmp_path)
    found = train(loaders[1], 3)
    save_and_resume(loaders[1], loaders[2], PER_EPOCH + 3, tmp_path)
    assert found + [batch.tolist() for batch in loaders[2]] == expected


def test_a_loader_of_nodes_that_has_begun_begins_anew_where_it_had_not_when_saved(tmp_path: Path) -> None:
    loader, resumed = make_nodes(0), make_nodes(0)
    train(resumed, 3)
    save_and_resume(loader, resumed, 0, tmp_path)
    assert train(resumed, 2) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(("workers", "others"), [(2, 1), (2, 0), (0, 2)])
def test_another_number_of_workers_is_told_and_nothing_is_touched(workers: int, others: int, tmp_path: Path) -> None:
    loader, resumed = make(InGenerator, workers, False), make(InGenerator, others, False)
    train(loader, 3)
    weights = torch.ones(2)
    ranks.save(PosixStore(tmp_path), Key(Attempt(0, 1), 3), {"loader": everstep.PerRank(loader), "weights": weights})
    told = rf"loader was saved with {workers} workers, and has {others} here.*num_workers={workers}"
    objects = {"loader": everstep.PerRank(resumed), "weights": torch.zeros_like(weights)}
    with pytest.raises(StateMismatch, match=told):
        ranks.restore(tmp_path, tmp_path / "memory", objects)
    assert objects["weights"].tolist() == [0, 0]


@pytest.mark.parametrize("is_stateful", [True, False])
def test_a_loader_that_accelerate_has_prepared_is_refused_when_the_run_begins(
    tmp_path: Path, is_stateful: bool
) -> None:
    accelerate = pytest.importorskip("accelerate")
    options = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=is_stateful)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=options)
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(8), batch_size=2, shuffle=True))
    with session(tmp_path) as ckpt:
        for begin in (ckpt.restore, ckpt.track):
            with pytest.raises(CheckpointError, match=r"loader is a DataLoaderShard.*everstep\.data\.Sampler"):
                begin(loader=everstep.PerRank(loader))
