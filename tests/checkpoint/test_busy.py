"""A call of a session from within one of its own calls fails at once, and training goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.session.checkpointer import Checkpointer
from tests.checkpoint.ranks import run
from tests.checkpoint.sessions import Model, session, steps_in

pytestmark = pytest.mark.torch


class Nosy(Model):
    """Its state_dict() calls something once."""

    def __init__(self) -> None:
        super().__init__()
        self.call: Callable[[], Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        call, self.call = self.call, None
        if call is not None:
            call()
        return super().state_dict()


def calls_within(rank: int, folder: Path, where: str, call: str) -> list[str]:
    told: list[str] = []

    with session(folder, every=1000, timeout=300.0, commit_timeout=300.0, keep_last=9) as ckpt:

        def again(*_: Any) -> dict[str, Any]:
            try:
                ckpt.save(7) if call == "save" else ckpt.step(7)
            except CheckpointError as error:
                told.append(str(error))
            return {}

        model = Nosy()
        ckpt.track(model=model)
        _provoke(ckpt, model, where, again)
        ckpt.save(6)
        ckpt.wait()
    return told


def _provoke(ckpt: Checkpointer, model: Nosy, where: str, again: Callable[..., Any]) -> None:
    """Have a save go back and call the session anew."""
    if where == "state_dict":
        ckpt.save(3)
        model.call = again
    elif where == "metadata":
        ckpt.metadata = again
    else:  # a step that comes before one that was saved is told by an event, within the call
        ckpt.save(5)
        ckpt.on("stalled", again)
    ckpt.save(4)
    ckpt.wait()


@pytest.mark.parametrize(("where", "call"), [("state_dict", "save"), ("metadata", "step"), ("callback", "save")])
def test_a_call_from_within_a_save_is_refused_and_the_next_save_is_taken(where: str, call: str, folder: Path) -> None:
    worlds = run(2, calls_within, folder, where, call)
    asked = [told for told in worlds if told]
    assert asked
    for told in asked:
        assert told[0].startswith(f"{call}() is called while save() of the same session still runs: a callback")
        assert "Call request()" in told[0]
    assert 6 in steps_in(folder)
    assert 7 not in steps_in(folder)


def save_beside_a_child(rank: int, folder: Path, call: str) -> str:
    """Return what a child that was forked from the process of a session hears when it calls it."""
    model, ours = Model(), os.pipe()
    with session(folder) as ckpt:
        ckpt.track(model=model)
        ckpt.save(1)
        child = os.fork()
        if not child:
            try:
                CALLS[call](ckpt)
            except CheckpointError as error:
                os.write(ours[1], str(error).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(ours[1])
        for step in (2, 3):
            assert ckpt.save(step).saves
            ckpt.wait()
    with os.fdopen(ours[0]) as told:
        return told.read()


CALLS: dict[str, Callable[[Checkpointer], Any]] = {
    "save()": lambda ckpt: ckpt.save(2),
    "step()": lambda ckpt: ckpt.step(10),
    "wait()": lambda ckpt: ckpt.wait(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_forked_child_is_refused_and_its_parent_saves_on(call: str, folder: Path) -> None:
    (told,) = run(1, save_beside_a_child, folder, call)
    assert told.startswith(f"{call} is called in process ")
    assert "child of process" in told
    assert {1, 2, 3} <= set(steps_in(folder))


def test_what_is_called_after_the_end_is_refused(folder: Path) -> None:
    ckpt = session(folder)
    ckpt.track(model=Model())
    ckpt.save(1)
    ckpt.close()
    for call in (lambda: ckpt.save(2), lambda: ckpt.step(10), lambda: ckpt.restore(model=Model())):
        with pytest.raises(CheckpointError, match=r"is called after close\(\)"):
            call()
    ckpt.close()
    assert steps_in(folder) == [1]


def test_of_two_sessions_of_one_process_the_later_one_goes_on(folder: Path) -> None:
    """Before, the earlier one went on without a save, and said so at its end."""
    first, second = session(folder), session(folder)
    first.restore(model=Model())
    first.save(1)
    first.wait()
    assert second.restore(model=Model()).step == 1
    first.save(2)  # whoever has only read claims nothing
    first.wait()
    second.restore(model=Model())
    second.save(3)
    for call in (first.save, first.step):
        with pytest.raises(CheckpointError, match="another session of this process has begun to save in"):
            call(4)
    second.save(5)
    first.close()
    second.close()
    assert steps_in(folder) == [2, 3, 5]


def test_a_session_that_is_closed_or_forgotten_is_in_no_later_ones_way(folder: Path) -> None:
    for step in (1, 2, 3):
        ckpt = session(folder)
        ckpt.restore(model=Model())
        ckpt.save(step)
        if step == 1:
            ckpt.close()
        else:
            ckpt.wait()
    assert steps_in(folder) == [1, 2, 3]
    ckpt.close()
