"""MPI (and Horovod, which is a library over it): mpirun beside the leader, its daemons and ranks through the agents.

mpirun calls our `rsh` for each node; the agent there starts the daemon; the daemon starts `rank` for each of its ranks;
the agent there starts the real rank. Every process is so the child of its node's agent, or of a daemon that is.
"""

from __future__ import annotations

import asyncio
import base64
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable, NamedTuple, Protocol

from everstep.agent.ranks import logs
from everstep.agent.ranks.environment import count_cpus, find_interface, read_program
from everstep.agent.ranks.events import Event, LauncherExited, PodUnusable
from everstep.agent.system import faults
from everstep.agent.system.processes import ChildProcess, ChildProcesses
from everstep.agent.system.threads import in_thread_if_possible
from everstep.agent.wire.generation_layout import GenerationLayout

from . import mpi_flavors
from .local_socket import LocalConnection, LocalServer
from .rank_command import PASSED_DESCRIPTOR, SOCKET

VERSION_TIMEOUT_SECONDS = 30.0  # seconds; a cold image on a network disk
WRONG_RANKS_CODE = 2  # as of a program that was called wrongly
ABANDONED_SECONDS = 5.0  # seconds that a rank may outlive the MPI daemon's child: the leader's own stop comes first


class StartedRank(Protocol):
    """A started rank, as far as MPI needs to know it."""

    def kill(self) -> None: ...


class RankRequest(NamedTuple):
    """A request of MPI to run one rank."""

    rank: int
    local_rank: int
    argv: list[str]
    env: dict[str, str]
    cwd: str | None
    pass_fds: tuple[int, ...]
    affinity: set[int] | None


class AgentHooks(NamedTuple):
    """The functions of its node's agent that MPI needs."""

    processes: ChildProcesses
    stdout: logs.LogSink
    stderr: logs.LogSink
    emit: Callable[[Event], None]
    start_rank: Callable[[RankRequest, Callable[[int], None]], StartedRank]
    run_daemon: Callable[[int, str, str], asyncio.Future[int]]  # node index, id, shell command
    kill_daemon: Callable[[int, str], None]


class MpiSession:
    """One generation of an MPI job on one node."""

    def __init__(self, layout: GenerationLayout, scratch: Path, agent: Path, hooks: AgentHooks) -> None:
        self._layout = layout
        self._scratch = scratch
        self._made: Path | None = None
        self._hooks = hooks
        self._this = [sys.executable, "-I", "-S", "-B", str(agent)]
        # On every node: Open MPI's daemons get the launcher's parameters, and refuse a launch agent that is not there.
        self._rsh_program = self._shim()
        self._server = LocalServer(scratch, self._requested)
        self._peers: dict[str, LocalConnection] = {}  # by daemon id
        self._count = 0
        self._ended = False
        self._output: logs.ProcessOutput | None = None

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables for every daemon and launcher of this node, and so for `rank` and `rsh` below them."""
        return {SOCKET: str(self._server.path)}

    @property
    def rank_variables(self) -> dict[str, str]:
        """Return the variables that keep Open MPI apart where nodes are processes of one machine.

        They have one host name there, and Open MPI goes by that: it names the shared memory of equal local ranks
        equally, and its hierarchical collectives wait for ever.
        """
        if len(set(self._layout.hosts)) == self._layout.nodes:
            return {}
        folder = self._scratch / "mpi"
        folder.mkdir(exist_ok=True)
        backing = {f"OMPI_MCA_btl_{name}_backing_directory": str(folder) for name in ("vader", "sm")}
        return {**backing, "OMPI_MCA_coll_han_priority": "0"}

    @property
    def idle_variables(self) -> dict[str, str]:
        """Return variables that say how this node's ranks wait, unless the image, the user or an option of mpirun says
        it."""
        return mpi_flavors.make_idle_variables(self._layout.procs_per_node, count_cpus())

    async def launch(self, command: tuple[str, ...], options: tuple[str, ...], env: Mapping[str, str]) -> None:
        """Start mpirun; only on the node of the leader.

        Args:
            command: The command of each rank.
            options: Further arguments of mpirun.
            env: The environment of mpirun.
        """
        try:
            mpirun = await in_thread_if_possible(lambda: read_program("mpirun", env.get("PATH")), "find-mpirun")
            if mpirun is None:
                raise mpi_flavors.UnsupportedMpi(
                    f"no mpirun in the image (PATH={env.get('PATH')}): distribution needs {mpi_flavors.SUPPORTED}"
                )
            answer = await self._hooks.processes.run([mpirun, "--version"], env, timeout=VERSION_TIMEOUT_SECONDS)
            kind = mpi_flavors.detect_flavor(answer[1] if answer is not None else "")
            run = mpi_flavors.LauncherRun(
                mpirun=mpirun,
                nodes=self._layout.nodes,
                procs_per_node=self._layout.procs_per_node,
                hosts=self._layout.hosts,
                interface=find_interface(self._layout.hosts[self._layout.node_index]),
                rsh=str(self._rsh_program),
                rank_command=[*self._this, "rank", "--", *command],
                options=options,
            )
            argv, defaults = mpi_flavors.build_command(kind, run)
            self._output = output = logs.ProcessOutput(self._hooks.stdout, self._hooks.stderr, "[mpirun] ")
            try:
                self._hooks.processes.start(
                    argv,
                    {**defaults, **env, **self.variables},
                    stdout=output.stdout.inner,
                    stderr=output.stderr.inner,
                    on_exit=self._launcher_exited,
                )
            finally:
                output.opened()
        except (OSError, mpi_flavors.UnsupportedMpi) as error:
            if faults.is_pod_fault(error):
                raise
            self._hooks.stderr.write(f"[mpirun] everstep: {error}\n".encode())
            self._hooks.emit(LauncherExited(self._layout.generation, 127, str(error), ()))

    def quiet(self) -> None:
        """Stop reporting: the generation is being stopped, and whatever ends from now on is no cause of anything."""
        self._ended = True

    def close(self) -> None:
        self._ended = True
        self._server.close()
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)
        if self._output is not None:
            self._output.close()

    def daemon_output(self, daemon: str, stream: str, data: bytes) -> None:
        peer = self._peers.get(daemon)
        if peer is not None:
            peer.send({"stream": stream, "data": base64.b64encode(data).decode()})

    def _shim(self) -> Path:
        """Write the shim and return its path: Hydra takes a path without arguments, and Open MPI splits at blanks and
        colons."""
        folder = self._scratch
        if set(" \t:") & set(str(folder)):  # the folder of a run on a laptop
            folder = self._made = Path(tempfile.mkdtemp(prefix="everstep-"))
        path = folder / "rsh"
        with faults.name_file_in_errors(path):
            path.write_text(f'#!/bin/sh\nexec {shlex.join([*self._this, "rsh"])} "$@"\n')
        path.chmod(0o700)
        return path

    def _launcher_exited(self, process: ChildProcess) -> None:
        assert self._output is not None
        tail = self._output.tail()
        if not self._ended:
            code = process.exit_code
            message = "" if code == 0 else _explain_exit(tail, f"mpirun exited with code {code}")
            self._hooks.emit(LauncherExited(self._layout.generation, code, message, tail))

    def _requested(self, peer: LocalConnection, request: dict[str, Any]) -> None:
        if self._ended:
            peer.close()
        elif request["op"] == "rank":
            self._rank(peer, request)
        elif request["op"] == "rsh":
            self._rsh(peer, str(request["host"]), str(request["command"]))
        else:
            peer.close()

    def _rank(self, peer: LocalConnection, request: dict[str, Any]) -> None:
        env = dict(request["env"])
        rank, local_rank = mpi_flavors.read_rank(env)
        procs = self._layout.procs_per_node
        if rank is None:
            raise ValueError("MPI's daemon did not say which rank this is")
        wrong = mpi_flavors.explain_counts(env, self._layout.nodes, procs)
        if wrong is not None:  # nobody answers: this rank waits for the stop
            self._hooks.stderr.write(f"[mpirun] everstep: {wrong}\n".encode())
            self._hooks.emit(LauncherExited(self._layout.generation, WRONG_RANKS_CODE, wrong, ()))
            return
        env.pop(SOCKET, None)
        if peer.fds:
            env[PASSED_DESCRIPTOR] = str(peer.fds[0])

        def ended(code: int) -> None:
            if code == 0:
                peer.send({"exit": 0})  # else: see launch/rank.py

        wanted = RankRequest(
            rank=rank,
            local_rank=rank % procs if local_rank is None else local_rank,
            argv=list(request["argv"]),
            env=env,
            cwd=request.get("cwd"),
            pass_fds=tuple(peer.fds),
            affinity=set(request["affinity"]),
        )
        try:
            started = self._hooks.start_rank(wanted, ended)
        except OSError as error:  # nobody answers: like one that failed, this rank waits for the stop
            self._hooks.emit(PodUnusable(f"rank {rank} cannot start here: {faults.explain_fault(error)}"))
            return
        peer.close_fds()

        def abandoned() -> None:
            # Not at once: mpirun ends all ranks when one fails elsewhere, and that one's own report may still be on
            # its way to the leader. Its stop arrives first, with the grace that a checkpoint needs.
            if not self._ended:
                asyncio.get_running_loop().call_later(
                    ABANDONED_SECONDS, lambda: None if self._ended else started.kill()
                )

        peer.closed = abandoned

    def _rsh(self, peer: LocalConnection, host: str, command: str) -> None:
        name, _, number = host.partition("-")
        index = int(number) - 1 if name == "algo" and number.isdecimal() else -1
        if not 0 <= index < self._layout.nodes:
            peer.send({"stream": "stderr", "data": base64.b64encode(f"{host}: not in this job\n".encode()).decode()})
            peer.send({"exit": 255})
            return
        self._count += 1
        daemon = f"{self._layout.generation}-{self._count}-{host}"
        self._peers[daemon] = peer
        task = self._hooks.run_daemon(index, daemon, command)

        def done(_: asyncio.Future[int]) -> None:
            failed = task.cancelled() or task.exception() is not None
            peer.send({"exit": 255 if failed else task.result()})
            self._peers.pop(daemon, None)

        def closed() -> None:  # mpirun killed the shim: it wants the daemon gone
            self._hooks.kill_daemon(index, daemon)
            task.cancel()

        task.add_done_callback(done)
        peer.closed = closed


def _explain_exit(tail: tuple[str, ...], ending: str) -> str:
    """Return how mpirun ended. Open MPI explains itself in boxes of dashes: the first paragraph of the last box."""
    rulers = [i for i, line in enumerate(tail) if line.startswith("-----")]
    if rulers:
        start = rulers[-2] if len(rulers) > 1 else rulers[0]
        words = " ".join(line.strip() for line in tail[start + 1 :] if not line.startswith("-----"))
        return f"{ending}: {words}"[: logs.TAIL_COLUMNS]
    last = [line for line in tail if line.strip()]
    return f"{ending}: {last[-1]}" if last else ending
