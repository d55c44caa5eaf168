"""Ranks that save different steps, or not equally often, or leave: nobody hangs, and all are told what is wrong."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch.distributed as dist

from everstep.checkpoint.errors import AgreementLost
from everstep.checkpoint.session.checkpointer import Checkpointer, SaveFailed
from everstep.coordination.kv_store import LocalKVStore
from tests.checkpoint.ranks import run
from tests.checkpoint.sessions import Model, session, steps_in, train

pytestmark = pytest.mark.torch

PATIENT = {"timeout": 300.0, "commit_timeout": 300.0}  # whoever waits so long here fails its test


def list_failures(ckpt: Checkpointer) -> list[str]:
    """Collect the reasons of all `failed` events to come."""
    failed: list[str] = []
    ckpt.on("failed", lambda event: failed.append(f"{event.key and event.key.step}: {event.why.partition(': ')[0]}"))
    return failed


def saves_other_steps(rank: int, folder: Path) -> tuple[list[bool], list[str]]:
    """The first save, by which all plan, and a later one; each time the next one is of a step that rank 1 was at."""
    with session(folder, every=1000, keep_last=10, **PATIENT) as ckpt:
        failed = list_failures(ckpt)
        ckpt.track(model=Model())
        saves = [ckpt.save(step).saves for step in (5 + rank, 6, 20 + rank, 21)]
    return saves, failed


def test_a_save_to_which_ranks_come_with_different_steps_is_void_at_once_and_the_next_is_taken(folder: Path) -> None:
    said = [f"{step}: rank 1 is at step {step + 1}, rank 0 at step {step}" for step in (5, 20)]
    assert run(2, saves_other_steps, folder) == [([False, True, False, True], said)] * 2
    assert steps_in(folder) == [6, 21]


def steps_are_counted_otherwise(rank: int, folder: Path) -> list[str]:
    """Rank 1 is one step ahead of rank 0 for a while."""
    model = Model()
    with session(folder, every_steps=2, policy="wait", keep_last=10, **PATIENT) as ckpt:
        failed = list_failures(ckpt)
        ckpt.track(model=model)
        for step in (1, 2, 3):
            ckpt.step(step + rank)
        model.at = 4
        train(ckpt, model, 8)
    return failed


def test_steps_that_ranks_count_differently_void_the_saves_that_are_due_and_no_later_ones(folder: Path) -> None:
    first, second = run(2, steps_are_counted_otherwise, folder)
    assert first == second
    assert first[0] == "2: rank 1 is at step 3, rank 0 at step 2"
    assert steps_in(folder)[-2:] == [6, 8]


def requests_while_steps_differ(rank: int, folder: Path) -> list[str]:
    with session(folder, every=1000, **PATIENT) as ckpt:
        failed = list_failures(ckpt)
        ckpt.track(model=Model())
        for first in (rank, 1000):
            if rank == 1:
                ckpt.request()
            for step in range(first, first + 220):  # two boundaries at least
                ckpt.step(step)
                dist.barrier()
    return failed


def test_a_request_that_meets_ranks_at_different_steps_is_told_as_failed_and_the_next_is_met(folder: Path) -> None:
    first, second = run(2, requests_while_steps_differ, folder)
    assert first == second
    assert len(first) == 1
    assert "rank 1 is at step" in first[0]
    assert len(steps_in(folder)) == 1
    assert steps_in(folder)[0] >= 1000


def irregular(rank: int, folder: Path) -> list[str]:
    """All ranks make the same steps, but not those that could be foreseen."""
    with session(folder, every_steps=10, policy="wait", keep_last=10, **PATIENT) as ckpt:
        failed = list_failures(ckpt)
        ckpt.track(model=Model())
        for step in (3, 6, 9, 15, 18, 27, 31):
            ckpt.step(step)
    return failed


def test_strides_that_change_are_no_difference_between_ranks(folder: Path) -> None:
    assert run(2, irregular, folder) == [[], []]
    assert steps_in(folder) == [15, 27, 31]


def ends_early(rank: int, folder: Path, who: int) -> str:
    try:
        with session(folder, every_steps=2, policy="wait", **PATIENT) as ckpt:
            model = Model()
            ckpt.track(model=model)
            train(ckpt, model, 3 if rank == who else 8)
    except (SaveFailed, AgreementLost) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("who", "what"), [(0, "rank 0 has ended its session"), (1, "was not saved: rank 1 ")])
def test_a_rank_that_ends_earlier_than_the_others_is_named_and_not_waited_for(
    folder: Path, who: int, what: str
) -> None:
    said = run(2, ends_early, folder, who)
    assert said[who] == ""
    assert what in said[1 - who]
    assert steps_in(folder) == [2]


def leaves_by_an_error(rank: int, folder: Path, killed: bool) -> tuple[str, list[str]]:
    traces: list[str] = []

    class Traces(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            traces.extend([record.getMessage()] if record.exc_info else [])

    logging.getLogger("everstep.checkpoint").addHandler(Traces())
    try:
        with session(folder, every_steps=1, policy="wait", **PATIENT) as ckpt:
            model = Model()
            ckpt.track(model=model)
            train(ckpt, model, 3)
            if rank == 1 and killed:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 1:
                raise ValueError("an error of the training")
            train(ckpt, model, 5)
    except (ValueError, SaveFailed) as error:
        return str(error), traces
    raise AssertionError("no save without rank 1")


@pytest.mark.parametrize("killed", [False, True], ids=["an error", "a signal"])
def test_rank_0_does_not_wait_at_the_end_for_ranks_that_are_gone_and_logs_no_traces_of_it(
    folder: Path, killed: bool
) -> None:
    why, traces = run(2, leaves_by_an_error, folder, killed, dies=[1] if killed else [])[0]
    assert "step 5 was not saved: rank 1" in why
    assert traces == []
    assert steps_in(folder) == [1, 2, 3]


def saves_many_times(rank: int, folder: Path) -> int:
    with session(folder, every=1000, **PATIENT) as ckpt:
        ckpt.track(model=Model())
        for step in range(1, 101):
            ckpt.save(step)
        ckpt.wait()
        kv_store: Any = ckpt._kv_store
        return (
            len(kv_store._messages) + len(kv_store._counts)
            if isinstance(kv_store, LocalKVStore)
            else kv_store._store.num_keys()
        )


@pytest.mark.parametrize("world", [1, 2])
def test_what_ranks_tell_each_other_about_saves_is_not_kept(folder: Path, world: int) -> None:
    assert max(run(world, saves_many_times, folder)) < 150  # of 300 messages about saves, and some about other things
