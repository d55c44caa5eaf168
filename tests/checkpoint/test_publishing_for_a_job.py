"""Adapters publish into the store of their own job: another job's is left alone, on all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from everstep.checkpoint.adapters.published import Published  # noqa: E402
from everstep.checkpoint.catalog.candidates import list_candidates, verify_checkpoint  # noqa: E402
from everstep.checkpoint.errors import CheckpointError, StoreError  # noqa: E402
from everstep.checkpoint.publish import attempts  # noqa: E402
from everstep.checkpoint.publish.attempts import OWNER, StoreTaken, Superseded  # noqa: E402
from everstep.checkpoint.save.outcomes import SaveFailed  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch


def name_job(monkeypatch: pytest.MonkeyPatch, job: str, attempt: str) -> None:
    for name, value in (("JOB_NAMESPACE", "team"), ("JOB", job), ("ATTEMPT", attempt)):
        monkeypatch.setenv(f"EVERSTEP_{name}", value)


def save(published: Published, folder: Path, step: int) -> None:
    path = folder / "out" / f"checkpoint-{step}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "model").write_text(f"{step}")
    published.publish(path, step)
    published.finish()


def saved_steps(folder: Path) -> list[int]:
    return [key.step for key in list_candidates(PosixStore(folder / "store"))]


def test_another_job_is_refused_at_its_first_save_at_each_of_its_starts_and_the_first_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_job(monkeypatch, "first", "1795712347.1")
    first = Published(tmp_path / "store", keep_last=1)
    save(first, tmp_path, 100)
    for generation in (1, 2):
        name_job(monkeypatch, "second", f"1795719999.{generation}")
        second = Published(tmp_path / "store", keep_last=1)
        with pytest.raises(StoreTaken, match="is the store of job team/first, and this is job team/second"):
            save(second, tmp_path, 7)
        second.finish()
    name_job(monkeypatch, "first", "1795712347.1")
    save(first, tmp_path, 110)
    assert saved_steps(tmp_path) == [110]


def test_a_job_that_is_applied_anew_goes_on_and_the_former_one_saves_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_job(monkeypatch, "first", "1795712347.9")
    save(Published(tmp_path / "store"), tmp_path, 100)
    name_job(monkeypatch, "first", "1795719999.1")
    anew = Published(tmp_path / "store")
    assert anew.newest(lambda key: tmp_path / f"back-{key.step}") == tmp_path / "back-100"
    save(anew, tmp_path, 101)
    name_job(monkeypatch, "first", "1795712347.10")
    with pytest.raises(Superseded, match="belongs to attempt 1795719999"):
        save(Published(tmp_path / "store"), tmp_path, 110)
    assert saved_steps(tmp_path) == [101, 100]


class Away(PosixStore):
    """A store that does not say whose it is until it has been asked so often."""

    left = 1

    def read(self, name: str) -> bytes:
        if name == OWNER and self.left:
            self.left -= 1
            raise StoreError("503", name, may_pass=True)
        return super().read(name)


def test_nothing_is_stored_before_it_is_known_whose_the_store_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts.claim_for_job(PosixStore(tmp_path / "store"), "team/first")
    name_job(monkeypatch, "second", "1795719999.1")
    published = Published(tmp_path / "store")
    published.store = Away(tmp_path / "store")
    with pytest.raises(SaveFailed, match="is the store of job team/first"):
        save(published, tmp_path, 7)
    assert saved_steps(tmp_path) == []


def test_a_store_that_is_unavailable_at_the_first_save_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_job(monkeypatch, "first", "1795719999.1")
    published = Published(tmp_path / "store")
    published.store = Away(tmp_path / "store")
    save(published, tmp_path, 7)
    assert saved_steps(tmp_path) == [7]
    assert PosixStore(tmp_path / "store").read(OWNER) == b"team/first"


def save_on_ranks(rank: int, folder: Path, job: str, attempt: str) -> str:
    os.environ.update(EVERSTEP_JOB_NAMESPACE="team", EVERSTEP_JOB=job, EVERSTEP_ATTEMPT=attempt)
    from types import SimpleNamespace

    from everstep.checkpoint.adapters.huggingface import EverstepCallback

    out = folder / "out"
    (out / "checkpoint-4").mkdir(parents=True, exist_ok=True)
    (out / "checkpoint-4" / "model").write_text(job)
    state: Any = SimpleNamespace(global_step=4, is_world_process_zero=rank == 0, best_model_checkpoint=None)
    callback = EverstepCallback(folder / "store", out)
    try:
        callback.on_save(None, state, None)
    except CheckpointError as error:
        return str(error)
    callback.on_train_end(None, state, None)
    return ""


def test_all_ranks_hear_whose_the_store_is(tmp_path: Path) -> None:
    assert ranks.run(2, save_on_ranks, tmp_path, "first", "1795712347.1") == ["", ""]
    said = ranks.run(2, save_on_ranks, tmp_path, "second", "1795719999.1")
    assert all("is the store of job team/first, and this is job team/second" in why for why in said), said
    store = PosixStore(tmp_path / "store")
    (key,) = list_candidates(store)
    verify_checkpoint(store, key)
    assert (key.attempt.epoch, key.step) == (1795712347, 4)
