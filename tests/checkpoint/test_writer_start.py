"""A writer starts from whatever a script has made of its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from everstep.checkpoint.writer.rank_environment import find_environment, list_variables

_SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from everstep.checkpoint.writer import control
memory = Path("memory").absolute()
{change}
control.ensure_writer(memory, linger=0.1)
"""

CHANGES = {
    "a Path in its path": "sys.path.insert(0, Path('/packages'))",
    "other things in its path": "sys.path += [None, 7, b'/packages', 'a\\0b', chr(0xd800)]",
    "names of any kind in its path": "sys.path[:0] = ['/a:b', '/a\\nb', '', 'own', '--linger=x', '/' + chr(0xdcff)]",
    "a path above the limit of one argument": "sys.path += [f'/{each:06}' + 'x' * 200 for each in range(1000)]",
    "a deleted working directory": "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')",
}


def run_script(folder: Path, change: str, **environment: str) -> None:
    code = _SCRIPT.format(change=change)
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True, timeout=120)


@pytest.mark.parametrize("what", CHANGES)
def test_a_writer_starts_for_a_script_with(what: str, tmp_path: Path) -> None:
    run_script(tmp_path, CHANGES[what], PYTHONPATH="relative")


def test_files_that_a_rank_s_environment_names_by_relative_paths_are_found_by_its_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `AWS_SHARED_CREDENTIALS_FILE=aws.cfg python train.py`: a writer works in another folder than its ranks."""
    for name in ("aws.cfg", "key.json", "1", "default"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    names_file = {"AWS_SHARED_CREDENTIALS_FILE": "aws.cfg", "GOOGLE_APPLICATION_CREDENTIALS": "./key.json"}
    as_it_is = {
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_WEB_IDENTITY_TOKEN_FILE": "absent",
        "AWS_PROFILE": "default",
        "OMP_NUM_THREADS": "1",
        "SSL_CERT_FILE": "",
    }
    for name, value in {**names_file, **as_it_is}.items():
        monkeypatch.setenv(name, value)
    for found in (find_environment(), list_variables(1 << 20)):
        assert {name: found[name] for name in names_file} == {
            "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "aws.cfg"),
            "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "key.json"),
        }
        assert {name: found[name] for name in as_it_is} == as_it_is


def test_a_script_that_ends_by_sigpipe_outlives_its_writer(tmp_path: Path) -> None:
    """As a script does whose output may be cut by `head`; a rank hears of a lost writer by an error alone."""
    lose = """
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
control.ensure_writer(memory, linger=30)
link = control.WriterLink.connect(memory)
os.kill(link.pid, signal.SIGKILL)
while os.path.exists(f"/proc/{link.pid}") and open(f"/proc/{link.pid}/stat").read().split()[2] != "Z":
    pass
for _ in range(2):
    try:
        link.tell("occupants")
    except control.WriterLost:
        pass
"""
    run_script(tmp_path, lose)


def test_a_script_that_makes_warnings_errors_starts_a_writer_without_one(tmp_path: Path) -> None:
    """As a test of a user's does, under pytest's `filterwarnings = error`: the writer goes on when it is let go."""
    code = _SCRIPT.format(change="")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_writer_hears_sigterm_though_its_rank_has_blocked_it(tmp_path: Path) -> None:
    """As in a script that waits for signals in a thread, by sigwait(): a child has what its parent has blocked."""
    change = """
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
control.ensure_writer(memory, linger=30)
link = control.WriterLink.connect(memory)
pid = link.pid
link.close()
os.kill(pid, signal.SIGTERM)
deadline = time.monotonic() + 10
while os.path.exists(f"/proc/{pid}") and open(f"/proc/{pid}/stat").read().split()[2] != "Z":
    if time.monotonic() > deadline:
        os.kill(pid, signal.SIGKILL)
        sys.exit("the writer is still there")
"""
    run_script(tmp_path, change)
