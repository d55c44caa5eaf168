"""Track the ranks that a node's writer serves: who is connected, who is alive, and whether a run may have the node.

A node belongs to one run. Another one, or a second process with the place of a rank, takes it over only when nobody of
the first is alive: two that save into the same slots would destroy each other's checkpoints.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from everstep.checkpoint.errors import CheckpointError, CheckpointRankLost
from everstep.checkpoint.format.keys import Attempt
from everstep.checkpoint.writer import control
from everstep.checkpoint.writer.control import WriterConfig
from everstep.checkpoint.writer.process_identity import ProcessIdentity

_POLL = 0.05  # seconds

_UNSEEN = "one of another container"  # in place of the number of a process

LEFT_EARLY = "left before its part was copied"


@dataclass(frozen=True)
class Member:
    """A rank at the other end of a connection; `run`: the one that it takes part in."""

    local: int
    process: ProcessIdentity
    run: WriterConfig


class Membership:
    """The members of the run that has this node, by their connections; those of an earlier run stay until they hang up.

    `config`: of the run, None before the first one. `known`: local ranks that have come in it; `gone`: those that said
    goodbye.
    """

    def __init__(self) -> None:
        self.config: WriterConfig | None = None
        self.connected: dict[asyncio.StreamWriter, Member] = {}
        self.known: set[int] = set()
        self.gone: set[int] = set()
        self._processes: dict[int, ProcessIdentity] = {}  # the last one that has come as each local rank
        self._coming: dict[asyncio.StreamWriter, tuple[WriterConfig, ProcessIdentity]] = {}  # wait to take part
        self._said: weakref.WeakKeyDictionary[asyncio.StreamWriter, str] = weakref.WeakKeyDictionary()

    def introduce(self, connection: asyncio.StreamWriter, said: str) -> None:
        """Note what the process at the other end says first of itself: see control.describe_process()."""
        self._said.setdefault(connection, said)

    def is_of_run(self, run: WriterConfig) -> bool:
        """Tell whether the run that has the node is this one."""
        return self.config is not None and identify_run(run) == identify_run(self.config)

    @property
    def has_ended_well(self) -> bool:
        """Tell whether all ranks of the run said goodbye, and no connection is left."""
        return self.config is not None and not self.connected and self.gone >= set(range(len(self.config.ranks)))

    def check_present(self, present: Collection[int], ranks: Sequence[int]) -> None:
        """See that no local rank is missing of those that have come.

        Args:
            present: The local ranks that are connected and of the run.
            ranks: The global rank of each local one, for the message.

        Raises:
            CheckpointError: One has ended its session.
            CheckpointRankLost: One has lost its connection.
        """
        absent = self.known - set(present)
        if ended := sorted(ranks[local] for local in absent & self.gone):
            raise CheckpointError(
                f"rank {', '.join(map(str, ended))} has ended its session before this save: call save() and step() "
                "equally often on all ranks"
            )
        if absent:
            raise CheckpointRankLost([ranks[local] for local in sorted(absent)], LEFT_EARLY)

    async def wait_for_place(self, connection: asyncio.StreamWriter, config: WriterConfig, local: int) -> None:
        """Wait until nobody else has what this rank asks for: the node, if it is of another run, else its place in it.

        What was killed may take a while to die.

        Raises:
            CheckpointError: Somebody else lives on, or a later attempt has the node.
        """
        until = time.monotonic() + control.TAKEOVER_TIMEOUT
        self._coming[connection] = (identify_run(config), self._identify(connection))
        try:
            while True:
                if self.config and Attempt.parse(config.attempt) < Attempt.parse(self.config.attempt):
                    raise CheckpointError(f"attempt {self.config.attempt} runs on this node; {config.attempt} is over")
                others = self._list_occupants(connection, config, local)
                if not others or self.config is None:
                    return
                if time.monotonic() >= until:
                    what = f"local rank {local}" if self.is_of_run(config) else "node"
                    pids = ", ".join(str(pid or _UNSEEN) for pid in sorted({each.process.pid for each in others}))
                    raise CheckpointError(
                        f"this {what} belongs to attempt {self.config.attempt} of {config.url} (world "
                        f"{self.config.world}), which is alive: process {pids}; attempt "
                        f"{config.attempt} (world {config.world}) saves nothing here. Stop those processes first, or "
                        "save to a store of your own; to restore from this store needs neither"
                    )
                await asyncio.sleep(_POLL)
        finally:
            del self._coming[connection]

    def take_over(self, config: WriterConfig) -> None:
        """Give the node to this run; whoever still speaks on a connection of the earlier one is told."""
        self.config = config
        self.known.clear()
        self.gone.clear()
        self._processes.clear()

    def join(self, connection: asyncio.StreamWriter, local: int, config: WriterConfig) -> None:
        """Note that this rank takes part in the run."""
        process = self._processes[local] = self._identify(connection)
        self.connected[connection] = Member(local, process, identify_run(config))
        self.known.add(local)
        self.gone.discard(local)

    def is_new_process(self, connection: asyncio.StreamWriter, local: int) -> bool:
        """Tell whether another process, or none, has come as this local rank before."""
        return self._processes.get(local) != self._identify(connection)

    def find_earlier_connection(self, connection: asyncio.StreamWriter, local: int) -> asyncio.StreamWriter | None:
        """Return the connection that the same process had before this one."""
        process = self._identify(connection)
        old = [each for each, its in self.connected.items() if (its.local, its.process) == (local, process)]
        return old[-1] if old else None

    def list_pids(self, beside: asyncio.StreamWriter) -> list[int]:
        """Return the processes of ranks that are alive, but the one at the other end of this connection."""
        return sorted({member.process.pid for member in self._list_alive(beside)})

    def _list_occupants(self, connection: asyncio.StreamWriter, config: WriterConfig, local: int) -> list[Member]:
        others = self._list_alive(beside=connection)
        if self.is_of_run(config):
            return [member for member in others if member.local == local]
        # Processes that begin anew without having ended meet here, each with a connection of before.
        meet = {process for its, process in self._coming.values() if its == identify_run(config)}
        return [member for member in others if member.process not in meet]

    def _list_alive(self, beside: asyncio.StreamWriter) -> list[Member]:
        # A connection alone is no sign of life: children of a rank hold it.
        process = self._identify(beside)
        return [each for each in self.connected.values() if each.process != process and each.process.is_alive]

    def _identify(self, connection: asyncio.StreamWriter) -> ProcessIdentity:
        """Return the process at the other end."""
        return ProcessIdentity.of_peer(connection.get_extra_info("socket"), self._said.get(connection, ""))


def identify_run(config: WriterConfig) -> WriterConfig:
    """Return the run that a config is of: what is known only after its nodes have met makes no other one of it."""
    return replace(config, keeper=None)
