"""Ranks start with the right environment, and their ends are told truly."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .node import SOURCE, Node
from .test_cleanup import needs_root

pytestmark = pytest.mark.integration


async def test_a_rank_knows_who_it_is_and_nothing_of_the_agent(tmp_path: Path, python: str) -> None:
    environ = {"EVERSTEP_POD_UID": "p-1", "EVERSTEP_POD_IP": "10.0.0.1", "EVERSTEP_NODE_NAME": "n", "KEPT": "yes"}
    command = ["sh", "-c", f'env > "{tmp_path}/env-$RANK"; cat "$SM_INPUT_CONFIG_DIR/resourceconfig.json"']
    async with Node(tmp_path, command, index=1, nodes=2, procs=2, python=python, environ=environ) as node:
        await node.start(generation=7)
        await node.event("RankExited", rank=2)
        await node.event("RankExited", rank=3)
        env = dict(line.split("=", 1) for line in (tmp_path / "env-3").read_text().splitlines() if "=" in line)
    expected = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "EVERSTEP_EPOCH": "1",
        "EVERSTEP_GENERATION": "7",
        "EVERSTEP_JOB": "digits",
        "SM_CURRENT_HOST": "algo-2",
        "SM_HP_EPOCHS": "10",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "KEPT": "yes",
        "EVERSTEP_NODE_NAME": "n",  # by which the checkpoint library knows its machine
    }
    assert {name: env.get(name) for name in expected} == expected
    assert not [name for name in env if name.startswith("EVERSTEP_POD") or name == "EVERSTEP_INDEX"]
    assert env["EVERSTEP_PROGRESS"].endswith("/progress/1")
    assert env["EVERSTEP_CHECKPOINT_REQUEST"].endswith("/run/checkpoint-request.json")


@needs_root
@pytest.mark.parametrize("named", ["", "/cache"])
async def test_ranks_find_the_pods_memory_for_copies_unless_the_user_names_another(tmp_path: Path, named: str) -> None:
    environ = {"EVERSTEP_CHECKPOINT_MEMORY": named} if named else {}
    command = [
        "sh",
        "-c",
        'printf "%s" "$EVERSTEP_CHECKPOINT_MEMORY" > "$0"; test "$1" = "$EVERSTEP_CHECKPOINT_MEMORY"',
    ]
    command += [f"{tmp_path}/told", "$(EVERSTEP_CHECKPOINT_MEMORY)"]
    async with Node(tmp_path, command, pod=True, environ=environ) as node:
        await node.start()
        (ended,) = await node.exits(1)
        assert ended["exit_code"] == 0, "a reference in the command is the same as the variable"
        assert (tmp_path / "told").read_text() == (named or f"{node.folder}/slots")


@pytest.mark.parametrize("distribution", ["torch", "none"])
async def test_references_in_a_command_are_expanded_as_kubernetes_does(tmp_path: Path, distribution: str) -> None:
    words = ["$(KEPT)", "a-$(KEPT)-$(KEPT)", "$(NONE)", "$$(KEPT)", "$$$(KEPT)", "$KEPT", "$(KEPT", "x$", "$()", "$$"]
    expected = [
        "yes $(X)",
        "a-yes $(X)-yes $(X)",
        "$(NONE)",
        "$(KEPT)",
        "$yes $(X)",
        "$KEPT",
        "$(KEPT",
        "x$",
        "$()",
        "$",
    ]
    command = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]), end='|')", *words]
    async with Node(tmp_path, command, distribution=distribution, environ={"KEPT": "yes $(X)"}) as node:
        await node.start()
        await node.exits(1)
        await node.stop()
        assert json.loads(node.logged().partition("|")[0]) == expected


async def test_none_runs_the_command_once_per_node_with_torchruns_variables(tmp_path: Path) -> None:
    command = ["sh", "-c", f'env > "{tmp_path}/env-$RANK"']
    async with Node(tmp_path, command, index=1, nodes=2, procs=4, distribution="none") as node:
        await node.start()
        ended = await node.event("RankExited")
        assert (ended["rank"], ended["exit_code"]) == (1, 0)
        assert len(node.all("RankStarted")) == 1
        text = (tmp_path / "env-1").read_text().splitlines()
    assert {"PET_NNODES=2", "PET_NODE_RANK=1", "PET_NPROC_PER_NODE=4", "PET_MASTER_PORT=29500"} <= set(text)


@pytest.mark.parametrize("procs", [1, 2])
async def test_a_torchrun_in_the_place_of_a_rank_is_one_node_of_the_job(tmp_path: Path, procs: int) -> None:
    """By itself it would know of no other: each would train a model of its own, and all would succeed."""
    command = [f"{tmp_path}/torchrun"]
    (tmp_path / "torchrun").write_text(f'#!/bin/sh\nenv > "{tmp_path}/env-$RANK"\n')
    (tmp_path / "torchrun").chmod(0o755)
    async with Node(tmp_path, command, index=1, nodes=2, procs=procs, environ={"PET_MAX_RESTARTS": "3"}) as node:
        await node.start()
        await node.exits(procs)
        for rank in range(procs, 2 * procs):
            text = set((tmp_path / f"env-{rank}").read_text().splitlines())
            own = {f"PET_NNODES={2 * procs}", f"PET_NODE_RANK={rank}", "PET_NPROC_PER_NODE=1", "PET_MASTER_PORT=29500"}
            assert {*own, "PET_MAX_RESTARTS=3"} <= text
        assert node.logged().count("write distribution: {none: {}}") == (procs > 1)


async def test_the_only_rank_of_a_job_may_be_any_torchrun(tmp_path: Path) -> None:
    async with Node(tmp_path, ["sh", "-c", "env"]) as node:
        await node.start()
        await node.exits(1)
        assert await node.stop() is None
        assert "PET_" not in node.logged()


async def test_exit_code_signal_and_cause_are_those_of_the_rank(tmp_path: Path, python: str) -> None:
    script = "import os; r = os.environ['RANK']\nif r == '0': raise ValueError('boom')\n"
    script += "os.kill(os.getpid(), 11)\n"
    async with Node(tmp_path, [sys.executable, "-c", script], procs=2, python=python) as node:
        await node.start()
        failed = await node.event("RankExited", rank=0)
        killed = await node.event("RankExited", rank=1)
    assert (failed["exit_code"], failed["signal"], failed["message"]) == (1, None, "ValueError: boom")
    assert failed["log_tail"][0] == "Traceback (most recent call last):"
    assert (killed["exit_code"], killed["signal"], killed["oom"]) == (139, signal.SIGSEGV, False)
    assert killed["message"] == "killed by SIGSEGV"


@needs_root
@pytest.mark.parametrize("there", [True, False], ids=["with a folder", "empty"])
async def test_ranks_start_where_the_users_own_input_volume_is_read_only(tmp_path: Path, there: bool) -> None:
    """A claim with the data, mounted in place of /opt/ml/input: there is no room for the contract's files in it."""
    volume = tmp_path / "node-0/ml/input"
    (volume / "config" if there else volume).mkdir(parents=True)
    mount = f'mount --bind {volume} {volume} && mount -o remount,ro,bind {volume} && exec "$@"'
    prefix = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    async with Node(tmp_path, ["sh", "-c", 'echo "$SM_HPS"'], prefix=prefix) as node:
        await node.start()
        assert (await node.event("RankExited"))["exit_code"] == 0
        await node.until(lambda: '{"epochs":10}' in node.logged(), "the hyperparameters of the environment")
        assert f"{volume}/config/hyperparameters.json is not written" in node.logged()


@needs_root
async def test_pods_that_share_a_volume_of_input_read_their_own_files(tmp_path: Path) -> None:
    """One claim with the data, mounted in place of /opt/ml/input by all pods of a job, or of several jobs."""
    claim, scratch, go = tmp_path / "claim", tmp_path / "run", tmp_path / "go"
    script = f'until [ -e {go} ]; do sleep 0.05; done; cat "$SM_INPUT_CONFIG_DIR/resourceconfig.json"'
    claim.mkdir()
    scratch.mkdir()
    async with contextlib.AsyncExitStack() as stack:
        nodes = []
        for index in range(2):
            own, ml = tmp_path / f"run-{index}", tmp_path / f"node-{index}/ml"
            own.mkdir()
            ml.mkdir(parents=True)
            (ml / "input").symlink_to(claim)
            # As in a pod: an own folder, under the same path in all of them.
            prefix = ["unshare", "--mount", "sh", "-c", f'mount --bind {own} {scratch} && exec "$@"', "sh"]
            node = Node(
                tmp_path, ["sh", "-c", script], index=index, nodes=2, prefix=prefix, scratch=scratch, shares_input=True
            )
            nodes.append(await stack.enter_async_context(node))
            await node.start()
        go.touch()
        for node, host in zip(nodes, ("algo-1", "algo-2"), strict=True):
            assert (await node.event("RankExited"))["exit_code"] == 0
            said = f'"current_host":"{host}"'
            await node.until(lambda node=node, said=said: said in node.logged(), said)  # type: ignore[misc]


async def test_an_agent_that_waits_for_a_network_volume_still_hears_its_leader(tmp_path: Path) -> None:
    """A server of files that fails over for a minute is no lost node: the ranks start when it is back."""
    async with Node(tmp_path, ["sh", "-c", "exec sleep 600"], slow_volume=True) as node:
        first = asyncio.ensure_future(node.start())
        await node.event("Forgetting")
        await node.call("go_on")
        await first
        await node.event("RankStarted", generation=1)
        assert await node.stop() is None


async def test_an_agent_whose_program_is_on_a_volume_that_hangs_hears_its_leader(tmp_path: Path) -> None:
    """To execute it is to wait for the volume, on the loop; a thread has waited for it before."""
    async with Node(tmp_path, ["sleep", "600"], hung_program=True) as node:
        first = asyncio.ensure_future(node.start())
        assert (await node.event("ReadingProgram"))["name"] == "sleep"
        assert await node.call("has_run_here", pid=1) is False
        await node.call("go_on")
        await first
        await node.event("RankStarted", generation=1)
        assert await node.stop() is None


@pytest.fixture
def hung_volume(tmp_path: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A folder whose server never answers, and a function that ends the server: every call on it fails from then on."""
    if os.getuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("mounts a volume of its own")
    volume = tmp_path / "volume"
    volume.mkdir()
    libc, servers = ctypes.CDLL(None), [os.open("/dev/fuse", os.O_RDWR)]
    options = f"fd={servers[0]},rootmode=40000,user_id=0,group_id=0".encode()

    def fail() -> None:
        while servers:
            os.close(servers.pop())

    if libc.mount(b"hung", bytes(volume), b"fuse", 0, options) != 0:
        fail()
        pytest.skip("no mount is allowed here")
    yield volume, fail
    fail()
    libc.umount2(bytes(volume), 2)


@pytest.mark.parametrize("what", ["program", "interpreter", "PATH", "HOME", "TMPDIR"])
async def test_an_agent_answers_while_a_volume_that_a_rank_needs_does_not(
    tmp_path: Path, hung_volume: tuple[Path, Callable[[], None]], what: str
) -> None:
    volume, fail = hung_volume
    script = tmp_path / "script"
    script.write_text(f"#!{volume}/bin/python -u\n")
    script.chmod(0o755)
    command = {"program": [f"{volume}/bin/python"], "interpreter": [str(script)]}.get(what, ["true"])
    environ = {what: f"{volume}/folder:{os.environ['PATH']}" if what == "PATH" else f"{volume}/folder"}
    async with Node(tmp_path, command, environ=environ if what.isupper() else {}) as node:
        starting = asyncio.ensure_future(node.start())
        await node.call("lag", seconds=1.0)  # no answer would come from a loop that waits for the volume
        assert not starting.done()
        fail()
        await starting
        assert (await node.event("RankExited"))["exit_code"] in ((0,) if what.isupper() else (126, 127))
        assert await node.stop() is None


async def test_a_command_that_is_not_there_exits_127_and_says_so(tmp_path: Path) -> None:
    async with Node(tmp_path, ["no-such-program"]) as node:
        await node.start()
        ended = await node.event("RankExited")
        assert ended["exit_code"] == 127
        assert ended["message"].startswith("no-such-program: not found in the image")
        assert "a list" not in ended["message"]
        assert await node.stop() is None


async def test_a_command_that_is_one_line_of_text_is_told_to_be_a_list(tmp_path: Path) -> None:
    async with Node(tmp_path, ["python3 train.py"]) as node:
        await node.start()
        ended = await node.event("RankExited")
        assert ended["exit_code"] == 127
        assert "a command is a list with an item for each word" in ended["message"]
        assert await node.stop() is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("#!/bin/bash\r\necho never\r\n", "its interpreter '/bin/bash\\r' is not in the image"),
        ("#! /no/such/python -u\n", "its interpreter '/no/such/python' is not in the image"),
    ],
    ids=["of Windows", "missing"],
)
async def test_a_script_whose_interpreter_is_missing_is_not_said_to_be_missing(
    tmp_path: Path, content: str, said: str
) -> None:
    script = tmp_path / "train.sh"
    script.write_text(content, newline="")
    script.chmod(0o755)
    async with Node(tmp_path, [str(script)]) as node:
        await node.start()
        ended = await node.event("RankExited")
        assert ended["exit_code"] == 127
        assert ended["message"].startswith(f"{script}: {said}")


async def test_a_rank_that_ends_at_once_is_not_lost(tmp_path: Path) -> None:
    async with Node(tmp_path, ["true"], procs=32) as node:
        for _ in range(5):
            await node.start()
            await node.exits(32)
            assert await node.stop() is None


def test_a_rank_that_was_forked_by_an_agent_that_is_gone_does_not_run() -> None:
    """Killed between the fork and the rank's wish to die with it: nothing would ever end that rank."""
    script = (
        "import asyncio, os, sys, time\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from everstep.agent.system.processes import ChildProcesses\n"
        "async def main():\n"
        "    agent, prepare = os.getpid(), ChildProcesses(owns_pod=False)._die_with_parent()\n"
        "    if os.fork() == 0:\n"
        "        while os.getppid() == agent: time.sleep(0.001)\n"
        "        prepare(); os.write(1, b'runs'); os._exit(0)\n"
        "    os._exit(0)\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(SOURCE)], stdout=subprocess.PIPE, timeout=60, check=True)
    assert ended.stdout == b""


async def test_the_ranks_die_with_a_killed_agent(tmp_path: Path) -> None:
    """Laptop mode; in a pod the kernel does it."""
    pids = tmp_path / "pid"
    command = ["sh", "-c", f"echo $$$$ > {pids}; exec sleep 600"]
    node = Node(tmp_path, command)
    async with node:
        await node.start()
        await node.until(lambda: pids.exists() and pids.read_text().strip(), "pid")
        node.process.kill()
        pid = int(pids.read_text())
        await node.until(lambda: not _alive(pid), "end of the rank")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
