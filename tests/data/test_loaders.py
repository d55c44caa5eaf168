"""With loaders that read ahead, what is trained next after a restart is what would have been trained next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset  # noqa: E402

from everstep.checkpoint.keys import Attempt, Key  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from everstep.data import Sampler  # noqa: E402
from everstep.data.loaders import loader, stateful  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

KEY = Key(Attempt(0, 1), 5)


class Numbers(Dataset):  # type: ignore[misc]  # torch is not where types are checked
    """Its items tell how often this copy of the dataset was asked, as one that buffers or augments would."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return torch.tensor([index, self.asked])

    def state_dict(self) -> dict[str, int]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.asked = state["asked"]


def test_making_batches_draws_no_numbers_that_a_model_would_draw() -> None:
    """Else dropout after a restart would differ: a plain DataLoader draws a number when it begins."""
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    trained(loader(Numbers(), Sampler(100, global_batch=4)), 2)
    assert torch.equal(torch.rand(1), expected)


def trained(batched: Any, steps: int) -> list[list[list[int]]]:
    batches = iter(batched)
    return [next(batches).tolist() for _ in range(steps)]


def indices(batches: list[list[list[int]]]) -> list[list[int]]:
    return [[index for index, _ in batch] for batch in batches]


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
    ranks.save(PosixStore(tmp_path), KEY, {"sampler": sampler, "loader": stateful(loader)})
    sampler, loader = make()
    restored = ranks.restore(tmp_path, tmp_path / "memory", {"sampler": sampler, "loader": stateful(loader)})
    assert restored.left == ()
    assert first + trained(loader, 5) == expected
