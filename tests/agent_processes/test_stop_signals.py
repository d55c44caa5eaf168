"""A stop is one TERM to whatever a user's wrapper runs, however the wrapper runs it."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path

import pytest

from .node import Node

pytestmark = pytest.mark.integration

# Saves at a TERM and prints meanwhile, as any training that is told to stop; a second TERM adds a line.
SAVES = """
import pathlib, signal, sys, time
def save(*_):
    with open(sys.argv[1], "a") as told:
        told.write("TERM\\n")
    print("saving", flush=True)
    time.sleep(0.7)
    print("still", flush=True)
    pathlib.Path(sys.argv[1] + ".done").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
while True:
    time.sleep(0.05)
"""
# As `conda run` and many a script of one's own: it has no handler, and passes on what the training prints.
LAUNCHER = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
for line in child.stdout:
    sys.stdout.buffer.write(line)
    sys.stdout.flush()
sys.exit(child.wait())
"""


@pytest.mark.parametrize("how", ["launcher", "terminal", "shell of a launcher", "substitution", "descriptor"])
async def test_a_launcher_that_reads_what_a_rank_prints_outlives_it(tmp_path: Path, how: str) -> None:
    told, done = tmp_path / "told", tmp_path / "told.done"
    train = [sys.executable, "-c", SAVES, str(told)]
    command = [sys.executable, "-c", LAUNCHER, *train]
    if how == "terminal":
        command = [sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])", *train]
    elif how == "shell of a launcher":
        command = ["bash", "-c", f"{shlex.join(command)}; true"]
    elif how == "substitution":
        command = ["bash", "-c", f"while read -r line; do echo $line; done < <({shlex.join(train)}); true"]
    elif how == "descriptor":
        command = ["bash", "-c", f"exec 7< <({shlex.join(train)}); while read -r -u 7 line; do echo $line; done; true"]
    async with Node(tmp_path, command) as node:
        await node.start()
        await node.until(lambda: "up" in node.logged(), "start of the script")
        assert await node.stop(grace=30) is None
        assert done.exists()
        assert told.read_text() == "TERM\n"
        assert "still" in node.logged()


@pytest.mark.parametrize(
    "script",
    [
        "trap 'kill -TERM $child' TERM; {train} & child=$!; wait $child",
        "trap 'kill -TERM $child; wait $child' TERM; {train} & child=$!; wait $child; wait $child",
        "trap 'kill $(jobs -p)' EXIT; {train} & wait",
        "trap 'trap - TERM; kill 0' TERM; {train} & wait; wait",
        "trap 'kill -TERM $child; wait $child' TERM; ({train}; true) & child=$!; wait $child",
        "trap 'true' TERM; {train} & wait; wait",
        "trap 'exit 3' TERM; {train} & wait",
        "trap 'rm -f /nonexistent' EXIT; {train}",
    ],
    ids=["kill", "kill and wait", "exit", "group", "subshell", "nobody tells it", "leaves it", "foreground"],
)
@pytest.mark.parametrize("shell", ["bash", "sh"])
async def test_what_a_shell_with_a_trap_runs_hears_of_a_stop_once(tmp_path: Path, shell: str, script: str) -> None:
    """By the trap or by the agent; libraries take a second TERM for impatience, and end in the middle of a save."""
    told, done = tmp_path / "told", tmp_path / "told.done"
    text = script.format(train=shlex.join([sys.executable, "-c", SAVES, str(told)]))
    async with Node(tmp_path, [shell, "-c", text.replace("$", "$$")]) as node:
        await node.start()
        await node.until(lambda: "up" in node.logged(), "start of the script")
        assert await node.stop(grace=30) is None
        assert done.exists()
        assert told.read_text() == "TERM\n"


async def test_nobody_who_stood_still_for_a_trap_is_left_so(tmp_path: Path) -> None:
    """A shell whose trap takes its time: what it runs goes on, and hears of the signal, before the trap has ended."""
    script = "import signal, time; signal.signal(15, lambda *_: print('told', flush=True)); print('up', flush=True)\n"
    script += "while True: time.sleep(0.05); print('on', flush=True)"
    text = f"trap 'sleep 600' TERM; {shlex.join([sys.executable, '-c', script])} & wait"
    async with Node(tmp_path, ["bash", "-c", text]) as node:
        await node.start()
        await node.until(lambda: "on" in node.logged(), "start of the script")
        await node.call("signal", signum=int(signal.SIGTERM))
        await node.until(lambda: "on" in node.logged().partition("told")[2], "that it goes on")
        assert await node.stop() is None
