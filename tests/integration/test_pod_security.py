"""The operator and the API server's own admission mean the same by restricted, field by field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import pytest_asyncio

from e2e.cluster.controlplane import ControlPlane
from everstep_operator.cluster import errors
from everstep_operator.cluster.client import Client
from everstep_operator.cluster.resources import PODS
from everstep_operator.plan.plan_settings import PlanSettings
from everstep_operator.plan.pod_security import Profile, list_violations
from everstep_operator.plan.template import resolve_template
from tests.builders import job
from tests.integration.world import NAMESPACES, SERVICE_ACCOUNTS

LEVELS: dict[Profile, str] = {"restricted": "restricted", "image": "baseline"}


def container(**security: Any) -> dict[str, Any]:
    return {"containers": [{"name": "trainer", "securityContext": security}]}


def sidecar(**security: Any) -> dict[str, Any]:
    return {"initContainers": [{"name": "first", "image": "example.com/first:1", "securityContext": security}]}


# The fields of the standard, each with values that one of the two profiles forbids and with some that none does.
CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "host network": {"hostNetwork": True},
    "host pid": {"hostPID": True},
    "host ipc": {"hostIPC": True},
    "privileged": container(privileged=True, allowPrivilegeEscalation=True),
    "privileged init": sidecar(privileged=True, allowPrivilegeEscalation=True),
    "SYS_ADMIN": container(capabilities={"add": ["SYS_ADMIN"]}),
    "NET_RAW": container(capabilities={"add": ["NET_RAW"]}),
    "CHOWN": container(capabilities={"add": ["CHOWN"]}),
    "NET_BIND_SERVICE": container(capabilities={"add": ["NET_BIND_SERVICE"]}),
    "drops less": container(capabilities={"drop": ["NET_RAW"]}),
    "host path": {"volumes": [{"name": "v", "hostPath": {"path": "/data"}}]},
    "nfs": {"volumes": [{"name": "v", "nfs": {"server": "10.0.0.1", "path": "/data"}}]},
    "iscsi": {"volumes": [{"name": "v", "iscsi": {"targetPortal": "10.0.0.1", "iqn": "iqn.2001-04.x:y", "lun": 0}}]},
    "claim": {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]},
    "secret": {"volumes": [{"name": "v", "secret": {"secretName": "s"}}]},
    "image volume": {"volumes": [{"name": "v", "image": {"reference": "example.com/data:1"}}]},
    "host port": {"containers": [{"name": "trainer", "ports": [{"containerPort": 80, "hostPort": 80}]}]},
    "port": {"containers": [{"name": "trainer", "ports": [{"containerPort": 80}]}]},
    "apparmor unconfined": container(appArmorProfile={"type": "Unconfined"}),
    "apparmor of the pod": {"securityContext": {"appArmorProfile": {"type": "Unconfined"}}},
    "apparmor of the runtime": container(appArmorProfile={"type": "RuntimeDefault"}),
    "selinux type": container(seLinuxOptions={"type": "spc_t"}),
    "selinux container type": container(seLinuxOptions={"type": "container_t", "level": "s0:c1,c2"}),
    "selinux user": {"securityContext": {"seLinuxOptions": {"user": "system_u"}}},
    "selinux role": container(seLinuxOptions={"role": "system_r"}),
    "unmasked proc": {**container(procMount="Unmasked"), "hostUsers": False},
    "default proc": container(procMount="Default"),
    "seccomp unconfined": container(seccompProfile={"type": "Unconfined"}),
    "seccomp of the pod": {"securityContext": {"seccompProfile": {"type": "Unconfined"}}},
    "seccomp localhost": container(seccompProfile={"type": "Localhost", "localhostProfile": "p.json"}),
    "no seccomp": {"securityContext": {"seccompProfile": None}},
    "unsafe sysctl": {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}},
    "safe sysctl": {"securityContext": {"sysctls": [{"name": "net.ipv4.tcp_syncookies", "value": "1"}]}},
    "escalation": container(allowPrivilegeEscalation=True),
    "escalation init": sidecar(allowPrivilegeEscalation=True),
    "root": container(runAsUser=0),
    "root of the pod": {"securityContext": {"runAsUser": 0}},
    "maybe root": container(runAsNonRoot=False),
    "maybe root of the pod": {"securityContext": {"runAsNonRoot": False}},
    "another user": container(runAsUser=4242),
    "plain init": sidecar(),
    "probe of a host": {
        "containers": [{"name": "trainer", "livenessProbe": {"httpGet": {"host": "10.0.0.1", "port": 80}}}]
    },
    "hook to a host": {
        "containers": [{"name": "trainer", "lifecycle": {"preStop": {"httpGet": {"host": "10.0.0.1", "port": 80}}}}]
    },
}


@pytest_asyncio.fixture
async def admin(control_plane: ControlPlane) -> Any:
    client = await Client.connect(str(control_plane.kubeconfig), field_manager="user")
    yield client
    await client.close()


def rejections(profile: Profile) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each case as a pod that everything was granted for: only the profile judges it."""
    for number, (name, over) in enumerate(CASES.items()):
        made = resolve_template(
            job().spec(securityProfile=profile, podTemplate={"spec": over}).build(),
            epoch=1,
            pool=None,
            plain=False,
            settings=PlanSettings(host_fields=frozenset("*")),
        )
        pod = {"metadata": {"name": f"case-{number}"}, "spec": made.pod["spec"]}  # type: ignore[union-attr]
        yield name, pod


@pytest.mark.parametrize("profile", LEVELS)
async def test_a_pod_is_refused_by_us_exactly_where_the_api_servers_admission_would(
    admin: Client, profile: Profile
) -> None:
    namespace = f"pod-security-{profile}"
    labels = {"pod-security.kubernetes.io/enforce": LEVELS[profile]}
    head = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": labels}}
    await admin.create(NAMESPACES, None, head)
    await admin.create(SERVICE_ACCOUNTS, namespace, {"metadata": {"name": "default"}})
    ours, theirs = {}, {}
    for name, pod in rejections(profile):
        ours[name] = bool(list_violations(pod["spec"], {}, profile))
        said = ""
        try:
            await admin.create(PODS, namespace, pod)
        except errors.Forbidden as error:
            said = str(error)
        assert not said or "PodSecurity" in said
        theirs[name] = bool(said)
    assert ours == theirs
    assert any(theirs.values())
    assert not theirs["nothing"]
