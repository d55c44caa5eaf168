"""A control plane: etcd and kube-apiserver, alone for integration tests; with controllers under a whole cluster."""

from __future__ import annotations

import http.client
import json
import shutil
import ssl
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from e2e.cluster import binaries, packages
from e2e.cluster.certificates import Authority
from e2e.cluster.controlplane_flags import (
    CONTROLLER_MANAGER,
    SCHEDULER,
    ClientLimits,
    apiserver_command,
    controller_manager_command,
    etcd_command,
    scheduler_command,
)
from e2e.cluster.errors import ClusterError
from e2e.cluster.ports import free_ports
from e2e.cluster.processes import Process, ProcessTable
from e2e.cluster.state import write_atomically
from e2e.cluster.waiting import until

SERVICE_NAMES = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")
KUBERNETES_SERVICE_IP = "10.96.0.1"


@dataclass(frozen=True)
class Settings:
    """The settings that must be the same when a part of a running control plane is started again."""

    address: str
    port: int
    etcd_port: int
    etcd_peer_port: int
    apiserver_flags: dict[str, str] = field(default_factory=dict)


class ControlPlane:
    """etcd and kube-apiserver in a folder of their own, on free ports; a context manager.

    ``with ControlPlane() as cp`` lives as long as the calling thread: not even a killed test leaves a server behind.
    With ``folder`` and ``detached=True`` it stays until ``stop()``, also by another process through ``open(folder)``.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        address: str = "127.0.0.1",
        port: int | None = None,
        apiserver_flags: Mapping[str, str] | None = None,
        detached: bool = False,
    ) -> None:
        self._temporary = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="everstep-control-plane-"))
        self._address = address
        self._port = port
        self._apiserver_flags = dict(apiserver_flags or {})
        self._detached = detached
        self.processes = ProcessTable(self.folder / "processes")
        self.authority = Authority(self.folder / "pki")

    @classmethod
    def open(cls, folder: Path) -> ControlPlane:
        """Return the detached control plane that another process started in ``folder``."""
        return cls(folder, detached=True)

    @property
    def settings(self) -> Settings:
        return Settings(**json.loads((self.folder / "settings.json").read_text()))

    @property
    def url(self) -> str:
        return f"https://{self.settings.address}:{self.settings.port}"

    @property
    def kubeconfig(self) -> Path:
        """Return the administrator's kubeconfig."""
        return self.folder / "kubeconfig"

    @property
    def audit_log(self) -> Path:
        """JSON lines: metadata of every request but the control plane's own reads; pods written or removed in full."""
        return self.folder / "audit.log"

    def read_audit_log(self) -> Iterator[str]:
        """Yield the lines of the audit log, first those of the part that was put aside when it had grown too large."""
        for path in (*sorted(self.folder.glob("audit-*.log")), self.audit_log):
            with path.open() as log:
                yield from log

    def start(self) -> None:
        """Return when the API server is ready: about three seconds with built binaries."""
        packages.ensure(packages.CONTROL_PLANE)
        binaries.ensure(binaries.CONTROL_PLANE)
        apiserver_port, etcd_port, etcd_peer_port = free_ports(3)
        settings = Settings(
            self._address, self._port or apiserver_port, etcd_port, etcd_peer_port, self._apiserver_flags
        )
        write_atomically(self.folder / "settings.json", json.dumps(asdict(settings)))
        self.start_etcd()
        self._issue_certificates()
        self.start_apiserver()

    def start_etcd(self) -> None:
        settings = self.settings
        self._start("etcd", etcd_command(settings.etcd_port, settings.etcd_peer_port, self.folder))

    def stop_etcd(self) -> None:
        """Kill etcd, after the API server; its data stay in the folder `etcd`."""
        self.processes.stop(["etcd"])

    def start_apiserver(self) -> None:
        settings = self.settings
        command = apiserver_command(settings.address, settings.port, settings.etcd_port, self.folder)
        command += [f"--{name}={value}" for name, value in settings.apiserver_flags.items()]
        self._start("kube-apiserver", command)
        until(self.ready, "kube-apiserver is ready", 180)

    def stop_apiserver(self) -> None:
        """Kill the API server; etcd and its data stay."""
        self.processes.stop(["kube-apiserver"])

    def restart_apiserver(self, away: float = 0.0) -> None:
        """Kill the API server and start it again, `away` seconds later: every watch breaks, nothing stored is lost."""
        self.stop_apiserver()
        time.sleep(away)
        self.start_apiserver()

    def start_controllers(self, limits: ClientLimits | None = None) -> None:
        """Start controller-manager and scheduler, with their default client limits unless told otherwise."""
        binaries.ensure([CONTROLLER_MANAGER, SCHEDULER])
        limits = limits or ClientLimits()
        self._start(CONTROLLER_MANAGER, controller_manager_command(self.folder, limits))
        self._start(SCHEDULER, scheduler_command(self.folder, limits))

    def restart_controllers(self, limits: ClientLimits | None = None) -> None:
        """Start both again, with other limits: a benchmark must not measure the default 20 requests a second."""
        self.processes.stop([CONTROLLER_MANAGER, SCHEDULER])
        self.start_controllers(limits)

    def user_kubeconfig(self, user: str, *groups: str) -> Path:
        """Return a kubeconfig for a user with no rights but those that RBAC gives to ``user`` and ``groups``."""
        subject = "".join(f"/O={group}" for group in groups) + f"/CN={user}"
        name = user.replace(":", "-")
        pair = self.authority.issue(name, subject)
        return self.authority.kubeconfig(self.folder / f"{name}.kubeconfig", self.url, pair)

    def ready(self) -> bool:
        """Return whether the API server says that it is ready; raise an error if it or etcd has ended."""
        for name in ("etcd", "kube-apiserver"):
            if self.processes.find(name) is None:
                raise ClusterError(f"{name} is not running: {self._log_tail(name)}")
        settings = self.settings
        context = ssl.create_default_context(cafile=str(self.authority.own.certificate))
        connection = http.client.HTTPSConnection(settings.address, settings.port, timeout=2, context=context)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == http.client.OK
        except OSError:
            return False
        finally:
            connection.close()

    def stop(self) -> None:
        """End every process; a temporary folder goes too."""
        self.processes.stop()
        self.processes.sweep()
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> ControlPlane:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _start(self, name: str, command: list[str]) -> Process:
        log = self.folder / f"{name}.log"
        return self.processes.start(name, command, log, die_with_parent=not self._detached)

    def _issue_certificates(self) -> None:
        self.authority.create()
        address = self._address
        names = [f"DNS:{name}" for name in (*SERVICE_NAMES, "localhost")]
        names += [f"IP:{ip}" for ip in dict.fromkeys((address, "127.0.0.1", KUBERNETES_SERVICE_IP))]
        # Not the group system:masters for the controllers: with their bootstrap roles they may do what they really may.
        subjects = {
            "admin": "/O=system:masters/CN=admin",
            CONTROLLER_MANAGER: f"/CN=system:{CONTROLLER_MANAGER}",
            SCHEDULER: f"/CN=system:{SCHEDULER}",
        }
        with ThreadPoolExecutor(4) as pool:
            server = pool.submit(self.authority.issue, "apiserver", "/CN=kube-apiserver", names)
            kubelet = pool.submit(self.authority.issue, "kubelet-client", "/O=system:masters/CN=kube-apiserver")
            signing = pool.submit(self.authority.issue, "service-accounts", "/CN=service-accounts")
            pairs = {name: pool.submit(self.authority.issue, name, subject) for name, subject in subjects.items()}
            for done in (server, kubelet, signing):
                done.result()
            for name, pair in pairs.items():
                path = self.kubeconfig if name == "admin" else self.folder / f"{name}.kubeconfig"
                self.authority.kubeconfig(path, self.url, pair.result())

    def _log_tail(self, name: str) -> str:
        log = self.folder / f"{name}.log"
        return log.read_text(errors="replace")[-1500:] if log.exists() else "it was never started"
