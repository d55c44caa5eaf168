"""Writes what an agent leaves behind: the termination message, the failure file, and its own few log lines."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, Callable

from everstep.agent.ranks.logs import drop_control_codes
from everstep.agent.system.threads import in_thread_when_possible
from everstep.agent.wire.protocol import bounded_tail

MAX_TERMINATION_BYTES = 4096
MAX_FAILURE_CHARS = 1024  # what SageMaker shows of /opt/ml/output/failure
FAILURE_FILE_SECONDS = 2.0  # seconds for what takes milliseconds, unless its volume hangs
CANNOT_RUN = 120


_write: Callable[[str], None] | None = None


def route_log_lines(write: Callable[[str], None] | None) -> None:
    """Send log lines this way from now on: a log that nobody reads must not stop the agent. None: straight to
    stderr."""
    global _write
    _write = write


def log_line(text: str) -> None:
    """Write one line for the people who read the pod's log."""
    if _write is not None:
        _write(f"everstep: {text}")
    else:
        print(f"everstep: {text}", file=sys.stderr, flush=True)


def safe_exit_code(code: int) -> int:
    """Return an exit code that is not 120, which means "the agent cannot run in this image"; Python itself uses it when
    a flush at exit fails."""
    return 1 if code == CANNOT_RUN else code & 0xFF


def encode_termination_message(word: dict[str, Any]) -> bytes:
    """Return JSON of at most 4,096 bytes: what tells least goes first, from the start of the log tail to the message.

    A ledger stays: it is short, and what it tells nobody else can tell any more.
    """
    word = dict(word)
    word["logTail"] = bounded_tail(word.get("logTail", ()))
    while True:
        data = json.dumps(word, separators=(",", ":")).encode()
        if len(data) <= MAX_TERMINATION_BYTES:
            return data
        if word["logTail"]:
            word["logTail"] = word["logTail"][1:]
        else:
            word["message"] = str(word.get("message", ""))[: len(str(word.get("message", ""))) // 2]


def write_termination_message(path: Path, word: dict[str, Any]) -> None:
    try:
        path.write_bytes(encode_termination_message(word))
    except OSError as error:
        log_line(f"cannot write {path}: {error.strerror}")


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
