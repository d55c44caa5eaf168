"""Between generations nothing survives: processes, zombies, shared memory."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.agent.system import shared_memory

from .node import Node

pytestmark = pytest.mark.integration

needs_root = pytest.mark.skipif(
    os.getuid() != 0 or subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"]).returncode != 0,
    reason="needs to make PID namespaces",
)

# Leaves a daemon behind: double fork, own session, no inherited environment, deaf to every signal that can be ignored.
DAEMON = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for s in (1, 2, 3, 15): signal.signal(s, signal.SIG_IGN)
        os.environ.clear()
        open(sys.argv[1], "w").write(os.readlink("/proc/self"))
        time.sleep(600)
    os._exit(0)
os.wait()
print("up", flush=True)
if len(sys.argv) > 2: time.sleep(600)
"""


def read(path: str) -> str:
    return Path(path).read_text(errors="replace")


def processes_with(word: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if word.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.parametrize("pod", [pytest.param(True, marks=needs_root), False], ids=["pod", "laptop"])
@pytest.mark.parametrize("running", [True, False], ids=["running", "ended"])
async def test_a_daemonised_child_is_gone_after_stop(tmp_path: Path, python: str, pod: bool, running: bool) -> None:
    mark = tmp_path / "daemon"
    command = [sys.executable, "-c", DAEMON, str(mark), *(["stay"] if running else [])]
    async with Node(tmp_path, command, pod=pod, python=python) as node:
        await node.start()
        await node.until(lambda: mark.exists() and mark.read_text() and "up" in node.logged(), "daemon")
        if not running:
            await node.event("RankExited")
        driver = {pid for pid in processes_with(str(mark)) if "driver.py" in read(f"/proc/{pid}/cmdline")}
        assert set(processes_with(str(mark))) - driver
        assert await node.stop(grace=0.1) is None
        assert not set(processes_with(str(mark))) - driver


@needs_root
async def test_orphans_of_ranks_leave_no_zombies_while_training(tmp_path: Path, python: str) -> None:
    """As PID 1 the agent inherits every orphan; a training run makes thousands of them."""
    script = (
        "import os, sys, time\n"
        "for _ in range(300):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        os.fork() and os._exit(0)\n"
        "        os._exit(0)\n"
        "    os.waitpid(pid, 0)\n"
        "deadline = time.monotonic() + 20\n"
        "def zombies():\n"
        "    found = 0\n"
        "    for p in os.listdir('/proc'):\n"
        "        if p.isdecimal():\n"
        "            try: found += open(f'/proc/{p}/stat').read().rpartition(')')[2].split()[0] == 'Z'\n"
        "            except OSError: pass\n"
        "    return found\n"
        "while (left := zombies()) and time.monotonic() < deadline: time.sleep(0.01)\n"
        "sys.exit(left)\n"  # one that ends just now is a zombie until it is reaped
    )
    async with Node(tmp_path, [sys.executable, "-c", script], pod=True, python=python) as node:
        await node.start()
        assert (await node.event("RankExited"))["exit_code"] == 0


@needs_root
async def test_shared_memory_is_cleared(tmp_path: Path) -> None:
    script = (
        "import ctypes, os, sys\n"
        "open(sys.argv[1] + '/torch_1', 'w').write('x'); os.makedirs(sys.argv[1] + '/folder/deep')\n"
        "libc = ctypes.CDLL(None); print('id', libc.shmget(0x1234, 4096, 0o1600), libc.semget(0x77, 1, 0o1600))\n"
        "print(open('/proc/sysvipc/shm').read().count(chr(10)) - 1, 'segments', flush=True)\n"
    )
    async with Node(tmp_path, [sys.executable, "-c", script, str(tmp_path / "node-0" / "shm")], pod=True) as node:
        for _ in range(2):  # the second generation finds what the first did: a segment would be counted twice
            await node.start()
            await node.event("RankExited", generation=node.generation)
            assert await node.stop() is None
            assert list(node.shm.iterdir()) == []
        await node.until(lambda: node.logged().count("1 segments") == 2, "two counts")
        assert "-1" not in node.logged()


@needs_root
async def test_a_writer_of_checkpoints_ends_in_its_own_time_where_its_ranks_have_succeeded(tmp_path: Path) -> None:
    """Nothing else that they leave behind is waited for."""
    stored = tmp_path / "stored"
    writer = (
        "import pathlib, signal, sys, time\n"
        "def end(*_):\n"
        "    time.sleep(0.5); pathlib.Path(sys.argv[1]).touch(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "pathlib.Path('/proc/self/comm').write_text(sys.argv[2]); print('up', flush=True); time.sleep(600)\n"
    )
    train = (
        "import subprocess, sys\n"
        "for name in ('everstep-writer', 'tensorboard'):\n"
        "    argv = [sys.executable, '-c', sys.argv[1], sys.argv[2], name]\n"
        "    child = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)\n"
        "    child.stdout.readline()\n"
    )
    async with Node(tmp_path, [sys.executable, "-c", train, writer, str(stored)]) as node:
        await node.start()
        await node.event("RankExited", exit_code=0)
        await node.call("end_writers", seconds=30.0)
        assert stored.exists()
        assert await node.stop() is None


async def test_a_writer_of_checkpoints_that_does_not_end_in_time_is_told_of(tmp_path: Path) -> None:
    train = (
        "import subprocess, sys\n"
        "name = \"import pathlib; pathlib.Path('/proc/self/comm').write_text('everstep-writer')\"\n"
        "deaf = 'import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)'\n"
        "argv = [sys.executable, '-c', name + chr(10) + deaf]\n"
        "subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True).stdout.readline()\n"
    )
    async with Node(tmp_path, [sys.executable, "-c", train]) as node:
        await node.start()
        await node.event("RankExited", exit_code=0)
        await node.call("end_writers", seconds=0.5)
        await node.until(lambda: "saved last is not stored after 0.5 s, and is lost" in node.logged(), "a line")


async def test_slots_of_checkpoints_outlive_a_generation_but_for_those_of_stores_long_left(tmp_path: Path) -> None:
    """Each generation writes into a folder of its own, as with a script that names another store at each start."""
    slots = tmp_path / "node-0" / "slots"
    script = (
        "import os, sys\n"
        "folder = os.path.join(sys.argv[1], 'everstep-' + os.environ['EVERSTEP_GENERATION'], '0')\n"
        "os.makedirs(folder); open(os.path.join(folder, '0.part'), 'wb').write(b'weights')\n"
    )
    async with Node(tmp_path, [sys.executable, "-c", script, str(slots)], pod=True) as node:
        kept = []
        for generation in range(1, 5):
            await node.start()
            await node.event("RankExited", generation=node.generation)
            # A generation lasts longer than a tick of the file system's clock.
            newest = slots / f"everstep-{generation}" / "0" / "0.part"
            os.utime(newest, (1e9 + generation, 1e9 + generation))
            for folder in (newest.parent, newest.parent.parent):
                os.utime(folder, (1e9, 1e9))
            assert await node.stop() is None
            kept.append(sorted(path.name for path in slots.iterdir()))
        assert kept == [
            ["everstep-1"],
            ["everstep-1", "everstep-2"],
            ["everstep-2", "everstep-3"],
            ["everstep-3", "everstep-4"],
        ]
        assert (slots / "everstep-4" / "0" / "0.part").read_bytes() == b"weights"


def test_a_link_among_the_slots_is_as_old_as_itself_and_goes_alone(tmp_path: Path) -> None:
    slots, elsewhere = tmp_path / "slots", tmp_path / "elsewhere"
    for age, folder in enumerate((elsewhere, slots / "everstep-1", slots / "everstep-2")):
        folder.mkdir(parents=True)
        (folder / "data").write_bytes(b"weights")
        for path in (folder / "data", folder):
            os.utime(path, (2e9 - age, 2e9 - age))
    (slots / "link").symlink_to(elsewhere)
    os.utime(slots / "link", (1e9, 1e9), follow_symlinks=False)
    assert shared_memory.clear_shared_memory(None, owns_ipc=False, slots=slots) is None
    assert sorted(path.name for path in slots.iterdir()) == ["everstep-1", "everstep-2"]
    assert (elsewhere / "data").exists()


@needs_root
async def test_an_agent_that_clears_much_memory_still_hears_its_leader(tmp_path: Path) -> None:
    """A hundred thousand files, or a device that frees pages slowly: without heartbeats the node would be fenced."""
    async with Node(tmp_path, ["true"], pod=True, slow_memory=True) as node:
        await node.start()
        (node.shm / "torch_1").touch()
        stopped = asyncio.ensure_future(node.stop())
        await node.event("Clearing")
        await node.call("go_on")
        assert await stopped is None
        assert list(node.shm.iterdir()) == []


@needs_root
async def test_memory_that_is_not_cleared_in_time_makes_the_node_unclean(tmp_path: Path) -> None:
    async with Node(tmp_path, ["true"], pod=True, slow_memory=True, clean_timeout=0.5) as node:
        await node.start()
        assert await node.stop() == f"{node.shm} is still being emptied"
        await node.call("go_on")
        assert await node.stop() is None
        assert len(node.all("Clearing")) in (1, 2)


@needs_root
async def test_memory_that_other_pods_see_is_left_alone(tmp_path: Path) -> None:
    script = (
        "import ctypes, sys\n"
        "open(sys.argv[1] + '/of_another_job', 'w').write('x')\n"
        "print('id', ctypes.CDLL(None).shmget(0x1234, 4096, 0o1600))\n"
        "print(open('/proc/sysvipc/shm').read().count(chr(10)) - 1, 'segments', flush=True)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "node-0" / "shm")]
    async with Node(tmp_path, command, pod=True, shares_memory=True) as node:
        for _ in range(2):  # the second one finds the same segment
            await node.start()
            await node.event("RankExited", generation=node.generation)
            assert await node.stop() is None
        assert [path.name for path in node.shm.iterdir()] == ["of_another_job"]
        await node.until(lambda: node.logged().count("1 segments") == 2, "two counts")


MOUNT_BELOW_SHM = (
    'mkdir -p "$1/a folder" "$1/gone/deep" && touch "$1/token" "$1/gone/file" && mount --bind "$2" "$1/a folder"'
    ' && mkdir "$1/gone/deep/volume" && mount --bind "$2" "$1/gone/deep/volume" && mount --bind "$2/token" "$1/token"'
    ' && shift 2 && exec "$@"'
)


@needs_root
async def test_what_is_mounted_below_shared_memory_is_left_alone(tmp_path: Path) -> None:
    """A volume of the user's at /dev/shm/cache is none of the memory of a generation."""
    volume, shm = tmp_path / "volume", tmp_path / "node-0" / "shm"
    (volume / "folder").mkdir(parents=True)
    (volume / "folder" / "data").write_text("mine")
    (volume / "token").write_text("mine")
    prefix = ["sh", "-c", MOUNT_BELOW_SHM, "sh", str(shm), str(volume)]
    command = ["sh", "-c", f'cat "{shm}/a folder/folder/data"; touch "{shm}/segment"; ls "{shm}"']
    async with Node(tmp_path, command, pod=True, prefix=prefix) as node:
        await node.start()
        await node.event("RankExited")
        assert await node.stop() is None
        await node.start()
        await node.event("RankExited", generation=2)
        assert await node.stop() is None
        assert node.logged().count("mine") == 2
        assert sorted(path.name for path in volume.iterdir()) == ["folder", "token"]
        assert not (shm / "segment").exists()
        assert not (shm / "gone" / "file").exists()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that an unknown user may write; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory(prefix="everstep-test-") as name:
        for folder in (Path(name), Path(name) / "node-0"):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o777)
        yield Path(name)


AS_NOBODY = ["setpriv", "--reuid=4242", "--regid=4242", "--clear-groups"]


@needs_root
async def test_what_cannot_be_killed_makes_the_node_unclean(open_folder: Path) -> None:
    """An agent without rights over a process of another user (a setuid program) says which one is left."""
    mark = open_folder / "up"
    async with Node(open_folder, ["true"], pod=True, prefix=AS_NOBODY, clean_timeout=0.5) as node:
        await node.start()
        outside = node.process.pid
        agent = read(f"/proc/{outside}/task/{outside}/children").split()[0]
        enter = ["nsenter", "--pid", "--target", agent, "sh", "-c", f"echo up > {mark}; exec sleep 600"]
        intruder = subprocess.Popen(enter, start_new_session=True)  # noqa: ASYNC220
        try:
            await node.until(mark.exists, "intruder")
            reason = await node.stop()
            assert reason is not None
            assert reason.startswith("still alive after SIGKILL: ")
            assert "sleep" in reason or "sh" in reason
        finally:
            os.killpg(intruder.pid, signal.SIGKILL)
            intruder.wait()
        # The kernel hands a dead intruder over to the agent, and the agent reaps it, in their own time.
        for _ in range(40):
            if (left := await node.stop()) is None:
                break
        assert left is None


@pytest.fixture
def two_cgroups() -> Iterator[tuple[Path, Path]]:
    """As two containers have them; of either version of cgroups."""
    hierarchies = {line.split(":")[1]: line.split(":", 2)[2] for line in read("/proc/self/cgroup").splitlines()}
    name = "pids" if "pids" in hierarchies else ""
    own = Path("/sys/fs/cgroup") / name / hierarchies.get(name, "/").strip("/")
    groups = own / f"everstep-test-{os.getpid()}-1", own / f"everstep-test-{os.getpid()}-2"
    try:
        for group in groups:
            group.mkdir()
    except OSError as error:
        pytest.skip(f"cannot make a cgroup: {error}")
    yield groups
    for group in groups:
        group.rmdir()


def joined(group: Path) -> list[str]:
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]


@needs_root
async def test_a_debugger_in_a_container_of_its_own_is_neither_killed_nor_counted(
    open_folder: Path, two_cgroups: tuple[Path, Path]
) -> None:
    """As `kubectl debug --target` makes one: it is seen among the processes, and may be another user's."""
    mark = open_folder / "up"
    ours, theirs = map(joined, two_cgroups)
    async with Node(open_folder, ["sleep", "600"], pod=True, prefix=[*ours, *AS_NOBODY], clean_timeout=5.0) as node:
        await node.start()
        outside = node.process.pid
        agent = read(f"/proc/{outside}/task/{outside}/children").split()[0]
        inside = ["nsenter", "--pid", "--target", agent, "sh", "-c", f"echo up > {mark}; exec sleep 600"]
        debugger = subprocess.Popen([*theirs, *inside], start_new_session=True)  # noqa: ASYNC220
        try:
            await node.until(mark.exists, "debugger")
            assert await node.stop() is None
            assert (await node.event("RankExited"))["signal"] is not None, "ranks go as always"
            assert debugger.poll() is None
        finally:
            os.killpg(debugger.pid, signal.SIGKILL)
            debugger.wait()


@needs_root
async def test_an_unknown_user_gets_a_home_and_a_name(open_folder: Path) -> None:
    script = "import getpass, os, sys, tempfile; open(os.environ['HOME'] + '/x', 'w'); print(getpass.getuser()); "
    script += "print(os.environ['TORCHINDUCTOR_CACHE_DIR'], tempfile.gettempdir())"
    environ = {"HOME": "/", "USER": "", "LOGNAME": "", "LNAME": "", "USERNAME": ""}
    async with Node(open_folder, ["python3", "-c", script], pod=True, prefix=AS_NOBODY, environ=environ) as node:
        await node.start()
        ended = await node.event("RankExited")
        await node.stop()
    assert ended["exit_code"] == 0, ended
    assert node.logged().splitlines() == ["everstep", f"{node.folder}/run/inductor /tmp"]


@pytest.mark.skipif(
    not Path("/sys/fs/cgroup/memory").is_dir() or os.getuid() != 0, reason="needs a cgroup v1 of memory"
)
async def test_a_rank_killed_for_memory_says_so(tmp_path: Path) -> None:
    own = next(line.split(":")[2] for line in read("/proc/self/cgroup").splitlines() if ":memory:" in line)
    group = Path("/sys/fs/cgroup/memory") / own.strip("/") / f"everstep-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(128 << 20))
    except OSError as error:
        pytest.skip(f"cannot make a memory cgroup: {error}")
    try:
        script = "import os\nif os.environ['RANK'] == '1': x = bytearray(400 << 20)\nimport time; time.sleep(600)\n"
        enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
        async with Node(tmp_path, [sys.executable, "-c", script], procs=2, prefix=enter) as node:
            await node.start()
            ended = await node.event("RankExited")
            assert (ended["rank"], ended["signal"], ended["oom"]) == (1, 9, True)
            assert ended["message"] == "killed by SIGKILL (out of memory)"
            assert await node.stop() is None
    finally:
        group.rmdir()
