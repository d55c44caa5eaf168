"""`everstep.progress(step, total=…, loss=…)`: one call feeds the job's status, its metrics and the hang detector.

Outside of an everstep job it does nothing. It never blocks and never raises: a full pipe or a missing agent loses the
update, not the step. Any program can do the same without this library:
`echo "step=12 total=100 loss=0.5" > "$EVERSTEP_PROGRESS"`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import types
from collections.abc import Iterator
from typing import Any

PHASES = ("startup", "train", "checkpoint", "eval")
_STACKS_SIGNAL = 59  # a real-time one, which no program has for anything else
_MAX_LINE = 4096  # PIPE_BUF: a write up to here is never torn by another process's

_path: str | None = None
_fd: int | None = None
_phase = "train"  # that the script is in
_step: int | None = None  # that it has reported last
_untold: dict[str, int | str] = {}  # of checkpoints: what a full pipe had no room for


def progress(step: int, total: int | None = None, phase: str = "train", **metrics: float) -> None:
    """Reports that this rank has done `step` of `total` steps.

    `phase` is one of PHASES; time in any other phase than "train" is no hang. `metrics` are numbers (anything that
    `float()` takes, so a one-element tensor too, which waits for its device); those that are none are left out.
    """
    global _phase, _step
    _phase = phase
    try:
        step = _step = int(step)
        fd = _open()
        if fd is not None:
            _tell_words(fd)
            os.write(fd, _line(step, total, phase, metrics))
    except Exception:  # noqa: BLE001, S110, RUF100 - a report must never end a training run
        pass


def report_checkpoint(**words: int | str) -> None:
    """Report what the job's status says of checkpoints; the checkpoint library calls it.

    What a full pipe has no room for is told by the next call, of progress() too: nothing else tells of it again.

    Args:
        words: `checkpoint`: the step of the newest one that is stored; `checkpoint_bytes`: its size; `stall_ms`: how
            long it held up training; `checkpoints_failed`: saves that failed since then; `restored`: the step that
            training goes on from, with `restored_from` (memory, peer or store), `restored_ms` and `restored_over`, the
            number of newer ones that are damaged; `save_every`: seconds between two saves; `trained_step`: the last
            step that is trained; `progress_step`: get_last_step() at that moment; `takes_requests`: 1 where a request
            to save is met at the next one; `phase`: one of PHASES, while training waits for a checkpoint.
    """
    with contextlib.suppress(Exception):  # a report must never end a training run
        fd = _open()
        if fd is not None:
            _untold.update(words)
            _tell_words(fd)


def get_last_step() -> int | None:
    """Return the step that this process has reported last by progress(); None where it has reported none."""
    return _step


@contextlib.contextmanager
def reporting_checkpoint_phase() -> Iterator[None]:
    """Report that this rank waits for a checkpoint, which is no hang; afterwards, the phase that the script is in."""
    report_checkpoint(phase="checkpoint")
    try:
        yield
    finally:
        report_checkpoint(phase=_phase)


def _open() -> int | None:
    """The FIFO of this process's job, opened once and again when the variable changes (a launcher forked us)."""
    global _path, _fd
    path = os.environ.get("EVERSTEP_PROGRESS")
    if path != _path or (path and _fd is None):
        if _fd is not None:
            os.close(_fd)
        _path, _fd = path, None
        _untold.clear()  # it is of another job
        if path:
            # Without O_NONBLOCK this would wait for an agent that reads; with it, none is an error.
            _fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            _offer_stacks(_fd)
    return _fd


def _tell_words(fd: int) -> None:
    global _untold
    words, _untold = _untold, {}  # another thread may report meanwhile
    if not words:
        return
    try:
        os.write(fd, (" ".join(f"{name}={value}" for name, value in words.items()) + "\n").encode())
    except OSError:
        _untold = {**words, **_untold}
        raise


def _offer_stacks(fd: int) -> None:
    """Tell the agent by which signal this process writes the stacks of its threads, for the case that it hangs."""
    with contextlib.suppress(Exception):
        if signal.getsignal(_STACKS_SIGNAL) == signal.SIG_DFL:
            faulthandler.register(_STACKS_SIGNAL, file=2, all_threads=True)
            os.write(fd, f"stacks={int(_STACKS_SIGNAL)}:{os.getpid()}\n".encode())


def _line(step: int, total: int | None, phase: str, metrics: dict[str, float]) -> bytes:
    words = [f"step={step}", f"phase={phase}"]
    if total is not None:
        words.insert(1, f"total={int(total)}")
    size = sum(map(len, words)) + len(words)
    for name, value in metrics.items():
        try:
            word = f"{name}={float(value):.9g}"
        except (TypeError, ValueError):
            continue
        size += len(word.encode()) + 1
        if size > _MAX_LINE:
            break
        words.append(word)
    return (" ".join(words) + "\n").encode()


class _Callable(types.ModuleType):
    """`everstep.progress` is this module as well as the function: importing a submodule binds its name in the package,
    whatever the package had under that name. So the module itself can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        progress(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
