"""Track how optimizers step in this process: whether Python is called before each step changes the state.

A copy beside training relies on it. A step that was captured into a CUDA graph, or compiled, runs later without any
Python: then nothing may be copied beside training any more. The knowledge is one of the process, as graphs are.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

_OWN_CLASSES = "torch.optim."


class OptimizerSteps:
    """Calls back before each step of an optimizer, and keeps which optimizers were seen to step that way."""

    def __init__(self) -> None:
        self.unannounced = ""  # why steps may run without Python; empty while nothing is known
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._callbacks: list[Callable[[], None]] = []

    def call_before_each(self, callback: Callable[[], None]) -> None:
        """Call back before each step, on the thread and the stream of the step."""
        self._callbacks.append(callback)

    def stop_calling(self, callback: Callable[[], None]) -> None:
        """End what call_before_each began; nothing where that has ended."""
        self._callbacks = [each for each in self._callbacks if each != callback]

    def are_announced(self, optimizers: Iterable[torch.optim.Optimizer]) -> bool:
        """Return whether each next step of all of these will call back first.

        An optimizer that was not seen to step yet may have been captured or compiled before everstep was imported.
        """
        return not self.unannounced and all(has_hooked_steps(each) and each in self._seen for each in optimizers)

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take notice of a step that is about to run, or to be captured."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self.unannounced = "a step of an optimizer was captured into a CUDA graph"
            return
        if has_hooked_steps(optimizer):
            self._seen.add(optimizer)
        self._call_back()

    def note_compilation(self) -> None:
        """Take notice of a step that torch.compile traces: it will run without hooks, for the first time soon."""
        self.unannounced = "a step of an optimizer was compiled"
        self._call_back()

    def note_capture(self) -> None:
        """Take notice of a change that is being captured into a CUDA graph."""
        self.unannounced = "a change of the state was captured into a CUDA graph"

    def forget_callbacks(self) -> None:
        """Drop all callbacks: a forked child has no copies of its parent's GPUs to wait for."""
        self._callbacks = []

    def _call_back(self) -> None:
        for callback in tuple(self._callbacks):
            callback()


def has_hooked_steps(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether this optimizer's state and parameters change in its step() only, and torch's hooks run before.

    Known of torch's own classes alone: others swap weights for an evaluation, average them, or keep statistics in
    hooks of modules. Nor of one with `capturable=True`: its steps are meant to run within a CUDA graph.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith(_OWN_CLASSES) or not getattr(kind.step, "hooked", False):
        return False
    return not any(group.get("capturable") for group in optimizer.param_groups)


STEPS = OptimizerSteps()


def _note_compilation() -> int:
    STEPS.note_compilation()
    return 0


# As torch.compiler.assume_constant_result does, which imports the compiler: tracing calls it for real, once, and the
# compiled step gets no break.
_note_compilation._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
    if torch.compiler.is_compiling():
        _note_compilation()
        return
    STEPS.note_step(optimizer)


register_optimizer_step_pre_hook(_before_step)
os.register_at_fork(after_in_child=STEPS.forget_callbacks)
