"""MPI on one machine: two agents, mpirun beside the first, its daemons through both. No sshd, no name resolution."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.agent.laptop import Laptop

from .node import Event, Node

pytestmark = pytest.mark.integration


@asynccontextmanager
async def job(
    folder: Path,
    agent: Path,
    command: Sequence[str],
    *,
    nodes: int = 2,
    procs: int = 2,
    options: Sequence[str] = (),
    environ: dict[str, str] | None = None,
    prefixes: Sequence[Sequence[str]] | None = None,
    pod: bool = False,
    python: str = sys.executable,
) -> AsyncIterator[list[Node]]:
    """Nodes whose agents are joined by this test, as the leader's links would join them."""
    async with AsyncExitStack() as stack:
        members = [
            await stack.enter_async_context(
                Node(
                    folder,
                    command,
                    index=i,
                    nodes=nodes,
                    procs=procs,
                    distribution="mpi",
                    options=options,
                    agent=agent,
                    environ=environ,
                    prefix=prefixes[i] if prefixes else (),
                    pod=pod,
                    python=python,
                )
            )
            for i in range(nodes)
        ]
        links = asyncio.ensure_future(relay(members))
        try:
            yield members
        finally:
            links.cancel()


async def relay(members: list[Node]) -> None:
    """Relay `spawn` to its node, and the daemon's output and exit back to the leader, as the coordination does."""
    seen = [0] * len(members)
    while True:
        for index, node in enumerate(members):
            events, seen[index] = node.events[seen[index] :], len(node.events)
            for event in events:
                if event["kind"] == "SpawnOn":
                    target = members[event["node"]]
                    await target.call("spawn", daemon=event["daemon"], argv=event["argv"], env=event["env"])
                elif event["kind"] == "KillOn":
                    await members[event["node"]].call("kill_daemon", daemon=event["daemon"])
                elif event["kind"] == "DaemonOutput":
                    values = {name: event[name] for name in ("daemon", "stream", "data")}
                    await members[0].call("daemon_output", **values)
                elif event["kind"] == "DaemonExited":
                    await members[0].call("daemon_exited", daemon=event["daemon"], exit_code=event["exit_code"])
        await asyncio.sleep(0.005)


async def start(members: list[Node], **layout: Any) -> None:
    await asyncio.gather(*(node.start(**layout) for node in members))


async def stop(members: list[Node]) -> None:
    assert await asyncio.gather(*(node.stop(grace=0.5) for node in members)) == [None] * len(members)


def exits(members: list[Node]) -> dict[int, Event]:
    """By rank, the newest generation's."""
    return {
        e["rank"]: e for node in members for e in node.all("RankExited") if e["generation"] == members[0].generation
    }


async def test_ranks_of_two_nodes_run_as_mpirun_numbers_them(
    tmp_path: Path, agent: Path, mpi_program: Path, python: str
) -> None:
    async with job(tmp_path, agent, [str(mpi_program)], python=python) as members:
        for _ in range(2):  # the second generation in the same agents
            await start(members)
            launcher = await members[0].event("LauncherExited", generation=members[0].generation)
            assert (launcher["exit_code"], launcher["message"]) == (0, "")
            await members[0].until(lambda: len(exits(members)) == 4, "four exits")
            assert {rank: e["exit_code"] for rank, e in exits(members).items()} == dict.fromkeys(range(4), 0)
            await stop(members)
        for index, node in enumerate(members):
            for local in range(2):
                rank = 2 * index + local
                line = f"[rank {rank}] rank {rank} of 4, sum 6, RANK={rank} LOCAL_RANK={local} NODE_RANK={index}"
                assert node.logged().count(f"{line} SM_CURRENT_HOST=algo-{index + 1}") == 2
        assert {e["step"] for node in members for e in node.all("RankProgressed")} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("what", "code", "signum", "message"),
    [
        ("exit", 7, None, "exited with code 7"),
        ("kill", 137, 9, "killed by SIGKILL"),
    ],
)
async def test_the_first_cause_is_the_failed_rank(
    tmp_path: Path, agent: Path, mpi_program: Path, what: str, code: int, signum: int | None, message: str
) -> None:
    """Neither mpirun's end nor the ranks that it would kill because of it come first."""
    async with job(tmp_path, agent, [str(mpi_program), what]) as members:
        await start(members)
        failed = await members[1].event("RankExited")
        assert (failed["rank"], failed["exit_code"], failed["signal"]) == (3, code, signum)
        assert failed["message"] == message
        assert set(exits(members)) == {3}
        await stop(members)
        assert set(exits(members)) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("what", "code", "signum", "message"),
    [
        ("exit", 7, None, "exited with code 7"),
        ("kill", 137, 9, "killed by SIGKILL"),
    ],
)
def test_the_leaders_history_names_the_failed_rank_of_another_node(
    tmp_path: Path, mpi_program: Path, what: str, code: int, signum: int | None, message: str
) -> None:
    """Between agents as they are. mpirun, beside the leader, tells its own code for either end."""
    restart = {"application": 0, "maxBackoffSeconds": 0}
    command, mpi = [str(mpi_program), what], {"kind": "mpi", "options": []}
    with Laptop(tmp_path, command, procs=2, distribution=mpi, restart=restart, restartGraceSeconds=1) as leader:
        state = leader.until(lambda s: s["outcome"])
        (entry,) = state["generationHistory"]
        assert (entry["cause"], entry["index"], entry["rank"]) == ("Application", 1, 3)
        assert (entry["exitCode"], entry["signal"], entry["message"]) == (code, signum, message)
        assert (state["outcome"]["result"], state["outcome"]["exitCode"]) == ("failed", code)
        assert leader.exit_codes() == [code] * 2


async def test_an_abort_tells_its_code(tmp_path: Path, agent: Path, mpi_program: Path) -> None:
    """By the rank, or (MPICH kills it before it can exit) by mpirun."""
    async with job(tmp_path, agent, [str(mpi_program), "abort"]) as members:
        await start(members)
        ends = ("RankExited", "LauncherExited")
        first = await members[0].until(
            lambda: next((e for node in members for e in node.events if e["kind"] in ends), None), "end"
        )
        assert first["exit_code"] == 7
        await stop(members)


async def test_a_stop_gives_mpi_ranks_their_grace(tmp_path: Path, agent: Path, mpi_program: Path) -> None:
    async with job(tmp_path, agent, [str(mpi_program), "pause"]) as members:
        await start(members)
        await members[0].until(lambda: sum(n.logged().count("sum 6") for n in members) == 4, "four lines")
        await stop(members)
        assert {rank: e["signal"] for rank, e in exits(members).items()} == dict.fromkeys(range(4), 15)
        assert members[0].all("LauncherExited") == []


async def test_a_missing_mpirun_is_explained(tmp_path: Path, agent: Path) -> None:
    async with job(tmp_path, agent, ["true"], nodes=1, environ={"PATH": str(tmp_path)}) as members:
        await start(members)
        event = await members[0].event("LauncherExited")
        assert event["exit_code"] == 127
        assert "no mpirun in the image" in event["message"]
        assert "Open MPI 4 or 5, MPICH or Intel MPI" in event["message"]


async def test_an_unknown_mpirun_is_explained(tmp_path: Path, agent: Path) -> None:
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho mpirun of another kind 1.0\n")
    program.chmod(0o755)
    async with job(tmp_path, agent, ["true"], nodes=1, environ={"PATH": f"{tmp_path}:{os.environ['PATH']}"}) as members:
        await start(members)
        event = await members[0].event("LauncherExited")
        assert "the image's mpirun is not supported: mpirun of another kind 1.0" in event["message"]


def pretend_mpirun(folder: Path, daemon: str) -> dict[str, str]:
    """An mpirun that runs the rest of its command as its only rank, with these variables of its daemon's."""
    program = folder / "mpirun"
    program.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec echo "mpirun (Open MPI) 4.1.6"\n'
        f'while [ "$1" != {shlex.quote(sys.executable)} ]; do shift; done\n'
        f'{daemon} "$@"\n'
    )
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize("number", ["1", "3"])
async def test_an_option_that_counts_ranks_is_ignored_or_ends_the_generation(
    tmp_path: Path, agent: Path, mpi_program: Path, number: str
) -> None:
    """Open MPI 4 takes the last of two `-np`, 5 the first one, and MPICH neither. Nobody would ever start the ranks
    that are left out, and the job would wait for them."""
    async with job(tmp_path, agent, [str(mpi_program), "pause"], options=["-np", number]) as members:
        await start(members)

        def ends() -> list[Event]:
            return [event for node in members for event in node.all("LauncherExited")]

        def started() -> set[int]:
            return {event["rank"] for node in members for event in node.all("RankStarted")}

        await members[0].until(lambda: ends() or len(started()) == 4, "an end, or all ranks")
        if ends():
            assert ends()[0]["exit_code"] != 0
            assert "np" in ends()[0]["message"] + " ".join(ends()[0]["log_tail"])
            assert not started()
        await stop(members)


@pytest.mark.parametrize(
    ("daemon", "said"),
    [
        ("OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_SIZE=1", "mpirun starts 1 ranks, and the job has 2"),
        ("PMI_SIZE=8 MPI_LOCALNRANKS=2", "mpirun starts 8 ranks, and the job has 2"),
        ("OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=1", "mpirun starts 1 ranks on one node, and the job has 2"),
    ],
)
async def test_ranks_that_are_not_the_jobs_are_told_by_their_numbers(
    tmp_path: Path, agent: Path, daemon: str, said: str
) -> None:
    environ = pretend_mpirun(tmp_path, f"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0 {daemon} exec")
    async with job(tmp_path, agent, ["true"], nodes=1, environ=environ) as members:
        await start(members)
        event = await members[0].event("LauncherExited")
        assert said in event["message"]
        assert "-np" in event["message"]


def test_a_launcher_that_ends_well_without_some_ranks_ends_the_generation(tmp_path: Path) -> None:
    """One that does not tell how many there are, or whose options run another program in the place of some."""
    environ = pretend_mpirun(tmp_path, "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0 exec")
    restart, mpi = {"application": 0, "maxBackoffSeconds": 0}, {"kind": "mpi", "options": []}
    job = Laptop(tmp_path / "job", ["true"], environ=environ, distribution=mpi, restart=restart)
    with job:
        outcome = job.until(lambda s: s["outcome"])["outcome"]
        assert outcome["result"] == "failed"
        assert "mpirun exited with code 0, but not all ranks of 1 of 2 nodes have run" in outcome["message"]


async def test_ranks_run_in_a_folder_whose_name_has_blanks_and_colons(
    tmp_path: Path, agent: Path, mpi_program: Path
) -> None:
    """As that of a run on a laptop: Open MPI splits the name of its rsh at either."""
    async with job(tmp_path / "my runs: first", agent, [str(mpi_program)]) as members:
        await start(members)
        launcher = await members[0].event("LauncherExited")
        assert (launcher["exit_code"], launcher["message"]) == (0, "")
        await stop(members)


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no MPI here")
async def test_mpiruns_own_complaint_is_its_message(tmp_path: Path, agent: Path) -> None:
    async with job(tmp_path, agent, ["true"], nodes=1, options=["--no-such-option"]) as members:
        await start(members)
        event = await members[0].event("LauncherExited")
        assert event["exit_code"] != 0
        assert "no-such-option" in event["message"] + " ".join(event["log_tail"])


@pytest.fixture
def networks() -> Iterator[list[str]]:
    """Two network namespaces with an address each, joined by a cable; 192.0.2.9 swallows everything."""
    names = [f"everstep-{os.getpid()}-{i}" for i in (1, 2)]
    ends = [f"ev{os.getpid() % 100000}{end}" for end in "ab"]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
        cable = ["ip", "link", "add", ends[0], "netns", names[0], "type", "veth", "peer", ends[1], "netns", names[1]]
        subprocess.run(cable, check=True, capture_output=True)
        for index, (name, end) in enumerate(zip(names, ends, strict=True)):
            for words in (
                f"addr add 192.0.2.{5 + index}/24 dev {end}",
                f"link set {end} up",
                "link set lo up",
                f"neigh add 192.0.2.9 lladdr 02:00:00:00:00:09 dev {end} nud permanent",
            ):
                subprocess.run(["ip", "-netns", name, *words.split()], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot make network namespaces: {error}")
    else:
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


async def test_pods_need_no_name_resolution(
    tmp_path: Path, agent: Path, mpi_program: Path, networks: list[str], python: str
) -> None:
    """Own network, PIDs and host name each, as in a cluster whose DNS never answers."""
    resolver = tmp_path / "resolv.conf"
    resolver.write_text("nameserver 192.0.2.9\noptions timeout:30 attempts:5\n")
    # Equal PIDs and host names in every run: what MPI keeps in /tmp and /dev/shm must be each pod's own, as it is.
    setup = "mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /dev/shm && export TMPDIR=$(mktemp -d) && "
    setup += f'mount --bind {resolver} /etc/resolv.conf && hostname algo-$0 && exec "$@"'
    prefixes = [
        ["nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "--mount", "sh", "-c", setup, str(i + 1)]
        for i, name in enumerate(networks)
    ]
    async with job(tmp_path, agent, [str(mpi_program)], prefixes=prefixes, pod=True, python=python) as members:
        begun = time.monotonic()
        await start(members, hosts=["192.0.2.5", "192.0.2.6"])
        launcher = await members[0].event("LauncherExited")
        assert launcher["exit_code"] == 0, launcher
        await members[0].until(lambda: len(exits(members)) == 4, "four exits")
        assert {rank: e["exit_code"] for rank, e in exits(members).items()} == dict.fromkeys(range(4), 0)
        assert time.monotonic() - begun < 100  # one look-up that nobody answers takes 150 s
        await stop(members)
        assert sum(node.logged().count("sum 6") for node in members) == 4


async def test_a_rank_that_has_no_room_for_its_pipe_is_not_the_applications_fault(tmp_path: Path, agent: Path) -> None:
    """Nor does it wait for ever: what MPI starts for it hears nothing of an exception in the agent."""
    environ = pretend_mpirun(tmp_path, "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_LOCAL_RANK=0 exec")
    async with job(tmp_path, agent, ["true"], nodes=1, environ=environ) as members:
        blocked = members[0].folder / "run/progress"
        blocked.touch()
        await start(members)
        event = await members[0].event("PodUnusable")
        assert event["message"] == f"rank 0 cannot start here: {blocked}: File exists"
        assert not members[0].all("RankExited")


@pytest.mark.parametrize(
    "request_",
    [
        b"[" * 100_000,
        b"17",
        b'{"op": "rank", "argv": ["true"], "env": {"OMPI_COMM_WORLD_RANK": 7}, "affinity": [0]}',
        b'{"op": "rank", "argv": [], "env": {"OMPI_COMM_WORLD_RANK": "0"}, "affinity": [0]}',
    ],
    ids=["deep", "number", "no text", "no program"],
)
async def test_what_is_no_request_ends_its_connection_and_nothing_else(
    tmp_path: Path, agent: Path, request_: bytes
) -> None:
    """Any process of the user may connect to the agent's socket."""
    program = tmp_path / "mpirun"
    program.write_text('#!/bin/sh\n[ "$1" = --version ] && exec echo "mpirun (Open MPI) 4.1.6"\nexec sleep 600\n')
    program.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    async with job(tmp_path, agent, ["true"], nodes=1, environ=environ) as members:
        await start(members)
        reader, writer = await asyncio.open_unix_connection(members[0].folder / "run/agent.sock")
        writer.write(request_ + b"\n")
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
        await stop(members)
        assert "Exception in callback" not in members[0].logged()
