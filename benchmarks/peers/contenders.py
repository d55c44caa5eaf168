"""The contenders: how each is asked for the same ranks, in its own words and with the settings that its makers show.

Everything here is pure: a request becomes the objects that a user of that contender would apply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.worker import COMMAND, IMAGE
from e2e.harness import JOBS, training_job

Object = dict[str, Any]
LABEL = "bench"
RESTARTS = 20  # the budget of each contender that has one: none may end a job for the restarts of a measurement
GRACE_SECONDS = 5
REQUESTS = {"requests": {"cpu": "10m", "memory": "32Mi"}}
MPI_USER = {"runAsUser": 1000}
PATHS = {
    "Service": "/api/v1/namespaces/{namespace}/services",
    "Job": "/apis/batch/v1/namespaces/{namespace}/jobs",
    "TrainingJob": JOBS,
    "JobSet": "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets",
    "TrainJob": "/apis/trainer.kubeflow.org/v1alpha1/namespaces/{namespace}/trainjobs",
    "MPIJob": "/apis/kubeflow.org/v2beta1/namespaces/{namespace}/mpijobs",
}


@dataclass(frozen=True)
class RankRequest:
    """The ranks that are wanted of a contender.

    Attributes:
        name: The job's name, and the value of the label `bench` of its ranks' pods.
        ranks: How many, one in each pod.
        env: Their environment beside what the contender sets.
        placement: Fields of a pod's spec that say where the ranks run: affinity, tolerations, nodeSelector.
        launcher: The same for a pod that starts ranks and is none.
    """

    name: str
    ranks: int
    env: Mapping[str, str] = field(default_factory=dict)
    placement: Object = field(default_factory=dict)
    launcher: Object = field(default_factory=dict)

    @property
    def labels(self) -> dict[str, str]:
        return {LABEL: self.name}

    def variables(self, master: str = "") -> list[Object]:
        """Return the environment of a rank; with `master`, the address of rank 0 where the contender tells none."""
        told = {"WORLD": str(self.ranks)} | ({"MASTER_ADDR": master} if master else {}) | dict(self.env)
        return [{"name": name, "value": value} for name, value in told.items()]

    def pod_spec(self, master: str, **more: Any) -> Object:
        """Return the spec of a rank's pod, for contenders that take a whole one."""
        container = {
            "name": "trainer",
            "image": IMAGE,
            "imagePullPolicy": "IfNotPresent",
            "command": COMMAND,
            "env": self.variables(master),
            "resources": REQUESTS,
        }
        common = {"containers": [container], "terminationGracePeriodSeconds": GRACE_SECONDS}
        return {**common, **self.placement, **more}


@dataclass(frozen=True)
class Contender:
    """One way to run ranks.

    Attributes:
        name: The key in results.
        title: The name that tables and pictures show.
        kinds: The kinds that it makes Jobs and pods from, the highest first.
        objects: The objects that a request becomes; the pods of its ranks, and no others, have the label `bench`.
    """

    name: str
    title: str
    kinds: tuple[str, ...]
    objects: Callable[[RankRequest], list[Object]]


def make_training_job(request: RankRequest) -> list[Object]:
    """Return a TrainingJob, with the defaults of everstep."""
    template = {"metadata": {"labels": request.labels}, "spec": dict(request.placement)}
    fields = {"image": IMAGE, "numNodes": request.ranks, "env": request.variables(), "podTemplate": template}
    return [training_job(request.name, COMMAND, **fields)]


def make_indexed_job(request: RankRequest) -> list[Object]:
    """Return an Indexed Job whose kubelets restart the ranks, and the headless service of their names."""
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": request.labels}
    spec = request.pod_spec(f"{request.name}-0.{request.name}", restartPolicy="OnFailure", subdomain=request.name)
    job = {
        "completions": request.ranks,
        "parallelism": request.ranks,
        "completionMode": "Indexed",
        "backoffLimit": RESTARTS,
        "template": {"metadata": {"labels": request.labels}, "spec": spec},
    }
    return [_object("v1", "Service", request.name, service), _object("batch/v1", "Job", request.name, job)]


def make_job_set(request: RankRequest) -> list[Object]:
    """Return a JobSet that starts all ranks anew when one fails, as its design for training shows it: `maxRestarts`,
    no retries within the Job, and the default strategy `Recreate`."""
    spec = request.pod_spec(f"{request.name}-ranks-0-0.{request.name}", restartPolicy="Never")
    job = {
        "completions": request.ranks,
        "parallelism": request.ranks,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"metadata": {"labels": request.labels}, "spec": spec},
    }
    ranks = {"name": "ranks", "replicas": 1, "template": {"spec": job}}
    body = {"failurePolicy": {"maxRestarts": RESTARTS}, "replicatedJobs": [ranks]}
    return [_object("jobset.x-k8s.io/v1alpha2", "JobSet", request.name, body)]


def make_train_job(request: RankRequest) -> list[Object]:
    """Return a TrainJob of the runtime `torch-distributed` as Kubeflow Trainer ships it: how ranks restart is its own
    matter."""
    pod = {"metadata": {"labels": request.labels}, "spec": dict(request.placement)}
    patched = {"name": "node", "template": {"spec": {"template": pod}}}
    patch = {"template": {"spec": {"replicatedJobs": [patched]}}}
    trainer = {
        "image": IMAGE,
        "command": COMMAND,
        "env": request.variables(f"{request.name}-node-0-0.{request.name}"),
        "numNodes": request.ranks,
        "resourcesPerNode": REQUESTS,
    }
    body = {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": trainer,
        "runtimePatches": [{"manager": "everstep.dev/bench-peers", "trainingRuntimeSpec": patch}],
    }
    return [_object("trainer.kubeflow.org/v1alpha1", "TrainJob", request.name, body)]


def make_mpi_job(request: RankRequest) -> list[Object]:
    """Return an MPIJob as its examples show it, whose launcher waits until the workers are ready: started at once, it
    fails when it looks them up too soon."""
    variables = request.variables(f"{request.name}-worker-0.{request.name}")
    exported = [word for variable in variables for word in ("-x", variable["name"])]
    command = ["mpirun", "-n", str(request.ranks), "--bind-to", "none", *exported, *COMMAND]
    common = {"image": IMAGE, "imagePullPolicy": "IfNotPresent", "securityContext": MPI_USER, "resources": REQUESTS}
    launcher = {"name": "mpi-launcher", "command": command, "env": variables, **common}
    sshd = {"command": ["/usr/sbin/sshd"], "args": ["-De", "-f", "/home/mpiuser/.sshd_config"]}
    worker = {"name": "mpi-worker", **sshd, **common}
    grace = {"terminationGracePeriodSeconds": GRACE_SECONDS}
    replicas = {
        "Launcher": {"replicas": 1, "template": {"spec": {"containers": [launcher], **grace, **request.launcher}}},
        "Worker": {
            "replicas": request.ranks,
            "template": {
                "metadata": {"labels": request.labels},
                "spec": {"containers": [worker], **grace, **request.placement},
            },
        },
    }
    body = {
        "slotsPerWorker": 1,
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": RESTARTS},
        "sshAuthMountPath": "/home/mpiuser/.ssh",
        "launcherCreationPolicy": "WaitForWorkersReady",
        "mpiReplicaSpecs": replicas,
    }
    return [_object("kubeflow.org/v2beta1", "MPIJob", request.name, body)]


def _object(version: str, kind: str, name: str, spec: Object) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


EVERSTEP = Contender("everstep", "everstep", ("TrainingJob",), make_training_job)
INDEXED_JOB = Contender("indexed-job", "Indexed Job", ("Job", "Service"), make_indexed_job)
JOB_SET = Contender("jobset", "JobSet", ("JobSet",), make_job_set)
TRAINER = Contender("trainer", "Kubeflow Trainer", ("TrainJob", "JobSet"), make_train_job)
MPI_OPERATOR = Contender("mpi-operator", "mpi-operator", ("MPIJob",), make_mpi_job)
CONTENDERS = (EVERSTEP, INDEXED_JOB, JOB_SET, TRAINER, MPI_OPERATOR)
