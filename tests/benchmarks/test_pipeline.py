"""The measuring tools of the pipeline benchmarks."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from benchmarks import measure
from benchmarks.pipeline import memory
from benchmarks.pipeline.__main__ import KINDS
from benchmarks.pipeline.chain import CHUNKS, ChainWork, engine
from tests.pipeline.inprocess import Fabric, InProcess

pytestmark = pytest.mark.torch

SMALL = ChainWork("1f1b", ranks=4, microbatches=8, width=8, rows=2, layers=4)


@pytest.mark.parametrize("precision", memory.PRECISIONS)
@pytest.mark.parametrize("name", CHUNKS)
def test_every_rank_keeps_as_many_bytes_as_the_schedule_says(name: str, precision: str) -> None:
    row = memory.row(replace(SMALL, schedule=name, precision=precision))
    found = row.samples["ranks"]
    assert row.name.endswith("-bf16") == (precision == "bf16")
    if name.startswith("zb"):  # what only the input gradient needs goes with it, before the weight gradient
        assert 0.7 < min(found) <= max(found) == 1.0
    else:
        assert found == [1.0] * SMALL.ranks


def test_every_row_of_memory_has_a_usual_range() -> None:
    names = {f"memory-{name}" for name in KINDS["memory"]}
    assert names == {name for name in measure.usual() if name.startswith("memory-")}


def test_a_schedule_that_keeps_more_is_seen() -> None:
    """The bytes of GPipe, against the bound of 1F1B."""
    work = replace(SMALL, schedule="simple")
    batch = work.batch()

    def rank(transport: InProcess) -> int:
        part = engine(work, transport, {transport.rank: work.module(transport.rank)})
        kept = memory.Kept([*part.parameters.own, batch])
        with kept.counting():
            part.step({"x": batch}, batch)
        return kept.peak

    last = Fabric(work.ranks).run(rank)[-1]
    assert last > 4 * memory.row(SMALL).samples["floor"][0] / SMALL.ranks
