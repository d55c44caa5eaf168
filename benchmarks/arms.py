"""Three ways to run the same ranks: a TrainingJob, pods made by hand, an Indexed Job."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from benchmarks.barrier import RANK, Ear
from e2e.harness import JOBS, Cluster, Object, training_job, wait

IMAGE = "docker.io/everstep/byo:test"
COMMAND = ["python3", "-u", "-c", RANK]
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
}


@dataclass(frozen=True)
class Site:
    """The place of a benchmark: one namespace, some nodes, one ear."""

    cluster: Cluster
    namespace: str
    ear: Ear
    nodes: tuple[str, ...]

    @property
    def affinity(self) -> Object:
        """On these nodes, spread evenly: the arms must not differ in placement."""
        expression = {"key": "kubernetes.io/hostname", "operator": "In", "values": list(self.nodes)}
        terms = [{"matchExpressions": [expression]}]
        return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


class Arm(Protocol):
    def create(self, site: Site, tag: str, world: int, **env: str) -> None: ...
    def delete(self, site: Site, tag: str) -> None: ...


class Everstep:
    """One TrainingJob, a rank per pod unless ``spec`` says otherwise."""

    def __init__(self, command: list[str] = COMMAND, image: str = IMAGE, **spec: object) -> None:
        self._command = command
        self._spec = {"image": image} | spec

    def create(self, site: Site, tag: str, world: int, **env: str) -> None:
        fields = {
            "numNodes": world,
            "env": site.ear.env(tag, **env),
            "podTemplate": {"spec": {"affinity": site.affinity}},
        }
        job = training_job(tag, self._command, **(fields | self._spec))
        site.cluster.request("POST", JOBS.format(namespace=site.namespace), job)

    def delete(self, site: Site, tag: str) -> None:
        site.cluster.request("DELETE", f"{JOBS.format(namespace=site.namespace)}/{tag}")
        gone(site, tag)


class Bare:
    """A headless service and pods, created at once by one client: the least that Kubernetes can do."""

    def __init__(self, command: list[str] = COMMAND, image: str = IMAGE) -> None:
        self._command, self._image = command, image

    def create(self, site: Site, tag: str, world: int, **env: str) -> None:
        base = f"/api/v1/namespaces/{site.namespace}"
        site.cluster.request("POST", f"{base}/services", service(tag))
        bodies = [self.pod(site, tag, rank, world, **env) for rank in range(world)]
        with ThreadPoolExecutor(world) as pool:
            list(pool.map(lambda body: site.cluster.request("POST", f"{base}/pods", body), bodies))

    def pod(self, site: Site, tag: str, rank: int, world: int, **env: str) -> Object:
        place = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": f"{tag}-0.{tag}"} | env
        spec = pod_spec(site, tag, place, self._command, self._image)
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"{tag}-{rank}", "labels": {"bench": tag}},
            "spec": spec | {"hostname": f"{tag}-{rank}", "subdomain": tag, "restartPolicy": "Never"},
        }

    def delete(self, site: Site, tag: str) -> None:
        base = f"/api/v1/namespaces/{site.namespace}"
        remove_pods(site, tag)
        site.cluster.request("DELETE", f"{base}/services/{tag}")
        gone(site, tag)


class Mounted(Bare):
    """The same pods with a ConfigMap and a Secret of their own in volumes, as scripts and credentials are brought.

    A kubelet that hears of a pod before the API server's node authorizer does may not read them, and asks again after
    more than a second: a start with such volumes is of one of two kinds, whoever made the pod.
    """

    KINDS = (("configmaps", "ConfigMap", "data"), ("secrets", "Secret", "stringData"))

    def create(self, site: Site, tag: str, world: int, **env: str) -> None:
        for plural, kind, field in self.KINDS:
            body = {"apiVersion": "v1", "kind": kind, "metadata": {"name": tag}, field: {"a": "b"}}
            site.cluster.request("POST", f"/api/v1/namespaces/{site.namespace}/{plural}", body)
        super().create(site, tag, world, **env)

    def pod(self, site: Site, tag: str, rank: int, world: int, **env: str) -> Object:
        pod = super().pod(site, tag, rank, world, **env)
        spec = pod["spec"]
        spec["volumes"] = [
            {"name": "script", "configMap": {"name": tag}},
            {"name": "credentials", "secret": {"secretName": tag}},
        ]
        [container] = spec["containers"]
        mounts = [{"name": volume["name"], "mountPath": f"/mnt/{volume['name']}"} for volume in spec["volumes"]]
        container["volumeMounts"] = mounts
        return pod

    def delete(self, site: Site, tag: str) -> None:
        super().delete(site, tag)
        for plural, _, _ in self.KINDS:
            site.cluster.request("DELETE", f"/api/v1/namespaces/{site.namespace}/{plural}/{tag}")


class Indexed:
    """An Indexed Job with a headless service: what most users write themselves.

    Unless they forbid it, its pods mount a token of their service account: ``token``.
    """

    def __init__(self, restart_policy: str = "Never", *, token: bool = False) -> None:
        self._restart_policy, self._token = restart_policy, token

    def create(self, site: Site, tag: str, world: int, **env: str) -> None:
        site.cluster.request("POST", f"/api/v1/namespaces/{site.namespace}/services", service(tag))
        place = {"WORLD": str(world), "MASTER_ADDR": f"{tag}-0.{tag}"} | env
        spec = pod_spec(site, tag, place) | {"subdomain": tag, "restartPolicy": self._restart_policy}
        spec["automountServiceAccountToken"] = self._token
        body = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": tag},
            "spec": {
                "completions": world,
                "parallelism": world,
                "completionMode": "Indexed",
                "backoffLimit": 20,
                "template": {"metadata": {"labels": {"bench": tag}}, "spec": spec},
            },
        }
        site.cluster.request("POST", f"/apis/batch/v1/namespaces/{site.namespace}/jobs", body)

    def delete(self, site: Site, tag: str) -> None:
        path = f"/apis/batch/v1/namespaces/{site.namespace}/jobs/{tag}"
        site.cluster.request("DELETE", path, {"propagationPolicy": "Background"})
        site.cluster.request("DELETE", f"/api/v1/namespaces/{site.namespace}/services/{tag}")
        gone(site, tag)


def service(tag: str) -> Object:
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"bench": tag}}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": tag}, "spec": spec}


def pod_spec(site: Site, tag: str, env: dict[str, str], command: list[str] = COMMAND, image: str = IMAGE) -> Object:
    container = {
        "name": "trainer",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "env": site.ear.env(tag, **env),
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
        "securityContext": RESTRICTED,
    }
    return {
        "containers": [container],
        "affinity": site.affinity,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 5,
    }


def remove_pods(site: Site, tag: str) -> None:
    base = f"/api/v1/namespaces/{site.namespace}/pods"
    for pod in site.cluster.items(base, labelSelector=f"bench={tag}"):
        site.cluster.request("DELETE", f"{base}/{pod['metadata']['name']}", {"gracePeriodSeconds": 1})


def gone(site: Site, tag: str) -> None:
    """Wait until the pods are: the next arm must not share the nodes with them."""
    base = f"/api/v1/namespaces/{site.namespace}/pods"

    def none() -> bool:
        selectors = (f"bench={tag}", f"everstep.dev/job={tag}")
        return not any(site.cluster.items(base, labelSelector=selector) for selector in selectors)

    wait(none, 150, f"pods of {tag} gone")
