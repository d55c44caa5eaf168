"""Exchange, at a run's start, where each node's writer listens, and which node keeps the copy of which."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from everstep.checkpoint.peers import placement
from everstep.checkpoint.peers.peer_link import Address
from everstep.checkpoint.peers.peer_server import PeerServer
from everstep.checkpoint.ranks.topology import Topology
from everstep.coordination.address import find_host_address
from everstep.coordination.group import RankGroup

DOMAIN_VARIABLE = "EVERSTEP_FAILURE_DOMAIN"


@dataclass(frozen=True)
class Peers:
    """`addresses` of the nodes' writers in the order of nodes; `keeper`: the node that keeps our copies; `kept`: the
    ranks, in order, of the node whose copies we keep. `secret`: who knows it is heard."""

    secret: str
    addresses: tuple[Address, ...]
    keeper: int
    kept: tuple[int, ...]


@dataclass(frozen=True)
class _Card:
    node: int
    domain: str
    address: Address
    ranks: tuple[int, ...]


def connect_peers(port: int, secret: str, topology: Topology, group: RankGroup) -> Peers:
    """Collective, of at least two nodes. `port`: of this node's writer."""
    card = (
        _Card(topology.node, get_failure_domain(), (find_host_address(), port), topology.ranks)
        if topology.local == 0
        else None
    )
    cards = sorted((each for each in group.gather(card) if each), key=lambda each: each.node)
    keepers = placement.choose_copy_keepers([each.domain for each in cards])
    keeper = keepers[topology.node]
    assert keeper is not None
    kept = cards[keepers.index(topology.node)].ranks
    return Peers(secret, tuple(each.address for each in cards), keeper, kept)


@contextlib.contextmanager
def serve_reads(
    directory: Path, topology: Topology, group: RankGroup, run: str | None, *, wanted: bool
) -> Iterator[Peers | None]:
    """Let the nodes of a restore read each other's slots while the block runs. Collective.

    No writer takes part: each node's first rank gives out what is in the slots on its node, under a secret of this
    restore alone. So a process that has claimed nothing, and where no writer runs any more, restores from them too.

    Args:
        directory: This node's slots, there or not.
        topology: Where this rank is.
        group: All ranks that restore.
        run: See peer_server.iterate_held_slots().
        wanted: Whether the nodes are to read from each other at all; the same on all ranks.

    Yields:
        Where the nodes are reached; None where they do not read from each other.
    """
    if not wanted:
        yield None
        return
    secret = group.broadcast(secrets.token_hex(32))
    server = PeerServer(directory, only_reads=True, run=run) if topology.local == 0 else None
    try:
        port = group.run_on_all_ranks(lambda: server.trust(secret, 0) if server is not None else None)
        yield connect_peers(port or 0, secret, topology, group)
    finally:
        if server is not None:
            server.close()


def get_failure_domain() -> str:
    """Return what this node fails together with: EVERSTEP_FAILURE_DOMAIN (a rack, a zone), else the machine."""
    return os.environ.get(DOMAIN_VARIABLE) or os.environ.get("EVERSTEP_NODE_NAME") or socket.gethostname()
