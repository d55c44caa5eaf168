"""`everstep run`: real agents, real ranks, on the loopback."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

Everstep = Callable[..., subprocess.CompletedProcess[str]]

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


STUBBORN = WAITS.replace("sys.exit(0)", "None")


@pytest.fixture
def manifest(tmp_path: Path) -> Callable[..., Path]:
    """A job of two nodes with two ranks each that runs this script, which lies beside the manifest."""

    def write(source: str, **spec: Any) -> Path:
        (tmp_path / "train.py").write_text(source)
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
        file = tmp_path / "job.yaml"
        file.write_text(yaml.safe_dump(job))
        return file

    return write


def told(output: str) -> list[dict[str, str]]:
    return [json.loads(line.split("TELL ", 1)[1]) for line in output.splitlines() if "TELL " in line]


def test_every_rank_runs_with_its_place_in_the_world(everstep: Everstep, manifest: Callable[..., Path]) -> None:
    env = [{"name": "MINE", "value": "yes"}]
    done = everstep("run", "-f", str(manifest(TELL, hyperparameters={"lr": "0.1"}, env=env)), "--base", "base")
    assert done.returncode == 0, done.stderr
    ranks = sorted(told(done.stdout), key=lambda rank: int(rank["RANK"]))
    assert [rank["RANK"] for rank in ranks] == ["0", "1", "2", "3"]
    assert [rank["NODE_RANK"] for rank in ranks] == ["0", "0", "1", "1"]
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"4"}
    assert {rank["MINE"] for rank in ranks} == {"yes"}
    assert {rank["SM_HP_LR"] for rank in ranks} == {"0.1"}
    assert all(Path(rank["SM_MODEL_DIR"]).is_dir() for rank in ranks)


def test_lines_carry_their_rank(everstep: Everstep, manifest: Callable[..., Path]) -> None:
    done = everstep("run", "-f", str(manifest(TELL)))
    tags = re.findall(r"^\[rank (\d)\] TELL", done.stdout, re.MULTILINE)
    assert sorted(tags) == ["0", "1", "2", "3"]


def test_a_path_of_the_image_is_found_beside_the_manifest_and_said(
    everstep: Everstep, manifest: Callable[..., Path], tmp_path: Path
) -> None:
    done = everstep("run", "-f", str(manifest(TELL)))
    assert f"/opt/code/train.py -> {tmp_path}/train.py" in done.stderr


def test_a_failed_rank_restarts_all_and_the_job_succeeds(everstep: Everstep, manifest: Callable[..., Path]) -> None:
    done = everstep("run", "-f", str(manifest(FAILS_ONCE)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "generation 1.1 ended: Application, rank 3, exit code 7" in done.stderr
    assert "(0 of 1 restarts left)" in done.stderr
    assert "1 restart" in done.stderr.splitlines()[-2]


def test_the_exit_code_is_the_first_failed_rank_s(everstep: Everstep, manifest: Callable[..., Path]) -> None:
    done = everstep("run", "-f", str(manifest("raise SystemExit(9)", restart={"application": 0})))
    assert done.returncode == 9


def test_nodes_and_ranks_can_be_fewer_than_in_the_manifest(everstep: Everstep, manifest: Callable[..., Path]) -> None:
    done = everstep("run", "-f", str(manifest(TELL)), "--nodes", "1", "--procs", "1")
    assert done.returncode == 0, done.stderr
    assert [rank["WORLD_SIZE"] for rank in told(done.stdout)] == ["1"]


def test_progress_reaches_the_summary(everstep: Everstep, manifest: Callable[..., Path]) -> None:
    done = everstep("run", "-f", str(manifest(STEPS)))
    found = re.search(r"step (\d+)$", done.stderr.splitlines()[-2])
    assert found, done.stderr
    assert 0 < int(found[1]) <= 20


def test_a_program_that_is_not_here_is_refused_before_anything_starts(
    everstep: Everstep, manifest: Callable[..., Path]
) -> None:
    done = everstep("run", "-f", str(manifest("", command=["/opt/only-in-the-image"])))
    assert done.returncode == 1
    assert done.stderr.startswith("everstep: /opt/only-in-the-image is not on this machine")
    assert "--map" in done.stderr


def test_a_job_that_is_its_image_s_entrypoint_is_refused(everstep: Everstep, tmp_path: Path) -> None:
    text = "apiVersion: everstep.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: x}\nspec: {image: a}\n"
    done = everstep("run", "-f", "-", stdin=text)
    assert done.returncode == 1
    assert "spec.command" in done.stderr


def test_the_token_is_its_owner_s_alone(everstep: Everstep, manifest: Callable[..., Path], tmp_path: Path) -> None:
    everstep("run", "-f", str(manifest("")), "--base", "base", "--nodes", "1", "--procs", "1")
    assert (tmp_path / "base" / "token").stat().st_mode & 0o777 == 0o600


@pytest.fixture
def started(manifest: Callable[..., Path], tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts `everstep run` of a script and waits until its four ranks have printed UP."""
    processes: list[subprocess.Popen[str]] = []

    def start(source: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "everstep.cli", "run", "-f", str(manifest(source)), "--base", "base"]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        up = 0
        while up < 4:
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            up += "UP" in line
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_ctrl_c_stops_the_ranks_with_their_grace_and_leaves_nothing(
    started: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = started(WAITS)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=40)
    assert process.returncode == 130, out + err
    assert "stopping; once more kills" in err
    assert until_gone(tmp_path) == []


def test_a_second_ctrl_c_does_not_wait_for_the_grace(
    started: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = started(STUBBORN)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "once more kills" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert until_gone(tmp_path) == []


def test_nothing_trains_on_when_the_command_itself_is_killed(
    started: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    started(WAITS).kill()
    assert until_gone(tmp_path) == []


def until_gone(folder: Path) -> list[str]:
    """What is left of the processes of a run, after a while."""
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
