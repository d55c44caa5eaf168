"""Checks a pod's spec against a profile of the Pod Security Standards, with what an administrator has granted.

The API server checks this only where a namespace asks for it. A job that says `restricted` is restricted anywhere
(https://kubernetes.io/docs/concepts/security/pod-security-standards/).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from everstep_operator.plan.folder_publisher import VOLUME
from everstep_operator.plan.overlay import merge_overlay

Profile = Literal["restricted", "image"]  # `image`: the standard's baseline

_CONTAINER_LISTS = ("containers", "initContainers", "ephemeralContainers")
_CONFINED_CONTAINER = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_HOST_FIELDS = ("hostNetwork", "hostPID", "hostIPC")
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
        # The one volume that the operator adds with somebody else's words in it.
        said = "checkpoint.volume" if self.path == f"volumes[{VOLUME}]" else f"podTemplate.spec.{self.path}"
        return f"{said} is {self.value!r:.100}, allowed: {self.allowed}"


def confine_containers(spec: Mapping[str, Any]) -> None:
    """Give each container what the restricted profile wants, where it does not say otherwise itself.

    Args:
        spec: A pod's own copy; its containers are changed.
    """
    for kind in _CONTAINER_LISTS:
        for container in spec.get(kind) or ():
            said = _get_mapping(container, "securityContext")
            if not said.get("privileged"):
                container["securityContext"] = merge_overlay(_CONFINED_CONTAINER, said)


def list_violations(spec: Mapping[str, Any], annotations: Mapping[str, str], profile: Profile) -> list[Violation]:
    """Return what a profile forbids in a pod.

    Args:
        spec: The pod's, complete.
        annotations: The pod's: AppArmor was chosen by them once.
        profile: `restricted`, or `image` for the baseline.
    """
    found = [*_check_baseline(spec, annotations)]
    if profile == "restricted":
        found += _check_restricted(spec)
    return found


def _check_baseline(spec: Mapping[str, Any], annotations: Mapping[str, str]) -> Iterator[Violation]:
    for name in _HOST_FIELDS:
        if spec.get(name):
            yield Violation(name, name, True, "false")
    for volume in spec.get("volumes") or ():
        if "hostPath" in volume:
            yield Violation("hostPath", f"volumes[{volume.get('name')}]", "hostPath", "other kinds of volumes")
    for sysctl in _as_items(_get_mapping(spec, "securityContext").get("sysctls")):
        wanted = _get_mapping({"": sysctl}, "").get("name")
        if wanted not in _SYSCTLS:
            yield Violation("sysctls", "securityContext.sysctls", wanted, ", ".join(sorted(_SYSCTLS)))
    for name, value in annotations.items():
        if name.startswith("container.apparmor.security.beta.kubernetes.io/") and value == "unconfined":
            yield Violation("appArmorProfile", f"annotations[{name}]", value, "runtime/default or localhost/…")
    yield from _check_confinement("", _get_mapping(spec, "securityContext"))
    for path, container in _list_containers(spec):
        security = _get_mapping(container, "securityContext")
        if security.get("privileged"):
            yield Violation("privileged", f"{path}.securityContext.privileged", True, "false")
            continue  # all the others are nothing beside it
        yield from _check_confinement(f"{path}.", security)
        mount = security.get("procMount")
        if mount not in (None, "Default"):
            yield Violation("procMount", f"{path}.securityContext.procMount", mount, "Default")
        yield from _check_capabilities(path, security, _BASELINE_CAPABILITIES)
        yield from _check_handlers(path, container)
        for port in container.get("ports") or ():
            if port.get("hostPort"):
                yield Violation("hostPort", f"{path}.ports.hostPort", port["hostPort"], "none")


def _check_restricted(spec: Mapping[str, Any]) -> Iterator[Violation]:
    for volume in spec.get("volumes") or ():
        kinds = set(volume) - {"name"} - _VOLUMES - {"hostPath"}
        for kind in sorted(kinds):
            yield Violation("volumes", f"volumes[{volume.get('name')}]", kind, ", ".join(sorted(_VOLUMES)))
    pod = _get_mapping(spec, "securityContext")
    if pod.get("runAsUser") == 0:
        yield Violation("runAsUser", "securityContext.runAsUser", 0, "any but 0")
    for path, container in _list_containers(spec):
        security = _get_mapping(container, "securityContext")
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
        yield from _check_capabilities(path, security, _RESTRICTED_CAPABILITIES)
        dropped = _as_items(_get_mapping(security, "capabilities").get("drop"))
        if "ALL" not in dropped:
            yield Violation("capabilities", f"{path}.securityContext.capabilities.drop", dropped, "[ALL]")
        profile = _get_mapping(security, "seccompProfile") or _get_mapping(pod, "seccompProfile")
        if profile.get("type") not in _CONFINED:
            where = f"{path}.securityContext.seccompProfile.type"
            yield Violation("seccompProfile", where, profile.get("type"), "RuntimeDefault, Localhost")


def _check_confinement(path: str, security: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield what is forbidden of the fields that a pod and a container have alike."""
    if _get_mapping(security, "windowsOptions").get("hostProcess"):
        yield Violation("hostProcess", f"{path}securityContext.windowsOptions.hostProcess", True, "false")
    for field in ("seccompProfile", "appArmorProfile"):
        kind = _get_mapping(security, field).get("type")
        if kind is not None and kind not in _CONFINED:
            yield Violation(field, f"{path}securityContext.{field}.type", kind, "RuntimeDefault, Localhost")
    labels = _get_mapping(security, "seLinuxOptions")
    if (kind := labels.get("type") or "") not in _SELINUX_TYPES:
        where = f"{path}securityContext.seLinuxOptions.type"
        yield Violation("seLinuxOptions", where, kind, ", ".join(sorted(_SELINUX_TYPES - {""})))
    for field in ("user", "role"):
        if labels.get(field):
            yield Violation("seLinuxOptions", f"{path}securityContext.seLinuxOptions.{field}", labels[field], "none")


def _check_handlers(path: str, container: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield the probes and hooks that ask another host: they let the kubelet speak to what the pod may not reach."""
    hooks = _get_mapping(container, "lifecycle")
    places = [(name, _get_mapping(container, name)) for name in ("livenessProbe", "readinessProbe", "startupProbe")]
    places += [(f"lifecycle.{name}", _get_mapping(hooks, name)) for name in ("postStart", "preStop")]
    for where, handler in places:
        for kind in ("httpGet", "tcpSocket"):
            if host := _get_mapping(handler, kind).get("host"):
                yield Violation("hostProbes", f"{path}.{where}.{kind}.host", host, "none: the pod itself")


def _check_capabilities(path: str, security: Mapping[str, Any], allowed: frozenset[str]) -> Iterator[Violation]:
    for name in _as_items(_get_mapping(security, "capabilities").get("add")):
        if name not in allowed:
            where = f"{path}.securityContext.capabilities.add"
            yield Violation("capabilities", where, name, ", ".join(sorted(allowed)))


def _list_containers(spec: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for kind in _CONTAINER_LISTS:
        for number, container in enumerate(spec.get(kind) or ()):
            yield f"{kind}[{container.get('name', number)}]", container


def _get_mapping(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = fields.get(name)
    return found if isinstance(found, Mapping) else {}


def _as_items(value: Any) -> list[Any]:
    """Return the items of a field that the API server has not looked at yet: what is no list is one odd item."""
    return value if isinstance(value, list) else [] if value is None else [value]
