"""Checks a pod's spec against a profile of the Pod Security Standards, with what an administrator has granted.

The API server checks this only where a namespace asks for it. A job that says `restricted` is restricted anywhere
(https://kubernetes.io/docs/concepts/security/pod-security-standards/).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from everstep_operator.plan.overlay import overlay

Profile = Literal["restricted", "image"]  # `image`: the standard's baseline

_KINDS = ("containers", "initContainers", "ephemeralContainers")
_CONFINED_CONTAINER = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_HOST = ("hostNetwork", "hostPID", "hostIPC")
_BASELINE_CAPABILITIES = frozenset(
    {
        "AUDIT_WRITE",
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "KILL",
        "MKNOD",
        "NET_BIND_SERVICE",
        "SETFCAP",
        "SETGID",
        "SETPCAP",
        "SETUID",
        "SYS_CHROOT",
    }
)
_RESTRICTED_CAPABILITIES = frozenset({"NET_BIND_SERVICE"})
_SELINUX_TYPES = frozenset({"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"})
_CONFINED = frozenset({"RuntimeDefault", "Localhost"})
_VOLUMES = frozenset(
    {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
)
_SYSCTLS = frozenset(
    {
        "kernel.shm_rmid_forced",
        "net.ipv4.ip_local_port_range",
        "net.ipv4.ip_local_reserved_ports",
        "net.ipv4.ip_unprivileged_port_start",
        "net.ipv4.ping_group_range",
        "net.ipv4.tcp_fin_timeout",
        "net.ipv4.tcp_keepalive_intvl",
        "net.ipv4.tcp_keepalive_probes",
        "net.ipv4.tcp_keepalive_time",
        "net.ipv4.tcp_rmem",
        "net.ipv4.tcp_syncookies",
        "net.ipv4.tcp_wmem",
    }
)


@dataclass(frozen=True, slots=True)
class Violation:
    """A field that the profile forbids. `grant`: the name by which an administrator may allow it."""

    grant: str
    path: str
    value: Any
    allowed: str

    def __str__(self) -> str:
        return f"podTemplate.spec.{self.path} is {self.value!r:.100}, allowed: {self.allowed}"


def confine_containers(spec: Mapping[str, Any]) -> None:
    """Give each container what the restricted profile wants, where it does not say otherwise itself.

    Args:
        spec: A pod's own copy; its containers are changed.
    """
    for kind in _KINDS:
        for container in spec.get(kind) or ():
            said = _below(container, "securityContext")
            if not said.get("privileged"):
                container["securityContext"] = overlay(_CONFINED_CONTAINER, said)


def list_violations(spec: Mapping[str, Any], annotations: Mapping[str, str], profile: Profile) -> list[Violation]:
    """Return what a profile forbids in a pod.

    Args:
        spec: The pod's, complete.
        annotations: The pod's: AppArmor was chosen by them once.
        profile: `restricted`, or `image` for the baseline.
    """
    found = [*_baseline(spec, annotations)]
    if profile == "restricted":
        found += _restricted(spec)
    return found


def _baseline(spec: Mapping[str, Any], annotations: Mapping[str, str]) -> Iterator[Violation]:
    for name in _HOST:
        if spec.get(name):
            yield Violation(name, name, True, "false")
    for volume in spec.get("volumes") or ():
        if "hostPath" in volume:
            yield Violation("hostPath", f"volumes[{volume.get('name')}]", "hostPath", "other kinds of volumes")
    for sysctl in _items(_below(spec, "securityContext").get("sysctls")):
        wanted = _below({"": sysctl}, "").get("name")
        if wanted not in _SYSCTLS:
            yield Violation("sysctls", "securityContext.sysctls", wanted, ", ".join(sorted(_SYSCTLS)))
    for name, value in annotations.items():
        if name.startswith("container.apparmor.security.beta.kubernetes.io/") and value == "unconfined":
            yield Violation("appArmorProfile", f"annotations[{name}]", value, "runtime/default or localhost/…")
    yield from _confinement("", _below(spec, "securityContext"))
    for path, container in _containers(spec):
        security = _below(container, "securityContext")
        if security.get("privileged"):
            yield Violation("privileged", f"{path}.securityContext.privileged", True, "false")
            continue  # all the others are nothing beside it
        yield from _confinement(f"{path}.", security)
        mount = security.get("procMount")
        if mount not in (None, "Default"):
            yield Violation("procMount", f"{path}.securityContext.procMount", mount, "Default")
        yield from _capabilities(path, security, _BASELINE_CAPABILITIES)
        yield from _handlers(path, container)
        for port in container.get("ports") or ():
            if port.get("hostPort"):
                yield Violation("hostPort", f"{path}.ports.hostPort", port["hostPort"], "none")


def _restricted(spec: Mapping[str, Any]) -> Iterator[Violation]:
    for volume in spec.get("volumes") or ():
        kinds = set(volume) - {"name"} - _VOLUMES - {"hostPath"}
        for kind in sorted(kinds):
            yield Violation("volumes", f"volumes[{volume.get('name')}]", kind, ", ".join(sorted(_VOLUMES)))
    pod = _below(spec, "securityContext")
    if pod.get("runAsUser") == 0:
        yield Violation("runAsUser", "securityContext.runAsUser", 0, "any but 0")
    for path, container in _containers(spec):
        security = _below(container, "securityContext")
        if security.get("privileged"):
            continue  # forbidden, or granted with all that it implies
        root = security.get("runAsNonRoot", pod.get("runAsNonRoot"))
        if root is not True:
            yield Violation("runAsUser", f"{path}.securityContext.runAsNonRoot", root, "true")
        if security.get("runAsUser") == 0:
            yield Violation("runAsUser", f"{path}.securityContext.runAsUser", 0, "any but 0")
        if (escalates := security.get("allowPrivilegeEscalation")) is not False:
            where = f"{path}.securityContext.allowPrivilegeEscalation"
            yield Violation("allowPrivilegeEscalation", where, escalates, "false")
        yield from _capabilities(path, security, _RESTRICTED_CAPABILITIES)
        dropped = _items(_below(security, "capabilities").get("drop"))
        if "ALL" not in dropped:
            yield Violation("capabilities", f"{path}.securityContext.capabilities.drop", dropped, "[ALL]")
        profile = _below(security, "seccompProfile") or _below(pod, "seccompProfile")
        if profile.get("type") not in _CONFINED:
            where = f"{path}.securityContext.seccompProfile.type"
            yield Violation("seccompProfile", where, profile.get("type"), "RuntimeDefault, Localhost")


def _confinement(path: str, security: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield what is forbidden of the fields that a pod and a container have alike."""
    if _below(security, "windowsOptions").get("hostProcess"):
        yield Violation("hostProcess", f"{path}securityContext.windowsOptions.hostProcess", True, "false")
    for field in ("seccompProfile", "appArmorProfile"):
        kind = _below(security, field).get("type")
        if kind is not None and kind not in _CONFINED:
            yield Violation(field, f"{path}securityContext.{field}.type", kind, "RuntimeDefault, Localhost")
    labels = _below(security, "seLinuxOptions")
    if (kind := labels.get("type") or "") not in _SELINUX_TYPES:
        where = f"{path}securityContext.seLinuxOptions.type"
        yield Violation("seLinuxOptions", where, kind, ", ".join(sorted(_SELINUX_TYPES - {""})))
    for field in ("user", "role"):
        if labels.get(field):
            yield Violation("seLinuxOptions", f"{path}securityContext.seLinuxOptions.{field}", labels[field], "none")


def _handlers(path: str, container: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield the probes and hooks that ask another host: they let the kubelet speak to what the pod may not reach."""
    hooks = _below(container, "lifecycle")
    places = [(name, _below(container, name)) for name in ("livenessProbe", "readinessProbe", "startupProbe")]
    places += [(f"lifecycle.{name}", _below(hooks, name)) for name in ("postStart", "preStop")]
    for where, handler in places:
        for kind in ("httpGet", "tcpSocket"):
            if host := _below(handler, kind).get("host"):
                yield Violation("hostProbes", f"{path}.{where}.{kind}.host", host, "none: the pod itself")


def _capabilities(path: str, security: Mapping[str, Any], allowed: frozenset[str]) -> Iterator[Violation]:
    for name in _items(_below(security, "capabilities").get("add")):
        if name not in allowed:
            where = f"{path}.securityContext.capabilities.add"
            yield Violation("capabilities", where, name, ", ".join(sorted(allowed)))


def _containers(spec: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for kind in _KINDS:
        for number, container in enumerate(spec.get(kind) or ()):
            yield f"{kind}[{container.get('name', number)}]", container


def _below(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = fields.get(name)
    return found if isinstance(found, Mapping) else {}


def _items(value: Any) -> list[Any]:
    """Return the items of a field that the API server has not looked at yet: what is no list is one odd item."""
    return value if isinstance(value, list) else [] if value is None else [value]
