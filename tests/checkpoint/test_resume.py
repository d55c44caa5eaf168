"""A hundred steps are the same hundred steps when a SIGKILL comes in between."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.checkpoint import ranks
from tests.checkpoint.text_training import BATCH, train, train_and_die
from tests.long_sweeps import only_in_long_sweeps

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("kind", "tier"), [("fsdp", "store"), *only_in_long_sweeps(("ddp", "memory"))])
def test_a_killed_training_goes_on_bit_for_bit(kind: str, tier: str, tmp_path: Path) -> None:
    straight = ranks.run(2, train, tmp_path / "straight", tmp_path / "memory-straight", kind, 100)
    ranks.run(2, train_and_die, tmp_path / "store", tmp_path / "memory", kind, dies=[0, 1])
    memory = tmp_path / ("memory" if tier == "memory" else "memory-of-another-node")
    resumed = ranks.run(2, train, tmp_path / "store", memory, kind, 100)
    for one, other in zip(straight, resumed, strict=True):
        assert (other["start"].step, other["start"].tier) == (50, tier)
        for what in ("losses", "seen"):
            assert other[what] == {step: each for step, each in one[what].items() if step >= 50}
        assert (one["state"], one["draws"]) == (other["state"], other["draws"])


@pytest.mark.parametrize("world", [4, *only_in_long_sweeps(1)])
def test_another_number_of_ranks_keeps_the_sequence_of_samples(world: int, tmp_path: Path) -> None:
    straight = ranks.run(1, train, tmp_path / "straight", tmp_path / "memory-straight", "plain", 60)[0]["seen"]
    ranks.run(2, train_and_die, tmp_path / "store", tmp_path / "memory", "ddp", dies=[0, 1])
    kind = "ddp" if world > 1 else "plain"
    resumed = ranks.run(world, train, tmp_path / "store", tmp_path / "memory", kind, 60)
    assert all((rank["start"].step, rank["start"].not_restored) == (50, ("rng",)) for rank in resumed)
    for step in range(50, 60):
        together = [index for rank in resumed for index in rank["seen"][step]]
        assert len(together) == BATCH
        assert together == straight[step]
