"""A session as a script sees it: saves by steps, time or notice, an end that waits, errors that do not end training."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import numpy as np
import torch

from everstep.checkpoint.catalog.candidates import list_candidates, verify_checkpoint
from everstep.checkpoint.errors import CheckpointError, StoreError
from everstep.checkpoint.events import CheckpointEvent
from everstep.checkpoint.publish.attempts import StoreTaken, Superseded
from everstep.checkpoint.save import saver
from everstep.checkpoint.session import claiming
from everstep.checkpoint.session.checkpointer import SaveFailed
from everstep.checkpoint.slots.slots import Slots
from everstep.checkpoint.store.base import StoredObject
from everstep.checkpoint.store.posix import PosixStore
from everstep.checkpoint.writer import control
from tests.checkpoint.sessions import Model, claim, session, steps_in, train

pytestmark = pytest.mark.torch


def test_a_run_is_saved_and_goes_on_where_it_was(folder: Path) -> None:
    model = Model()
    with session(folder, policy="wait") as ckpt:
        assert ckpt.restore(model=model).step == 0
        train(ckpt, model, 25)
    assert steps_in(folder) == [10, 20]
    again = Model()
    with session(folder) as ckpt:
        assert ckpt.restore(model=again).step == 20
        assert again.at == 20
        assert ckpt.attempt is None  # it has only read
        train(ckpt, again, 21)
        assert ckpt.attempt is not None
        assert ckpt.attempt.generation == 2


def test_the_end_waits_for_the_last_commit_and_leaves_no_memory(folder: Path) -> None:
    model = Model()
    with session(folder) as ckpt:
        ckpt.track(model=model)
        train(ckpt, model, 10)
    assert steps_in(folder) == [10]
    until = time.monotonic() + 10
    while (folder / "memory").exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_session_that_names_nothing_leaves_no_memory_either(folder: Path) -> None:
    session(folder).close()
    until = time.monotonic() + 10
    while (folder / "memory").exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_an_error_in_the_script_is_not_delayed_and_what_was_filled_is_still_saved(folder: Path) -> None:
    def script() -> None:
        model = Model()
        with session(folder) as ckpt:
            ckpt.track(model=model)
            train(ckpt, model, 10)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        script()
    until = time.monotonic() + 20
    while steps_in(folder) != [10]:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("code", [None, 0])
def test_a_script_that_exits_well_waits_for_the_last_commit(folder: Path, code: int | None) -> None:
    told: list[CheckpointEvent] = []

    def script() -> None:
        with session(folder) as ckpt:
            ckpt.on("saved", told.append)
            ckpt.track(model=Model())
            ckpt.save(10)
            sys.exit(code)

    with pytest.raises(SystemExit):
        script()
    assert len(told) == 1


def test_what_a_session_has_mapped_is_given_back_with_it_and_not_when_garbage_is_collected(folder: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        for step in (1, 2):
            with session(folder) as ckpt:
                ckpt.restore(model=Model())
                ckpt.save(step)
            assert str(folder / "memory") not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


def test_a_script_that_exits_because_it_failed_waits_for_nothing(folder: Path) -> None:
    def script() -> None:
        with session(folder) as ckpt:
            ckpt.track(model=Model())
            claim(ckpt)
            link = control.WriterLink.connect(folder / "memory")
            pid = link.pid
            link.close()
            ckpt.save(10)
            os.kill(pid, signal.SIGSTOP)
            stopped.append(pid)
            sys.exit(1)

    stopped: list[int] = []
    began = time.monotonic()
    with pytest.raises(SystemExit):
        script()
    assert time.monotonic() - began < 10  # it would have waited for 40 s
    os.kill(stopped[0], signal.SIGCONT)


def test_a_save_by_time_needs_no_step_count(folder: Path) -> None:
    model = Model()
    with session(folder, every=0.1, policy="wait") as ckpt:
        ckpt.track(model=model)
        train(ckpt, model, 40, pause=0.01)
    assert len(steps_in(folder)) >= 2


def test_auto_saves_once_to_measure_and_then_by_the_optimum(folder: Path) -> None:
    model = Model()
    with session(folder, every="auto", time_between_failures=1e9) as ckpt:
        ckpt.track(model=model)
        train(ckpt, model, 30, pause=0.005)
        assert ckpt.metrics()["saved"] in (0, 1)
    assert len(steps_in(folder)) == 1


@pytest.mark.parametrize(("policy", "saved"), [("wait", [1, 2, 3, 4]), ("queue", [1, 2, 3, 4]), ("skip", None)])
def test_policies_for_a_save_that_comes_too_soon(folder: Path, policy: Any, saved: list[int] | None) -> None:
    model = Model()
    with session(folder, every_steps=1, policy=policy, keep_last=10) as ckpt:
        ckpt.track(model=model)
        train(ckpt, model, 4)
        skipped = ckpt.metrics()["skipped"]
    found = steps_in(folder)
    assert found[0] == 1
    if saved is not None:
        assert found == saved
    if policy == "skip":
        assert len(found) + int(skipped or 0) == 4


def test_memory_may_be_named_from_where_the_script_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with session(folder, directory="memory") as ckpt:
        ckpt.track(model=Model())
        ckpt.save(1)
    assert steps_in(folder) == [1]


def test_the_same_step_is_not_saved_twice(folder: Path) -> None:
    model = Model()
    with session(folder, every_steps=1) as ckpt:
        ckpt.track(model=model)
        train(ckpt, model, 1)
        assert not ckpt.save(1).saves
    assert steps_in(folder) == [1]


def test_a_state_that_changes_its_layout_is_planned_again(folder: Path) -> None:
    state: dict[str, Any] = {"a": torch.ones(10)}
    failures: list[CheckpointEvent] = []
    with session(folder, every_steps=1, policy="wait", keep_last=10) as ckpt:
        ckpt.on("failed", failures.append)
        ckpt.track(state=state)
        ckpt.step(1)
        state["b"] = torch.ones(100_000)
        for step in (2, 3, 4):
            ckpt.step(step)
    assert failures == []
    assert steps_in(folder) == [1, 2, 3, 4]
    assert (
        "state.b"
        in verify_checkpoint(PosixStore(folder / "store"), list_candidates(PosixStore(folder / "store"))[0]).tensors
    )


def test_a_state_that_finds_no_room_costs_its_own_saves_alone(folder: Path) -> None:
    state: dict[str, Any] = {"a": torch.ones(10)}
    failures: list[CheckpointEvent] = []
    with session(folder, every_steps=1, policy="wait", keep_last=10) as ckpt:
        ckpt.on("failed", failures.append)
        ckpt.track(state=state)
        claim(ckpt)
        state["huge"] = torch.zeros(1).expand(1 << 40)
        for step in (1, 2):
            ckpt.step(step)
        del state["huge"]
        for step in (3, 4):
            ckpt.step(step)
    assert [event.key.step for event in failures if event.key] == [1, 2]
    assert all("GB more memory" in event.why for event in failures)
    assert steps_in(folder) == [3, 4]


def test_room_for_what_an_optimizer_will_hold_is_asked_for_at_the_start(folder: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(1000))
    with session(folder) as ckpt:
        ckpt.track(weight=weight, optimizer=torch.optim.Adam([weight]))
        claim(ckpt)
        part = Slots(folder / "memory")[0].part(0)
        until = time.monotonic() + 10
        while not (part.exists() and part.stat().st_size > 3 * weight.nbytes):
            assert time.monotonic() < until
            time.sleep(0.01)


def test_a_store_that_fails_ends_no_training_but_is_told_at_the_end(folder: Path) -> None:
    model = Model()
    failures: list[CheckpointEvent] = []
    ckpt = session(folder)
    ckpt.on("failed", failures.append)
    ckpt.track(model=model)
    claim(ckpt)
    (folder / "store" / "data").write_text("no folder")
    train(ckpt, model, 15)
    with pytest.raises(SaveFailed, match="step 10 was not saved"):
        ckpt.close()
    assert len(failures) == 1


def test_a_writer_that_is_killed_before_it_has_made_the_memory_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = control.WriterLink.hello
    killed: list[int] = []

    def greet_and_kill(link: control.WriterLink, *what: Any) -> None:
        hello(link, *what)
        if not killed:
            killed.append(link.pid)
            os.kill(link.pid, signal.SIGKILL)

    monkeypatch.setattr(control.WriterLink, "hello", greet_and_kill)
    with session(folder) as ckpt:
        ckpt.track(model=Model())
        ckpt.save(1)
    assert killed
    assert steps_in(folder) == [1]


def test_a_killed_writer_is_replaced_and_loses_nothing(folder: Path) -> None:
    model = Model()
    with session(folder, policy="wait") as ckpt:
        ckpt.track(model=model)
        train(ckpt, model, 10)
        ckpt.wait()
        link = control.WriterLink.connect(folder / "memory")
        pid = link.pid
        link.close()
        os.kill(pid, signal.SIGKILL)
        train(ckpt, model, 40)
        ckpt.wait()
    assert steps_in(folder)[-1] == 40


def test_what_cannot_be_saved_is_refused_at_the_start(folder: Path) -> None:
    with session(folder) as ckpt, pytest.raises(CheckpointError, match="thing"):
        ckpt.track(thing=threading.Lock())


def test_too_little_memory_is_told_at_the_start(folder: Path) -> None:
    with (
        session(folder) as ckpt,
        pytest.raises(CheckpointError, match=r"2 slots for checkpoints need .* GB more memory"),
    ):
        ckpt.track(huge=torch.zeros(1).expand(1 << 40))


def test_an_older_attempt_is_refused(folder: Path) -> None:
    with session(folder, attempt=(2, 1)) as ckpt:
        ckpt.track(model=Model())
        ckpt.save(1)
    with session(folder, attempt=(1, 7)) as ckpt:
        assert ckpt.restore(model=Model()).step == 1  # to read is no attempt
        with pytest.raises(Superseded, match=r"belongs to attempt 0000000002\.0000000001"):
            ckpt.save(2)


@pytest.mark.parametrize("every", ["10m", "auto"])
def test_a_run_of_a_given_attempt_begins_while_its_store_does_not_answer(
    every: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(prefix: str) -> Iterator[StoredObject]:
        raise StoreError("does not answer", "the store", may_pass=True)

    with session(folder, attempt=(1, 1), every=every) as ckpt:
        ckpt.restore(model=Model())
        monkeypatch.setattr(ckpt.store, "list", fail)
        ckpt.save(1)
    assert steps_in(folder) == [1]


@pytest.mark.parametrize("call", ["list", "put_if_absent", "read"])
def test_a_run_begins_though_its_store_rejects_some_requests_at_first(
    call: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claiming, "_AGAIN", replace(claiming._AGAIN, first=0.001, longest=0.001))
    failed: list[str] = []

    def fail(*args: Any) -> Any:
        if len(failed) < 5:
            failed.append(call)
            raise StoreError("slow down", "the store", may_pass=True)
        return real(*args)

    with session(folder) as ckpt:
        real = getattr(ckpt.store, call)
        monkeypatch.setattr(ckpt.store, call, fail)
        ckpt.track(model=Model())
        ckpt.save(1)
    assert len(failed) == 5
    assert steps_in(folder) == [1]


@pytest.mark.parametrize("attempt", [None, (1, 2)])
def test_a_store_whose_name_is_damaged_is_restored_and_saved_into(
    attempt: tuple[int, int] | None, folder: Path
) -> None:
    with session(folder, attempt=attempt and (1, 1)) as ckpt:
        ckpt.track(model=Model())
        ckpt.save(1)
    (folder / "store" / "run").write_bytes(b"\xff" * 32)
    with session(folder, attempt=attempt) as ckpt:
        assert ckpt.restore(model=Model()).step == 1
        ckpt.save(2)
    assert steps_in(folder) == [1, 2]


def test_a_plan_that_was_not_finished_is_made_anew_for_the_next_save(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"weights": torch.zeros(4)}

    def fail(tensors: Any) -> Any:
        monkeypatch.undo()
        raise CheckpointError("a GPU has no stream left")

    with session(folder) as ckpt:
        ckpt.track(state=state)
        ckpt.save(1)
        state["history"] = torch.zeros(2)
        monkeypatch.setattr(saver, "choose_staging", fail)
        ckpt.save(2)
        ckpt.save(3)
        ckpt.save(4)
    assert steps_in(folder) == [1, 3, 4]


def test_a_second_job_with_the_same_attempt_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older agent gives every job (1, 1) at first; ranks of one job that are started again save on."""
    for job, step in (("one", 1), ("other", 2), ("one", 3)):
        monkeypatch.setenv("EVERSTEP_JOB", job)
        with session(folder, attempt=(1, 1), directory=folder / f"memory of {job}") as ckpt:
            assert ckpt.restore(model=Model()).step == min(step - 1, 1), "to read is no attempt"
            if job == "other":
                with pytest.raises(StoreTaken, match=r"is the store of job one, and this is job other"):
                    ckpt.save(step)
            else:
                ckpt.save(step)
    assert steps_in(folder) == [1, 3]


def test_a_callback_that_raises_ends_nothing(folder: Path) -> None:
    def careless(event: CheckpointEvent) -> None:
        raise RuntimeError("careless")

    with session(folder) as ckpt:
        ckpt.on("saved", careless)
        ckpt.track(model=Model())
        ckpt.save(1)
    assert steps_in(folder) == [1]


def test_figures_are_there_after_a_save(folder: Path) -> None:
    with session(folder) as ckpt:
        ckpt.track(model=Model())
        ckpt.save(1)
        ckpt.wait()
        figures = ckpt.metrics()
    assert figures["saved"] == 1
    assert (figures["bytes"] or 0) > 4000
    assert (figures["bandwidth"] or 0) > 0
    assert 0 <= (figures["age_seconds"] or 0) < 60


@pytest.mark.parametrize("step", [2.0, "7", None, torch.tensor(1.5)])
def test_a_step_that_is_no_whole_number_is_refused_before_other_ranks_hear_of_it(folder: Path, step: Any) -> None:
    with session(folder, every_steps=1) as ckpt:
        ckpt.track(model=Model())
        with pytest.raises(TypeError, match="a step is a whole number"):
            ckpt.step(step)
        with pytest.raises(TypeError, match="a step is a whole number"):
            ckpt.save(step)


def test_a_step_may_be_numpys_or_a_tensors(folder: Path) -> None:
    given: list[Any] = [np.int64(1), torch.tensor(2), np.int64(3), np.float32(100)]
    first, second, third, soon = given
    with session(folder, every_steps=1, policy="wait", keep_last=10) as ckpt:
        ckpt.track(model=Model())
        ckpt.step(first)
        ckpt.save(second)
        ckpt.save(third, deadline=soon)
    assert steps_in(folder) == [1, 2, 3]


@pytest.mark.parametrize(("deadline", "error"), [("30", TypeError), (float("nan"), ValueError)])
def test_a_deadline_that_is_no_time_is_refused(folder: Path, deadline: Any, error: type[Exception]) -> None:
    with session(folder, every_steps=1) as ckpt:
        ckpt.track(model=Model())
        with pytest.raises(error, match="a deadline is a number of seconds"):
            ckpt.save(1, deadline)
        with pytest.raises(error, match="a deadline is a number of seconds"):
            ckpt.request(deadline)
