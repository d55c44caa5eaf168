"""The command lines of the control plane's programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.binaries import path_of

CONTROLLER_MANAGER = "kube-controller-manager"
SCHEDULER = "kube-scheduler"
SERVICE_CIDR = "10.96.0.0/16"
ISSUER = "https://kubernetes.default.svc.cluster.local"
AUDIT_POLICY = Path(__file__).parent / "config" / "audit-policy.yaml"


@dataclass(frozen=True)
class ClientLimits:
    """Requests a second, and the burst above it, that a component allows itself; None is its own default."""

    qps: int | None = None
    burst: int | None = None

    def flags(self) -> list[str]:
        pairs = {"kube-api-qps": self.qps, "kube-api-burst": self.burst}
        return [f"--{name}={value}" for name, value in pairs.items() if value is not None]


def etcd_command(port: int, peer_port: int, folder: Path) -> list[str]:
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
    return [
        str(path_of("etcd")),
        "--name=default",
        f"--data-dir={folder / 'etcd'}",
        # The data need not survive a power cut, and fsync is what makes etcd slow on a laptop's disk.
        "--unsafe-no-fsync",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--quota-backend-bytes=4294967296",
        "--log-level=warn",
    ]


def apiserver_command(address: str, port: int, etcd_port: int, folder: Path) -> list[str]:
    pki = folder / "pki"
    return [
        str(path_of("kube-apiserver")),
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        f"--bind-address={address}",
        f"--advertise-address={address}",
        f"--secure-port={port}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--kubelet-client-certificate={pki / 'kubelet-client.crt'}",
        f"--kubelet-client-key={pki / 'kubelet-client.key'}",
        # Nodes' names resolve nowhere: logs and exec need the address.
        "--kubelet-preferred-address-types=InternalIP",
        f"--service-account-issuer={ISSUER}",
        f"--service-account-key-file={pki / 'service-accounts.crt'}",
        f"--service-account-signing-key-file={pki / 'service-accounts.key'}",
        f"--service-cluster-ip-range={SERVICE_CIDR}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        # The host has no kube-proxy: webhooks and aggregated APIs are reached at their pods, not at a ClusterIP.
        "--enable-aggregator-routing=true",
        f"--audit-policy-file={AUDIT_POLICY}",
        f"--audit-log-path={folder / 'audit.log'}",
        "--audit-log-maxsize=1000",
        "--audit-log-maxbackup=1",
        # The default 60 s let a stopping server wait for its watchers.
        "--shutdown-delay-duration=0s",
        # The default is one: a namespace with a thousand pods would be cleared at the pace of one request at a time.
        "--delete-collection-workers=8",
        f"--cert-dir={folder / 'apiserver'}",
    ]


def controller_manager_command(folder: Path, limits: ClientLimits) -> list[str]:
    pki = folder / "pki"
    return [
        str(path_of(CONTROLLER_MANAGER)),
        f"--kubeconfig={folder / f'{CONTROLLER_MANAGER}.kubeconfig'}",
        "--leader-elect=false",
        "--secure-port=0",
        # As on real clusters: each controller has its own identity, rights and request budget.
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={pki / 'service-accounts.key'}",
        f"--root-ca-file={pki / 'ca.crt'}",
        f"--cluster-signing-cert-file={pki / 'ca.crt'}",
        f"--cluster-signing-key-file={pki / 'ca.key'}",
        *limits.flags(),
    ]


def scheduler_command(folder: Path, limits: ClientLimits) -> list[str]:
    return [
        str(path_of(SCHEDULER)),
        f"--kubeconfig={folder / f'{SCHEDULER}.kubeconfig'}",
        "--leader-elect=false",
        "--secure-port=0",
        *limits.flags(),
    ]
