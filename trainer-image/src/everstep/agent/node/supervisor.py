"""The processes of one node: ranks, MPI daemons, and everything that they leave behind."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from everstep.agent.config import AgentConfig, AgentPaths
from everstep.agent.launch import none, torch
from everstep.agent.launch.launcher import Launcher, count_ranks_on_node
from everstep.agent.launch.mpi_daemons import Daemons
from everstep.agent.ranks import environment, failure_file, logs
from everstep.agent.ranks.container_contract import (
    ContractFacts,
    JobIdentity,
    build_contract_files,
    build_rank_variables,
    build_sm_environment,
    drop_unusable_variables,
    list_contract_folders,
)
from everstep.agent.ranks.contract_files import make_contract_folders, write_contract_files
from everstep.agent.ranks.events import (
    DaemonExited,
    DaemonOutput,
    Event,
    LauncherExited,
    PodUnusable,
    RankExited,
    RankProgressed,
    RankStarted,
)
from everstep.agent.ranks.placement import RankPlacement
from everstep.agent.ranks.rank import Rank, RankCommand, RankContext
from everstep.agent.ranks.stack_dumps import request_stacks
from everstep.agent.system import gpu, oom, shared_memory
from everstep.agent.system.process_table import format_pids
from everstep.agent.system.processes import ChildProcesses
from everstep.agent.system.signal_targets import SignalTargets
from everstep.agent.system.tasks import Tasks
from everstep.agent.system.threads import in_thread_if_possible, in_thread_when_possible
from everstep.agent.wire.generation_layout import GenerationLayout

if TYPE_CHECKING:
    from everstep.agent.launch import mpi

__all__ = [
    "DaemonExited",
    "DaemonOutput",
    "Event",
    "GenerationLayout",
    "LauncherExited",
    "PodUnusable",
    "RankExited",
    "RankProgressed",
    "RankStarted",
    "SpawnOn",
    "Supervisor",
    "count_ranks_on_node",
]

# (node index, daemon id, argv, additional environment) -> exit code. Cancelling it must kill the daemon.
SpawnOn = Callable[[int, str, "list[str]", "dict[str, str]"], "Coroutine[Any, Any, int]"]

WRITER_NAME = "everstep-writer"  # of a process, as the checkpoint library names it
CLEAN_TIMEOUT_SECONDS = 30.0  # seconds from the first KILL until the node is called unclean
NOTE_SECONDS = 5.0  # seconds between two looks at what runs, where it may use GPUs
OTHERS_TIMEOUT = 5.0  # seconds for processes on a GPU of which nobody can say whose they are
_FLUSH_TIMEOUT_SECONDS = 2.0  # seconds for the last lines, when nobody may be reading them
_MAX_FLUSH_SECONDS = 6.0  # seconds for them, when somebody reads them slowly


class Supervisor:
    """A supervisor of all processes of a node. It must be made and used on the main thread, inside the running event
    loop: it owns SIGCHLD and every child."""

    def __init__(
        self, config: AgentConfig, place: AgentPaths, emit: Callable[[Event], None], spawn_on: SpawnOn
    ) -> None:
        self._config = config
        self._place = place
        self._emit = emit
        self._spawn_on = spawn_on
        self._processes = ChildProcesses(place.owns_pod)
        self._stdout, self._stderr = logs.LogSink(1), logs.LogSink(2)
        self._base = environment.build_base_environment(os.environ, place.slots)
        self._command = config.command
        self._gpus = gpu.count_gpus(os.environ)
        self._memory_counter = oom.find_oom_counter()
        self._daemons = Daemons(self._processes, emit)
        self._tasks = Tasks(lambda error: emit(PodUnusable(f"the agent failed: {error!r}")))
        self._ranks: list[Rank] = []
        self._layout: GenerationLayout | None = None
        self._node: RankContext | None = None
        self._session: mpi.MpiSession | None = None
        self._contract: dict[str, str] = {}
        self._others: set[int] = set()  # PIDs on the GPUs that are none of ours
        self._noting: asyncio.Task[None] | None = None
        self._clearing: asyncio.Task[str | None] | None = None
        self._heard: SignalTargets | None = None  # who got the TERM of the stop that is going on
        # A daemon's `spawn` may overtake a `start` that waits for `mpirun --version`, and must not meet half a `stop`.
        self._turn = asyncio.Lock()
        self._disk = threading.Lock()

    async def start(self, layout: GenerationLayout) -> None:
        """Write the contract's files and start the ranks (MPI: node 0 starts mpirun, whose daemons start them).

        A command that cannot be executed is a RankExited with code 126 or 127, not an exception.
        """
        async with self._turn:
            config = self._config
            self._layout = layout
            self._processes.forget_seen()
            failure_path = await in_thread_if_possible(lambda: self._prepare(layout), "prepare")
            self._node = RankContext(
                generation=layout.generation,
                processes=self._processes,
                stdout=self._stdout,
                stderr=self._stderr,
                emit=self._emit,
                memory_counter=self._memory_counter,
                kills_before=oom.count_oom_kills(self._memory_counter),
                failure_file=failure_file.FailureFile(failure_path),
                start_task=self._tasks.start,
            )
            if self._gpus and self._noting is None:
                self._noting = self._tasks.start(self._note_processes())
            if config.mpi:
                from everstep.agent.launch import mpi  # only here: a zipapp's modules are compiled at every start

                self._session = session = mpi.MpiSession(
                    layout, self._place.scratch, self._place.agent, self._mpi_hooks()
                )
                if layout.node_index == 0:
                    await session.launch(self._command, config.distribution_options, {**self._base, **self._contract})
                return
            launcher: Launcher = none if config.distribution == "none" else torch
            if launcher is torch and (advice := torch.advise_on_launcher(self._command, layout)) is not None:
                self.log(advice)
            for place in launcher.place_ranks(layout):
                own = launcher.make_variables(layout, place.rank)
                env = {
                    **own,
                    **self._base,
                    **self._contract,
                    **self._variables(layout, place),
                }
                if config.distribution == "none":  # ours to say: an image's own PET_* would split the group
                    env.update(own)
                self._ranks.append(
                    Rank(
                        self._node,
                        RankCommand(self._command, drop_unusable_variables(env)),
                        rank=place.rank,
                        local_rank=place.local_rank,
                        tag=logs.make_rank_tag(place.rank, place.world_size),
                        fifo=self._fifo(place.local_rank),
                    )
                )

    async def dump_stacks(self) -> None:
        """Have the ranks that can do so write the stacks of all their threads to the log."""
        ranks = [(rank.process.pid, rank.stack_dump) for rank in self._ranks if rank.process is not None]
        dumped = await in_thread_if_possible(lambda: [request_stacks(*each) for each in ranks], "dump")
        if (silent := dumped.count(False)) > 0:
            self.log(
                f"everstep: {silent} of {len(dumped)} ranks of this node cannot dump their stacks: only programs "
                "that call everstep.progress() can"
            )

    async def stop(self, grace: float) -> str | None:
        """Send TERM to the ranks, KILL after `grace` seconds to every process but the agent; then look at memory and
        GPUs. Return None when the node is clean, else what is left after 30 s. No event of this generation comes
        later."""
        async with self._turn:
            if self._session is not None:
                self._session.quiet()
            if self._noting is not None:
                self._noting.cancel()
                self._noting = None
                await self._processes.note_living()
            await self._end_ranks(grace)
            deadline = time.monotonic() + CLEAN_TIMEOUT_SECONDS
            left = await self._processes.kill_all(deadline)
            for rank in self._ranks:
                await rank.wait_until_reported()
                rank.close()
            self._ranks = []
            self._daemons.close()
            if self._session is not None:
                self._session.close()
                self._session = None
            self._layout = self._node = self._heard = None
            if left is None and self._place.owns_pod:
                left = await self._clear_memory(deadline)
            if left is None and self._gpus:
                left = await self._wait_for_gpus(deadline)
            return left

    async def end_writers(self, seconds: float) -> None:
        """Have the processes that store checkpoints end, all of whose ranks have: a rank may have left its session
        open, and what it saved last be on its way."""
        if await self._processes.end_named(WRITER_NAME, time.monotonic() + seconds):
            self.log(f"everstep: what was saved last is not stored after {seconds:g} s, and is lost: see close()")

    async def signal(self, signum: int) -> set[int]:
        """Forward a signal to all ranks; the PIDs of those that heard it, see ChildProcesses.forward."""
        return set((await self._forward(signum)).heard)

    async def spawn(self, daemon: str, argv: list[str], env: dict[str, str]) -> None:
        """Start a launcher's daemon on this node; DaemonOutput and one DaemonExited follow, also when it cannot
        start."""
        async with self._turn:
            if self._session is None:  # of a generation that has been stopped meanwhile
                self._emit(DaemonExited(daemon, 255))
            else:
                self._daemons.start(daemon, argv, {**self._base, **env, **self._session.variables})

    def kill_daemon(self, daemon: str) -> None:
        self._daemons.kill(daemon)

    def daemon_output(self, daemon: str, stream: str, data: bytes) -> None:
        """Pass on what a daemon started by `spawn_on` wrote, to the launcher that waits for it (on the leader's
        node)."""
        if self._session is not None:
            self._session.daemon_output(daemon, stream, data)

    @property
    def has_gpus(self) -> bool:
        return self._gpus > 0

    async def gpus(self) -> list[gpu.GpuDevice] | None:
        """Return the GPUs and their health; None when the image cannot tell. Raises gpu.DriverTimeout."""
        return await gpu.query_devices(self._processes, self._base)

    def log(self, text: str) -> None:
        """Write a line of the agent's own to stderr, without waiting for whoever reads it."""
        self._stderr.write(f"{text}\n".encode(errors="replace"))

    async def close(self) -> None:
        """Flush the logs and give back descriptors. The ranks must have been stopped."""
        deadline = time.monotonic() + _MAX_FLUSH_SECONDS
        for sink in (self._stdout, self._stderr):
            sink.close(_FLUSH_TIMEOUT_SECONDS, deadline)
        self._processes.close()

    async def _end_ranks(self, grace: float) -> None:
        """Wait until all that heard the TERM have ended, which may be more than the ranks: see ChildProcesses.forward.

        A stop may be given up for one with less grace. Scripts take a second TERM for impatience, so there is only one.
        """
        if self._heard is None:
            self._heard = await self._forward(signal.SIGTERM)
        deadline = time.monotonic() + grace
        await self._processes.wait_until_ended(self._heard.heard, deadline)
        # What they printed last is with these by now. What the ranks leave behind may keep their pipes open for ever.
        until = min(deadline, time.monotonic() + _FLUSH_TIMEOUT_SECONDS)
        await self._processes.wait_until_ended(self._heard.filters, until)

    async def _forward(self, signum: int) -> SignalTargets:
        return await self._processes.forward([rank.process for rank in self._ranks if rank.process], signum)

    async def _clear_memory(self, deadline: float) -> str | None:
        """In a thread: a million files, or a terabyte in one of them, are gone after more than a few heartbeats."""
        if self._clearing is None or self._clearing.done():  # else it is that of a stop that was given up for this one
            shm, owns_ipc = self._place.shm if self._config.owns_shared_memory else None, self._config.owns_ipc
            self._clearing = self._tasks.start(
                in_thread_when_possible(
                    lambda: shared_memory.clear_shared_memory(shm, owns_ipc=owns_ipc, slots=self._place.slots),
                    "clear-memory",
                )
            )
        done, _ = await asyncio.wait([self._clearing], timeout=max(0.0, deadline - time.monotonic()))
        return self._clearing.result() if done else f"{self._place.shm} is still being emptied"

    async def _note_processes(self) -> None:
        """Note what runs, until a stop: nobody is told of it when a launcher's own children come and go."""
        while True:
            await asyncio.sleep(NOTE_SECONDS)
            await self._processes.note_living()

    async def _wait_for_gpus(self, deadline: float) -> str | None:
        """Wait until the driver has torn the contexts of killed processes down: seconds, with much memory.

        Of ours none lives any more, so one that does is a stranger's: of a laptop, or of a debugger's container. PIDs
        that nobody here ever had are those of the machine, as some drivers tell them: of other pods on a shared GPU, of
        an MPS server, and of ours as well. Such are waited for a little, and no more while they stay.
        """
        began, left = time.monotonic(), None
        while True:
            try:
                found = await gpu.list_device_pids(self._processes, self._base)
            except gpu.DriverTimeout as error:
                left = str(error)
            else:
                strangers = self._processes.living(found)
                ours = [pid for pid in found if self._processes.has_run_here(pid) and pid not in strangers]
                self._others &= set(found)
                unknown = set(found) - strangers - set(ours) - self._others
                if unknown and time.monotonic() > min(deadline, began + OTHERS_TIMEOUT):
                    self._others |= unknown
                    self.log(f"everstep: other processes use the GPUs as well: {format_pids(sorted(unknown))}")
                    unknown = set()
                if not ours and not unknown:
                    return None
                left = f"GPU still used by processes {format_pids(ours)}" if ours else None
            if left is not None and time.monotonic() > deadline:
                return left
            await asyncio.sleep(0.2)

    def _prepare(self, layout: GenerationLayout) -> Path:
        """In a thread, for a user's network volume may take its time: make what ranks need, and return the failure
        file's path."""
        with self._disk:  # a start that was given up may still wait for the same volume
            if self._layout is not layout:
                raise ValueError("this start was given up")
            base = {**self._base, **environment.make_home_variables(self._base, self._place.scratch)}
            command = tuple(environment.expand_references(word, base) for word in self._config.command)
            if command:
                environment.read_program(command[0], base.get("PATH"))
            path = failure_file.remove_failure_file(self._place.ml / "output")
            contract = self._write_contract(layout, command)
            if self._layout is layout:
                self._base, self._command, self._contract = base, command, contract
            return path

    def _write_contract(self, layout: GenerationLayout, command: tuple[str, ...]) -> dict[str, str]:
        config, place = self._config, self._place
        address = layout.hosts[layout.node_index]
        facts = ContractFacts(
            job=config.name,
            hyperparameters=config.hyperparameters,
            num_nodes=layout.nodes,
            node_index=layout.node_index,
            instance_type=config.instance_type,
            command=command,
            num_cpus=environment.count_cpus(),
            num_gpus=self._gpus,
            network_interface=environment.find_interface(address) or "eth0",
            master_addr=layout.master_addr,
            master_port=layout.master_port,
            ml=str(place.ml),
        )
        make_contract_folders(list_contract_folders(facts))
        own = None if config.owns_input else place.scratch / "config"
        write_contract_files(build_contract_files(facts), own, self.log)
        network = environment.make_network_variables(address, facts.current_host, self._base)
        return {**network, **build_sm_environment(facts), **self._config.variables}

    def _variables(self, layout: GenerationLayout, place: RankPlacement) -> dict[str, str]:
        return build_rank_variables(
            place,
            node_rank=layout.node_index,
            master_addr=layout.master_addr,
            master_port=layout.master_port,
            epoch=layout.epoch,
            generation=layout.generation,
            job=JobIdentity(self._config.namespace, self._config.name, self._config.attempt_base),
            progress=str(self._fifo(place.local_rank)),
            checkpoint_request=str(self._place.checkpoint_request),
        )

    def _fifo(self, local_rank: int) -> Path:
        return self._place.scratch / "progress" / str(local_rank)

    def _mpi_hooks(self) -> mpi.AgentHooks:
        from everstep.agent.launch import mpi

        return mpi.AgentHooks(
            processes=self._processes,
            stdout=self._stdout,
            stderr=self._stderr,
            emit=self._emit,
            start_rank=self._start_mpi_rank,
            run_daemon=self._run_daemon,
            kill_daemon=self._kill_daemon_on,
        )

    def _start_mpi_rank(self, request: mpi.RankRequest, ended: Callable[[int], None]) -> Rank:
        layout, node, session = self._layout, self._node, self._session
        assert layout is not None
        assert node is not None
        assert session is not None
        procs = layout.procs_per_node
        world = layout.nodes * procs
        env = {
            **torch.make_variables(layout, request.rank),
            **session.idle_variables,
            **request.env,
            "PATH": environment.restore_path(request.env.get("PATH", ""), self._base.get("PATH", "")),
            **session.rank_variables,
            **self._contract,
            **self._variables(layout, RankPlacement(request.rank, request.local_rank, world, procs)),
        }
        rank = Rank(
            node,
            RankCommand(
                request.argv,
                drop_unusable_variables(env),
                cwd=request.cwd,
                pass_fds=request.pass_fds,
                affinity=request.affinity,
            ),
            rank=request.rank,
            local_rank=request.local_rank,
            tag=logs.make_rank_tag(request.rank, world),
            fifo=self._fifo(request.local_rank),
            on_exit=ended,
        )
        self._ranks.append(rank)
        return rank

    def _run_daemon(self, index: int, daemon: str, command: str) -> asyncio.Future[int]:
        argv = ["/bin/sh", "-c", command]
        layout, session = self._layout, self._session
        assert layout is not None
        assert session is not None
        if index != layout.node_index:
            return self._tasks.start(self._spawn_on(index, daemon, argv, {}))
        # Where this host's name is none of the job's (nodes that are processes of one machine).
        output = self.daemon_output
        return self._daemons.run(daemon, argv, {**self._base, **session.variables}, output)

    def _kill_daemon_on(self, index: int, daemon: str) -> None:
        """Kill a daemon. A remote one dies by the cancelled `spawn_on`."""
        if self._layout is not None and index == self._layout.node_index:
            self._daemons.kill(daemon)
