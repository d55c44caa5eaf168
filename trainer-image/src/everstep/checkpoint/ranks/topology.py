"""Find which ranks there are and which of them share a node."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from everstep.checkpoint.errors import CheckpointError
from everstep.coordination.group import RankGroup

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Topology:
    """Nodes are counted in the order of their first ranks; `ranks` are those of this node in order."""

    rank: int
    world: int
    node: int
    nodes: int
    ranks: tuple[int, ...]

    @property
    def local(self) -> int:
        return self.ranks.index(self.rank)


def find_topology(group: RankGroup) -> Topology:
    """Find the nodes of all ranks: by a launcher's node rank, else by the host's name. Collective.

    Raises:
        CheckpointError: The launcher has started several ranks, which have no process group yet.
    """
    if group.size == 1 and int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise CheckpointError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} and there is no process group: call "
            "torch.distributed.init_process_group() first, or set WORLD_SIZE=1 for a process that runs alone"
        )
    name = os.environ.get("GROUP_RANK") or os.environ.get("NODE_RANK") or socket.gethostname()
    names = group.gather(name)
    order = list(dict.fromkeys(names))
    ranks = tuple(other for other in range(group.size) if names[other] == name)
    return Topology(group.rank, group.size, order.index(name), len(order), ranks)


def check_shares_memory(topology: Topology, directory: Path, group: RankGroup) -> None:
    """See that the ranks of each node keep their slots in one place: they fill a slot together. Collective.

    Args:
        topology: What find_topology() gave.
        directory: Where the slots of this rank's node are, there or not.
        group: See find_topology().

    Raises:
        CheckpointError: On all ranks: two ranks of a node do not, so that no save would ever be whole.
    """
    every = group.gather((topology.node, _identify_folder(directory), f"{directory} on {socket.gethostname()}"))
    first: dict[int, int] = {}
    for rank, (node, place, words) in enumerate(every):
        other = first.setdefault(node, rank)
        if every[other][1] != place:
            raise CheckpointError(
                f"ranks {other} and {rank} are of one node, and their memory for checkpoints is not the same: "
                f"{every[other][2]}, and {words}. Give all ranks of a node the same MemoryOptions(directory=…) or "
                "EVERSTEP_CHECKPOINT_MEMORY. Ranks on different machines, or in containers that share no memory, need "
                "a GROUP_RANK or NODE_RANK of their own, or none"
            )


def _identify_folder(folder: Path) -> tuple[str, int, str]:
    """Return the machine since its boot, the file system and the path of a folder: not its inode, since another rank
    may make it, or the writer of a run that is over remove it, at this moment."""
    real = Path(os.path.realpath(folder))
    device = 0
    for nearest in real.parents:
        with contextlib.suppress(OSError):
            device = nearest.stat().st_dev
            break
    return _identify_boot(), device, str(real)


def find_place(topology: Topology, memory: Path, group: RankGroup) -> int:
    """Return the number of this node among those that share one memory with it: 0 where it has a memory of its own.

    It stays the same when a launcher numbers the nodes anew, as torchrun does after each failure, so that a node finds
    its slots under the same name again. Collective over `group`.

    Args:
        topology: What find_topology() gave.
        memory: The folder in which the slots are, there or not.
        group: See find_topology().
    """
    mine = _identify_machine(memory)
    leaders = group.gather((topology.node, mine) if topology.local == 0 else None)
    known = dict(each for each in leaders if each is not None)
    sharing = sorted(node for node, memory_of in known.items() if memory_of == known[topology.node])
    return sharing.index(topology.node)


def _identify_machine(memory: Path) -> tuple[str, int, int, str]:
    """Return the machine since its boot, and the folder (or, until it is made, the nearest one above it)."""
    for folder in (memory, *memory.absolute().parents):
        with contextlib.suppress(OSError):
            found = folder.stat()
            return _identify_boot(), found.st_dev, found.st_ino, os.path.relpath(memory, folder)
    return _identify_boot(), 0, 0, str(memory)


def _identify_boot() -> str:
    with contextlib.suppress(OSError):
        return _BOOT.read_text().strip()
    return socket.gethostname()
