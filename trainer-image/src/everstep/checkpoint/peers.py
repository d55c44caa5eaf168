"""At a run's start: where each node's writer listens, and which node keeps the copy of which."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import torch.distributed as dist

from everstep.checkpoint import placement
from everstep.checkpoint.address import host
from everstep.checkpoint.collectives import gather
from everstep.checkpoint.peer_link import Address
from everstep.checkpoint.topology import Topology

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


def meet(port: int, secret: str, topology: Topology, group: dist.ProcessGroup | None) -> Peers:
    """Collective over `group` (gloo), of at least two nodes. `port`: of this node's writer."""
    card = _Card(topology.node, domain(), (host(), port), topology.ranks) if topology.local == 0 else None
    cards = sorted((each for each in gather(card, group) if each), key=lambda each: each.node)
    keepers = placement.keepers([each.domain for each in cards])
    keeper = keepers[topology.node]
    assert keeper is not None
    kept = cards[keepers.index(topology.node)].ranks
    return Peers(secret, tuple(each.address for each in cards), keeper, kept)


def domain() -> str:
    """What this node fails together with: EVERSTEP_FAILURE_DOMAIN (a rack, a zone), else the machine."""
    return os.environ.get(DOMAIN_VARIABLE) or os.environ.get("EVERSTEP_NODE_NAME") or socket.gethostname()
