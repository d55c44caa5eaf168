"""`everstep run`: real agents, real ranks, on the loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import pytest
import yaml

from everstep_operator.plan import agent_config
from tests.cli.command import Done, in_process

pytestmark = pytest.mark.integration

Everstep = Callable[..., Done]

TELL = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "SM_MODEL_DIR", "SM_HP_LR", "MINE")
print("TELL", json.dumps({name: os.environ.get(name) for name in names}), flush=True)
"""
STEPS = """
import os, time
for step in range(1, 21):
    with open(os.environ["EVERSTEP_PROGRESS"], "w") as progress:
        progress.write(f"step={step} total=20 loss=0.5\\n")
    time.sleep(0.1)
"""
FAILS_ONCE = """
import os, sys
if os.environ["EVERSTEP_GENERATION"] == "1" and os.environ["RANK"] == "3":
    sys.stderr.write("ValueError: boom\\n")
    sys.exit(7)
"""
WAITS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("UP", flush=True)
time.sleep(600)
"""


UNTIL_TOLD = """
import pathlib, time
print("UP", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.05)
"""
# Leaves behind what stores checkpoints: told to end, it stores for longer than a fence timeout, and may publish then.
STORES = """
import pathlib, subprocess, sys
writer = (
    "import pathlib, shutil, signal, sys, time\\n"
    "def end(*_):\\n"
    "    time.sleep(5); shutil.copy('base/node-0/run/fence.json', 'published'); sys.exit(0)\\n"
    "signal.signal(signal.SIGTERM, end)\\n"
    "pathlib.Path('/proc/self/comm').write_text('everstep-writer'); print('up', flush=True); time.sleep(600)\\n"
)
child = subprocess.Popen([sys.executable, "-c", writer], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
"""
STUBBORN = WAITS.replace("sys.exit(0)", "None")


def write(folder: Path, source: str, **spec: Any) -> str:
    """The manifest of a job of two nodes with two ranks each that runs this script, which lies beside it."""
    (folder / "train.py").write_text(source)
    job = {
        "apiVersion": "everstep.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "local"},
        "spec": {
            "image": "none",
            "command": ["python", "/opt/code/train.py"],
            "numNodes": 2,
            "numProcPerNode": 2,
            "restart": {"application": 1, "maxBackoff": "0s"},
            **spec,
        },
    }
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    return str(file)


@pytest.fixture
def manifest(tmp_path: Path) -> Callable[..., str]:
    return partial(write, tmp_path)


@dataclass(frozen=True)
class Ran:
    folder: Path
    done: Done

    @property
    def ranks(self) -> list[dict[str, str]]:
        """Return the reports of the ranks, by rank."""
        return sorted(told(self.done.stdout), key=lambda rank: int(rank["RANK"]))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A job whose four ranks tell what they are, to its end."""
    folder = tmp_path_factory.mktemp("run")
    file = write(folder, TELL, hyperparameters={"lr": "0.1"}, env=[{"name": "MINE", "value": "yes"}])
    done = in_process(folder, "run", "-f", file, "--base", "base")
    assert done.returncode == 0, done.stderr
    return Ran(folder, done)


def told(output: str) -> list[dict[str, str]]:
    return [json.loads(line.split("TELL ", 1)[1]) for line in output.splitlines() if "TELL " in line]


def test_every_rank_runs_with_its_place_in_the_world(ran: Ran) -> None:
    assert [rank["RANK"] for rank in ran.ranks] == ["0", "1", "2", "3"]
    assert [rank["LOCAL_RANK"] for rank in ran.ranks] == ["0", "1", "0", "1"]
    assert [rank["NODE_RANK"] for rank in ran.ranks] == ["0", "0", "1", "1"]
    assert {rank["WORLD_SIZE"] for rank in ran.ranks} == {"4"}
    assert {rank["MINE"] for rank in ran.ranks} == {"yes"}
    assert {rank["SM_HP_LR"] for rank in ran.ranks} == {"0.1"}
    assert all(Path(rank["SM_MODEL_DIR"]).is_dir() for rank in ran.ranks)


def test_lines_carry_their_rank(ran: Ran) -> None:
    tags = re.findall(r"^\[rank (\d)\] TELL", ran.done.stdout, re.MULTILINE)
    assert sorted(tags) == ["0", "1", "2", "3"]


def test_a_path_of_the_image_is_found_beside_the_manifest_and_said(ran: Ran) -> None:
    assert f"/opt/code/train.py -> {ran.folder}/train.py" in ran.done.stderr


def test_the_token_is_its_owner_s_alone(ran: Ran) -> None:
    assert (ran.folder / "base" / "token").stat().st_mode & 0o777 == 0o600


def test_a_failed_rank_restarts_all_and_the_job_succeeds(everstep: Everstep, manifest: Callable[..., str]) -> None:
    done = everstep("run", "-f", manifest(FAILS_ONCE))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "generation 1.1 ended: Application, rank 3, exit code 7" in done.stderr
    assert "(0 of 1 restarts left)" in done.stderr
    assert "1 restart" in done.stderr.splitlines()[-2]


def test_the_exit_code_is_the_first_failed_rank_s(everstep: Everstep, manifest: Callable[..., str]) -> None:
    done = everstep("run", "-f", manifest("raise SystemExit(9)", numNodes=1, restart={"application": 0}))
    assert done.returncode == 9


def test_what_was_saved_last_may_be_published_until_the_agents_have_ended(
    everstep: Everstep, manifest: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_config, "compute_fence_timeout", lambda *_: 3.0)
    done = everstep("run", "-f", manifest(STORES, numNodes=1, numProcPerNode=1), "--base", "base")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "published").read_text())["fenced"] is False


def test_nodes_and_ranks_can_be_fewer_than_in_the_manifest(everstep: Everstep, manifest: Callable[..., str]) -> None:
    done = everstep("run", "-f", manifest(TELL), "--nodes", "1", "--procs", "1")
    assert done.returncode == 0, done.stderr
    assert [rank["WORLD_SIZE"] for rank in told(done.stdout)] == ["1"]


def test_progress_reaches_the_summary(everstep: Everstep, manifest: Callable[..., str]) -> None:
    done = everstep("run", "-f", manifest(STEPS), "--nodes", "1", "--procs", "1")
    found = re.search(r"step (\d+)$", done.stderr.splitlines()[-2])
    assert found, done.stderr
    assert 0 < int(found[1]) <= 20


def test_a_program_that_is_not_here_is_refused_before_anything_starts(
    everstep: Everstep, manifest: Callable[..., str]
) -> None:
    done = everstep("run", "-f", manifest("", command=["/opt/only-in-the-image"]))
    assert done.returncode == 1
    assert done.stderr.startswith("everstep: /opt/only-in-the-image does not exist on this machine")
    assert "--map" in done.stderr


def test_a_job_that_is_its_image_s_entrypoint_is_refused(everstep: Everstep, tmp_path: Path) -> None:
    text = "apiVersion: everstep.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: x}\nspec: {image: a}\n"
    done = everstep("run", "-f", "-", stdin=text)
    assert done.returncode == 1
    assert "spec.command" in done.stderr


class Started(Protocol):
    def __call__(self, source: str, nodes: int = 2) -> subprocess.Popen[str]: ...


@pytest.fixture
def started(manifest: Callable[..., str], tmp_path: Path) -> Iterator[Started]:
    """Starts `everstep run` of a script as a process of its own and waits until all ranks have printed UP."""
    processes: list[subprocess.Popen[str]] = []
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # tests in the background of a shell: processes inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def start(source: str, nodes: int = 2) -> subprocess.Popen[str]:
        file = manifest(source, numNodes=nodes)
        command = [sys.executable, "-m", "everstep.cli", "run", "-f", file, "--base", "base"]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        up = 0
        while up < 2 * nodes:
            up += "UP" in next_line(process.stdout)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def next_line(stream: IO[str] | None) -> str:
    assert stream is not None
    line = stream.readline()
    assert line, "everstep has ended"
    return line


def test_ctrl_c_stops_the_ranks_with_their_grace_and_leaves_nothing(started: Started, tmp_path: Path) -> None:
    process = started(WAITS)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=40)
    assert process.returncode == 130, out + err
    assert "stopping; press Ctrl-C again to kill the ranks" in err
    assert until_gone(tmp_path) == []


def test_a_second_ctrl_c_does_not_wait_for_the_grace(started: Started, tmp_path: Path) -> None:
    process = started(STUBBORN, nodes=1)
    process.send_signal(signal.SIGINT)
    while "press Ctrl-C again" not in next_line(process.stderr):
        pass
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert until_gone(tmp_path) == []


def test_a_run_whose_leader_is_killed_is_never_taken_for_the_run_before_it(started: Started, tmp_path: Path) -> None:
    """Runs may share a base; what an earlier one said of its end is not this one's."""
    (tmp_path / "base" / "node-0").mkdir(parents=True)
    (tmp_path / "base" / "node-0" / "termination-log").write_text('{"result": "succeeded", "exitCode": 0}')
    process = started(WAITS, nodes=1)
    os.kill(find_agent(tmp_path, 0), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the leader exited without a message" in err


def test_a_command_that_was_killed_may_be_started_again_while_its_ranks_still_end(
    started: Started, everstep: Everstep, manifest: Callable[..., str], tmp_path: Path
) -> None:
    """They hold the base until they have: what they write last is not for two runs."""
    process = started(WAITS.replace("sys.exit(0)", "(time.sleep(2), open('ended', 'w'), sys.exit(0))"), nodes=1)
    process.kill()
    done = everstep("run", "-f", manifest(TELL, numNodes=1), "--base", "base")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ended").exists()


def test_a_base_belongs_to_one_run_at_a_time(
    started: Started, everstep: Everstep, manifest: Callable[..., str], tmp_path: Path
) -> None:
    process = started(WAITS, nodes=1)
    token = (tmp_path / "base" / "token").read_bytes()
    done = everstep("run", "-f", str(tmp_path / "job.yaml"), "--base", "base")
    assert (done.returncode, process.poll()) == (1, None)
    assert f"{tmp_path}/base is in use by another run" in done.stderr
    assert (tmp_path / "base" / "token").read_bytes() == token
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert everstep("run", "-f", manifest(TELL, numNodes=1), "--base", "base").returncode == 0


def test_a_run_goes_on_when_its_terminal_is_closed_under_nohup(started: Started, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = started(UNTIL_TOLD, nodes=1)
    finally:
        signal.signal(signal.SIGHUP, before)
    process.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err


@pytest.mark.parametrize("base", ["file", "file/below"])
def test_a_base_that_cannot_be_made_is_named(everstep: Everstep, manifest: Callable[..., str], base: str) -> None:
    file = manifest(TELL)
    (Path(file).parent / "file").touch()
    done = everstep("run", "-f", file, "--base", base)
    assert done.returncode == 1
    assert f"{base}: " in done.stderr
    assert "--base" in done.stderr


def test_a_folder_that_takes_no_files_is_named(
    everstep: Everstep, manifest: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "base" / "agent.pyz").mkdir(parents=True)
    done = everstep("run", "-f", manifest(TELL), "--base", "base")
    assert done.returncode == 1
    assert "base/agent.pyz: Is a directory" in done.stderr
    assert "--base" in done.stderr


def test_without_any_temporary_folder_a_base_is_asked_for(
    everstep: Everstep, manifest: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    done = everstep("run", "-f", manifest(TELL))
    assert done.returncode == 1
    assert "give a folder with --base" in done.stderr


def test_an_agent_that_ends_too_early_is_quoted_and_not_the_others(
    everstep: Everstep, manifest: Callable[..., str], tmp_path: Path
) -> None:
    """They are ended because of it."""
    (tmp_path / "base" / "node-1" / "run").mkdir(parents=True)
    (tmp_path / "base" / "node-1" / "run" / "fence.json.new").mkdir()
    done = everstep("run", "-f", manifest(TELL), "--base", "base")
    assert done.returncode == 1
    assert "the agent of node 1 ended unexpectedly" in done.stderr
    assert "fence.json.new: Is a directory" in done.stderr.splitlines()[-3]


def find_agent(folder: Path, index: int) -> int:
    """Return the PID of a run's agent."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().split(b"\0")
        if os.fsencode(folder / "base") in words and f"{index}".encode() == words[words.index(b"--index") + 1]:
            return int(path.parent.name)
    raise AssertionError("no such agent")


def test_nothing_trains_on_when_the_command_itself_is_killed(started: Started, tmp_path: Path) -> None:
    started(WAITS).kill()
    assert until_gone(tmp_path) == []


def test_ranks_keep_their_grace_when_the_command_itself_is_killed(started: Started, tmp_path: Path) -> None:
    """The kernel tells the agents several times, once for each thread of the command; that is no hurry."""
    saved = f"time.sleep(1.5), open({str(tmp_path / 'saved')!r} + os.environ['RANK'], 'w').close(), sys.exit(0)"
    started(WAITS.replace("sys.exit(0)", f"({saved})").replace("import", "import os,")).kill()
    assert until_gone(tmp_path) == []
    assert len(list(tmp_path.glob("saved*"))) == 4


def until_gone(folder: Path) -> list[str]:
    """Return the processes of a run that are left after a while."""
    deadline = time.monotonic() + 20
    while (left := running(str(folder))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def running(part: str) -> list[str]:
    """Command lines of processes that mention this path."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if part in words:
            found.append(words)
    return found
