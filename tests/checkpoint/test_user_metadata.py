"""Metadata that users note beside a checkpoint: it is small, it comes back, and the best by it is found and kept."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import everstep  # noqa: E402
from everstep.checkpoint.catalog.best import KeepBest  # noqa: E402
from everstep.checkpoint.catalog.verification import VerifiedCheckpoints, verify_and_mark  # noqa: E402
from everstep.checkpoint.errors import CheckpointError, UnknownFormat  # noqa: E402
from everstep.checkpoint.retention.pruning import prune_by_hand  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.builders import newer  # noqa: E402
from tests.checkpoint.sessions import Model, session, steps_in  # noqa: E402

pytestmark = pytest.mark.torch


def save(folder: Path, losses: dict[int, Any], **options: Any) -> None:
    with session(folder, **{"keep_last": 9, **options}) as ckpt:
        model = Model()
        ckpt.restore(model=model)
        for step, loss in losses.items():
            model.at = step
            ckpt.save(step, metadata={} if loss is None else {"loss": loss})
            ckpt.wait()


def test_metadata_comes_back_wherever_a_checkpoint_is_looked_at(tmp_path: Path) -> None:
    noted = {"loss": torch.tensor(0.5), "tokens": 12, "of": {"run": "a", "tags": ["x", None, True]}}
    with session(tmp_path) as ckpt:
        model = Model()
        ckpt.metadata = {"commit": "c0ffee", "tokens": 1}
        ckpt.restore(model=model)
        ckpt.save(1, metadata=noted)
        ckpt.wait()
        ckpt.metadata = lambda step: {"doubled": 2 * step}
        for step in range(2, 12):
            model.at = step
            ckpt.step(step)
    expected = {"commit": "c0ffee", "loss": 0.5, "tokens": 12, "of": noted["of"]}
    second, first = everstep.list_checkpoints(tmp_path / "store")
    assert first.metadata == everstep.load(tmp_path / "store", step=1).metadata == expected
    assert second.metadata == {"doubled": 2 * second.step}
    until = time.monotonic() + 120
    while not everstep.list_checkpoints(tmp_path / "store")[0].verified:  # it is read back when it is committed
        assert time.monotonic() < until
        time.sleep(0.05)
    with session(tmp_path) as ckpt:
        assert ckpt.restore(step=1, model=Model()).metadata == expected


RING: dict[str, Any] = {}
RING["x"] = RING


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"a": 1, "x": object()}, "metadata 'x' is a object"),
        ({"a": 1, "x": "y" * 70000}, "most of them in 'x'"),
        ([1], "metadata is a list"),
        ({"x": {"y": [1, torch.ones(2)]}}, r"metadata 'x\.y\[1\]' is a Tensor"),
        (RING, "metadata 'x' is nested more than 100 deep, or holds itself"),
    ],
)
def test_metadata_that_cannot_be_kept_is_refused_where_it_is_given(bad: Any, named: str, tmp_path: Path) -> None:
    with session(tmp_path) as ckpt:
        ckpt.restore(model=Model())
        with pytest.raises(CheckpointError, match=named):
            ckpt.save(1, metadata=bad)


def test_metadata_for_a_step_that_is_saved_already_is_told_to_be_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """best() would find nothing, long after the training."""
    with session(tmp_path, every_steps=1, policy="wait") as ckpt:
        ckpt.track(model=Model())
        ckpt.save(1, metadata={"loss": 1.0})
        ckpt.step(1)
        assert "saved already" not in caplog.text
        ckpt.step(2)
        assert not ckpt.save(2, metadata={"loss": 2.0}).saves
    assert "step 2 is saved already, without this metadata" in caplog.text
    assert [each.metadata for each in everstep.list_checkpoints(tmp_path / "store")] == [{}, {"loss": 1.0}]


def test_the_metadata_of_ranks_that_measure_differently_is_that_of_rank_0(tmp_path: Path) -> None:
    ranks.run(2, note_by_rank, tmp_path)
    assert [each.metadata for each in everstep.list_checkpoints(tmp_path / "store")] == [{"loss": 0.0}]


def note_by_rank(rank: int, folder: Path) -> None:
    with session(folder) as ckpt:
        ckpt.restore(model={"weight": torch.ones(3)})
        ckpt.save(1, metadata={"loss": float(rank)})


def test_the_best_is_found_and_restored(tmp_path: Path) -> None:
    save(tmp_path, {1: 0.5, 2: float("nan"), 3: 0.25, 4: None, 5: 0.75, 6: 0.25})
    store = tmp_path / "store"
    assert everstep.best(store, "loss").step == 6, "of equals the newest"
    assert everstep.best(store, "loss", "max").step == 5
    model = Model()
    with session(tmp_path) as ckpt:
        assert ckpt.restore(step=everstep.best(store, "loss", "max"), model=model).step == 5
    assert model.at == 5
    with pytest.raises(CheckpointError, match="a number called 'accuracy' in its metadata; there are loss"):
        everstep.best(store, "accuracy")
    with pytest.raises(ValueError, match="best_mode is 'min' or 'max', not 'least'"):
        everstep.best(store, "loss", "least")  # type: ignore[arg-type]


def test_a_metric_that_is_nan_everywhere_is_told_as_that(tmp_path: Path) -> None:
    save(tmp_path, {1: float("nan"), 2: float("nan")})
    with pytest.raises(CheckpointError, match="there are loss, and loss is no number or NaN: give it"):
        everstep.best(tmp_path / "store", "loss")


def test_what_another_version_wrote_is_listed_and_nothing_else_is_called_the_best(tmp_path: Path) -> None:
    save(tmp_path, {1: 0.5, 2: 0.25})
    store = PosixStore(tmp_path / "store")
    newest, older = everstep.list_checkpoints(store)
    store.replace(newest.key.manifest_name, newer(store.read(newest.key.manifest_name)))
    unknown, known = everstep.list_checkpoints(store)
    assert "has format 77" in unknown.unknown
    assert (unknown.key, known) == (newest.key, older)
    with pytest.raises(UnknownFormat, match="has format 77"):
        everstep.best(store, "loss")
    store.replace(newest.key.manifest_name, b"{")
    assert "is no manifest" in everstep.list_checkpoints(store)[0].damaged
    assert everstep.best(store, "loss").step == 1


def test_the_best_stay_beside_the_newest(tmp_path: Path) -> None:
    losses = {1: 0.5, 2: 0.125, 3: float("nan"), 4: 0.25, 5: None, 6: 0.75, 7: 0.625}
    save(tmp_path, losses, keep_last=2, keep_best=2)
    settled(tmp_path, [2, 4, 6, 7])
    save(tmp_path, {8: 0.0625, 9: 0.5}, keep_last=2, keep_best=1, best_mode="max")
    settled(tmp_path, [6, 8, 9])


@pytest.mark.parametrize("noted", [{"val_loss": 0.5}, {"loss": "0.5"}, {"loss": True}, {}])
def test_a_run_that_keeps_the_best_by_what_no_checkpoint_has_is_warned_once(
    noted: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its best would be removed without a word."""
    with session(tmp_path, keep_last=1, keep_best=2) as ckpt:
        ckpt.track(model=Model())
        for step in (1, 2, 3):
            ckpt.save(step, metadata=noted)
    told = [each for each in caplog.messages if "keep_best keeps none" in each]
    assert len(told) == 1
    assert "none of the 2 checkpoints of this session has a number called 'loss'" in told[0]


def test_a_run_that_has_measured_once_is_not_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, {1: torch.tensor(0.5), 2: None, 3: None, 4: None}, keep_last=1, keep_best=1)
    save(tmp_path, {5: None, 6: None}, keep_last=1)
    assert "keep_best" not in caplog.text


@pytest.mark.parametrize(
    ("steps", "told"), [([3, 8, 12], "none is saved at step 5: the saves are at 3 and 8"), ([3, 5, 7, 10, 11], "")]
)
def test_a_run_whose_saves_miss_the_steps_that_are_to_stay_is_warned_once(
    steps: list[int], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With every="10m" a save meets none of these steps but by chance."""
    with session(tmp_path, keep_last=1, keep_every=5) as ckpt:
        ckpt.track(model=Model())
        for step in steps:
            ckpt.save(step)
    found = [each for each in caplog.messages if "keep_every" in each]
    assert len(found) == bool(told)
    assert told in "".join(found)


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 4)])
def test_a_person_who_prunes_may_keep_the_best_too(mode: Any, best: int, tmp_path: Path) -> None:
    save(tmp_path, {1: 0.5, 2: 0.125, 3: 0.25, 4: 0.75, 5: None, 6: 0.625}, keep_last=9)
    store = PosixStore(tmp_path / "store")
    for each in everstep.list_checkpoints(store):
        verify_and_mark(store, each.key)  # the best that nobody has verified takes no other's place
    options: dict[str, Any] = {"keep_last": 1, "keep_best": KeepBest(1, "loss", mode)}
    planned = prune_by_hand(VerifiedCheckpoints(store), **options, dry_run=True).planned
    assert [key.step for key in planned] == [step for step in range(1, 6) if step != best]
    done = prune_by_hand(VerifiedCheckpoints(store), **options).done
    assert done.removed == planned
    assert steps_in(tmp_path) == [best, 6]


def settled(folder: Path, expected: list[int]) -> None:
    """Retention follows a save; the last one's is over soon."""
    until = time.monotonic() + 120
    while steps_in(folder) != expected:
        assert time.monotonic() < until, steps_in(folder)
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("options", "why"), [({"keep_best": 0}, "keep_best is"), ({"best_mode": "most"}, "best_mode is")]
)
def test_what_cannot_be_kept_is_said_at_the_start(options: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=why):
        session(tmp_path, **{"keep_best": 1, **options})
