"""Addresses, the bridge that joins the nodes, and one network namespace for each.

Pods reach pods on other nodes by routes between the nodes; nothing is translated, and the host forwards nothing.
The cluster is closed: no pod reaches beyond this machine.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.errors import ClusterError

BRIDGE = "everstep0"
HOST_ADDRESS = "10.200.0.1"
MAX_NODES = 200


@dataclass(frozen=True)
class Place:
    """The place of node number ``index`` (from 1) in the network."""

    index: int

    @property
    def namespace(self) -> str:
        return f"everstep-node-{self.index}"

    @property
    def namespace_file(self) -> Path:
        return Path("/run/netns") / self.namespace

    @property
    def link(self) -> str:
        """Return the host's end of the node's cable."""
        return f"everstep-n{self.index}"

    @property
    def address(self) -> str:
        return f"10.200.0.{10 + self.index}"

    @property
    def pod_cidr(self) -> str:
        return f"10.201.{self.index}.0/24"


def create_bridge(places: Sequence[Place]) -> None:
    """Create the switch, the host's address on it, and the host's routes to every node's pods."""
    _batch(
        [
            f"link add {BRIDGE} type bridge",
            f"address add {HOST_ADDRESS}/24 dev {BRIDGE}",
            f"link set {BRIDGE} up",
            *(f"route add {place.pod_cidr} via {place.address}" for place in places),
        ]
    )
    if _host_drops_forwarded():
        # With br_netfilter loaded, frames between two ports of a bridge pass the host's FORWARD chain.
        _run("iptables", "-w", "-I", *_forward_rule())


def remove_bridge() -> None:
    """Remove the switch, and the routes through it along."""
    if Path(f"/sys/class/net/{BRIDGE}").exists():
        _run("ip", "link", "delete", BRIDGE)
    if _host_drops_forwarded():
        subprocess.run(["iptables", "-w", "-D", *_forward_rule()], capture_output=True, check=False)


def attach(place: Place, others: Sequence[Place]) -> None:
    """Give a node its namespace, plug it into the bridge and tell it the way to the other nodes' pods."""
    _run("ip", "netns", "add", place.namespace)
    _batch(
        [
            f"link add {place.link} type veth peer name eth0 netns {place.namespace}",
            f"link set {place.link} master {BRIDGE} up",
        ]
    )
    _batch(
        [
            "link set lo up",
            f"address add {place.address}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {HOST_ADDRESS}",
            *(f"route add {other.pod_cidr} via {other.address}" for other in others if other != place),
        ],
        place.namespace,
    )


def detach(place: Place) -> None:
    """Remove a node's namespace and cable, as far as they are there."""
    # The namespace may outlive its name while a process ends; the cable must not, a new one takes its name.
    if Path(f"/sys/class/net/{place.link}").exists():
        subprocess.run(["ip", "link", "delete", place.link], capture_output=True, check=False)
    if place.namespace_file.exists():
        _run("ip", "netns", "delete", place.namespace)


def unplug(place: Place) -> None:
    """Cut the node off: nobody on either side is told."""
    if Path(f"/sys/class/net/{place.link}").exists():
        _run("ip", "link", "set", place.link, "down")


def plug(place: Place) -> None:
    _run("ip", "link", "set", place.link, "up")


def is_plugged(place: Place) -> bool:
    flags = Path(f"/sys/class/net/{place.link}/flags")
    administratively_up = 1
    return flags.exists() and bool(int(flags.read_text(), 16) & administratively_up)


def leftover_places() -> list[Place]:
    """Places whose namespace exists, whatever state files say."""
    prefix = "everstep-node-"
    names = (path.name for path in Path("/run/netns").glob(f"{prefix}*"))
    return [Place(int(name.removeprefix(prefix))) for name in names if name.removeprefix(prefix).isdigit()]


def _host_drops_forwarded() -> bool:
    rules = subprocess.run(["iptables", "-w", "-S", "FORWARD"], capture_output=True, text=True, check=False)
    return "-P FORWARD DROP" in rules.stdout


def _forward_rule() -> list[str]:
    return ["FORWARD", "-i", BRIDGE, "-o", BRIDGE, "-m", "comment", "--comment", "everstep", "-j", "ACCEPT"]


def _batch(lines: Sequence[str], namespace: str | None = None) -> None:
    inside = ["-n", namespace] if namespace else []
    _run("ip", *inside, "-batch", "-", stdin="\n".join(lines))


def _run(*command: str, stdin: str | None = None) -> None:
    result = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ClusterError(f"{' '.join(command)}: {result.stderr.strip()}")
