"""An Indexed Job whose parts are broken: what most users have without an operator for training.

Its script is the friendliest that such a user can write: it saves to a store and restores from it, notices within 30 s
that another rank is gone, and waits in the rendezvous for ranks that start later.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable

from benchmarks.arms import RESTRICTED
from e2e.harness import Cluster, Object, python, wait
from e2e.stores import SECRET, PodStore
from tests.checkpoint.s3_server import BUCKET

LONGEST_S = 400.0
INDEX = "batch.kubernetes.io/job-completion-index"
_numbers = itertools.count()

_TRAINS = """
import datetime, os, time
ticks = int(open('/proc/self/stat').read().rpartition(')')[2].split()[19]) / os.sysconf('SC_CLK_TCK')
began = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks
import torch, torch.distributed as dist, everstep
print('TELL imported', time.time() - began, flush=True)
dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=600))
group = dist.new_group(timeout=datetime.timedelta(seconds=30))
weight, rank = torch.zeros(BYTES // 4), dist.get_rank()
with everstep.checkpointer(os.environ['STORE'], every_steps=10) as checkpoints:
    start = checkpoints.restore(weight=weight)
    for step in range(start.step + 1, 100000):
        weight[:1000] += 1
        dist.all_reduce(torch.zeros(1), group=group)
        checkpoints.step(step)
        print('TELL step', step, time.time(), flush=True)
        if CRASH and rank == 0 and step == CRASH:
            checkpoints.wait()
            print('TELL exit', step, time.time(), flush=True)
            os._exit(3)
        time.sleep(0.1)
"""


class IndexedJob:
    """An Indexed Job of some pods that trains until it is deleted, with the headless service of its ranks."""

    def __init__(self, cluster: Cluster, namespace: str, store: PodStore) -> None:
        self._cluster, self._namespace, self._store = cluster, namespace, store
        self.name = f"indexed-{next(_numbers)}"
        self._size = 0

    def start(self, nodes: int, size: int, affinity: Object, crash: int = 0, memory: str = "1Gi") -> None:
        """Create it, and wait until a checkpoint is stored, or with `crash` until each pod has begun."""
        self._size = nodes
        program = _TRAINS.replace("BYTES", str(size)).replace("CRASH", str(crash))
        for body in (self._service(), self._job(program, affinity, memory)):
            self._cluster.apply(body, namespace=self._namespace)
        if crash:
            wait(self._told, 120, f"{self.name} trains")
        else:
            wait(lambda: self._store.newest_step(self.name) >= 20, 120, "a checkpoint is stored")

    def pods(self) -> list[Object]:
        """Return its pods in the order of their indices, one that is being deleted not."""
        found = self._cluster.items(f"/api/v1/namespaces/{self._namespace}/pods", labelSelector=f"indexed={self.name}")
        alive = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
        return sorted(alive, key=lambda pod: int(pod["metadata"]["annotations"][INDEX]))

    def wait_for_step(self, since: Callable[[], float | None]) -> float:
        """Return the seconds from a time, once it is known, until each pod has told a step of a process that began
        later; at most `LONGEST_S`, when nobody waits any longer."""
        began = wait(since, 120, f"what breaks {self.name} has happened")
        until = time.time() + LONGEST_S
        while time.time() < until:
            told = self._told()
            if told is not None and min(told) > began:
                return max(told) - began
            time.sleep(0.5)
        return LONGEST_S

    def find_exit(self) -> float | None:
        """Return when the rank that crashes on purpose has left, from the log of its container before this one."""
        first, *_ = self.pods()
        pod = first["metadata"]["name"]
        text = self._cluster.kubectl("logs", pod, "--previous", "-n", self._namespace, check=False)
        found = re.search(r"TELL exit \d+ (\S+)", text)
        return float(found[1]) if found else None

    def read_imports(self) -> float:
        """Return the seconds that the present process of the first pod took to import torch."""
        first, *_ = self.pods()
        text = self._cluster.logs(self._namespace, first["metadata"]["name"])
        found = re.search(r"TELL imported (\S+)", text)
        assert found, text
        return float(found[1])

    def delete(self) -> None:
        """Delete it, and wait until its pods are gone."""
        for kind in ("job", "service"):
            self._cluster.kubectl("delete", kind, self.name, "-n", self._namespace, "--wait=false")
        base = f"/api/v1/namespaces/{self._namespace}/pods"
        wait(lambda: not self._cluster.items(base, labelSelector=f"indexed={self.name}"), 180, f"{self.name} is gone")

    def _told(self) -> list[float] | None:
        """Return when each pod's present process has made its first step, once all have."""
        pods = self.pods()
        texts = [self._cluster.logs(self._namespace, pod["metadata"]["name"]) for pod in pods]
        found = [re.search(r"TELL step \d+ (\S+)", text) for text in texts]
        return [float(each[1]) for each in found if each] if len(pods) == self._size and all(found) else None

    def _service(self) -> Object:
        spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"indexed": self.name}}
        return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": self.name}, "spec": spec}

    def _job(self, program: str, affinity: Object, memory: str) -> Object:
        rank = {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}}
        environment = {
            "STORE": f"s3://{BUCKET}/{self.name}",
            "MASTER_ADDR": f"{self.name}-0.{self.name}",
            "MASTER_PORT": "29500",
            "WORLD_SIZE": str(self._size),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }
        container = {
            "name": "trainer",
            "image": "everstep/trainer:0.1.0",
            "imagePullPolicy": "IfNotPresent",
            "command": python(program),
            "env": [*({"name": name, "value": value} for name, value in environment.items()), rank],
            "envFrom": [{"secretRef": {"name": SECRET}}],
            "resources": {"requests": {"cpu": "100m", "memory": memory}},
            "securityContext": RESTRICTED,
            "volumeMounts": [{"name": "memory", "mountPath": "/dev/shm"}],
        }
        spec = {
            "subdomain": self.name,
            "restartPolicy": "OnFailure",
            "terminationGracePeriodSeconds": 5,
            "affinity": affinity,
            "containers": [container],
            "volumes": [{"name": "memory", "emptyDir": {"medium": "Memory"}}],
        }
        labels = {"indexed": self.name}
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": self.name},
            "spec": {
                "completions": self._size,
                "parallelism": self._size,
                "completionMode": "Indexed",
                "backoffLimit": 100,
                "template": {"metadata": {"labels": labels}, "spec": spec},
            },
        }
