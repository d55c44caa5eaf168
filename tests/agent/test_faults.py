"""Faults of a pod and mistakes of the agent are named, and never charged to the application."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from everstep.agent.system.faults import explain_fault, is_pod_fault
from everstep.agent.system.tasks import Tasks
from everstep.checkpoint.format.keys import Attempt
from everstep.checkpoint.publish.fence import explain_fence

from .fakes import fence, gang, leader_of, until
from .laptop import SOURCE, Laptop

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="mounts need root")


def wrapper(folder: Path, agent: int, shell: str) -> str:
    """Return a program that stands for Python: for one of the agents, `shell` has to execute it ("$@")."""
    folder.mkdir(exist_ok=True)
    program, python = folder / "python", shlex.quote(sys.executable)
    case = f'case "$*" in *" --index {agent} "*) set -- {python} "$@"; {shell};; esac'
    program.write_text(f'#!/bin/sh\n{case}\nexec {python} "$@"\n')
    program.chmod(0o755)
    return str(program)


@needs_root
@pytest.mark.parametrize(("volume", "file"), [("ml", "hyperparameters.json"), ("run", "fence.json.new")])
def test_a_full_disk_is_not_the_applications_fault(tmp_path: Path, volume: str, file: str) -> None:
    """The pod is lost, with the file and what to do in the generation history, and the job waits for another."""
    full = tmp_path / "job/node-1" / volume
    full.mkdir(parents=True)
    (full / "input/config").mkdir(parents=True)
    fill = f"mount -t tmpfs -o size=64k full {full} && mkdir -p {full}/input/config"
    fill += f" {full}/input/data {full}/output/data {full}/output/intermediate {full}/model {full}/checkpoints"
    fill += f"; cat /dev/zero > {full}/filler 2>/dev/null"
    python = wrapper(tmp_path / "bin", 1, f"""exec unshare --mount sh -c '{fill}; exec "$@"' sh "$@" """)
    with Laptop(tmp_path / "job", ["sleep", "600"], python=python) as job:
        state = job.until(lambda s: s["generationHistory"], "an ended generation")
        assert job.agents[1].wait(60) == 1
        state = job.until(lambda s: s["missing"] == [1], "the lost pod")
        (entry,) = state["generationHistory"]
        assert (entry["cause"], entry["index"]) == ("PodLost", 1)
        assert f"{file}: No space left on device: free space" in entry["message"]
        word = job.word(1)
        assert word["result"] == "left"
        assert entry["message"] == f"node 1: {word['message']}"


async def test_a_fence_that_cannot_be_written_stops_the_ranks_at_once(tmp_path: Path) -> None:
    """They would go on publishing without a lease."""
    async with gang(tmp_path, 2, fence_timeout=1.0) as agents:
        await until(lambda: leader_of(agents).phase == "running")
        assert fence(agents[1])["fenced"] is False
        agents[1].fence.with_name("fence.json.new").mkdir()
        ended = await asyncio.wait_for(agents[1].node.ended, 60)
        assert (ended.result, ended.exit_code) == ("left", 1)
        assert "the fencing token cannot be written: " in ended.message
        assert agents[1].processes.stops[:1] == [0.0]
        assert "cannot be read" in str(explain_fence(Attempt(1, 1), agents[1].fence))


async def test_a_mistake_in_any_task_is_seen() -> None:
    seen: list[BaseException] = []
    tasks = Tasks(seen.append)

    async def mistaken() -> None:
        raise KeyError("no such thing")

    tasks.start(mistaken())
    await until(lambda: seen)
    assert isinstance(seen[0], KeyError)
    waiting = tasks.start(asyncio.sleep(600))
    tasks.cancel()
    await asyncio.wait([waiting])
    assert len(seen) == 1


def test_no_task_is_started_elsewhere() -> None:
    """One that is started by hand ends by a mistake without a word, as all of them did before."""
    starts = re.compile(r"create_task|ensure_future")
    files = [path for path in SOURCE.rglob("*.py") if path.name != "tasks.py"]
    assert [path.name for path in files if starts.search(path.read_text())] == []


async def test_a_mistake_in_the_heartbeats_ends_the_agent_and_names_the_node(tmp_path: Path) -> None:
    async with gang(tmp_path, 2, fence_timeout=1.0) as agents:
        leader = leader_of(agents)
        await until(lambda: leader.phase == "running")
        agents[1].node._look_at_lease = lambda: 1 / 0  # type: ignore[method-assign,assignment]
        ended = await asyncio.wait_for(agents[1].node.ended, 60)
        assert (ended.result, ended.message) == ("left", "the agent failed: ZeroDivisionError('division by zero')")
        await until(lambda: leader.state()["generationHistory"])
        entry = leader.state()["generationHistory"][0]
        assert (entry["cause"], entry["message"]) == ("PodLost", f"node 1: {ended.message}")


def test_a_mistake_in_a_callback_ends_the_agent(tmp_path: Path) -> None:
    """Else the exit of a rank is lost, and the job waits for it for ever."""
    patch = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.argv = sys.argv[1:]\n"
        "from everstep.agent.ranks import logs\n"
        "from everstep.agent.main import main\n"
        "logs.ProcessOutput.tail = lambda self: 1 / 0\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    python = wrapper(tmp_path / "bin", 0, f"""p=$1; shift 3; exec "$p" -I -S -c {shlex.quote(patch)} "$@" """)
    with Laptop(tmp_path / "job", ["false"], nodes=1, python=python) as job:
        assert job.exit_codes() == [1]
        word = job.word(0)
        assert word["result"] == "left"
        assert word["message"].startswith("the agent failed: ZeroDivisionError")


def test_a_connection_that_breaks_before_it_is_accepted_ends_no_agent(tmp_path: Path) -> None:
    """accept() passes on what has happened to it (EPROTO, EHOSTUNREACH); anybody may have made that connection."""
    patch = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.argv = sys.argv[1:]\n"
        "import errno, socket\n"
        "from everstep.agent.main import main\n"
        "accept, failed = socket.socket.accept, []\n"
        "def broken(self):\n"
        "    if failed: return accept(self)\n"
        "    failed.append(1); raise OSError(errno.EPROTO, 'Protocol error')\n"
        "socket.socket.accept = broken\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    python = wrapper(tmp_path / "bin", 0, f"""p=$1; shift 3; exec "$p" -I -S -c {shlex.quote(patch)} "$@" """)
    with Laptop(tmp_path / "job", ["sleep", "600"], nodes=1, python=python) as job:
        job.until(lambda s: s["phase"] == "running", "the ranks")
        assert "Protocol error" in job.log(0)


def test_a_limit_of_threads_leaves_a_last_word(tmp_path: Path) -> None:
    patch = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.argv = sys.argv[1:]\n"
        "import threading\n"
        'def start(self): raise RuntimeError("can\'t start new thread")\n'
        "threading.Thread.start = start\n"
        "from everstep.agent.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    python = wrapper(tmp_path / "bin", 0, f"""p=$1; shift 3; exec "$p" -I -S -c {shlex.quote(patch)} "$@" """)
    with Laptop(tmp_path / "job", ["true"], nodes=1, python=python) as job:
        assert job.exit_codes() == [1]
        word = job.word(0)
        assert word["result"] == "left"
        assert "raise the pod's limit of processes" in word["message"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/opt/ml/x"), "/opt/ml/x: Disk quota exceeded: its quota is"),
        (OSError(errno.EROFS, "Read-only file system", "/run/x"), "/run/x: Read-only file system: a node whose disk"),
        (
            BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
            "Resource temporarily unavailable: no more",
        ),
        (ValueError("job.json: not JSON"), "job.json: not JSON"),
    ],
)
def test_what_a_pod_lacks_is_said_with_what_to_do(error: Exception, said: str) -> None:
    assert explain_fault(error).startswith(said)


def test_a_program_that_is_missing_is_the_applications() -> None:
    assert not is_pod_fault(FileNotFoundError(errno.ENOENT, "No such file or directory"))
    assert not is_pod_fault(ValueError("embedded null byte"))
    assert is_pod_fault(BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"))
