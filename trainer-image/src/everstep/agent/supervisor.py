"""The processes of one node: ranks, MPI daemons, and everything that they leave behind."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Callable, Optional

from .config import Config, Place
from .events import (
    DaemonExited,
    DaemonOutput,
    Event,
    LauncherExited,
    Layout,
    Progress,
    RankExited,
    RankStarted,
)

__all__ = [
    "DaemonExited",
    "DaemonOutput",
    "Event",
    "LauncherExited",
    "Layout",
    "Progress",
    "RankExited",
    "RankStarted",
    "SpawnOn",
    "Supervisor",
]

# (node index, daemon id, argv, additional environment) -> exit code. Cancelling it must kill the daemon.
SpawnOn = Callable[[int, str, "list[str]", "dict[str, str]"], Awaitable[int]]


class Supervisor:
    """Must be made and used on the main thread, inside the running event loop: it owns SIGCHLD and every child."""

    def __init__(self, config: Config, place: Place, emit: Callable[[Event], None], spawn_on: SpawnOn) -> None:
        self._config = config
        self._place = place
        self._emit = emit
        self._spawn_on = spawn_on

    async def start(self, layout: Layout) -> None:
        """Writes the contract's files and starts the ranks (MPI: node 0 starts mpirun, whose daemons start them).

        A command that cannot be executed is a RankExited with code 126 or 127, not an exception.
        """
        raise NotImplementedError

    async def stop(self, grace: float) -> Optional[str]:
        """TERM to the ranks, KILL after `grace` seconds to every process but the agent; then memory and GPUs are
        looked at. None when the node is clean, else what is left after 30 s. No event of this generation comes later.
        """
        raise NotImplementedError

    def signal(self, signum: int) -> None:
        """Forwards a signal to all ranks."""
        raise NotImplementedError

    async def spawn(self, daemon: str, argv: list[str], env: dict[str, str]) -> None:
        """Starts a launcher's daemon on this node; DaemonOutput and one DaemonExited follow, also if it cannot start."""
        raise NotImplementedError

    def kill_daemon(self, daemon: str) -> None:
        raise NotImplementedError

    def daemon_output(self, daemon: str, stream: str, data: bytes) -> None:
        """On the leader: what a daemon started by `spawn_on` wrote, for the launcher that waits for it."""
        raise NotImplementedError

    async def close(self) -> None:
        """Flushes the logs and gives back descriptors. The ranks must have been stopped."""
        raise NotImplementedError
