"""Finds the failure that ended a generation: the first of several that is not secondary to another.

When one process of a job dies, its peers see broken connections and die too, often within the same milliseconds and in
any order; a pod that is lost breaks its peers' connections a little before the leader sees that its link is gone.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.agent.wire.protocol import APPLICATION, LEAVING, OUT_OF_MEMORY, POD_LOST, ProcessExit

# Failures this long after the first (in seconds at the leader) are taken for its consequences.
WINDOW_SECONDS = 1.0

# What a rank says when it was its peer that vanished. NCCL, Gloo, MPI, Horovod and plain sockets.
_SECONDARY_ERRORS = (
    "connection reset by peer",
    "connection closed by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "distbackenderror",
    "distnetworkerror",
    "ncclremoteerror",
    "nccl error",
    "nccl communicator was aborted",
    "processgroupnccl",
    "gloo/transport",
    "tcpstore",
    "horovodinternalerror",
    "horovod has been shut down",
)
_TERM, _KILL = 15, 9


@dataclass(frozen=True)
class GenerationFailure:
    """Something that makes a generation end. `exit` is None for what befell a node rather than a process."""

    at: float
    cause: str
    index: int | None
    message: str = ""
    exit: ProcessExit | None = None
    echo: bool = False  # likely the consequence of another failure
    rank: int | None = None  # that it is about, where no process ended

    @property
    def termed(self) -> bool:
        """Return whether the process left on the signal with which a generation is stopped."""
        return self.exit is not None and (self.exit.signal == _TERM or self.exit.exit_code == 128 + _TERM)

    @property
    def killed(self) -> bool:
        return self.exit is not None and (self.exit.signal == _KILL or self.exit.exit_code == 128 + _KILL)

    @property
    def graceful(self) -> bool:
        """Return whether there is no reason to hurry its peers: a second pod leaves, or a rank had a handler for TERM
        and came to its end."""
        if self.exit is None:
            return self.cause == LEAVING
        return self.termed and self.exit.signal is None


def make_leaving_failure(now: float, index: int) -> GenerationFailure:
    """Return the failure of a generation whose node `index` was told to stop."""
    return GenerationFailure(now, LEAVING, index, f"the pod of node {index} was told to stop")


def make_exit_failure(at: float, index: int, end: ProcessExit) -> GenerationFailure:
    return GenerationFailure(at, OUT_OF_MEMORY if end.oom else APPLICATION, index, end.message, end, is_echo(end))


def find_root_cause(failures: list[GenerationFailure]) -> GenerationFailure:
    """Return the failure that the generation history names. `failures` is not empty and in order of arrival."""
    first = failures[0]
    if first.exit is None and first.cause not in (POD_LOST, LEAVING):
        return first  # a stop, or a lost lease: what follows is what was asked for
    near = [f for f in failures if f.at - first.at <= WINDOW_SECONDS]
    own = [f for f in near if f.exit is not None and (f is first or not f.termed)]
    own.sort(key=lambda f: (f.cause != OUT_OF_MEMORY, f.echo, f.at))
    lost = next((f for f in near if f.exit is None), None)
    if lost is None:
        return own[0]
    # A rank that failed on the lost node before the node went, and not by a kill, took the node with it.
    took_it = next((f for f in own if f.index == lost.index and f.at <= lost.at), None)
    if took_it is None or (took_it.cause != OUT_OF_MEMORY and (took_it.echo or took_it.termed or took_it.killed)):
        return lost
    return took_it


def is_echo(end: ProcessExit) -> bool:
    """Tell whether it is likely the consequence of another failure, by its last words."""
    # mpirun fails because a rank did; it can name neither its exception nor, always, its rank.
    if end.launcher or end.echo:
        return True
    return names_lost_peer("\n".join((end.message, *end.log_tail[-5:])))


def names_lost_peer(text: str) -> bool:
    """Return whether `text` is what a rank says when it was its peer that vanished."""
    lowered = text.lower()
    return any(echo in lowered for echo in _SECONDARY_ERRORS)
