"""A stop reaches what a rank runs, once, with the grace that it has."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from pathlib import Path

import pytest

from .node import Node

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("shell", ["sh -c", "script", "launcher", "script of a launcher"])
async def test_term_reaches_what_a_shell_or_a_launcher_runs_and_its_grace_is_kept(tmp_path: Path, shell: str) -> None:
    """Both die of the TERM at once; the checkpoint that their child then writes must still find its time.

    The launcher is as `accelerate launch` of one process: it waits for a child of its own, and has no handler."""
    script = (
        "import signal, sys, time, pathlib\n"
        "def save(*_):\n"
        "    time.sleep(0.5); pathlib.Path(sys.argv[1]).write_text('saved'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save); print('up', flush=True); time.sleep(600)\n"
    )
    saved = tmp_path / "saved"
    command = ["sh", "-c", f"{sys.executable} -c \"$0\" '{saved}' && true", script]
    train = [sys.executable, "-c", script, str(saved)]
    if "launcher" in shell:
        launch = "import subprocess, sys; child = subprocess.Popen(sys.argv[1:]); sys.exit(child.wait())"
        command = train = [sys.executable, "-c", launch, *train]
    if "script" in shell:  # the kernel names its process after the file
        file = tmp_path / "train.sh"
        file.write_text(f"#!/bin/sh\n{shlex.join(train)} && true\n")
        file.chmod(0o755)
        command = [str(file)]
    async with Node(tmp_path, command) as node:
        await node.start()
        await node.until(lambda: "up" in node.logged(), "start of the script")
        assert await node.stop(grace=30) is None
        assert saved.read_text() == "saved"


@pytest.mark.parametrize(
    "pipeline",
    [
        '"$@" 2>&1 | tee "{log}"',
        '"$@" 2>&1 | sed -u "s/^/said /" | cat -u | tee "{log}"',
        'exec > >(tee "{log}") 2>&1; "$@"; true',
        'mkfifo "{log}.fifo"; tee "{log}" < "{log}.fifo" & "$@" > "{log}.fifo" 2>&1; true',
    ],
    ids=["tee", "filters", "substitution", "named"],
)
async def test_who_reads_what_a_rank_prints_hears_nothing_of_a_stop(tmp_path: Path, pipeline: str) -> None:
    """A script that prints while it saves would fail by the broken pipe, and its last checkpoint with it."""
    script = (
        "import signal, sys, time, pathlib\n"
        "def save(*_):\n"
        "    print('saving', flush=True); time.sleep(0.5); print('still', flush=True)\n"
        "    pathlib.Path(sys.argv[1]).write_text('saved'); print('saved', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save); print('up', flush=True); time.sleep(600)\n"
    )
    saved, log = tmp_path / "saved", tmp_path / "log"
    command = ["bash", "-c", pipeline.format(log=log), "bash", sys.executable, "-c", script, str(saved)]
    async with Node(tmp_path, command) as node:
        await node.start()
        await node.until(lambda: "up" in node.logged(), "start of the script")
        assert await node.stop(grace=30) is None
        assert saved.read_text() == "saved"
        assert [line.split()[-1] for line in log.read_text().splitlines()] == ["up", "saving", "still", "saved"]


async def test_a_program_that_reads_from_another_one_is_told_to_stop(tmp_path: Path) -> None:
    """A rank in a pipe is no filter of the one that feeds it: `yes | train` would else go on until the KILL."""
    script = "import sys, pathlib; print('up', flush=True)\nfor line in sys.stdin: pass\nimport time; time.sleep(600)"
    command = ["bash", "-c", 'yes | "$@"', "bash", sys.executable, "-c", script]
    async with Node(tmp_path, command) as node:
        await node.start()
        await node.until(lambda: "up" in node.logged(), "start of the script")
        started = asyncio.get_running_loop().time()
        assert await node.stop(grace=600) is None
        assert asyncio.get_running_loop().time() - started < 300


async def test_a_filter_that_does_not_end_holds_no_stop_up(tmp_path: Path) -> None:
    """Something that a rank leaves behind may hold the pipe open, for ever."""
    script = (
        "import signal, subprocess, sys, time\n"
        "subprocess.Popen(['sleep', '600'])\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True); time.sleep(600)\n"
    )
    async with Node(tmp_path, ["bash", "-c", '"$@" | cat -u', "bash", sys.executable, "-c", script]) as node:
        await node.start()
        await node.until(lambda: "up" in node.logged(), "start of the script")
        started = asyncio.get_running_loop().time()
        assert await node.stop(grace=600) is None
        assert asyncio.get_running_loop().time() - started < 300


async def test_what_a_rank_with_a_handler_runs_hears_nothing_of_a_stop(tmp_path: Path) -> None:
    """Its data loader workers: without them it cannot finish the step before its last checkpoint."""
    script = (
        "import signal, subprocess, sys, time, pathlib\n"
        "worker = subprocess.Popen(['sleep', '600'])\n"
        "def save(*_):\n"
        "    time.sleep(0.5); pathlib.Path(sys.argv[1]).write_text(str(worker.poll())); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save); print('up', flush=True); time.sleep(600)\n"
    )
    saved = tmp_path / "saved"
    async with Node(tmp_path, [sys.executable, "-c", script, str(saved)]) as node:
        await node.start()
        await node.until(lambda: "up" in node.logged(), "start of the script")
        assert await node.stop(grace=30) is None
        assert saved.read_text() == "None"


async def test_a_helper_that_ignores_term_has_no_grace_of_its_own(tmp_path: Path) -> None:
    """Its rank has no handler and dies at once: to wait for the helper would make every restart that much longer."""
    helper = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    script = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {helper!r}]); time.sleep(600)"
    async with Node(tmp_path, [sys.executable, "-c", script]) as node:
        await node.start()
        await node.until(lambda: "up" in node.logged(), "the helper")
        assert await node.call("signal", signum=signal.SIGTERM) == 1
        assert (await node.event("RankExited"))["signal"] == signal.SIGTERM
        assert await node.stop(grace=30) is None


@pytest.mark.parametrize("who", ["script", "program"])
async def test_what_a_shell_runs_keeps_its_grace_though_it_ignores_term(tmp_path: Path, who: str) -> None:
    """A script with `trap '' TERM` waits for what it runs, which has a handler; a program may end with its epoch."""
    saved = tmp_path / "saved"
    if who == "script":
        handler = f"import pathlib, sys, time; time.sleep(0.5); pathlib.Path({str(saved)!r}).touch(); sys.exit(0)"
        train = f"import signal\ndef save(*_):\n    {handler}\nsignal.signal(15, save)\n"
        train += "print('up', flush=True); signal.sigtimedwait([], 600)"
        run = ["sh", "-c", f"trap '' TERM; {shlex.join([sys.executable, '-c', train])}; true"]
    else:
        train = "import pathlib, signal, sys, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\n"
        train += "while os.getppid() == parent: time.sleep(0.01)\n"
        train += f"time.sleep(0.5); pathlib.Path({str(saved)!r}).touch()"
        run = [sys.executable, "-c", f"import os; parent = os.getppid(); {train}"]
    async with Node(tmp_path, ["sh", "-c", f"{shlex.join(run)}; true"]) as node:
        await node.start()
        await node.until(lambda: "up" in node.logged(), "start of the script")
        assert await node.stop(grace=30) is None
        assert saved.exists()


@pytest.mark.parametrize("shell", [False, True], ids=["program", "shell"])
async def test_ranks_hear_of_a_stop_where_the_kernel_does_not_tell_what_they_handle(
    tmp_path: Path, shell: bool
) -> None:
    """As in a sandbox of gVisor, whose /proc/<pid>/status has no masks of signals."""
    script = "import signal, sys, time\nsignal.signal(15, lambda *_: print('saved', flush=True) or sys.exit(0))\n"
    train = [sys.executable, "-c", f"{script}print('up', flush=True); time.sleep(600)"]
    command = ["sh", "-c", f"{shlex.join(train)}; true"] if shell else train
    async with Node(tmp_path, command, sandbox=True) as node:
        await node.start()
        await node.until(lambda: "up" in node.logged(), "start of the script")
        assert await node.stop(grace=30) is None
        await node.until(lambda: "saved" in node.logged(), "its last words")


async def test_a_stop_with_less_grace_replaces_one_with_more(tmp_path: Path) -> None:
    script = "import signal, time\nsignal.signal(15, lambda *_: print('term', flush=True))\nprint('up', flush=True)\n"
    script += "while True: time.sleep(60)\n"
    async with Node(tmp_path, [sys.executable, "-c", script]) as node:
        await node.start()
        await node.until(lambda: "up" in node.logged(), "start of the script")
        assert await node.stop(grace=0.3) is None
        ended = await node.event("RankExited")
        assert (ended["signal"], ended["message"]) == (signal.SIGKILL, "killed by SIGKILL")
        assert node.logged().count("term") == 1


async def test_signals_are_forwarded_to_every_rank(tmp_path: Path) -> None:
    command = ["sh", "-c", "trap 'echo got it; exit 0' USR1; echo up; while :; do sleep 0.05; done"]
    async with Node(tmp_path, command, procs=2) as node:
        await node.start()
        await node.until(lambda: node.logged().count("up") == 2, "start of both")
        await node.call("signal", signum=int(signal.SIGUSR1))
        for rank in (0, 1):
            await node.event("RankExited", rank=rank)
        await node.until(lambda: node.logged().count("got it") == 2, "answer of both")
