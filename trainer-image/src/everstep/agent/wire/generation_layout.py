"""The layout of a generation: the leader's `start` message, as every node reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class GenerationLayout(NamedTuple):
    """A generation's hosts and ports, the same on every node but for `node_index`."""

    epoch: int
    generation: int
    hosts: tuple[str, ...]  # IP addresses by node index, without ports
    ports: tuple[int, ...]  # agent ports by node index
    node_index: int
    procs_per_node: int
    master_addr: str
    master_port: int

    @property
    def nodes(self) -> int:
        return len(self.hosts)

    def to_json(self) -> dict[str, Any]:
        """Return the leader's `start` message, the same for every node."""
        return {
            "type": "start",
            "epoch": self.epoch,
            "generation": self.generation,
            "layout": {"hosts": self.hosts, "ports": self.ports, "procsPerNode": self.procs_per_node},
            "masterAddr": self.master_addr,
            "masterPort": self.master_port,
        }

    @classmethod
    def from_json(cls, message: Mapping[str, Any], index: int) -> GenerationLayout:
        """Read the `start` message for node `index`."""
        layout = message["layout"]
        return cls(
            epoch=int(message["epoch"]),
            generation=int(message["generation"]),
            hosts=tuple(str(h) for h in layout["hosts"]),
            ports=tuple(int(p) for p in layout["ports"]),
            node_index=index,
            procs_per_node=int(layout["procsPerNode"]),
            master_addr=str(message["masterAddr"]),
            master_port=int(message["masterPort"]),
        )
