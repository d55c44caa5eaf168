"""A restore from a node's memory reads it to the end, whatever becomes of the run whose memory it is."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from everstep.checkpoint.slots import slot_marks  # noqa: E402
from everstep.checkpoint.slots.slots import Slots, SlotState  # noqa: E402
from everstep.checkpoint.writer import control  # noqa: E402
from tests.checkpoint.sessions import claim, session  # noqa: E402
from tests.checkpoint.writers import until  # noqa: E402

pytestmark = pytest.mark.torch


class Waits(nn.Linear):  # type: ignore[misc]  # torch is not where types are checked
    """Calls back once, when a restore holds the slots and is about to read them into its parameters."""

    def __init__(self, slots: Slots, meanwhile: Callable[[], object]) -> None:
        super().__init__(40, 40)
        self._slots, self._meanwhile = slots, [meanwhile]

    def state_dict(self, *args: Any, **options: Any) -> Any:
        if self._meanwhile and any(slot.is_read for slot in self._slots):
            self._meanwhile.pop()()
        return super().state_dict(*args, **options)


def model_of(step: int) -> Any:
    model = nn.Linear(40, 40)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(step)
    return model


def save_one(folder: Path) -> Slots:
    """A run saves step 10 and its ranks go, not for good; its writer has verified what is in memory."""
    ckpt = session(folder, linger=60.0)
    ckpt.start_over(model=model_of(10))
    ckpt.save(10)
    ckpt.wait()
    ckpt.close(wait=False)
    slots = Slots(folder / "memory")
    [slot] = [slot for slot in slots if slot.state is SlotState.STORED]
    manifest = slot.manifest()
    assert manifest is not None
    until(lambda: slot_marks.is_marked(slot, manifest), "the writer has verified it")  # so it is read once, and late
    return slots


def test_a_run_that_ends_while_another_process_restores_from_its_memory_leaves_it_there_until_then(
    tmp_path: Path,
) -> None:
    slots = save_one(tmp_path)

    def begin_and_end_a_run() -> None:
        with session(tmp_path) as other:
            other.start_over(model=model_of(0))
            claim(other)
        log = slots.directory / control.LOG
        until(lambda: not log.exists() or "still read" in log.read_text(), "its writer has nothing left to do")

    model = Waits(slots, begin_and_end_a_run)
    with session(tmp_path) as reader:
        restored = reader.restore(model=model)
    assert (restored.step, restored.tier, set(model.bias.tolist())) == (10, "memory", {10.0})
    until(lambda: not slots.directory.exists(), "the memory is given back")


def test_slots_that_are_removed_by_force_are_read_to_the_end_by_who_holds_them(tmp_path: Path) -> None:
    slots = save_one(tmp_path)
    with closing(control.WriterLink.connect(slots.directory)) as link:
        writer = link.pid
    model = Waits(slots, lambda: slots.remove(is_forced=True))
    with session(tmp_path) as reader:
        restored = reader.restore(model=model)
    os.kill(writer, signal.SIGTERM)
    assert (restored.step, restored.tier, set(model.bias.tolist())) == (10, "memory", {10.0})


def test_a_child_that_is_forked_in_a_session_holds_no_memory_of_its_slots(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=lambda: theirs.send(Path("/proc/self/maps").read_text()))
    with session(tmp_path) as ckpt:
        ckpt.track(model=model_of(10))
        ckpt.save(10)
        assert str(tmp_path / "memory") in Path("/proc/self/maps").read_text()
        child.start()
        maps = ours.recv()
        child.join()
    assert str(tmp_path / "memory") not in maps
