"""Why a process ended: by the exception that stands in its log, or by something else after that was caught."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from everstep.agent.ranks.tracebacks import explain_exit

from .node import Node

HEAD, FRAME = "Traceback (most recent call last):", '  File "t.py", line 9, in f'


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ([HEAD, FRAME, "    boom()", "ValueError: boom"], "ValueError: boom"),
        ([HEAD, FRAME, "KeyError: 1", "", HEAD, FRAME, "RuntimeError: last"], "RuntimeError: last"),
        ([FRAME, "    f()", "RecursionError: too deep"], "RecursionError: too deep"),
        ([HEAD, FRAME, "ValueError: boom", "1 leaked semaphore objects to clean up at shutdown"], "ValueError: boom"),
        ([f"[rank3]: {line}" for line in (HEAD, FRAME, "ValueError: boom")], "ValueError: boom"),
        ([f"[rank3]: {line}" for line in (FRAME, "    f()", "ValueError: boom")], "ValueError: boom"),
        (["all is well"], "exited with code 1"),
        ([], "exited with code 1"),
    ],
)
def test_the_cause_is_the_last_exception(tail: list[str], expected: str) -> None:
    assert explain_exit(tuple(tail), "exited with code 1", 1, None) == expected


CAUGHT = ("ERROR:root:cannot read, tried again", HEAD, FRAME, "KeyError: 'retry'")
PRINTED = CAUGHT[1:]


@pytest.mark.parametrize(
    ("tail", "code", "signum", "pause", "expected"),
    [
        (CAUGHT, 1, None, 0.0, "KeyError: 'retry'"),  # its handler may have ended the process
        (CAUGHT, 2, None, 0.0, "E after KeyError: 'retry'"),
        (CAUGHT, 3, None, 60.0, "E"),
        ((*CAUGHT, "epoch 2"), 3, None, 0.0, "E"),
        ((*CAUGHT, "no data found"), 1, None, 0.0, "E: no data found"),
        (CAUGHT, 139, 11, 0.0, "E"),
        (CAUGHT, 137, 9, 60.0, "E"),
        (PRINTED, 139, 11, 0.0, "E after KeyError: 'retry'"),  # many an uncaught one is followed by a crash at the end
    ],
)
def test_an_exception_that_was_caught_is_not_the_cause_of_a_later_failure(
    tail: tuple[str, ...], code: int, signum: int | None, pause: float, expected: str
) -> None:
    assert explain_exit(tail, "E", code, signum, pause) == expected


CATCH = "import ctypes, logging, os, sys\ntry:\n    {}['retry']\nexcept KeyError:\n    logging.exception('again')\n"


@pytest.mark.integration
@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("print('on', file=sys.stderr); os._exit(3)", "exited with code 3"),
        ("ctypes.string_at(0)", "killed by SIGSEGV"),
        ("sys.exit('no data found')", "exited with code 1: no data found"),
        ("raise ValueError('boom')", "ValueError: boom"),
    ],
)
async def test_a_script_that_went_on_is_quoted_with_its_own_end(tmp_path: Path, end: str, expected: str) -> None:
    async with Node(tmp_path, [sys.executable, "-c", CATCH + end]) as node:
        await node.start()
        assert (await node.event("RankExited"))["message"] == expected


@pytest.mark.integration
async def test_colours_and_other_words_to_a_terminal_reach_no_status(tmp_path: Path) -> None:
    """Python 3.13 colours tracebacks under FORCE_COLOR, and a script may print what clears the reader's screen."""
    words = (
        "\x1b[31mTraceback (most recent call last):\x1b[0m\n"
        '  File \x1b[35m"t.py"\x1b[0m, line 1\n'
        "\x1b]0;title\x07\x1b[1;35mValueError\x1b[0m: \x00b\x1b[2Joo\x1bcm\x9b\x08 é\n"
    )
    script = f"import sys; sys.stderr.write({words!r}); sys.exit(1)"
    async with Node(tmp_path, [sys.executable, "-c", script], environ={"PYTHONUTF8": "1"}) as node:
        await node.start()
        ended = await node.event("RankExited")
    assert ended["message"] == "ValueError: boom é"
    assert ended["log_tail"] == ["Traceback (most recent call last):", '  File "t.py", line 1', "ValueError: boom é"]
