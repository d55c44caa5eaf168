"""A writer that is killed at one moment or another of a session costs no save that all ranks had copied, and no run."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from everstep.checkpoint.events import CheckpointEvent
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.save import saver
from everstep.checkpoint.save.saver import WriterConnection
from everstep.checkpoint.writer import control
from everstep.checkpoint.writer.control import WriterLink, WriterLost
from tests.checkpoint.ranks import run
from tests.checkpoint.sessions import Model, claim, session, steps_in, train
from tests.checkpoint.writers import until

pytestmark = pytest.mark.torch


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text(), "it is dead")


def kill_at(node: WriterConnection, verb: str) -> None:
    """Kill the node's writer right before this rank says `verb`, once."""
    tell = node.tell

    def tell_nobody(said: str, **fields: Any) -> int:
        if said == verb:
            node.tell = tell  # type: ignore[method-assign]
            assert node._link is not None
            kill(node._link.pid)
        return tell(said, **fields)

    node.tell = tell_nobody  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("policy", ["skip", "wait", "queue"])
def test_a_writer_that_is_killed_before_it_tells_of_a_commit_is_followed_by_one_that_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Else the save stayed on its way for good: no later one was begun, or each waited for it."""
    reports = WriterLink.reports
    lost: list[int] = []

    def lose_report(link: WriterLink, timeout: float = 0.0) -> list[dict[str, Any]]:
        found = reports(link, timeout)
        if not lost and any(each["event"] == "saved" and each["key"].endswith("2") for each in found):
            lost.append(link.pid)
            kill(link.pid)
            raise WriterLost("the writer is gone")
        return found

    monkeypatch.setattr(WriterLink, "reports", lose_report)
    monkeypatch.setattr(saver, "_AGAIN", 0.1)
    told: list[Key | None] = []
    model = Model()
    with session(folder, every_steps=2, policy=policy, keep_last=10) as ckpt:
        ckpt.on("saved", lambda event: told.append(event.key))
        ckpt.track(model=model)
        for step in (2, 4, 6):
            model.at = step
            ckpt.save(step)
            ckpt.wait()
    assert lost
    assert [key and key.step for key in told] == steps_in(folder) == [2, 4, 6]


def test_a_save_that_all_had_copied_when_the_writer_died_is_stored(folder: Path) -> None:
    with session(folder, commit_timeout=35.0) as ckpt:
        ckpt.track(model=Model())
        node = claim(ckpt)
        ckpt.save(1)
        ckpt.wait()
        kill_at(node, "filled")
        ckpt.save(2)
    assert steps_in(folder) == [1, 2]


def test_the_memory_goes_though_the_writer_dies_while_the_session_ends(folder: Path) -> None:
    with session(folder) as ckpt:
        ckpt.track(model=Model())
        ckpt.save(1)
        ckpt.wait()
        kill_at(claim(ckpt), "bye")
    until(lambda: not (folder / "memory").exists(), "the memory is given back")


def loses_its_writer_at_the_start(rank: int, folder: Path) -> None:
    """Rank 0 has its answer when the writer dies, and waits for rank 1."""
    call, dead = WriterConnection.call_until_heard, folder / "dead"

    def call_around_a_death(node: WriterConnection, verb: str, *args: Any, **fields: Any) -> Any:
        if rank == 1 and not dead.exists():
            until(dead.exists, "the writer is dead", 60)
        found = call(node, verb, *args, **fields)
        if rank == 0 and not dead.exists():
            assert node._link is not None
            kill(node._link.pid)
            dead.touch()
        return found

    WriterConnection.call_until_heard = call_around_a_death  # type: ignore[method-assign,assignment]
    with session(folder, timeout=60.0) as ckpt:
        ckpt.track(model=Model())
        ckpt.save(1)


def test_any_rank_starts_a_writer_where_the_first_one_died_and_rank_0_waits(folder: Path) -> None:
    run(2, loses_its_writer_at_the_start, folder)
    assert steps_in(folder) == [1]


def test_a_writer_that_is_killed_while_it_starts_is_started_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = control.start_writer, []

    def start_and_kill(*args: Any) -> Any:
        child = start(*args)
        started.append(child.pid)
        if len(started) == 1:
            child.kill()
            child.wait()
        return child

    monkeypatch.setattr(control, "start_writer", start_and_kill)
    with session(folder) as ckpt:
        ckpt.track(model=Model())
        ckpt.save(1)
    assert len(started) == 2
    assert steps_in(folder) == [1]


@pytest.mark.parametrize("policy", ["skip", "wait", "queue"])
@pytest.mark.parametrize("interrupt", [SystemExit, KeyboardInterrupt])
def test_a_save_that_a_signals_handler_interrupts_is_void_at_once(
    folder: Path, policy: str, interrupt: type[BaseException]
) -> None:
    """`sys.exit(0)` waits for the last save, and one that was left in the middle never gets into the store."""
    failed: list[CheckpointEvent] = []

    def leave(step: int) -> dict[str, Any]:
        if step == 2:
            raise interrupt(0)
        return {}

    with session(folder, policy=policy, commit_timeout=3600.0) as ckpt:
        ckpt.on("failed", failed.append)
        ckpt.metadata = leave
        ckpt.track(model=Model())
        for step in (1, 2, 3):
            with contextlib.suppress(interrupt):
                ckpt.save(step)
    assert [event.key and event.key.step for event in failed] == [2]
    assert f"it was interrupted by {interrupt.__name__}" in failed[0].why
    assert steps_in(folder) == [1, 3]


def test_a_child_that_was_forked_leaves_the_session_to_its_parent(folder: Path) -> None:
    with session(folder) as ckpt:
        ckpt.track(model=Model())
        ckpt.save(1)
        child = os.fork()
        if child == 0:
            try:
                ckpt.close()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        ckpt.save(2)
    assert steps_in(folder) == [1, 2]


def test_the_error_that_ends_a_session_is_told_though_no_thread_can_be_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    def train_out_of_memory() -> None:
        with session(folder) as ckpt:
            ckpt.track(model=Model())
            ckpt.save(1)
            monkeypatch.setattr("threading.Thread.start", refuse)
            raise MemoryError("of the script")

    with pytest.raises(MemoryError, match="of the script"):
        train_out_of_memory()


def is_wrong_about_one_step(rank: int, folder: Path) -> list[str]:
    told: list[str] = []
    with session(folder, every_steps=1, keep_last=10, policy="wait") as ckpt:
        ckpt.on("failed", lambda event: told.append(event.why))
        ckpt.track(model=Model())
        for step in (1, 2, 3):
            ckpt.step(step)
        ckpt.step(1000 if rank == 0 else 4)
        for step in (5, 6):
            ckpt.step(step)
        ckpt.save(7)
    return told


def test_after_a_save_at_which_rank_0_was_too_far_the_next_ones_are_taken(folder: Path) -> None:
    for told in run(2, is_wrong_about_one_step, folder):
        assert len(told) == 1
        assert "rank 1 is at step 4, rank 0 at step 1000" in told[0]
    assert {5, 6, 7} & set(steps_in(folder)) == {5, 6, 7}


def test_steps_that_go_back_are_told_once(folder: Path) -> None:
    told: list[str] = []
    model = Model()
    with session(folder, every_steps=2, policy="wait") as ckpt:
        ckpt.on("stalled", lambda event: told.append(event.why))
        ckpt.track(model=model)
        train(ckpt, model, 6)
        ckpt.wait()
        model.at = 0
        train(ckpt, model, 6)
    (why,) = told
    assert "step 1 comes before step 6, which was saved: nothing is saved until a later step" in why
