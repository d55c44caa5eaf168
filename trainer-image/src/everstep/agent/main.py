"""The agent's command line, and how its parts are put together."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import resource
import secrets
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import report
from .auth import read_token
from .clock import boottime
from .config import Config, Place, load
from .faults import explained
from .http import Handler, Server
from .node import Ended, Node
from .processes import undumpable
from .protocol import FAILED, LEFT
from .report import say
from .supervision import Supervision
from .supervisor import Supervisor
from .tasks import Tasks

if TYPE_CHECKING:
    from .leading import Leading

FILES = 65536

# With TERM, those that images name as their STOPSIGNAL (web servers QUIT, systemd RTMIN+3): a pod's deletion sends that
# one instead, and without a handler process 1 would not even notice it until the KILL.
_RTMIN_3 = 37  # as container runtimes count; signal.SIGRTMIN is one more with musl
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, _RTMIN_3)


@dataclasses.dataclass(frozen=True)
class Options:
    """Laptop mode; `base` is None in a pod."""

    base: Path | None = None
    index: int = 0
    epoch: int = 1
    address: str = ""
    port: int = 0
    leader: str = ""


def main(argv: list[str]) -> int:
    # The programs that MPI starts know their arguments better than argparse does.
    if argv[:1] == ["rank"]:
        from .launch.rank import main as rank

        return rank(argv[1:])
    if argv[:1] == ["rsh"]:
        from .launch.rsh import main as rsh

        return rsh(argv[1:])
    return run(parse(argv))


def parse(argv: list[str]) -> Options:
    if argv == ["run"]:  # every pod: each module less is a job that starts earlier
        return Options()
    import argparse

    parser = argparse.ArgumentParser(prog="agent.pyz", description="The agent of an everstep job.")
    parser.add_argument(
        "command", choices=["run"], help="supervise the ranks of one node; in a pod it needs no options"
    )
    parser.add_argument("--local", type=Path, metavar="BASE", help="no pod: BASE/job.json, BASE/token, BASE/node-<i>/")
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--epoch", type=int, default=1)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8470)
    parser.add_argument("--leader", default="", metavar="IP:PORT", help="a leader that runs already")
    given = parser.parse_args(argv)
    if given.local is None:
        return Options()
    return Options(given.local.absolute(), given.index, given.epoch, given.address, given.port, given.leader)


def run(options: Options) -> int:
    agent = Path(sys.argv[0]).absolute()
    if options.base is None:
        place, environ = Place.pod(agent), dict(os.environ)
    else:
        place = Place.local(agent, options.base, options.index)
        environ = {
            "EVERSTEP_INDEX": str(options.index),
            "EVERSTEP_EPOCH": str(options.epoch),
            "EVERSTEP_POD_UID": f"local-{options.index}-{os.getpid()}",
            "EVERSTEP_POD_IP": options.address,
            "EVERSTEP_NODE_NAME": "localhost",
            "EVERSTEP_LEADER": options.leader,
        }
    undumpable()  # before the token is in memory
    try:
        config, token = load(place.job, environ), read_token(place.token)
        place.scratch.mkdir(parents=True, exist_ok=True)
        if options.base is not None:
            config = dataclasses.replace(config, port=options.port, service="")
        return asyncio.run(_Agent(config, place, token).run())
    except Exception as error:
        report.through(None)
        if not isinstance(error, (OSError, ValueError)):
            say(traceback.format_exc())
        say(explained(error))
        # No outcome: a full disk or a port in use is this pod's, and another pod may do better.
        report.leave_word(place.termination_log, {"result": LEFT, "exitCode": 1, "message": explained(error)})
        return 1


class _Agent:
    def __init__(self, config: Config, place: Place, token: bytes) -> None:
        self._config = config
        self._place = place
        self._token = token
        self._signals = 0

    async def run(self) -> int:
        config, loop = self._config, asyncio.get_running_loop()
        incarnation = secrets.token_hex(8)
        node = Node(config, self._place, incarnation, loop.time)
        tasks = Tasks(node.crash)
        loop.set_exception_handler(lambda _, context: _mistake(node, context))
        leading: Leading | None = None
        routes: dict[str, tuple[str, Handler]] = {"/v1/link": ("POST", node.accept)}
        if config.leads:
            # Only here: a module in a zipapp is compiled at every start, and a job waits for its slowest agent.
            from .leader import Leader
            from .leading import Leading, free_port

            raise_file_limit(config.num_nodes)
            leader = Leader(config, incarnation, loop.time(), time.time(), free_port)
            leading = Leading(config, self._token, node, leader, loop.time)
            routes.update(leading.routes())
        processes = Supervisor(config, self._place, node.emit, leading.spawn_on if leading else _nowhere)
        report.through(processes.log)
        node.run_with(processes, self._token)
        # By this clock a request that was signed before this machine was suspended is too old to renew a lease.
        server = Server(self._token, routes, boottime)
        await server.start("::" if ":" in config.pod_ip else "0.0.0.0", config.port)  # noqa: S104 - the pod's own
        for signum in STOP_SIGNALS:
            loop.add_signal_handler(signum, self._told_to_stop, node, tasks)
        say(f"agent {config.index} of {config.num_nodes} for job {config.name}, epoch {config.epoch}")
        if leading is not None:
            leading.start(processes)
        elif config.leader_address:
            from .announce import announce

            tasks.start(announce(config.leader_address, self._token, node))
        if processes.has_gpus:
            from .health import watch

            tasks.start(watch(processes.gpus, node.gpus))
        ended = await node.ended
        await node.finish(ended.result)
        self._leave_word(node, leading, ended)
        if leading is not None:
            await leading.linger()
            leading.close()
        server.close()
        await self._close(processes)
        return report.exit_code(ended.exit_code)

    async def _close(self, processes: Supervision) -> None:
        report.through(None)
        await processes.close()

    def _leave_word(self, node: Node, leading: Leading | None, ended: Ended) -> None:
        word: dict[str, Any] = node.last_word(ended)
        if leading is not None:
            # For an operator that was away: what the job's restarts were, and how far it came, before nobody can be
            # asked any more.
            word["ledger"], word["progress"] = leading.charges(), leading.progress()
        failure = leading.failure() if leading is not None else None
        if failure is not None:
            # Agent 0 speaks for the job: what made it fail, on whichever node.
            word.update(
                index=failure.index,
                rank=failure.rank,
                generation=failure.generation,
                message=failure.message,
                logTail=list(failure.log_tail),
            )
        report.leave_word(self._place.termination_log, word)
        if ended.result == FAILED:
            report.leave_failure(self._place.ml / "output", str(word["message"]), tuple(word["logTail"]))

    def _told_to_stop(self, node: Node, tasks: Tasks) -> None:
        """The signal of a pod that is deleted, or Ctrl-C; who repeats it on a laptop is in a hurry."""
        self._signals += 1
        grace = self._config.stop_grace
        if self._signals > 1:
            if self._place.owns_pod:
                return
            grace = min(grace, 2.0 if self._signals == 2 else 0.0)
        else:
            say(f"told to stop: the ranks have {grace:g} s")
        tasks.start(node.leave(grace))


def _mistake(node: Node, context: dict[str, Any]) -> None:
    """What the event loop could not deliver to anybody. A callback that failed may have lost the exit of a rank."""
    error = context.get("exception")
    if isinstance(error, Exception) and "handle" in context and _is_ours(error):
        node.crash(error)
    else:  # a connection of some stranger's, or one that broke before it was accepted
        say(f"{context.get('message', 'a mistake')}: {error!r}")


def _is_ours(error: Exception) -> bool:
    """Tell whether it came through the agent's own code: asyncio's callbacks pass on what the network does to them."""
    trace = error.__traceback__
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__")).startswith("everstep.agent."):
            return True
        trace = trace.tb_next
    return False


async def _nowhere(index: int, daemon: str, argv: list[str], env: dict[str, str]) -> int:
    raise RuntimeError("only the leader starts daemons on other nodes")


def raise_file_limit(nodes: int) -> None:
    """Raise the limit of open files: a link per node needs a descriptor. Smaller jobs leave the limit alone: ranks
    inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < nodes + 512:
        most = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
