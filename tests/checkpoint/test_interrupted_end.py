"""A signal's handler interrupts the end of a session, or a wait: sys.exit(0) abandons no commit, Ctrl-C ends it."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.events import CheckpointEvent
from everstep.checkpoint.host.interruptions import find_interruption
from everstep.checkpoint.save.saver import WriterConnection
from everstep.checkpoint.session.checkpointer import Checkpointer
from everstep.checkpoint.session.one_at_a_time import one_at_a_time
from everstep.checkpoint.writer.control import WriterLink
from everstep.coordination.kv_store import LocalKVStore
from everstep.coordination.message_series import MessageSeries
from tests.checkpoint.ranks import run
from tests.checkpoint.sessions import Model, session, steps_in
from tests.checkpoint.writers import until

pytestmark = pytest.mark.torch


def raise_timeout(*_: object) -> None:
    raise TimeoutError("the time of the script is over")


HANDLERS: dict[type[BaseException], Callable[..., None]] = {
    TimeoutError: raise_timeout,
    SystemExit: lambda *_: sys.exit(0),
    KeyboardInterrupt: signal.default_int_handler,
}


@contextlib.contextmanager
def handled_by(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def interrupt_once(patched: Any, name: str, when: Callable[[Any], bool]) -> list[str]:
    """This process gets SIGTERM right after the first call of a method whose result is such a one, which is lost."""
    method = getattr(patched, name)
    done: list[str] = []

    def interrupted(*args: Any) -> Any:
        found = method(*args)
        if not done and when(found):
            done.append(name)
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    setattr(patched, name, interrupted)
    return done


def tells_of_save(reports: list[dict[str, Any]], step: int) -> bool:
    return any(each["event"] == "saved" and each["key"].endswith(f"-{step:012}") for each in reports)


def test_a_handler_that_exits_well_during_the_final_wait_loses_no_commit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it interrupts just after the writer's word has come."""
    monkeypatch.setattr(WriterLink, "reports", WriterLink.reports)
    told: list[int | None] = []

    def script() -> None:
        with session(folder, commit_timeout=3600.0) as ckpt:
            ckpt.on("saved", lambda event: told.append(event.key.step if event.key else None))
            ckpt.track(model=Model())
            ckpt.save(1)
            ckpt.wait()
            ckpt.save(2)
            interrupt_once(WriterLink, "reports", lambda found: tells_of_save(found, 2))

    with handled_by(HANDLERS[SystemExit]), pytest.raises(SystemExit) as exited:
        script()
    assert exited.value.code == 0
    assert told == steps_in(folder) == [1, 2]
    until(lambda: not (folder / "memory").exists(), "the memory is given back")


def test_a_handler_that_exits_before_the_commit_waits_for_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer stands still until the handler has run: nothing is in the store before."""
    monkeypatch.setattr(WriterLink, "reports", WriterLink.reports)
    writer: list[int] = []

    def leave(*_: object) -> None:
        assert steps_in(folder) == [1]
        os.kill(writer[0], signal.SIGCONT)
        sys.exit(0)

    def script() -> None:
        with session(folder, commit_timeout=3600.0) as ckpt:
            ckpt.track(model=Model())
            ckpt.save(1)
            ckpt.wait()
            ckpt.save(2)
            stop_writer(ckpt, writer)
            interrupt_once(WriterLink, "reports", lambda _: True)

    with handled_by(leave), pytest.raises(SystemExit):
        script()
    assert steps_in(folder) == [1, 2]


def stop_writer(ckpt: Checkpointer, writer: list[int]) -> None:
    link = ckpt._claimed().node._link
    assert link is not None
    writer.append(link.pid)
    os.kill(link.pid, signal.SIGSTOP)


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_whatever_else_interrupts_the_final_wait_ends_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, interrupt: type[BaseException]
) -> None:
    """Ctrl-C, or an exit that tells of a failure; a writer that stands still is not waited for either."""
    monkeypatch.setattr(WriterLink, "reports", WriterLink.reports)
    writer: list[int] = []

    def script() -> None:
        with session(folder, commit_timeout=3600.0) as ckpt:
            ckpt.track(model=Model())
            ckpt.save(1)
            stop_writer(ckpt, writer)
            interrupt_once(WriterLink, "reports", lambda _: True)

    began = time.monotonic()
    handler = HANDLERS[interrupt] if interrupt is KeyboardInterrupt else lambda *_: sys.exit(1)
    with handled_by(handler), pytest.raises(interrupt):
        script()
    assert time.monotonic() - began < 50  # two minutes for a writer that does not answer, an hour for its commit
    os.kill(writer[0], signal.SIGCONT)
    until(lambda: steps_in(folder) == [1], "what was filled is stored")


class Interrupts(Model):
    """Is interrupted by Ctrl-C when it is saved."""

    def state_dict(self) -> dict[str, Any]:
        if self.at == 2:
            raise KeyboardInterrupt
        return super().state_dict()


@pytest.mark.parametrize("moment", ["read", "remove"])
def test_two_interruptions_hold_no_later_save_up(folder: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """The second one comes when rank 0 has read that the first has made a save void."""
    monkeypatch.setattr(LocalKVStore, moment, getattr(LocalKVStore, moment))
    model = Interrupts()
    with handled_by(HANDLERS[KeyboardInterrupt]), session(folder, commit_timeout=3.0) as ckpt:
        ckpt.track(model=model)
        ckpt.step(1)  # claims the store, and saves nothing
        model.at = 2
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(2)  # before the writer knows of it
        model.at = 3
        interrupt_once(LocalKVStore, moment, lambda found: moment == "remove" or "void" in str(found))
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(3)
        assert ckpt.save(4).saves
    assert steps_in(folder) == [4]


class GetsSignal(Model):
    """Gets SIGTERM while step 2 of it is saved."""

    def state_dict(self) -> dict[str, Any]:
        if self.at == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().state_dict()


@pytest.mark.parametrize("steps", [[1, 2, 3], [2, 3]], ids=["by the plan that is there", "while ranks plan"])
def test_what_a_handler_raises_during_a_save_reaches_the_script(folder: Path, steps: list[int]) -> None:
    """As that of an alarm, by which a script ends before its time is over: it comes once."""
    failed: list[CheckpointEvent] = []
    model = GetsSignal()
    with handled_by(raise_timeout), session(folder) as ckpt:
        ckpt.on("failed", failed.append)
        ckpt.track(model=model)
        ckpt.step(1)  # claims the store, and saves nothing
        for step in steps:
            model.at = step
            with pytest.raises(TimeoutError, match="is over") if step == 2 else contextlib.nullcontext():
                ckpt.save(step)
    assert ["it was interrupted by TimeoutError" in event.why for event in failed] == [True]
    assert steps_in(folder) == [step for step in steps if step != 2]


def test_what_a_callback_is_interrupted_by_reaches_the_script(folder: Path) -> None:
    with handled_by(raise_timeout), session(folder) as ckpt:
        ckpt.on("saved", lambda event: os.kill(os.getpid(), signal.SIGTERM))
        ckpt.track(model=Model())
        ckpt.save(1)
        with pytest.raises(TimeoutError, match="is over"):
            ckpt.wait()


class Waits:
    """Takes whatever ends its wait for the loss of another rank, as a store that is shared with other ranks does."""

    def check_call(self, call: str) -> None:
        pass

    @one_at_a_time
    def step(self) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except TimeoutError as error:
            raise CheckpointError("rank 0 cannot be reached") from error


def test_what_a_handler_raises_while_other_ranks_are_waited_for_reaches_the_script() -> None:
    with handled_by(raise_timeout), pytest.raises(TimeoutError, match="is over"):
        Waits().step()


def test_an_error_is_no_interruption_because_the_script_handles_one() -> None:
    """As where a script saves once more when its time is over, and that save fails."""

    def raise_once(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise_timeout()

    class Handler:
        def __call__(self, *_: object) -> None:
            raise_timeout()

        def leave(self, *_: object) -> None:
            raise CheckpointError("save() is called while step() of the same session still runs")

    for handler in (raise_timeout, raise_once, Handler(), functools.partial(raise_timeout, 1)):
        with handled_by(handler), pytest.raises(TimeoutError) as caught:
            os.kill(os.getpid(), signal.SIGTERM)
        assert find_interruption(caught.value) is caught.value
        try:
            raise caught.value
        except TimeoutError:
            with pytest.raises(ValueError, match="of the save") as failed:
                raise ValueError("of the save")  # noqa: B904
        assert failed.value.__context__ is caught.value
        assert find_interruption(failed.value) is None
    with handled_by(Handler().leave):
        with pytest.raises(CheckpointError) as refused:
            os.kill(os.getpid(), signal.SIGTERM)
        assert find_interruption(refused.value) is None, "a call that is rejected fails alone"


@pytest.mark.parametrize("interrupt", [SystemExit, KeyboardInterrupt, TimeoutError])
def test_a_wait_that_is_interrupted_may_be_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, interrupt: type[BaseException]
) -> None:
    monkeypatch.setattr(WriterLink, "reports", WriterLink.reports)
    told: list[int | None] = []
    with handled_by(HANDLERS[interrupt]), session(folder, commit_timeout=3600.0) as ckpt:
        ckpt.on("saved", lambda event: told.append(event.key.step if event.key else None))
        ckpt.track(model=Model())
        ckpt.save(1)
        interrupt_once(WriterLink, "reports", lambda found: tells_of_save(found, 1))
        with pytest.raises(interrupt):
            ckpt.wait()
        ckpt.wait()
        assert told == [1]
        ckpt.save(2)
    assert told == steps_in(folder) == [1, 2]


def is_interrupted_everywhere(rank: int, folder: Path) -> tuple[list[str], list[int | None]]:
    """Rank 0 while it waits for its writer and for rank 1, rank 1 while it waits for rank 0.

    Rank 1 leaves when rank 0 has looked for it: one that has left by then is not looked for.
    """
    told: list[int | None] = []
    interrupted: list[list[str]] = []
    looked = folder / "rank-0-has-looked"

    def leave_mark(_: object) -> bool:
        looked.touch()
        return True

    def await_mark(_: object) -> bool:
        until(looked.exists, "rank 0 looks for lost ranks")
        return True

    def script() -> None:
        with session(folder, commit_timeout=3600.0) as ckpt:
            ckpt.on("saved", lambda event: told.append(event.key.step if event.key else None))
            ckpt.track(model=Model())
            ckpt.save(1)
            if rank == 0:
                interrupted.append(interrupt_once(WriterLink, "reports", lambda found: tells_of_save(found, 1)))
                interrupted.append(interrupt_once(WriterConnection, "list_lost_ranks", leave_mark))
            else:
                interrupted.append(interrupt_once(MessageSeries, "read", lambda found: found is not None))
                interrupted.append(interrupt_once(WriterConnection, "call_until_heard", await_mark))

    with handled_by(HANDLERS[SystemExit]), pytest.raises(SystemExit) as exited:
        script()
    assert exited.value.code == 0
    return [name for each in interrupted for name in each], told


def test_no_rank_abandons_the_others_at_the_end(folder: Path) -> None:
    assert run(2, is_interrupted_everywhere, folder) == [
        (["reports", "list_lost_ranks"], [1]),
        (["read", "call_until_heard"], [1]),
    ]
    assert steps_in(folder) == [1]


class InterruptedOnce:
    """Is interrupted right after the first attribute is set."""

    def __setattr__(self, name: str, value: object) -> None:
        is_first = not vars(self)
        super().__setattr__(name, value)
        if is_first:
            raise KeyboardInterrupt

    def check_call(self, call: str) -> None:
        pass

    @one_at_a_time
    def step(self) -> str:
        return "done"


def test_a_call_that_is_interrupted_when_it_begins_keeps_no_later_one_out() -> None:
    made = InterruptedOnce()
    with pytest.raises(KeyboardInterrupt):
        made.step()
    assert made.step() == "done"


def test_errors_that_are_causes_of_each_other_are_each_looked_at_once() -> None:
    """As one that is kept, and raised again by who has caught what was made of it."""
    kept, made = CheckpointError("rank 1 left"), CheckpointError("the save failed")
    kept.__cause__, made.__cause__ = made, kept
    assert find_interruption(kept) is None
