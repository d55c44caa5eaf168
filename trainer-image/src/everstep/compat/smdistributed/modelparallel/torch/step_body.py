"""Runs a step function for one micro-batch, and pauses it where it calls the model.

The pipeline needs what the model is called with before the first forward, and goes on with the function once the
model's output is there: the function runs in a thread of its own, and exactly one of the two runs at any time.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

_thread_state = threading.local()


class _BodyUnwound(BaseException):
    """Unwinds a function whose output is not needed on this rank."""


class StepBody:
    """One run of a function. `run` it until it calls the model: `arguments` are then those of the call. `resume` with
    the model's output runs the rest."""

    def __init__(
        self,
        function: Callable[[], Any],
        training: bool,
        around: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
    ) -> None:
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.autocast: Any = None  # the type of the function's autocast around the call, None without
        self.loss: Any = None
        self.returned: Any = None
        self._function, self._training, self._around = function, training, around
        self._error: BaseException | None = None
        self._output: Any = None
        self._ended = False
        self._go, self._stop = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._main, daemon=True, name="step function")

    def run(self) -> None:
        """Run until the function calls the model, or returns. An error of the function is raised here."""
        self._around = self._around or _capture_thread_state()
        self._context = contextvars.copy_context()
        self._thread.start()
        self._wait()

    def resume(self, output: Any) -> None:
        """Run to the function's end. An error of the function is raised here."""
        self._output = output
        self._go.release()
        self._wait()
        self._thread.join()

    def rerun(self) -> StepBody:
        """Return another run of the same function, up to its call of the model: recomputation of a stage repeats the
        loss too."""
        fresh = StepBody(self._function, self._training, self._around)
        fresh.run()
        return fresh

    @property
    def is_finished(self) -> bool:
        """Return whether the function has returned or raised."""
        return not self._thread.is_alive()

    def end(self) -> None:
        """Unwind the function, if it is paused."""
        if self._thread.is_alive():
            self._ended = True
            self._go.release()
            self._thread.join()

    def pause_for_output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pause the thread of the function until `resume` gives it the model's output; return that."""
        if self.arguments is not None:
            raise RuntimeError(
                "the step function calls the model twice for one micro-batch, and may call it once: combine both "
                "calls in one module"
            )
        self.arguments = args, kwargs
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            kind = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
            self.autocast = torch.get_autocast_dtype(kind)
        self._stop.release()
        self._go.acquire()
        if self._ended:
            raise _BodyUnwound
        return self._output

    def note_backward(self, loss: Any, gradients: Any) -> None:
        """Store, in the thread of the function, the loss that is differentiated."""
        if not self._training:
            raise RuntimeError(
                "model.backward was called in an evaluation, which a step function is under torch.no_grad(), or if "
                "neither it nor a function of its module that it calls names backward: call it by that name there"
            )
        if self.loss is not None:
            raise RuntimeError(
                "the step function calls model.backward twice for one micro-batch, and may call it once: add the "
                "losses up first"
            )
        self.loss = _weigh_outputs(loss, gradients)

    def _wait(self) -> None:
        self._stop.acquire()
        if self._error is not None:
            raise self._error

    def _main(self) -> None:
        _thread_state.body = self
        try:
            assert self._around is not None
            with self._around():
                self.returned = self._context.run(self._function)
        except _BodyUnwound:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._stop.release()


def _weigh_outputs(tensors: Any, gradients: Any) -> Any:
    """Return the scalar with the gradients that torch.autograd.backward(tensors, gradients) would give."""
    several = list(tensors) if isinstance(tensors, list | tuple) else [tensors]
    given = list(gradients) if isinstance(gradients, list | tuple) else [gradients] * len(several)
    if len(given) != len(several):
        raise ValueError(f"model.backward: {len(several)} tensors, but gradients for {len(given)}")
    parts = [each if of is None else (each * of).sum() for each, of in zip(several, given, strict=True)]
    if any(each.numel() != 1 for each in parts):
        raise RuntimeError(
            "model.backward: a tensor of more than one number needs its gradient: model.backward(out, of)"
        )
    return sum(each.reshape(()) for each in parts)


def _capture_thread_state() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Capture the state that torch keeps for each thread; return a context in which another thread has it."""
    gradients = torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    kinds = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu")]

    @contextlib.contextmanager
    def restore_thread_state() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if device is not None:
                stack.enter_context(torch.cuda.device(device))
            for kind, enabled, dtype in kinds:
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype))
            stack.enter_context(torch.set_grad_enabled(gradients))
            yield

    return restore_thread_state


def get_current_body() -> StepBody | None:
    """Return the step body that this thread runs; None outside of step functions."""
    return getattr(_thread_state, "body", None)
