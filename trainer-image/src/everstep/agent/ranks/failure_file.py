"""The file in which a job says why it failed, `/opt/ml/output/failure`: the user's program, or the agent for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from everstep.agent.system.agent_log import log_line
from everstep.agent.system.threads import in_thread_when_possible

from .logs import drop_control_codes

MAX_FAILURE_CHARS = 1024  # what SageMaker shows of it
FAILURE_FILE_SECONDS = 2.0  # seconds for what takes milliseconds, unless its volume hangs


def write_failure_file(output: Path, message: str, log_tail: tuple[str, ...]) -> None:
    """Write `/opt/ml/output/failure`, unless the user's own program has said there why it failed."""
    path = output / "failure"
    try:
        if path.exists() and (path.stat().st_size > 0 or not path.is_file()):  # to open a pipe is to wait for a reader
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "\n".join([message, *log_tail])[:MAX_FAILURE_CHARS]
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        log_line(f"cannot write {path}: {error.strerror}")


def remove_failure_file(output: Path) -> Path:
    """Remove what an earlier generation said, and return the path, for the next to say something."""
    path = output / "failure"
    try:
        path.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        log_line(f"cannot remove {path}: {error.strerror}")
    return path


def read_failure_file(path: Path) -> str:
    """Return what the user's program itself said about its failure: the first 1,024 characters; nothing if it did
    not."""
    try:
        if not path.is_file():  # to open a pipe is to wait for a writer
            return ""
        with path.open("rb") as file:
            text = drop_control_codes(file.read(4 * MAX_FAILURE_CHARS).decode(errors="replace"))
            return text[:MAX_FAILURE_CHARS].strip()
    except OSError:
        return ""


class FailureFile:
    """A reader of the failure file of one generation. The file may be on a network volume of the user's: one that hangs
    must stop neither heartbeats nor the report of an exit."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hangs = False  # ranks often fail together: one of them has waited for all

    async def read(self) -> str:
        """Return what `read_failure_file` does; nothing where the volume does not answer in time."""
        if self._hangs:
            return ""
        try:
            reading = in_thread_when_possible(lambda: read_failure_file(self._path), "failure-file")
            return await asyncio.wait_for(reading, FAILURE_FILE_SECONDS)
        except asyncio.TimeoutError:
            if not self._hangs:
                log_line(f"cannot read {self._path}: its volume did not answer within {FAILURE_FILE_SECONDS:g} s")
            self._hangs = True
            return ""
