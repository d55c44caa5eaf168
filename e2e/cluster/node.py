"""A node: containerd, kubelet and kube-proxy in namespaces and control groups of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import cgroups, golden, network, node_config
from e2e.cluster.binaries import path_of
from e2e.cluster.certificates import Authority
from e2e.cluster.errors import ClusterError
from e2e.cluster.network import Place
from e2e.cluster.processes import Process, ProcessTable
from e2e.cluster.state import write_atomically

INIT = Path(__file__).parent / "node_init.py"
NODE_SYSCTLS = {
    "net/ipv4/ip_forward": "1",
    # Pods on one bridge reach each other through a Service only if bridged frames meet kube-proxy's rules.
    "net/bridge/bridge-nf-call-iptables": "1",
}


def capacity_type(index: int, count: int) -> str:
    """Return the capacity type of a node. The last third of the nodes is spot capacity: at least one of each type from
    two nodes on."""
    spot = max(1, count // 3) if count > 1 else 0
    return "spot" if index > count - spot else "on-demand"


def labels(index: int, count: int) -> dict[str, str]:
    kind = capacity_type(index, count)
    return {
        "everstep.dev/capacity-type": kind,
        "everstep.dev/pool": kind,
        "topology.kubernetes.io/region": "local",
        "topology.kubernetes.io/zone": "zone-a" if index % 2 else "zone-b",
    }


@dataclass(frozen=True)
class Node:
    """Node number ``place.index`` of a cluster of ``count``; ``folder`` is the cluster's."""

    place: Place
    count: int
    folder: Path
    root: Path

    @property
    def name(self) -> str:
        return f"node-{self.place.index}"

    @property
    def own(self) -> Path:
        """Return the node's private folder: its configuration, its logs, its disk."""
        return self.folder / "nodes" / self.name

    @property
    def processes(self) -> ProcessTable:
        return ProcessTable(self.folder / "processes")

    @property
    def process(self) -> Process | None:
        """Return the process that holds the node's namespaces, while the node is switched on."""
        return self.processes.find(self.name)

    @property
    def boot_id(self) -> str:
        """Changes with every start; kubelet reports it, which tells a fresh Ready from one that is left over."""
        return (self.own / "boot-id").read_text().strip()

    @property
    def is_disturbed(self) -> bool:
        """Return whether it is frozen or cut off."""
        return cgroups.is_frozen(self.name) or not network.is_plugged(self.place)

    def configure(self, authority: Authority, url: str, kube_proxy_kubeconfig: Path) -> None:
        """Write the configuration, once; the node keeps its identity over restarts."""
        self.own.mkdir(parents=True, exist_ok=True)
        pair = authority.issue(self.name, f"/O=system:nodes/CN=system:node:{self.name}")
        authority.kubeconfig(self.own / "kubelet.kubeconfig", url, pair)
        cni_folder = self.own / "cni-conf"
        cni_folder.mkdir(exist_ok=True)
        (cni_folder / "10-everstep.conflist").write_text(node_config.cni(self.place.pod_cidr))
        (self.own / "resolv.conf").write_text("")
        (self.own / "containerd.toml").write_text(node_config.containerd(self.root, cni_folder))
        kubelet = node_config.kubelet(cgroups.pods_path(self.name), authority.own.certificate, self.own / "resolv.conf")
        (self.own / "kubelet.json").write_text(kubelet)
        (self.own / "kube-proxy.json").write_text(node_config.kube_proxy(kube_proxy_kubeconfig, self.name))
        (self.own / "spec.json").write_text(json.dumps(self._spec(), indent=1))

    def start(self, others: Sequence[Place]) -> None:
        """Switch the node on; it is Ready some seconds later."""
        (self.own / "boot-id").write_text(f"{uuid.uuid4()}\n")
        network.attach(self.place, others)
        procs = cgroups.create(self.name)
        command: list[str | Path] = ["sh", "-c", 'echo $$ > "$1" && shift && exec "$@"', "sh", procs]
        command += ["nsenter", f"--net={self.place.namespace_file}"]
        command += ["unshare", "--mount", "--propagation", "private", "--uts", "--pid", "--fork", "--mount-proc"]
        command += ["--kill-child=KILL", sys.executable, "-I", "-S", INIT, self.own / "spec.json"]
        self.processes.start(self.name, command, self.own / "node.log")

    def kill(self) -> None:
        """Cut the power: first the cable, so that not even a TCP reset tells anyone, then every process."""
        network.unplug(self.place)
        self._end_processes()

    def stop(self) -> None:
        """Switch the node off and remove what it had on the host but its disk."""
        self.kill()
        network.detach(self.place)
        cgroups.remove(self.name)

    def freeze(self) -> None:
        """Stop all its processes at once, containers too; the kernel still acknowledges packets for them."""
        self._require_process()
        cgroups.freeze(self.name)

    def thaw(self) -> None:
        self._require_process()
        cgroups.thaw(self.name)

    def partition(self) -> None:
        """Cut the node's cable; its processes go on alone."""
        self._require_process()
        network.unplug(self.place)

    def heal(self) -> None:
        self._require_process()
        network.plug(self.place)

    def kill_kubelet(self) -> None:
        """Kill the kubelet; process 1 of the node starts it again."""
        init = self._init_pid()
        for pid in map(int, Path(f"/proc/{init}/task/{init}/children").read_text().split()):
            if Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].endswith(b"kubelet"):
                os.kill(pid, signal.SIGKILL)
                return
        raise ClusterError(f"no kubelet runs on {self.name}: it has just been killed, perhaps")

    def inside(self) -> list[str]:
        """Return the prefix with which a command runs on the node: ``subprocess.run([*node.inside(), "ip",
        "route"])``."""
        return ["nsenter", "--target", str(self._init_pid()), "--mount", "--net", "--pid", "--uts"]

    def reseed(self) -> None:
        """Replace the disk of a node that is switched off by a fresh one with all golden images."""
        write_atomically(self.own / "images.json", json.dumps(golden.seed(self.root)))

    def missing_images(self) -> list[str]:
        """Return the names of golden images that this node lacks, or has with other content."""
        held = json.loads((self.own / "images.json").read_text())
        return [name for name, key in golden.images().items() if held.get(name) != key]

    def link_image(self, name: str) -> None:
        """Take one golden image over while the node's pods run on."""
        key = golden.images()[name]
        with golden.unpacked(name) as image:
            golden.link_image([*self.inside(), "ctr"], name, image)
        record = self.own / "images.json"
        write_atomically(record, json.dumps({**json.loads(record.read_text()), name: key}))

    def remove_disk(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.rmtree(self.own, ignore_errors=True)

    def _require_process(self) -> Process:
        process = self.process
        if process is None:
            raise ClusterError(f"{self.name} is switched off; `node restart {self.name}` brings it back")
        return process

    def _init_pid(self) -> int:
        """Process 1 of the node as the host sees it: the only child of the process that made the namespaces."""
        pid = self._require_process().pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if not children:
            raise ClusterError(f"{self.name} has just ended; its output is in {self.own / 'node.log'}")
        return int(children[0])

    def _end_processes(self) -> None:
        holder = self.process
        if holder is not None:
            try:
                # Only process 1 takes the whole PID namespace along, and it ends after all the others. Its holder then
                # ends by itself.
                os.kill(self._init_pid(), signal.SIGKILL)
            except (ClusterError, FileNotFoundError, ProcessLookupError):
                holder.kill()
            # A frozen process dies only when it is thawed.
            cgroups.thaw(self.name)
            holder.wait_end(20)
        self.processes.stop([self.name])

    def _spec(self) -> dict[str, object]:
        private = {
            "kubelet": "/var/lib/kubelet",
            "cni": "/var/lib/cni",
            "pod-logs": "/var/log/pods",
            "container-logs": "/var/log/containers",
        }
        temporary = self.own / "tmp"
        return {
            "hostname": self.name,
            "binds": {str(self.own / name): target for name, target in private.items()},
            "boot_id": str(self.own / "boot-id"),
            "sysctls": NODE_SYSCTLS,
            "environment": {"TMPDIR": str(temporary)},
            "daemons": [
                self._daemon("containerd", None, shutil.which("containerd"), "--config", self.own / "containerd.toml"),
                self._daemon(
                    "kubelet",
                    node_config.CONTAINERD_SOCKET,
                    path_of("kubelet"),
                    "--config", self.own / "kubelet.json",
                    "--kubeconfig", self.own / "kubelet.kubeconfig",
                    "--hostname-override", self.name,
                    "--node-ip", self.place.address,
                    "--node-labels", ",".join(f"{k}={v}" for k, v in labels(self.place.index, self.count).items()),
                    "--cert-dir", "/var/lib/kubelet/pki",
                ),
                self._daemon("kube-proxy", None, path_of("kube-proxy"), "--config", self.own / "kube-proxy.json"),
            ],
        }  # fmt: skip

    def _daemon(self, name: str, after: str | None, *argv: object) -> dict[str, object]:
        return {"argv": [str(word) for word in argv], "log": str(self.own / f"{name}.log"), "after": after}
