"""Finds in a process's last lines why it ended, and tells an exception that ended it from one that it has survived."""

from __future__ import annotations

import re
from typing import NamedTuple

UNCAUGHT_CODE = 1  # with which Python ends after an exception that nobody caught
MAX_PAUSE_SECONDS = 2.0  # between a traceback and the exit with another code that a handler makes of it

_HEAD = "Traceback (most recent call last)"
# torch.distributed prefixes what is uncaught in a rank: `[rank3]: ValueError: boom`
_RANK = re.compile(r"^\[rank\d+\]: ")
# `ValueError: boom`, `torch.cuda.OutOfMemoryError: …`, `KeyboardInterrupt`
_EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Warning|Failure|Timeout|[A-Z]\w*)(?:: .*)?$")
# What `logging.exception` and its like write above the traceback of an exception that was caught.
_LOG_RECORD = re.compile(r"\b(?:WARN|WARNING|ERROR|CRITICAL|FATAL|EXCEPTION)\b")


class _LoggedException(NamedTuple):
    text: str
    last: bool  # nothing was written after it
    caught: bool  # it stands below a log record


def explain_exit(tail: tuple[str, ...], ending: str, code: int, signum: int | None, pause: float = 0.0) -> str:
    """Return the best single line about why a process ended with an error.

    Args:
        tail: Its last lines.
        ending: How it ended, in words.
        code: Its exit code, as a shell says it.
        signum: The signal that killed it, or None.
        pause: Seconds between the last of these lines and the end.

    Returns:
        The last exception, if the process can have ended by it; else `ending`, with the exception that came shortly
        before, or what the process said after it.
    """
    found = _find_exception(tuple(_RANK.sub("", line) for line in tail))
    if found is None:
        return ending
    if signum is None and code == UNCAUGHT_CODE:
        # `sys.exit("no data")` ends with the same code, and with its own words
        return f"{ending}: {tail[-1].strip()}" if found.caught and not found.last else found.text
    if signum is None and found.last and pause <= MAX_PAUSE_SECONDS:
        return f"{ending} after {found.text}"
    return ending if found.caught else f"{ending} after {found.text}"


def _find_exception(tail: tuple[str, ...]) -> _LoggedException | None:
    for index in range(len(tail) - 1, -1, -1):
        if tail[index].startswith(_HEAD):
            for at in range(index + 1, len(tail)):
                if not tail[at].startswith((" ", "\t")):
                    caught = index > 0 and _LOG_RECORD.search(tail[index - 1]) is not None
                    return _LoggedException(tail[at].strip(), at == len(tail) - 1, caught)
            return None
    # The traceback's head may have scrolled out: its frames and the line after them have not.
    for index in range(len(tail) - 1, 0, -1):
        if tail[index - 1].startswith("    ") and _EXCEPTION.match(tail[index]) and _has_frame(tail[:index]):
            return _LoggedException(tail[index].strip(), index == len(tail) - 1, caught=False)
    return None


def _has_frame(lines: tuple[str, ...]) -> bool:
    return any(line.startswith('  File "') for line in lines)
