"""State of one rank is saved for all of them: that rank is there, or the state is refused before training begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import everstep  # noqa: E402
from everstep.checkpoint.errors import CheckpointError  # noqa: E402
from everstep.checkpoint.state.kinds import FromRank  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch


def go_on(rank: int, folder: Path, source: int, how: str, step: int) -> dict[str, Any]:
    """One run that restores (or tracks) what rank `source` is to stand for, and saves it as it then is."""
    torch.manual_seed(rank)
    average = torch.nn.BatchNorm1d(2)
    average.running_mean.fill_(float(rank))
    best = {"loss": float(rank)}
    objects: dict[str, Any] = {"average": FromRank(average, rank=source), "best": FromRank(best, rank=source)}
    if how == "only on some ranks" and rank == source:
        del objects["best"]
    if how == "another on each rank":
        objects["best"] = FromRank(best, rank=1 - rank)
    said = ""
    with everstep.checkpointer(
        folder / "store",
        memory=everstep.MemoryOptions(directory=folder / "memory"),
        times=everstep.TimeOptions(timeout=60.0, linger=5.0),
    ) as ckpt:
        try:
            if how == "track":
                ckpt.track(**objects)
            else:
                ckpt.restore(**objects)
        except CheckpointError as error:
            said = str(error)
        else:
            found = best["loss"], average.running_mean.tolist()
            best["loss"] += 10
            ckpt.save(step)
            return {"found": found, "said": said}
    return {"found": (best["loss"], average.running_mean.tolist()), "said": said}


def test_a_rank_that_is_not_there_is_refused_and_another_one_gets_what_it_had(tmp_path: Path) -> None:
    ranks.run(4, go_on, tmp_path, 3, "restore", 1)
    for how in ("restore", "track"):
        folder = tmp_path if how == "restore" else tmp_path / "new"
        for rank, each in enumerate(ranks.run(2, go_on, folder, 3, how, 2)):
            assert each["found"] == (float(rank), [rank, rank]), "nothing is touched"
            assert "average: FromRank(…, rank=3)" in each["said"]
            assert "this run has 2 ranks" in each["said"]
            assert "name a rank of 0 to 1" in each["said"]
    assert len(list(PosixStore(tmp_path / "store").list("manifests/"))) == 1, "nothing is saved"
    assert [each["found"] for each in ranks.run(2, go_on, tmp_path, 1, "restore", 2)] == [(13.0, [3, 3])] * 2
    loaded = everstep.load(tmp_path / "store")
    assert (loaded.step, loaded["best"], loaded["average"]["running_mean"].tolist()) == (2, {"loss": 23.0}, [3, 3])


@pytest.mark.parametrize("how", ["only on some ranks", "another on each rank"])
def test_a_rank_that_does_not_give_the_object_is_refused_on_all_ranks(how: str, tmp_path: Path) -> None:
    for each in ranks.run(2, go_on, tmp_path, 1, how, 1):
        assert "best: FromRank(…, rank=" in each["said"]
        assert "give the object on all ranks with the same rank" in each["said"]
    assert not list(PosixStore(tmp_path / "store").list("manifests/"))
