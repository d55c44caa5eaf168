"""A rank that hangs writes its stacks to the log; one that cannot is not killed by the attempt."""

from __future__ import annotations

import sys
from pathlib import Path

from .node import SOURCE, Node

HANGS = f"""
import sys
sys.path.insert(0, {str(SOURCE)!r})
import threading, everstep

def waits_for_nobody() -> None:
    everstep.progress(3)
    threading.Event().wait()

waits_for_nobody()
"""
SHELL = "echo step=3 > $EVERSTEP_PROGRESS; echo stacks=59:$$ > $EVERSTEP_PROGRESS; sleep 600"


async def test_a_rank_with_the_library_writes_its_stacks(tmp_path: Path) -> None:
    async with Node(tmp_path, [sys.executable, "-c", HANGS]) as node:
        await node.start()
        await node.event("RankProgressed")
        await node.call("dump_stacks")
        await node.until(lambda: "in waits_for_nobody" in node.logged(), "stacks")
        assert node.all("RankExited") == []


async def test_a_rank_below_a_shell_writes_its_stacks(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    command = ["sh", "-c", f"{sys.executable} {tmp_path / 'hangs.py'}; exit 0"]
    async with Node(tmp_path, command) as node:
        await node.start()
        await node.event("RankProgressed")
        await node.call("dump_stacks")
        await node.until(lambda: "in waits_for_nobody" in node.logged(), "stacks")


async def test_a_rank_that_handles_no_such_signal_is_not_killed_by_it(tmp_path: Path) -> None:
    async with Node(tmp_path, ["sh", "-c", SHELL]) as node:
        await node.start()
        await node.event("RankProgressed")
        await node.call("dump_stacks")
        await node.until(lambda: "1 of 1 ranks of this node cannot dump their stacks" in node.logged(), "stacks")
        assert node.all("RankExited") == []
