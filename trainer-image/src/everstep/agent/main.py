"""The agent's command line, and how its parts are put together."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import AgentConfig, AgentPaths, load_config
from .node import termination_message
from .node.node_agent import AgentExit, NodeAgent
from .node.supervisor import Supervisor
from .node.supervisor_interface import SupervisorInterface
from .ranks import failure_file
from .system import agent_log
from .system.agent_log import log_line
from .system.clock import read_boottime
from .system.faults import explain_fault
from .system.processes import make_undumpable, name_process
from .system.tasks import Tasks
from .system.threads import in_thread_when_possible
from .wire.auth import read_token
from .wire.http_server import Handler, HttpServer
from .wire.protocol import FAILED, LEFT

if TYPE_CHECKING:
    from .leader.leader_server import LeaderServer

MAX_OPEN_FILES = 65536
PROCESS_NAME = "everstep-agent"

# With TERM, those that images name as their STOPSIGNAL, or pods as their stopSignal (web servers QUIT, systemd RTMIN+3,
# scripts that save on USR1): a pod's deletion sends that one instead, and without a handler process 1 would not even
# notice it until the KILL. Ranks get TERM, whichever it was: those of other pods hear of no other.
_RTMIN_3 = 37  # as container runtimes count; signal.SIGRTMIN is one more with musl
STOP_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    _RTMIN_3,
)


# On a laptop, the end of `everstep run` itself. The kernel sends it again for each thread of that process that ends, so
# that a repetition is no hurry.
PARENT_DEATH_SIGNAL = signal.SIGUSR2


# What a pod's own command says, and its environment where a template is older.
POD_OPTIONS = {"--index": "EVERSTEP_INDEX", "--epoch": "EVERSTEP_EPOCH", "--leader": "EVERSTEP_LEADER"}


@dataclasses.dataclass(frozen=True)
class AgentOptions:
    """The command line. `variables` stand over those of the environment in a pod, and in their place on a laptop, where
    `base` is not None."""

    variables: dict[str, str] = dataclasses.field(default_factory=dict)
    base: Path | None = None
    index: int = 0
    address: str = ""
    port: int = 0


def main(argv: list[str]) -> int:
    # The programs that MPI starts know their arguments better than argparse does.
    if argv[:1] == ["rank"]:
        from .launch.rank_command import main as rank

        return rank(argv[1:])
    if argv[:1] == ["rsh"]:
        from .launch.rsh_command import main as rsh

        return rsh(argv[1:])
    return run_agent(parse_options(argv))


def parse_options(argv: list[str]) -> AgentOptions:
    if (variables := _read_pod_options(argv)) is not None:
        return AgentOptions(variables)
    import argparse

    parser = argparse.ArgumentParser(prog="agent.pyz", description="The agent of an everstep job.")
    parser.add_argument(
        "command", choices=["run"], help="supervise the ranks of one node; pods have --index, --epoch and --leader"
    )
    parser.add_argument("--local", type=Path, metavar="BASE", help="no pod: BASE/job.json, BASE/token, BASE/node-<i>/")
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--epoch", type=int, default=1)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8470)
    parser.add_argument("--leader", default="", metavar="IP:PORT", help="a leader that runs already")
    given = parser.parse_args(argv)
    if given.local is None:
        return AgentOptions()
    variables = {
        "EVERSTEP_INDEX": str(given.index),
        "EVERSTEP_EPOCH": str(given.epoch),
        "EVERSTEP_POD_UID": f"local-{given.index}-{os.getpid()}",
        "EVERSTEP_POD_IP": given.address,
        "EVERSTEP_LEADER": given.leader,
    }
    return AgentOptions(variables, given.local.absolute(), given.index, given.address, given.port)


def _read_pod_options(argv: list[str]) -> dict[str, str] | None:
    """Return the variables that a pod's command gives, None if it is another command line. Every pod starts with this:
    each module less is a job that starts earlier."""
    if argv[:1] != ["run"]:
        return None
    words = [word.partition("=") for word in argv[1:]]
    if not all(name in POD_OPTIONS and value for name, _, value in words):
        return None
    return {POD_OPTIONS[name]: value for name, _, value in words}


def run_agent(options: AgentOptions) -> int:
    agent = Path(sys.argv[0]).absolute()
    if options.base is None:
        paths, environ = AgentPaths.for_pod(agent), {**os.environ, **options.variables}
    else:
        paths, environ = AgentPaths.for_laptop(agent, options.base, options.index), options.variables
    name_process(PROCESS_NAME)
    make_undumpable()  # before the token is in memory
    try:
        config, token = load_config(paths, environ), read_token(paths.token)
        listens_on = "::" if ":" in config.pod_ip else "0.0.0.0"  # noqa: S104 - the pod's own
        paths.scratch.mkdir(parents=True, exist_ok=True)
        if options.base is not None:
            config, listens_on = dataclasses.replace(config, port=options.port, service=""), options.address
        return asyncio.run(_Agent(config, paths, token, listens_on).run())
    except Exception as error:
        agent_log.route_log_lines(None)
        if not isinstance(error, (OSError, ValueError)):
            log_line(traceback.format_exc())
        log_line(explain_fault(error))
        # No outcome: a full disk or a port in use is this pod's, and another pod may do better.
        termination_message.write_termination_message(
            paths.termination_log, {"result": LEFT, "exitCode": 1, "message": explain_fault(error)}
        )
        return 1


class _Agent:
    def __init__(self, config: AgentConfig, paths: AgentPaths, token: bytes, listens_on: str) -> None:
        self._config = config
        self._listens_on = listens_on
        self._paths = paths
        self._token = token
        self._signals = 0

    async def run(self) -> int:
        config, loop = self._config, asyncio.get_running_loop()
        incarnation = os.urandom(8).hex()
        node = NodeAgent(config, self._paths, incarnation, loop.time)
        tasks = Tasks(node.crash)
        loop.set_exception_handler(lambda _, context: _handle_loop_error(node, context))
        leader_server: LeaderServer | None = None
        routes: dict[str, tuple[str, Handler]] = {"/v1/link": ("POST", node.accept)}
        if config.leads:
            # Only here: a module in a zipapp is compiled at every start, and a job waits for its slowest agent.
            from .leader.leader_server import LeaderServer, find_free_port
            from .leader.leader_state import LeaderState

            raise_file_limit(config.num_nodes)
            leader = LeaderState(config, incarnation, loop.time(), time.time(), find_free_port)
            leader_server = LeaderServer(config, self._token, node, leader, loop.time)
            routes.update(leader_server.routes())
        processes = Supervisor(
            config, self._paths, node.emit, leader_server.spawn_on if leader_server else _reject_spawn
        )
        agent_log.route_log_lines(processes.log)
        node.run_with(processes, self._token)
        # By this clock a request that was signed before this machine was suspended is too old to renew a lease.
        server = HttpServer(self._token, routes, read_boottime)
        await server.start(self._listens_on, config.port)
        for signum in STOP_SIGNALS:
            if signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN:
                continue  # a laptop's nohup
            loop.add_signal_handler(signum, self._handle_stop_signal, signum, node, tasks)
        log_line(f"agent {config.index} of {config.num_nodes} for job {config.name}, epoch {config.epoch}")
        if leader_server is not None:
            leader_server.start(processes)
        elif config.leader_address:
            from .node.announce import announce_agent

            tasks.start(announce_agent(config.leader_address, self._token, node))
        if processes.has_gpus:
            from .node.gpu_health import watch_gpus

            tasks.start(watch_gpus(processes.gpus, node.gpus))
        ended = await node.ended
        await node.finish(ended.result)
        await self._leave_termination_message(node, leader_server, ended)
        if leader_server is not None:
            await leader_server.linger()
            leader_server.close()
        server.close()
        await self._close(processes)
        return termination_message.safe_exit_code(ended.exit_code)

    async def _close(self, processes: SupervisorInterface) -> None:
        agent_log.route_log_lines(None)
        await processes.close()

    async def _leave_termination_message(
        self, node: NodeAgent, leader_server: LeaderServer | None, ended: AgentExit
    ) -> None:
        word: dict[str, Any] = node.termination_message(ended)
        if leader_server is not None:
            # For an operator that was away: what the job's restarts were, and how far it came, before nobody can be
            # asked any more.
            word["generationHistory"], word["progress"] = leader_server.charges(), leader_server.progress()
            word["checkpoint"] = leader_server.checkpoint()
        failure = leader_server.failure() if leader_server is not None else None
        if failure is not None:
            # Agent 0 speaks for the job: what made it fail, on whichever node.
            word.update(
                index=failure.index,
                rank=failure.rank,
                generation=failure.generation,
                message=failure.message,
                logTail=list(failure.log_tail),
            )
        termination_message.write_termination_message(self._paths.termination_log, word)
        if ended.result == FAILED:
            output, message, tail = self._paths.ml / "output", str(word["message"]), tuple(word["logTail"])
            writing = in_thread_when_possible(
                lambda: failure_file.write_failure_file(output, message, tail), "failure-file"
            )
            with contextlib.suppress(asyncio.TimeoutError):  # a volume that hangs must not keep the pod from ending
                await asyncio.wait_for(writing, failure_file.FAILURE_FILE_SECONDS)

    def _handle_stop_signal(self, signum: int, node: NodeAgent, tasks: Tasks) -> None:
        """The signal of a pod that is deleted, or Ctrl-C; who repeats it on a laptop is in a hurry."""
        if self._signals and signum == PARENT_DEATH_SIGNAL:
            return
        self._signals += 1
        grace = self._config.stop_grace
        if self._signals > 1:
            if self._paths.owns_pod:
                return
            grace = min(grace, 2.0 if self._signals == 2 else 0.0)
        else:
            log_line(f"told to stop: the ranks have {grace:g} s")
        tasks.start(node.leave(grace))


def _handle_loop_error(node: NodeAgent, context: dict[str, Any]) -> None:
    """Handle an error that the event loop could not deliver to any caller.

    A callback of the agent that failed may have lost the exit of a rank, so the agent crashes. Any other error is
    logged.
    """
    error = context.get("exception")
    if isinstance(error, Exception) and "handle" in context and _is_ours(error):
        node.crash(error)
    else:  # a connection of some stranger's, or one that broke before it was accepted
        log_line(f"{context.get('message', 'a mistake')}: {error!r}")


def _is_ours(error: Exception) -> bool:
    """Tell whether it came through the agent's own code: asyncio's callbacks pass on what the network does to them."""
    trace = error.__traceback__
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__")).startswith("everstep.agent."):
            return True
        trace = trace.tb_next
    return False


async def _reject_spawn(index: int, daemon: str, argv: list[str], env: dict[str, str]) -> int:
    raise RuntimeError("only the leader starts daemons on other nodes")


def raise_file_limit(nodes: int) -> None:
    """Raise the limit of open files: a link per node needs a descriptor. Smaller jobs leave the limit alone: ranks
    inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < nodes + 512:
        most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
