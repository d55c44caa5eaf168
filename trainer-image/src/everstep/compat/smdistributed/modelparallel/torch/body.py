"""One run of a step function for one micro-batch, which stands still where it calls the model.

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

_here = threading.local()


class _BodyUnwound(BaseException):
    """Unwinds a function whose output is not needed on this rank."""


class StepBody:
    """One run of a function. `run` it until the model is called: then `arguments` are what with. `resume` with its
    output runs the rest."""

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
        """Run until the function calls the model, or returns. Its errors come out here."""
        self._around = self._around or _capture_thread_state()
        self._context = contextvars.copy_context()
        self._thread.start()
        self._wait()

    def resume(self, output: Any) -> None:
        """Run to the function's end. Its errors come out here."""
        self._output = output
        self._go.release()
        self._wait()
        self._thread.join()

    def again(self) -> StepBody:
        """Return another run of the same, to the model: of a stage that does its forward once more the loss is done
        again."""
        fresh = StepBody(self._function, self._training, self._around)
        fresh.run()
        return fresh

    @property
    def over(self) -> bool:
        """Return whether it came to its end."""
        return not self._thread.is_alive()

    def end(self) -> None:
        """Unwind it, if it stands."""
        if self._thread.is_alive():
            self._ended = True
            self._go.release()
            self._thread.join()

    def model_called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stand still, in the thread, until the output is there."""
        if self.arguments is not None:
            raise RuntimeError(
                "the step function calls the model twice: it may once for each micro-batch; make one model of both"
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

    def backward_called(self, loss: Any, gradients: Any) -> None:
        """Note, in the thread, what is differentiated."""
        if not self._training:
            raise RuntimeError(
                "model.backward was called in an evaluation, which a step function is under torch.no_grad(), or if "
                "neither it nor a function of its module that it calls names backward: call it by that name there"
            )
        if self.loss is not None:
            raise RuntimeError(
                "the step function calls model.backward twice: it may once for each micro-batch; add the losses up"
            )
        self.loss = _weigh_outputs(loss, gradients)

    def _wait(self) -> None:
        self._stop.acquire()
        if self._error is not None:
            raise self._error

    def _main(self) -> None:
        _here.body = self
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
    """Capture what torch keeps for each thread, as it is where this is called; another thread enters it."""
    gradients = torch.is_grad_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    kinds = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu")]

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if device is not None:
                stack.enter_context(torch.cuda.device(device))
            for kind, enabled, dtype in kinds:
                if enabled:
                    stack.enter_context(torch.autocast(kind, dtype))
            stack.enter_context(torch.set_grad_enabled(gradients))
            yield

    return entered


def current_body() -> StepBody | None:
    """Return the body of the thread that asks; None outside of step functions."""
    return getattr(_here, "body", None)
