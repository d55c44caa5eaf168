"""Tell which processes of this machine are alive: a process id alone is given to another process sooner or later."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from everstep.checkpoint.writer.control import peer_of

_PROC = Path("/proc")
_DEAD = "ZXx"  # a zombie holds nothing and does nothing: only its parent has not asked yet how it ended


@dataclass(frozen=True)
class ProcessIdentity:
    """A process by its id and the time at which it was started, in clock ticks since boot (proc(5), field 22).

    `pid` is 0 for a process of another pid namespace, of which nothing more can be seen than what it says of itself:
    `said`, empty for all others.
    """

    pid: int
    started: int
    said: str = ""

    @classmethod
    def of_peer(cls, peer: socket.socket, said: str = "") -> ProcessIdentity:
        """Return the process that made the other end of a Unix socket.

        Args:
            peer: Our end.
            said: What the process says of itself: see control.describe_process().
        """
        pid = peer_of(peer)[0]
        return cls(pid, (_read_stat(pid) or ("", 0))[1], "" if pid else said)

    @property
    def is_alive(self) -> bool:
        """Tell whether it still runs.

        A process that cannot be seen is taken for alive as long as its connection is open.
        """
        if not self.pid:
            return True
        found = _read_stat(self.pid)
        return found is not None and found[0] not in _DEAD and found[1] == self.started


def _read_stat(pid: int) -> tuple[str, int] | None:
    """Return the state and the start time of a process; None when there is none of this id."""
    try:
        # The name of the program, in parentheses, may hold anything.
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])
