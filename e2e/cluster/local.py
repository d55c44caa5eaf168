"""The local cluster: a control plane on the host, nodes in namespaces, everything real but the machines."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

from e2e.cluster import binaries, cgroups, dns, golden, gpu, host, network, packages
from e2e.cluster.controlplane import ControlPlane
from e2e.cluster.controlplane_flags import CONTROLLER_MANAGER, SCHEDULER, ClientLimits
from e2e.cluster.errors import ClusterError
from e2e.cluster.kubectl import Kubectl, is_ready
from e2e.cluster.layers import UnpackedImage
from e2e.cluster.network import HOST_ADDRESS, MAX_NODES, Place
from e2e.cluster.node import Node
from e2e.cluster.phases import phase
from e2e.cluster.processes import ProcessTable
from e2e.cluster.state import (
    PUBLISHED_KUBECONFIG,
    ClusterSpec,
    cluster_dir,
    exclusive,
    make_shared_folder,
    write_atomically,
)
from e2e.cluster.waiting import until

BACKEND = "local"
API_PORT = 6443
LOCK = "cluster"


class LocalCluster:
    """The one cluster whose state is in ``folder``; every method works from any process.

    Attributes:
        broken: The nodes that this process has ever killed, frozen, cut off or restarted.
    """

    broken: ClassVar[set[str]] = set()

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cluster_dir()
        self.control = ControlPlane(self.folder, address=HOST_ADDRESS, port=API_PORT, detached=True)
        self.kubectl = Kubectl(self.kubeconfig)

    @staticmethod
    def possible() -> bool:
        return os.geteuid() == 0 and cgroups.MOUNT.is_dir()

    @property
    def kubeconfig(self) -> Path:
        return self.control.kubeconfig

    @property
    def processes(self) -> ProcessTable:
        return self.control.processes

    @property
    def shape(self) -> ClusterSpec:
        shape = ClusterSpec.load(self.folder)
        if shape is None or shape.backend != BACKEND:
            raise ClusterError("no local cluster is up; `python -m e2e.cluster up` starts one")
        return shape

    @property
    def nodes(self) -> list[Node]:
        count = self.shape.nodes
        return [Node(place, count, self.folder, golden.node_root(f"node-{place.index}")) for place in _places(count)]

    def node(self, name: str) -> Node:
        """Return a node by its name, such as ``node-2``."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise ClusterError(f"there is no node {name}; there are {', '.join(node.name for node in self.nodes)}")

    # -- up and down -----------------------------------------------------------------------------------------------

    def up(self, nodes: int | None = None, gpus: int | None = None) -> None:
        """Start the cluster, or bring back what is missing of it; returns at once when all is well."""
        with exclusive(LOCK):
            if not self._is_complete():
                self._remove()
                self._start(
                    ClusterSpec(BACKEND, nodes or ClusterSpec.nodes, ClusterSpec.gpus if gpus is None else gpus)
                )
                return
            present = self.shape
            wanted = ClusterSpec(BACKEND, nodes or present.nodes, present.gpus if gpus is None else gpus)
            if present != wanted:
                raise ClusterError(f"a cluster of another shape is up: {present}; run `down` first")
            self._repair()

    def down(self) -> None:
        """Remove every trace, also of a cluster whose start was interrupted or that a reboot ended."""
        with exclusive(LOCK):
            self._remove()

    def is_up(self) -> bool:
        """Return whether every process runs, the API server answers and every node is Ready with its GPUs."""
        if not self._is_complete() or self._missing_processes():
            return False
        with contextlib.suppress(ClusterError):
            return self.control.ready() and not self._unwell()
        return False

    # -- images ----------------------------------------------------------------------------------------------------

    def load_images(self, archives: Mapping[str, Path], keys: Mapping[str, str] | None = None) -> None:
        """Give images to every node, present and future; ``archives`` and ``keys`` as in ``golden.ensure``."""
        golden.ensure(archives, keys)
        self._complete_nodes()

    def link_images(self, unpacked: Mapping[str, UnpackedImage], keys: Mapping[str, str]) -> None:
        """Give images to every node out of a builder's store; ``unpacked`` and ``keys`` as in ``ensure_linked``."""
        golden.ensure_linked(unpacked, keys)
        self._complete_nodes()

    def _complete_nodes(self) -> None:
        with exclusive(LOCK):
            if not self._is_complete():
                return
            for node in self.nodes:
                self._complete_images(node)

    def _complete_images(self, node: Node) -> None:
        missing = node.missing_images()
        if not missing:
            return
        if node.process is None:
            node.reseed()
        elif not self.kubectl.items("pods", "-A", f"--field-selector=spec.nodeName={node.name}"):
            # Nothing runs there: a fresh disk is as good and quicker.
            self.restart_node(node.name)
        else:
            for name in missing:
                node.link_image(name)

    # -- faults ----------------------------------------------------------------------------------------------------

    def kill_node(self, name: str) -> None:
        """Cut a node's power; Kubernetes calls it NotReady 50 s later."""
        self.broken.add(name)
        self.node(name).kill()

    def freeze_node(self, name: str) -> None:
        """Stop every process of a node, daemons and containers, until ``thaw_node``."""
        self.broken.add(name)
        self.node(name).freeze()

    def thaw_node(self, name: str) -> None:
        self.node(name).thaw()

    def partition_node(self, name: str) -> None:
        """Cut a node off the network, until ``heal_node``; its pods go on running."""
        self.broken.add(name)
        self.node(name).partition()

    def heal_node(self, name: str) -> None:
        self.node(name).heal()

    def restart_node(self, name: str) -> None:
        """Switch a node off and on; returns when it is Ready with its GPUs, and with every image loaded so far."""
        self.broken.add(name)
        node = self.node(name)
        node.stop()
        if node.missing_images():
            node.reseed()
        node.start(_places(self.shape.nodes))
        self._wait_nodes([node])

    def restart_kubelet(self, name: str) -> None:
        """Kill a node's kubelet, which the node starts again as an init system does; its pods run on."""
        self.node(name).kill_kubelet()

    def restart_apiserver(self, away: float = 0.0) -> None:
        """Kill the API server, and start it again after so many seconds."""
        self.control.restart_apiserver(away)

    def restart_controllers(self, limits: ClientLimits | None = None) -> None:
        """Restart controller-manager and scheduler with other client limits (default: their own)."""
        self.control.restart_controllers(limits)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _start(self, shape: ClusterSpec) -> None:
        if not 1 <= shape.nodes <= MAX_NODES:
            raise ClusterError(f"a cluster has 1 to {MAX_NODES} nodes, not {shape.nodes}")
        packages.ensure(packages.NODES)
        binaries.ensure(binaries.LOCAL_CLUSTER)
        shape.save(self.folder)
        make_shared_folder()
        host.prepare(self.folder)
        network.create_bridge(_places(shape.nodes))
        with ThreadPoolExecutor() as pool:
            seeded = pool.submit(self._seed)
            with phase("etcd and API server"):
                self.control.start()
            self.control.start_controllers()
            named = pool.submit(self._start_dns)
            with phase("images linked to nodes (beside it)"):
                seeded.result()
            with phase("node processes"):
                self._start_nodes(pool)
            with phase("nodes Ready, GPUs"):
                self._wait_nodes()
            with phase("DNS, default service account"):
                named.result()
                until(self._has_default_account, "controller-manager made the default service account", 180)
        write_atomically(PUBLISHED_KUBECONFIG, self.kubeconfig.read_text())
        self._completed.touch()

    def _remove(self) -> None:
        shape = ClusterSpec.load(self.folder)
        self._completed.unlink(missing_ok=True)
        places = {place.index: place for place in network.leftover_places()}
        places |= {place.index: place for place in _places(shape.nodes if shape else 0)}
        nodes = [Node(p, 0, self.folder, golden.node_root(f"node-{p.index}")) for p in places.values()]
        with ThreadPoolExecutor() as pool:
            list(pool.map(Node.kill, nodes))
            self.processes.stop()
            self.processes.sweep()
            list(pool.map(Node.stop, nodes))
        cgroups.remove()
        network.remove_bridge()
        host.restore(self.folder)
        for node in nodes:
            node.remove_disk()
        shutil.rmtree(self.folder, ignore_errors=True)
        PUBLISHED_KUBECONFIG.unlink(missing_ok=True)

    @property
    def _completed(self) -> Path:
        return self.folder / "completed"

    def _is_complete(self) -> bool:
        """Return whether ``up`` once came to its end, and the data of that cluster are still served."""
        return self._completed.exists() and self.processes.find("etcd") is not None

    def _missing_processes(self) -> set[str]:
        needed = {"etcd", "kube-apiserver", CONTROLLER_MANAGER, SCHEDULER, dns.NAME}
        return {name for name in needed if self.processes.find(name) is None}

    def _repair(self) -> None:
        """Start again what has ended; a loaded machine's slow answers are waited for."""
        missing = self._missing_processes()
        for name in missing:
            print(f"{name} has ended and is started again", flush=True)
        if "kube-apiserver" in missing:
            self.control.start_apiserver()
        until(self.control.ready, "the API server answers", 180)
        if missing & {CONTROLLER_MANAGER, SCHEDULER}:
            self.control.restart_controllers()
        if dns.NAME in missing:
            self._start_dns()
        for node in self._unwell():
            print(f"{node.name} is restarted", flush=True)
            self.restart_node(node.name)

    def _seed(self) -> None:
        golden.ensure_pause()
        for node in self.nodes:
            node.reseed()

    def _start_dns(self) -> None:
        dns.start(self.processes, self.folder, self.kubectl, self.kubeconfig)

    def _has_default_account(self) -> bool:
        # Before that no pod can be created.
        return any(found["metadata"]["name"] == "default" for found in self.kubectl.items("serviceaccounts"))

    def _start_nodes(self, pool: ThreadPoolExecutor) -> None:
        proxy = self.control.user_kubeconfig("system:kube-proxy")
        places = _places(self.shape.nodes)

        def start(node: Node) -> None:
            node.configure(self.control.authority, self.control.url, proxy)
            node.start(places)

        list(pool.map(start, self.nodes))

    def _wait_nodes(self, nodes: list[Node] | None = None) -> None:
        """Wait for Ready after a start: a condition from before it does not count, GPUs are written again."""
        waiting = {node.name: node for node in (self.nodes if nodes is None else nodes)}
        gpus = self.shape.gpus

        def step() -> bool:
            for found in self.kubectl.items("nodes"):
                name = found["metadata"]["name"]
                if (
                    name in waiting
                    and is_ready(found)
                    and waiting[name].boot_id == found["status"]["nodeInfo"]["bootID"]
                ):
                    gpu.pretend(self.kubectl, name, gpus)
                    del waiting[name]
            return not waiting

        until(step, f"Ready: {', '.join(waiting)}", 120, interval=0.2)

    def _unwell(self) -> list[Node]:
        gpus = self.shape.gpus
        well = {
            found["metadata"]["name"]
            for found in self.kubectl.items("nodes")
            if is_ready(found) and gpu.has(found, gpus)
        }
        return [node for node in self.nodes if node.process is None or node.is_disturbed or node.name not in well]


def _places(count: int) -> list[Place]:
    return [Place(index) for index in range(1, count + 1)]
