"""The end of a session waits until what was saved last is verified: a container's writer ends with its ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

import everstep
from everstep.checkpoint.save import session_end
from everstep.checkpoint.session.checkpointer import Checkpointer
from tests.checkpoint.ranks import run
from tests.checkpoint.sessions import session
from tests.checkpoint.writers import until

pytestmark = pytest.mark.torch


def find_writer(ckpt: Checkpointer) -> int:
    link = ckpt._claimed().node._link
    assert link is not None
    return link.pid


def list_verified(folder: Path) -> list[tuple[int, bool]]:
    return [(each.step, bool(each.verified)) for each in everstep.list_checkpoints(folder / "store")]


def saves_and_loses_its_writer(rank: int, folder: Path) -> None:
    os.environ["GROUP_RANK"] = str(rank)
    memory = folder / f"memory-{rank}"
    with session(folder, directory=memory, keep_last=1, commit_timeout=60.0, timeout=60.0) as ckpt:
        ckpt.track(**{f"weights{rank}": {"weights": torch.ones(8_000_000)}})
        for step in (1, 2, 3):
            ckpt.save(step)
        writer = find_writer(ckpt)
    with contextlib.suppress(ProcessLookupError):  # as the end of a container does
        os.kill(writer, signal.SIGKILL)


def test_what_was_saved_last_is_verified_and_older_ones_are_gone_when_the_end_returns(folder: Path) -> None:
    run(2, saves_and_loses_its_writer, folder)
    assert list_verified(folder) == [(3, True)]


def test_the_memory_of_a_session_is_free_when_its_end_returns(folder: Path) -> None:
    """A script that goes on in another store, as with the next fold of its data, may have no room for both."""
    with session(folder) as ckpt:
        ckpt.track(state={"weights": torch.ones(1_000_000)})
        ckpt.save(1)
    assert [path.name for path in folder.iterdir()] == ["store"]


def test_the_writer_maps_nothing_of_a_session_any_more_when_its_end_returns(folder: Path) -> None:
    """The memory of a file that was removed is not free before that."""
    for step in range(1, 6):
        with session(folder) as ckpt:
            ckpt.start_over(state={"weights": torch.ones(1_000_000)})
            ckpt.save(step)
            maps = Path(f"/proc/{find_writer(ckpt)}/maps")
        with contextlib.suppress(OSError):  # it has ended by now
            assert f"{folder}/" not in maps.read_text()


@pytest.mark.parametrize("how", ["exit", "deadline"])
def test_who_is_told_to_end_waits_for_the_store_alone(folder: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The time that a process is given may be over soon: one that is killed counts as failed."""
    waited: list[object] = []
    monkeypatch.setattr(session_end.SessionEnd, "wait_until_tidy", waited.append)

    def script() -> None:
        with session(folder) as ckpt:
            ckpt.track(state={"weights": torch.ones(10)})
            ckpt.save(1, 1000.0 if how == "deadline" else None)
            if how == "exit":
                sys.exit(0)

    with contextlib.suppress(SystemExit):
        script()
    assert [each.step for each in everstep.list_checkpoints(folder / "store")] == [1]
    assert waited == []


def test_a_writer_that_stands_still_while_it_verifies_is_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_end, "_TIDY", 0.5)
    ckpt = session(folder)
    ckpt.track(state={"weights": torch.ones(10)})
    ckpt.save(1)
    ckpt.wait()
    writer = find_writer(ckpt)
    tell_end = session_end.SessionEnd._tell_end

    def stop_writer(end: session_end.SessionEnd) -> None:
        os.kill(writer, signal.SIGSTOP)
        tell_end(end)

    monkeypatch.setattr(session_end.SessionEnd, "_tell_end", stop_writer)
    begun = time.monotonic()
    try:
        ckpt.close()
    finally:
        os.kill(writer, signal.SIGCONT)
    assert time.monotonic() - begun < 20
    until(lambda: not (folder / "memory").exists(), "the memory is given back")
