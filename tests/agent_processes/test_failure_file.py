"""A program that says why it failed, where the container contract has a place for it, is quoted."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from everstep.agent.ranks import failure_file

from .node import Node


def test_the_programs_own_words_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "failure").write_text("x" * 5000)
    assert failure_file.read_failure_file(tmp_path / "failure") == "x" * failure_file.MAX_FAILURE_CHARS


def test_the_programs_own_words_are_text(tmp_path: Path) -> None:
    (tmp_path / "failure").write_bytes(b"\x1b[31mno data\x1b[0m\x00\n")
    assert failure_file.read_failure_file(tmp_path / "failure") == "no data"


def test_an_earlier_generation_is_not_quoted(tmp_path: Path) -> None:
    (tmp_path / "failure").write_text("old news")
    assert failure_file.read_failure_file(failure_file.remove_failure_file(tmp_path)) == ""


def test_no_file_is_no_message(tmp_path: Path) -> None:
    assert failure_file.read_failure_file(failure_file.remove_failure_file(tmp_path / "absent")) == ""


def test_nobody_waits_for_a_pipe_in_the_place_of_the_file(tmp_path: Path) -> None:
    """An agent that opens one would wait for ever, and its heartbeats with it."""
    os.mkfifo(tmp_path / "failure")

    def ask_and_tell() -> None:
        failure_file.read_failure_file(tmp_path / "failure")
        failure_file.write_failure_file(tmp_path, "exited with code 3", ())

    ended = threading.Thread(target=ask_and_tell, daemon=True)
    ended.start()
    ended.join(10)
    assert not ended.is_alive()


FOLLOW_UP = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:3021"


@pytest.mark.integration
async def test_a_rank_is_not_quoted_with_what_its_peer_said_about_losing_it(tmp_path: Path) -> None:
    """All ranks of a node share the one file. The rank that failed first has its own exception on stderr."""
    script = (
        "import os, pathlib, sys, time\n"
        "said = pathlib.Path(os.environ['SM_OUTPUT_FAILURE'])\n"
        "if os.environ['RANK'] == '0':\n"
        f"    said.parent.mkdir(parents=True, exist_ok=True); said.write_text({FOLLOW_UP!r}); sys.exit(1)\n"
        "while not said.exists() or not said.read_text(): time.sleep(0.01)\n"
        "raise ValueError('boom')\n"
    )
    async with Node(tmp_path, [sys.executable, "-c", script], procs=2) as node:
        await node.start()
        assert (await node.event("RankExited", rank=0))["message"] == FOLLOW_UP
        assert (await node.event("RankExited", rank=1))["message"] == "ValueError: boom"


@pytest.mark.integration
async def test_what_a_program_says_about_itself_is_quoted_before_its_exception(tmp_path: Path) -> None:
    script = (
        "import os, pathlib\n"
        "said = pathlib.Path(os.environ['SM_OUTPUT_FAILURE'])\n"
        "said.parent.mkdir(parents=True, exist_ok=True); said.write_text('the data set is empty')\n"
        "raise ValueError('boom')\n"
    )
    async with Node(tmp_path, [sys.executable, "-c", script]) as node:
        await node.start()
        assert (await node.event("RankExited"))["message"] == "the data set is empty"


@pytest.mark.integration
@pytest.mark.parametrize("stopped", [False, True])
async def test_a_volume_that_hangs_holds_up_neither_the_agent_nor_the_report_of_an_exit(
    tmp_path: Path, stopped: bool
) -> None:
    """`/opt/ml/output` may be a network volume: an agent that waits for one sends no heartbeats."""
    script = "import os, sys; sys.exit(3 + int(os.environ['RANK']))"
    async with Node(tmp_path, [sys.executable, "-c", script], procs=2, hung_failure_file=True) as node:
        await node.start()
        await node.event("Reading")
        if stopped:
            assert await node.stop() is None
        ends = {e["rank"]: e["exit_code"] for e in await node.exits(2)}
        assert ends == {0: 3, 1: 4} or (stopped and set(ends) == {0, 1})
        assert len(node.all("RankExited")) == 2
