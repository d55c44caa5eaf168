"""A StatefulDataLoader that shuffles by an epoch which the script sets goes on in the order of that epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torchdata = pytest.importorskip("torchdata.stateful_dataloader")

from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler  # noqa: E402

import everstep  # noqa: E402
from everstep.checkpoint.format.keys import Attempt, Key  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.sessions import session  # noqa: E402

pytestmark = pytest.mark.torch

SIZE, BATCH, EPOCHS = 24, 4, 3


class Epochs(BatchSampler):  # type: ignore[misc]  # torch is not where types are checked
    """A batch sampler that shuffles by its epoch itself."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.sampler.set_epoch(epoch)


class ShuffledByEpoch(IterableDataset):  # type: ignore[misc]
    """A dataset whose order follows from an epoch, and that has no state."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter(torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.epoch)))


class Settable(list):  # type: ignore[type-arg]
    """A dataset that takes an epoch, for what it does to its items."""

    def __init__(self, size: int) -> None:
        super().__init__(range(size))

    def set_epoch(self, epoch: int) -> None:
        pass


def in_batches(kind: type) -> Any:
    return kind(DistributedSampler(range(SIZE), num_replicas=2, rank=1, seed=5), BATCH, drop_last=False)


MAKERS: dict[str, Any] = {
    "of torch": lambda: {"sampler": DistributedSampler(range(SIZE), num_replicas=2, rank=1), "batch_size": BATCH},
    "of torchdata": lambda: {"sampler": StatefulDistributedSampler(range(SIZE), 2, 1), "batch_size": BATCH},
    "within batches": lambda: {"batch_sampler": in_batches(BatchSampler)},
    "of batches": lambda: {"batch_sampler": in_batches(Epochs)},
    "of the dataset": lambda: {"dataset": ShuffledByEpoch(), "batch_size": BATCH},
    "none": lambda: {"batch_size": BATCH},
}


def make(options: Any) -> Any:
    return torchdata.StatefulDataLoader(**{"dataset": range(SIZE), **options()})


class StatefulRandomSampler(RandomSampler):  # type: ignore[misc,unused-ignore]
    """A sampler of torch's kind that keeps its place."""

    def state_dict(self) -> dict[str, int]:
        return {"place": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


RANDOM: dict[str, Any] = {
    "RandomSampler": lambda: {"sampler": RandomSampler(range(SIZE))},
    "WeightedRandomSampler": lambda: {"sampler": WeightedRandomSampler([1.0] * SIZE, SIZE)},
    "SubsetRandomSampler": lambda: {"batch_sampler": BatchSampler(SubsetRandomSampler(range(SIZE)), BATCH, False)},
}


@pytest.mark.parametrize("kind", RANDOM)
def test_a_sampler_that_keeps_nothing_of_its_order_is_named(kind: str, tmp_path: Path, caplog: Any) -> None:
    loader = make(RANDOM[kind])
    with session(tmp_path) as ckpt:
        ckpt.restore(train=everstep.PerRank(loader))
    assert [each.args for each in caplog.records] == [("train", kind)]


UNWARNED = [*MAKERS.values(), lambda: {"shuffle": True}, lambda: {"sampler": StatefulRandomSampler(range(SIZE))}]


@pytest.mark.parametrize("maker", UNWARNED)
def test_a_loader_that_resumes_is_not_warned_of(maker: Any, tmp_path: Path, caplog: Any) -> None:
    with session(tmp_path) as ckpt:
        ckpt.restore(train=everstep.PerRank(make(maker)))
    assert not caplog.records


def train(loader: Any, epoch: int) -> Any:
    """Yield the epoch and the batch of each step, from the beginning of an epoch or from where a loader has begun."""
    for each in range(epoch, EPOCHS):
        parts: list[Any] = [loader.dataset, loader.sampler, loader.batch_sampler]
        for part in (*parts, getattr(loader.batch_sampler, "sampler", None)):
            if hasattr(part, "set_epoch"):
                part.set_epoch(each)
        yield from ((each, batch.tolist()) for batch in loader)


@pytest.mark.parametrize("trained", range(1, 9))
@pytest.mark.parametrize("maker", MAKERS)
def test_a_loader_goes_on_in_the_order_of_its_epoch(maker: str, trained: int, tmp_path: Path) -> None:
    expected = list(train(make(MAKERS[maker]), 0))
    loader = make(MAKERS[maker])
    steps = train(loader, 0)
    seen = [next(steps) for _ in range(trained)]
    ranks.save(PosixStore(tmp_path), Key(Attempt(0, 1), trained), {"loader": everstep.PerRank(loader)})
    resumed = make(MAKERS[maker])
    ranks.restore(tmp_path, tmp_path / "memory", {"loader": everstep.PerRank(resumed)})
    assert seen + list(train(resumed, seen[-1][0])) == expected


@pytest.mark.parametrize(("is_at_end", "restarts"), [(False, 2), (True, 1), (True, 2)])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_loader_goes_on_where_it_was_also_when_it_is_saved_before_its_next_batch(
    maker: str, is_at_end: bool, restarts: int, tmp_path: Path
) -> None:
    loader = make(MAKERS[maker])
    expected = list(train(make(MAKERS[maker]), 0))
    batches = iter(loader)
    trained = len(list(batches)) if is_at_end else len([next(batches), next(batches)])
    for restart in range(restarts):
        folder = tmp_path / str(restart)
        ranks.save(PosixStore(folder), Key(Attempt(0, 1), trained), {"loader": everstep.PerRank(loader)})
        loader = make(MAKERS[maker])
        ranks.restore(folder, folder / "memory", {"loader": everstep.PerRank(loader)})
    assert list(train(loader, int(is_at_end))) == expected[trained:]


def test_a_restore_of_a_loader_that_had_not_begun_draws_no_order(tmp_path: Path) -> None:
    loader, resumed = (make(lambda: {"dataset": Settable(SIZE), "shuffle": True}) for _ in range(2))
    before = resumed.sampler.generator.get_state()
    ranks.save(PosixStore(tmp_path), Key(Attempt(0, 1), 1), {"loader": everstep.PerRank(loader)})
    ranks.restore(tmp_path, tmp_path / "memory", {"loader": everstep.PerRank(resumed)})
    assert torch.equal(resumed.sampler.generator.get_state(), before)


@pytest.mark.parametrize("is_saved_first", [False, True])
@pytest.mark.parametrize("maker", ["of torch", "of the dataset"])
def test_a_loader_begins_in_the_epoch_that_is_set_after_it_was_given(
    maker: str, is_saved_first: bool, tmp_path: Path
) -> None:
    expected = list(train(make(MAKERS[maker]), 1))
    loader, resumed = make(MAKERS[maker]), make(MAKERS[maker])
    with session(tmp_path) as ckpt:
        ckpt.restore(train=everstep.PerRank(loader))
        if is_saved_first:
            ckpt.save(0)
        steps = train(loader, 1)
        seen = [next(steps) for _ in range(2)]
        ckpt.save(2)
    with session(tmp_path) as ckpt:
        assert ckpt.restore(train=everstep.PerRank(resumed)).step == 2
    assert seen + list(train(resumed, 1)) == expected


def test_a_loader_that_was_saved_before_its_first_batch_shuffles_as_it_would_have(tmp_path: Path) -> None:
    loader, resumed = (make(lambda: {"shuffle": True, "batch_size": BATCH}) for _ in range(2))
    with session(tmp_path) as ckpt:
        ckpt.restore(train=everstep.PerRank(loader))
        ckpt.save(0)
    with session(tmp_path) as ckpt:
        assert ckpt.restore(train=everstep.PerRank(resumed)).key is not None
    assert [each.tolist() for each in resumed] == [each.tolist() for each in loader]


def test_a_position_that_the_script_gave_a_loader_is_that_of_the_loader(tmp_path: Path) -> None:
    expected = list(train(make(MAKERS["of torch"]), 1))
    loader, given = make(MAKERS["of torch"]), make(MAKERS["of torch"])
    steps = train(loader, 1)
    seen = [next(steps) for _ in range(2)]
    weights = {"weights": torch.zeros(2)}
    ranks.save(PosixStore(tmp_path / "store"), Key(Attempt(0, 1), 2), {"state": weights})
    given.load_state_dict(loader.state_dict())
    with session(tmp_path) as ckpt:
        restored = ckpt.restore(strict=False, state=weights, train=everstep.PerRank(given))
        assert restored.missing == ("rank.0.train",)
        assert seen + list(train(given, 1)) == expected
