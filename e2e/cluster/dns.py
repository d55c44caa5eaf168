"""Cluster DNS: CoreDNS as a process on the host, behind the address that every pod asks."""

from __future__ import annotations

from pathlib import Path

from e2e.cluster.binaries import path_of
from e2e.cluster.kubectl import Kubectl, Object
from e2e.cluster.network import HOST_ADDRESS
from e2e.cluster.node_config import CLUSTER_DOMAIN, DNS_SERVICE_IP
from e2e.cluster.processes import ProcessTable
from e2e.cluster.state import write_atomically

NAME = "coredns"
# Policies see the port behind the Service, and those that people write say 53.
PORT = 53


def corefile(kubeconfig: Path) -> str:
    """As kubeadm sets it up, with its time to live of 30 s; a name outside the cluster does not exist."""
    zones = f"{CLUSTER_DOMAIN} in-addr.arpa ip6.arpa"
    return f"""\
{" ".join(f"{zone}:{PORT}" for zone in zones.split())} {{
    bind {HOST_ADDRESS}
    errors
    kubernetes {zones} {{
        kubeconfig {kubeconfig}
        pods insecure
        ttl 30
    }}
    cache 30 {{
        disable success {CLUSTER_DOMAIN}
        disable denial {CLUSTER_DOMAIN}
    }}
}}
.:{PORT} {{
    bind {HOST_ADDRESS}
    # The cluster is closed; an answer at once is better than a resolver's time-out.
    template ANY ANY {{
        rcode NXDOMAIN
    }}
}}
"""


def objects() -> list[Object]:
    """Return the Service without a selector, and the slice that leads it to the host."""
    metadata = {"name": "kube-dns", "namespace": "kube-system"}
    protocols = {"dns": "UDP", "dns-tcp": "TCP"}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**metadata, "labels": {"k8s-app": "kube-dns"}},
        "spec": {
            "clusterIP": DNS_SERVICE_IP,
            "ports": [
                {"name": name, "port": 53, "targetPort": PORT, "protocol": protocol}
                for name, protocol in protocols.items()
            ],
        },
    }
    slice_labels = {"kubernetes.io/service-name": "kube-dns", "endpointslice.kubernetes.io/managed-by": "everstep"}
    endpoint_slice = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {**metadata, "labels": slice_labels},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [HOST_ADDRESS], "conditions": {"ready": True}}],
        "ports": [{"name": name, "port": PORT, "protocol": protocol} for name, protocol in protocols.items()],
    }
    return [service, endpoint_slice]


def start(processes: ProcessTable, folder: Path, kubectl: Kubectl, kubeconfig: Path) -> None:
    """Start CoreDNS and publish its address."""
    path = folder / "Corefile"
    write_atomically(path, corefile(kubeconfig))
    processes.start(NAME, [path_of("coredns"), "-conf", path], folder / f"{NAME}.log")
    kubectl.apply(objects())
