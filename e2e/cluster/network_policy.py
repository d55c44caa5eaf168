"""NetworkPolicies: kube-router on every node, for as long as somebody asks for it.

The nodes' bridge plugin enforces none, and most scenarios want none. With kube-router alone a new pod may talk until it
has been seen, and what is connected then stays connected. So here a pod is cut off until its node knows it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from e2e.cluster import packages
from e2e.cluster.binaries import binary
from e2e.cluster.errors import ClusterError
from e2e.cluster.local import LocalCluster
from e2e.cluster.network import Place
from e2e.cluster.waiting import until

NAME = "kube-router"
PACKAGES = {"ipset": "ipset"}
# It accepts what policies allow by this mark; the rule is written together with those of the first pods.
ACCEPTED = "0x20000/0x20000"
GUARD = "everstep-unknown-pod"
CHAINS = ("KUBE-ROUTER-", "KUBE-NWPLCY-", "KUBE-POD-FW-")
SETS = ("KUBE-SRC-", "KUBE-DST-")


@contextmanager
def enforced(cluster: LocalCluster) -> Iterator[None]:
    """Enforce all NetworkPolicies within the block; afterwards the nodes are as they were.

    A node that is restarted meanwhile comes back without.
    """
    try:
        _start(cluster)
        yield
    finally:
        _stop(cluster)


def _start(cluster: LocalCluster) -> None:
    packages.ensure(PACKAGES)
    program = binary(NAME)
    kubeconfig = cluster.control.user_kubeconfig("system:kube-router", "system:masters")
    for node in cluster.nodes:
        # First, since kube-router writes the whole table again and again, as it was when it last looked.
        for direction in ("--source", "--destination"):
            _run(node.place, "iptables", "-w", "-A", "FORWARD", *_guard(direction, node.place))
        command: list[str | Path] = [*_on(node.place), program, "--kubeconfig", kubeconfig]
        command += ["--hostname-override", node.name, "--health-port=0"]
        command += ["--run-firewall=true", "--run-router=false", "--run-service-proxy=false"]
        cluster.processes.start(_process(node.name), command, cluster.folder / f"{_process(node.name)}.log")
    for node in cluster.nodes:
        until(partial(_knows_its_pods, node.place), f"{node.name} enforces network policies", 180)


def _stop(cluster: LocalCluster) -> None:
    cluster.processes.stop([_process(node.name) for node in cluster.nodes])
    for node in cluster.nodes:
        if node.place.namespace_file.exists():
            _clean(node.place)


def _clean(place: Place) -> None:
    """Take out our rules and nothing else: kube-proxy changes the same table."""
    saved = _run(place, "iptables-save", "-t", "filter").splitlines()
    chains = [line[1:].split()[0] for line in saved if line.startswith(tuple(f":{name}" for name in CHAINS))]
    foreign = [
        line for line in saved if line.startswith("-A ") and not line.startswith(tuple(f"-A {c}" for c in CHAINS))
    ]
    ours = [line for line in foreign if any(name in line for name in (*CHAINS, GUARD))]
    script = [f"-D{line.removeprefix('-A')}" for line in ours]
    script += [f"-F {chain}" for chain in chains] + [f"-X {chain}" for chain in chains]
    if script:
        _run(place, "iptables-restore", "-w", "--noflush", stdin="\n".join(["*filter", *script, "COMMIT", ""]))
    for name in _run(place, "ipset", "list", "-name").split():
        if name.startswith(SETS):
            _run(place, "ipset", "destroy", name)


def _knows_its_pods(place: Place) -> bool:
    return ACCEPTED in _run(place, "iptables-save", "-t", "filter")


def _guard(direction: str, place: Place) -> list[str]:
    return [direction, place.pod_cidr, "-m", "comment", "--comment", GUARD, "-j", "DROP"]


def _process(node: str) -> str:
    return f"{NAME}-{node}"


def _on(place: Place) -> list[str]:
    return ["nsenter", f"--net={place.namespace_file}"]


def _run(place: Place, *command: str, stdin: str | None = None) -> str:
    result = subprocess.run([*_on(place), *command], input=stdin, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ClusterError(f"{' '.join(command)}: {result.stderr.strip()}")
    return result.stdout
