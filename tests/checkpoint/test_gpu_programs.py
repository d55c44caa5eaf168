"""A save from GPUs holds the state at the moment of the save, whatever training does beside it; each wait is needed."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.save import device_staging
from everstep.checkpoint.save.device_staging import CudaStaging
from everstep.checkpoint.state import steps
from tests.checkpoint.gpu_programs import ACTIONS, random_actions, run_program

pytestmark = pytest.mark.torch

PROGRAMS = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 1)), max_size=40)


@given(seed=st.integers(0, 2**32), actions=PROGRAMS)
def test_a_save_holds_the_state_at_its_moment_whatever_training_does(seed: int, actions: list[tuple[str, int]]) -> None:
    run_program(seed, actions, CudaStaging)


WAITS = {
    "the copy's stream waits for training's": (
        "self._stream(device).wait_stream(torch.cuda.current_stream(device))",
        "pass",
    ),
    "a step waits for the copy": ("training.wait_event(event)", "pass"),
    "a step is heard of": ("steps.call_before_each(self.wait_for_copy)", "pass"),
    "statistics are copied before training goes on": ("if is_steady else", "if True else"),
    "done when all devices are": ("if not all(event.query()", "if not any(event.query()"),
    "an event for each device": (
        "self._record_event(device) for device in devices)",
        "self._record_event(device) for device in sorted(devices, key=str)[:1])",
    ),
    "a script's own copy into pinned memory": ("self._wait_for_devices()", "pass"),
    "torch needs no memory in between": (".contiguous()", ""),
}


def without(old: str, new: str) -> Any:
    """The staging of a module in which a line is another."""
    source = Path(device_staging.__file__).read_text()
    assert source.count(old) == 1, old
    module = types.ModuleType("everstep_mutant")
    sys.modules[module.__name__] = module
    exec(compile(source.replace(old, new), "mutant", "exec"), module.__dict__)
    del sys.modules[module.__name__]
    return module.CudaStaging


def fails(staging: Any, programs: int) -> int | None:
    """The first of so many programs whose save is not the state at its moment."""
    for seed in range(programs):
        try:
            run_program(seed, random_actions(seed), lambda devices: staging(devices, steps.STEPS))
        except AssertionError:
            return seed
    return None


@pytest.mark.parametrize("wait", WAITS)
def test_every_wait_is_needed(wait: str) -> None:
    assert fails(without(*WAITS[wait]), 30) is not None, "no program has noticed that it is gone"


def test_memory_that_is_being_copied_is_not_given_away() -> None:
    """Either of the two does: one for those who drop a tensor, one for those who resize its storage."""
    held = "self._held = tuple(pair.source for pair in pairs)"
    noted = "pair.source.record_stream(stream)"
    source = Path(device_staging.__file__).read_text()
    assert source.count(held) == source.count(noted) == 1
    for kept in ({held}, {noted}, set()):
        text = source
        for line in {held, noted} - kept:
            text = text.replace(line, "pass")
        module = types.ModuleType("everstep_mutant")
        sys.modules[module.__name__] = module
        exec(compile(text, "mutant", "exec"), module.__dict__)
        del sys.modules[module.__name__]
        assert (fails(module.CudaStaging, 30) is None) == bool(kept), kept


def test_a_capture_that_goes_unnoticed_is_noticed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(self: steps.OptimizerSteps, optimizer: torch.optim.Optimizer) -> None:
        if not torch.cuda.is_current_stream_capturing():
            self._seen.add(optimizer)
            self._call_back()

    monkeypatch.setattr(steps.OptimizerSteps, "note_step", deaf)
    assert fails(CudaStaging, 30) is not None
