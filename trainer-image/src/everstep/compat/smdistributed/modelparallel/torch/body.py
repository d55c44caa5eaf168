"""One run of a step function for one micro-batch, which stands still where it calls the model.

The pipeline needs what the model is called with before the first forward, and goes on with the function once the
model's output is there: the function runs in a thread of its own, and exactly one of the two runs at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

_here = threading.local()


class _Ended(BaseException):
    """Unwinds a function whose output is not needed on this rank."""


class Body:
    """`run` until the model is called: then `arguments` are what with. `resume` with its output runs the rest."""

    def __init__(self, function: Callable[[], Any], training: bool) -> None:
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.autocast: Any = None  # the type of the function's autocast around the call, None without
        self.loss: Any = None
        self.returned: Any = None
        self._function, self._training = function, training
        self._error: BaseException | None = None
        self._output: Any = None
        self._ended = False
        self._go, self._stop = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._main, daemon=True, name="step function")

    def run(self) -> None:
        """Until it calls the model, or returns. Its errors come out here."""
        self._gradients = torch.is_grad_enabled()
        self._thread.start()
        self._wait()

    def resume(self, output: Any) -> None:
        """To its end. Its errors come out here."""
        self._output = output
        self._go.release()
        self._wait()

    def end(self) -> None:
        """Unwinds it, if it stands."""
        if self._thread.is_alive():
            self._ended = True
            self._go.release()
            self._thread.join()

    def model_called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In the thread: stands still until the output is there."""
        if self.arguments is not None:
            raise RuntimeError("the step function calls the model twice: it may once for each micro-batch")
        self.arguments = args, kwargs
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            kind = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
            self.autocast = torch.get_autocast_dtype(kind)
        self._stop.release()
        self._go.acquire()
        if self._ended:
            raise _Ended
        return self._output

    def backward_called(self, loss: Any, gradients: Any) -> None:
        """In the thread: notes what is differentiated."""
        if not self._training:
            raise RuntimeError("model.backward was called in a step function that is not known to call it")
        if self.loss is not None:
            raise RuntimeError("the step function calls model.backward twice: it may once for each micro-batch")
        self.loss = loss if gradients is None else (loss * gradients).sum()

    def _wait(self) -> None:
        self._stop.acquire()
        if self._error is not None:
            raise self._error

    def _main(self) -> None:
        _here.body = self
        try:
            with torch.set_grad_enabled(self._gradients):
                self.returned = self._function()
        except _Ended:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._stop.release()


def body() -> Body | None:
    """That of the thread that asks; None outside of step functions."""
    return getattr(_here, "body", None)
