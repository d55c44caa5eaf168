"""Logs: tagged by rank, whole lines, never in a rank's way."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from everstep.agent.ranks.logs import MAX_LINE_BYTES

from .node import Node

pytestmark = pytest.mark.integration


async def test_lines_of_several_ranks_are_tagged_and_whole(tmp_path: Path, python: str) -> None:
    script = "import os, sys\nfor i in range(500): print('line', i, 'x' * (i % 97)); print('err', i, file=sys.stderr)\n"
    script += "print('no newline', end='')\n"
    async with Node(tmp_path, [sys.executable, "-u", "-c", script], procs=3, python=python) as node:
        await node.start()
        await node.until(lambda: len(node.all("RankExited")) == 3, "all exits")
        await node.stop()
    lines = node.logged().splitlines()
    for rank in range(3):
        own = [line.partition("] ")[2] for line in lines if line.startswith(f"[rank {rank}] ")]
        assert [line for line in own if line.startswith("line")] == [f"line {i} {'x' * (i % 97)}" for i in range(500)]
        assert [line for line in own if line.startswith("err")] == [f"err {i}" for i in range(500)]
        assert "no newline" in own
    assert len(lines) == 3 * 1001


async def test_a_job_of_one_rank_is_not_tagged(tmp_path: Path) -> None:
    async with Node(tmp_path, ["sh", "-c", "echo plain; echo wrong >&2; exit 3"]) as node:
        await node.start()
        ended = await node.event("RankExited")
        await node.stop()
    assert sorted(node.logged().splitlines()) == ["plain", "wrong"]
    assert (ended["message"], ended["log_tail"]) == ("exited with code 3", ["wrong"])


async def test_a_long_line_is_split_and_the_tail_is_bounded(tmp_path: Path) -> None:
    script = f"import sys\nsys.stdout.write('a' * {3 * MAX_LINE_BYTES + 5})\nsys.stdout.write(chr(10))\n"
    script += "for i in range(30): print('e' * 500, i, file=sys.stderr)\nsys.exit(1)\n"
    async with Node(tmp_path, [sys.executable, "-c", script], procs=1) as node:
        await node.start()
        ended = await node.event("RankExited")
        await node.stop()
    lines = [line for line in node.logged().splitlines() if line.startswith("a")]
    assert "".join(lines) == "a" * (3 * MAX_LINE_BYTES + 5)
    assert max(map(len, lines)) <= MAX_LINE_BYTES
    assert (len(ended["log_tail"]), max(map(len, ended["log_tail"]))) == (20, 300)


async def test_a_line_that_takes_long_is_one_line_and_a_progress_bar_is_shown(tmp_path: Path) -> None:
    """A line without an end is shown in its last state once nothing more is written; one that goes on is kept whole."""
    script = (
        "import sys, time\n"
        "for i in range(25): sys.stdout.write('x'); sys.stdout.flush(); time.sleep(0.1)\n"
        "sys.stdout.write('\\n10%\\r50%\\r'); sys.stdout.flush(); time.sleep(600)\n"
    )
    async with Node(tmp_path, [sys.executable, "-c", script]) as node:
        await node.start()
        await node.until(lambda: "50%" in node.logged(), "progress bar")
        assert node.logged().splitlines() == ["x" * 25, "50%"]


async def test_a_blocked_log_never_blocks_a_rank_and_says_what_it_lost(tmp_path: Path, python: str) -> None:
    """Nobody reads the agent's stdout while a rank writes 40 MB; then somebody does."""
    reader, writer = os.pipe()
    script = "import sys\nfor i in range(400_000): sys.stdout.write(f'{i:099d}\\n')\nsys.stdout.flush()\n"
    script += "import time; open(sys.argv[1], 'w').close(); time.sleep(600)\n"
    written = tmp_path / "written"
    command = [sys.executable, "-c", script, str(written)]
    async with Node(tmp_path, command, nodes=2, python=python, stdout=writer) as node:
        os.close(writer)
        await node.start()
        await node.until(written.exists, "end of writing")
        loop = asyncio.get_running_loop()
        collected = bytearray()

        def read_all() -> None:
            while data := os.read(reader, 1 << 20):
                collected.extend(data)

        reading = loop.run_in_executor(None, read_all)
        await node.stop()
    await asyncio.wait_for(reading, 30)
    os.close(reader)
    lines = collected.decode().splitlines()
    kept = [line for line in lines if "dropped" not in line]
    lost = sum(int(line.split()[4]) for line in lines if "dropped" in line)
    assert lost > 0
    assert all(line.startswith("[rank 0] ") for line in lines)
    assert len(kept) + lost == 400_000


async def test_a_slow_reader_gets_the_last_lines_of_a_long_log(tmp_path: Path) -> None:
    """They say why a rank failed. `everstep run` reads some megabytes a second, and an agent ends in less than that."""
    reader, writer = os.pipe()
    script = "import sys\nfor i in range(60_000): sys.stdout.write(f'{i:099d}\\n')\n"
    async with Node(tmp_path, [sys.executable, "-c", script], stdout=writer) as node:
        os.close(writer)
        collected = bytearray()

        def read_slowly() -> None:
            while data := os.read(reader, 1 << 16):
                collected.extend(data)
                time.sleep(0.04)

        await node.start()
        await node.exits(1)
        reading = asyncio.get_running_loop().run_in_executor(None, read_slowly)
    await asyncio.wait_for(reading, 60)
    os.close(reader)
    assert collected.decode().splitlines()[-1] == f"{59_999:099d}"


async def test_eight_ranks_of_ten_thousand_lines_a_second_cost_little(tmp_path: Path) -> None:
    seconds = 2
    script = (
        "import sys, time\n"
        "start = time.monotonic()\n"
        f"for tick in range({seconds} * 50):\n"
        "    lines = (f'step {tick} {i} loss=0.123456 lr=0.001 some more words to be read\\n' for i in range(200))\n"
        "    sys.stdout.write(''.join(lines))\n"
        "    sys.stdout.flush()\n"
        "    time.sleep(max(0, start + tick / 50 - time.monotonic()))\n"
    )
    async with Node(tmp_path, [sys.executable, "-c", script], procs=8) as node:
        await node.start()
        begun = time.monotonic()
        lag, cpu = await node.call("lag", seconds=seconds)
        await node.until(lambda: len(node.all("RankExited")) == 8, "all exits")
        elapsed = time.monotonic() - begun
        await node.stop()
    assert node.logged().count("\n") == 8 * seconds * 10_000
    print(
        f"8 ranks x 10,000 lines/s for {elapsed:.1f} s: {cpu:.2f} s of CPU, worst delay of the loop {1000 * lag:.0f} ms"
    )
    assert lag < elapsed  # a loop that waits for a reader of its log stands still all the time
