"""The agent as users' images run it: real agents, real ranks; the zipapp under every Python that is here."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep import agent_zip

from .laptop import DEADLINE, VERSIONS, Laptop, interpreter, until

pytestmark = pytest.mark.integration

# Fails once, in the first generation; the second one succeeds.
FAIL_ONCE = 'test "$EVERSTEP_GENERATION" = 2 || test "$RANK" = 0 || exit 7; test "$EVERSTEP_GENERATION" = 2 || sleep 60'


@pytest.mark.parametrize("version", VERSIONS)
def test_restarts_in_place_and_succeeds_under_every_python(tmp_path: Path, version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    with Laptop(tmp_path, ["sh", "-c", FAIL_ONCE], python=python, zipped=True) as job:
        state = job.until(lambda s: s["outcome"])
        assert state["outcome"]["result"] == "succeeded"
        assert [(e["id"], e["rank"], e["exitCode"]) for e in state["generationHistory"]] == [("1.1", 1, 7)]
        assert job.exit_codes() == [0, 0]
        assert [job.word(i)["result"] for i in range(2)] == ["succeeded"] * 2


def test_without_restarts_the_ranks_exit_code_is_everybodys(tmp_path: Path) -> None:
    command = ["sh", "-c", 'test "$RANK" = 1 || sleep 60; echo "ValueError: no such file" >&2; exit 7']
    with Laptop(tmp_path, command, restart={"application": 0, "maxBackoffSeconds": 0}) as job:
        outcome = job.until(lambda s: s["outcome"])["outcome"]
        assert (outcome["result"], outcome["exitCode"], outcome["failure"]) == ("failed", 7, "1.1")
        assert job.exit_codes() == [7, 7]
        word = job.word(0)
        assert (word["result"], word["index"], word["rank"], word["exitCode"]) == ("failed", 1, 1, 7)
        assert "ValueError: no such file" in "\n".join(word["logTail"])
        assert "ValueError" in (tmp_path / "node-0/ml/output/failure").read_text()


def test_the_exit_code_that_means_unusable_is_not_passed_on(tmp_path: Path) -> None:
    job = Laptop(tmp_path, ["sh", "-c", "exit 120"], nodes=1, restart={"application": 0, "maxBackoffSeconds": 0})
    with job:
        assert job.exit_codes() == [1]
        assert (job.word(0)["result"], job.word(0)["exitCode"]) == ("failed", 120)


def test_a_script_that_ends_every_python_by_its_name_does_not_end_its_agent(tmp_path: Path) -> None:
    """`pkill python` as the first line of a script, against what an earlier run may have left."""
    told = tmp_path / "name"
    with Laptop(tmp_path, ["sh", "-c", f"cat /proc/$PPID/comm > {told}"], nodes=1) as job:
        assert job.exit_codes() == [0]
        assert told.read_text() == "everstep-agent\n"


def test_agents_of_one_machine_listen_on_its_loopback_alone(tmp_path: Path) -> None:
    with Laptop(tmp_path, ["sleep", "600"], nodes=1) as job:
        job.client()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", job.ports[0]), timeout=10)


def test_the_users_own_failure_file_wins(tmp_path: Path) -> None:
    failure = tmp_path / "node-0/ml/output/failure"
    command = ["sh", "-c", f'printf "my own words" > {failure}; exit 1']
    with Laptop(tmp_path, command, nodes=1, restart={"application": 0, "maxBackoffSeconds": 0}) as job:
        assert job.exit_codes() == [1]
        assert failure.read_text() == "my own words"


@pytest.fixture
def hangups() -> Iterator[None]:
    """Provide processes that hear a hang-up, also where the tests run under nohup, which hands down its deafness."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize(
    "signum",
    [signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGHUP, 37],
    ids=["TERM", "QUIT", "USR1", "HUP", "RTMIN+3"],
)
def test_a_pod_that_is_told_to_stop_says_so_and_its_ranks_may_finish(tmp_path: Path, signum: int) -> None:
    """An image (STOPSIGNAL) or a pod (stopSignal) may name another one than TERM; that one is sent then."""
    command = ["sh", "-c", 'trap "echo saved; exit 0" TERM; echo ready; while :; do sleep 0.05; done']
    with Laptop(tmp_path, command) as job:
        job.until(lambda s: s["phase"] == "running")
        until(lambda: "ready" in job.log(0) and "ready" in job.log(1), "the ranks are ready")
        job.agents[1].send_signal(signum)
        assert job.agents[1].wait(DEADLINE) == 143
        assert job.word(1)["result"] == "left"
        assert "saved" in job.log(1)
        state = job.until(lambda s: s["phase"] == "forming")
        assert [(e["cause"], e["index"]) for e in state["generationHistory"]] == [("Leaving", 1)]
        assert "saved" in job.log(0)
        job.start(1)
        assert job.until(lambda s: s["phase"] == "running")["generation"] == 2


def test_a_leader_that_is_told_to_stop_stops_all_and_a_new_one_goes_on(tmp_path: Path) -> None:
    with Laptop(tmp_path, ["sleep", "60"]) as job:
        job.until(lambda s: s["phase"] == "running")
        job.agents[0].send_signal(signal.SIGTERM)
        assert job.agents[0].wait(DEADLINE) == 143
        assert job.word(0)["result"] == "left"  # not an outcome: the job goes on
        job.start(0, epoch=2)
        job.introduce(epoch=2)
        assert job.until(lambda s: s["phase"] == "running")["generationHistory"] == []
        assert job.agents[1].poll() is None


def test_a_killed_leader_is_replaced_and_survivors_stay(tmp_path: Path) -> None:
    with Laptop(tmp_path, ["sleep", "60"], nodes=3) as job:
        job.until(lambda s: s["phase"] == "running")
        job.agents[0].kill()
        job.agents[0].wait()
        job.start(0, epoch=2)
        job.introduce(epoch=2)
        state = job.until(lambda s: s["phase"] == "running")
        assert (state["epoch"], state["generation"]) == (2, 1)
        assert job.agents[1].poll() is None
        job.client().stop("enough")
        job.until(lambda s: s["outcome"])
        assert job.exit_codes() == [143] * 3
        assert job.word(2)["result"] == "stopped"


def test_a_replacement_announces_itself_and_nobody_has_to_introduce_it(tmp_path: Path) -> None:
    with Laptop(tmp_path, ["sleep", "60"], nodes=3) as job:
        job.until(lambda s: s["phase"] == "running")
        job.kill(1)
        job.until(lambda s: s["phase"] == "forming")
        job.start(1, leader=f"127.0.0.1:{job.ports[0]}")
        state = job.until(lambda s: s["phase"] == "running")
        assert (state["generation"], state["missing"]) == (2, [])


def test_an_announcement_that_nobody_hears_harms_nobody(tmp_path: Path) -> None:
    """The leader is gone by then: what becomes of the job is the next one's business."""
    with Laptop(tmp_path, ["sleep", "60"]) as job:
        job.until(lambda s: s["phase"] == "running")
        nobody = f"127.0.0.1:{job.ports[0]}"
        job.kill(0)
        job.kill(1)
        job.start(1, leader=nobody)
        until(lambda: "agent 1 of 2" in job.log(1), "the agent is up")
        job.start(0, epoch=2)
        job.introduce(epoch=2)
        assert job.until(lambda s: s["phase"] == "running")["epoch"] == 2
        assert job.agents[1].poll() is None


def test_an_agent_that_cannot_start_has_left_and_ends_no_job(tmp_path: Path) -> None:
    job = Laptop(tmp_path, ["true"], nodes=1)
    with socket.create_server(("0.0.0.0", job.ports[0])), job:
        assert job.exit_codes() == [1]
    word = job.word(0)
    assert (word["result"], word["exitCode"]) == ("left", 1)
    assert "in use" in word["message"]


LOOK = """
import ctypes, os
for name in ("environ", "mem"):
    try:
        open(f"/proc/{os.getppid()}/{name}", "rb").read(1)
        print(name, "is open")
    except PermissionError:
        print(name, "is closed")
print("ranks can be debugged:", ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))
"""


def test_a_rank_can_read_neither_the_agents_memory_nor_its_environment(tmp_path: Path) -> None:
    """Though it is of the same user. Where that is root, it is one without capabilities, as in a pod."""
    python = tmp_path / "python"
    drop = "setpriv --inh-caps=-all --bounding-set=-all" if os.getuid() == 0 else ""
    python.write_text(f'#!/bin/sh\nexec {drop} {sys.executable} "$@"\n')
    python.chmod(0o755)
    with Laptop(tmp_path / "job", [sys.executable, "-c", LOOK], nodes=1, python=str(python)) as job:
        assert job.exit_codes() == [0]
    assert "environ is closed" in job.log(0)
    assert "mem is closed" in job.log(0)
    assert "ranks can be debugged: 1" in job.log(0)


def test_the_token_reaches_no_rank(tmp_path: Path) -> None:
    with Laptop(tmp_path, ["sh", "-c", "env; cat /proc/$PPID/environ"], nodes=1) as job:
        assert job.exit_codes() == [0]
        assert job.token.hex() not in job.log(0)
        assert not any(str(job.token)[2:-1] in line for line in job.log(0).splitlines())


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.8"])
def test_an_old_python_is_named(tmp_path: Path, version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    agent = tmp_path / "agent.pyz"
    agent.write_bytes(agent_zip.build_zipapp())
    # `-I` is younger than 2.7; the reserved code must not depend on it.
    done = subprocess.run([python, str(agent), "run", "--local", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 120
    assert f"Python {version}" in done.stderr
    assert "3.9 or newer" in done.stderr


# A job waits for its slowest agent, and these take as long to import as Python takes to start.
@pytest.mark.parametrize("module", ["ssl", "random", "argparse", "tempfile"])
def test_a_start_imports_no_module_that_an_agent_does_without(tmp_path: Path, module: str) -> None:
    agent = tmp_path / "agent.pyz"
    agent.write_bytes(agent_zip.build_zipapp())
    run = f"sys.argv = ['', 'run', '--index=0']; runpy.run_path({str(agent)!r}, run_name='__main__')"
    tell = f"import runpy, sys, atexit; atexit.register(lambda: print({module!r} in sys.modules)); {run}"
    done = subprocess.run([sys.executable, "-I", "-S", "-B", "-c", tell], capture_output=True, text=True)
    assert "job.json" in done.stderr, "not so far that all is imported"
    assert done.stdout.strip() == "False"


def test_a_missing_module_is_named(tmp_path: Path) -> None:
    agent = tmp_path / "agent.pyz"
    agent.write_bytes(agent_zip.build_zipapp())
    with zipfile.ZipFile(agent, "a") as archive:
        archive.writestr("asyncio.py", "raise ImportError('No module named _asyncio')")
    done = subprocess.run([sys.executable, "-I", "-S", "-B", agent, "run", "--local", tmp_path], capture_output=True)
    assert done.returncode == 120
    assert b"No module named _asyncio" in done.stderr


def test_a_python_without_zlib_is_named(tmp_path: Path) -> None:
    agent = tmp_path / "agent.pyz"
    agent.write_bytes(agent_zip.build_zipapp())
    without = f"import runpy, sys; sys.modules['zlib'] = None; sys.argv = ['', 'run', '--local', {str(tmp_path)!r}]; "
    run = f"runpy.run_path({str(agent)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-I", "-S", "-B", "-c", without + run], capture_output=True, text=True)
    assert done.returncode == 120
    assert "zlib not available" in done.stderr


def write_with_broken_sources(folder: Path, packed: bytes) -> Path:
    """Write a zipapp whose byte code works, and whose sources say that they were taken."""
    agent = folder / "agent.pyz"
    with zipfile.ZipFile(io.BytesIO(packed)) as whole, zipfile.ZipFile(agent, "w") as archive:
        for name in whole.namelist():
            source = name.endswith("main.py") and not name.startswith("__main__")
            archive.writestr(name, b"raise ImportError('of the sources')" if source else whole.read(name))
    return agent


@pytest.mark.parametrize("version", VERSIONS)
def test_byte_code_is_run_by_the_python_that_it_is_made_for_and_sources_by_others(tmp_path: Path, version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    packed = agent_zip.pack_byte_code([sys.executable])
    assert agent_zip.read_sources(packed) == agent_zip.read_sources(agent_zip.pack_sources())
    agent = write_with_broken_sources(tmp_path, packed)
    done = subprocess.run([python, "-I", "-S", "-B", agent, "run", "--local", tmp_path], capture_output=True, text=True)
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        assert done.returncode == 1
        assert "job.json" in done.stderr
    else:
        assert done.returncode == 120
        assert "of the sources" in done.stderr


def test_an_agent_of_byte_code_supervises_ranks_and_tells_where_it_failed(tmp_path: Path) -> None:
    packed = agent_zip.pack_byte_code([sys.executable])
    with Laptop(tmp_path, ["sh", "-c", FAIL_ONCE], zipped=packed) as job:
        assert job.until(lambda s: s["outcome"])["outcome"]["result"] == "succeeded"
        assert job.exit_codes() == [0, 0]


def test_an_operator_takes_the_file_of_its_image_if_it_has_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = agent_zip.pack_byte_code([sys.executable])
    monkeypatch.setattr(agent_zip, "PACKED", tmp_path / "agent.pyz")
    assert agent_zip.build_zipapp.__wrapped__() == agent_zip.pack_sources()
    agent_zip.PACKED.write_bytes(packed)
    assert agent_zip.build_zipapp.__wrapped__() == packed
    monkeypatch.setattr(agent_zip, "pack_sources", lambda: agent_zip._write({"__main__.py": b"of a newer version"}))
    assert agent_zip.read_sources(agent_zip.build_zipapp.__wrapped__()) == {"__main__.py": b"of a newer version"}


@pytest.mark.parametrize("version", VERSIONS)
def test_there_is_room_for_the_byte_code_of_one_more_python(tmp_path: Path, version: str) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    agent = write_with_broken_sources(tmp_path, agent_zip.pack_byte_code([sys.executable, python]))
    for each in (sys.executable, python):
        done = subprocess.run([each, "-I", "-S", "-B", agent, "run", "--local", tmp_path], capture_output=True)
        assert done.returncode == 1
        assert b"job.json" in done.stderr


def test_more_byte_code_than_a_config_map_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_zip, "LIMIT", len(agent_zip.pack_sources()) + 1000)
    with pytest.raises(ValueError, match="name fewer Pythons"):
        agent_zip.pack_byte_code([sys.executable])


def test_a_job_that_cannot_be_read_is_a_failure_and_not_the_images_fault(tmp_path: Path) -> None:
    job = Laptop(tmp_path, ["true"], nodes=1, zipped=True)
    (tmp_path / "job.json").write_text("{}")
    job.start(0)
    assert job.exit_codes() == [1]
    assert "job.json: protocol must be int" in job.log(0)


def test_the_same_sources_are_the_same_bytes(tmp_path: Path) -> None:
    assert agent_zip.build_zipapp.__wrapped__() == agent_zip.build_zipapp.__wrapped__()
    subprocess.run([sys.executable, "-m", "everstep.agent_zip", tmp_path / "agent.pyz"], check=True)
    assert zipfile.is_zipfile(tmp_path / "agent.pyz")
    assert len(agent_zip.pack_sources()) < 256 * 1024  # a ConfigMap has room for 1 MiB
    assert (tmp_path / "agent.pyz").stat().st_size < 640 * 1024
    assert len(agent_zip.compute_digest()) == 12


def test_the_last_word_fits_the_termination_log() -> None:
    from everstep.agent.leader.leader_server import LAST_CHARGES
    from everstep.agent.node.termination_message import encode_termination_message

    word = {"result": "failed", "message": "\u00e9" * 5000, "logTail": ["x" * 5000 for _ in range(100)]}
    word["generationHistory"] = [f"{2**31}.{2**31} OutOfMemory"] * LAST_CHARGES
    data = encode_termination_message(word)
    assert len(data) <= 4096
    assert json.loads(data)["result"] == "failed"
    assert json.loads(data)["generationHistory"] == word["generationHistory"], "nobody else can tell it any more"
