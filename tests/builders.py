"""Objects for tests, in one readable line: ``job("digits").nodes(3).procs(2).spot().build()``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Self

from everstep_operator.api.job import TrainingJob
from everstep_operator.api.meta import API_VERSION
from everstep_operator.api.pool import TrainingPool
from everstep_operator.api.status import TrainingJobStatus

CREATED = datetime(2026, 1, 1, 12, tzinfo=UTC)


def job(name: str = "digits", namespace: str = "default") -> JobBuilder:
    """A one-node job with a command, as the API server would hand it out."""
    return JobBuilder(name, namespace)


def pool(name: str = "a100") -> PoolBuilder:
    """An on-demand pool open to every namespace."""
    return PoolBuilder(name)


class JobBuilder:
    """Collects a manifest; ``build`` gives it to the model, so that no test holds a job that the API would refuse."""

    def __init__(self, name: str, namespace: str) -> None:
        self._metadata: dict[str, Any] = {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{namespace}-{name}",
            "resourceVersion": "1",
            "generation": 1,
            "creationTimestamp": CREATED.isoformat(),
        }
        self._spec: dict[str, Any] = {"image": "everstep/trainer:test", "command": ["python", "train.py"]}
        self._status: TrainingJobStatus | None = None

    def nodes(self, count: int) -> Self:
        return self.spec(numNodes=count)

    def procs(self, count: int) -> Self:
        return self.spec(numProcPerNode=count)

    def plain(self) -> Self:
        """No command: the image's entrypoint runs without the agent."""
        del self._spec["command"]
        return self

    def gpus(self, count: int, resource: str = "nvidia.com/gpu") -> Self:
        return self.resources(limits={resource: count})

    def resources(self, **lists: dict[str, str | int]) -> Self:
        """``resources(requests={"cpu": 1}, limits={"memory": "2Gi"})``"""
        merged = self._spec.setdefault("resources", {})
        for kind, amounts in lists.items():
            merged.setdefault(kind, {}).update(amounts)
        return self

    def pool(self, name: str, wait: str = "10m") -> Self:
        self._spec.setdefault("pools", []).append({"name": name, "wait": wait})
        return self

    def spot(self, wait: str = "10m") -> Self:
        """First the pool ``spot``, then the pool ``on-demand``."""
        return self.pool("spot", wait).pool("on-demand")

    def distribution(self, kind: str, *options: str) -> Self:
        return self.spec(distribution={kind: {"options": list(options)} if options else {}})

    def restart(self, **fields: Any) -> Self:
        """``restart(application=0, maxBackoff="0s")``"""
        self._spec.setdefault("restart", {}).update(fields)
        return self

    def timeouts(self, **fields: str) -> Self:
        """``timeouts(pending="5m")``"""
        self._spec.setdefault("timeouts", {}).update(fields)
        return self

    def suspended(self, value: bool = True) -> Self:
        return self.spec(suspend=value)

    def ttl(self, duration: str) -> Self:
        return self.spec(ttlAfterFinished=duration)

    def pod(self, **fields: Any) -> Self:
        """Fields of podTemplate.spec: ``pod(priorityClassName="high")``"""
        self._spec.setdefault("podTemplate", {}).setdefault("spec", {}).update(fields)
        return self

    def spec(self, **fields: Any) -> Self:
        """Any other field, by its name in the manifest."""
        self._spec.update(fields)
        return self

    def meta(self, **fields: Any) -> Self:
        """Fields of metadata: ``meta(uid="u2", deletionTimestamp="2026-01-01T12:05:00Z")``"""
        self._metadata.update(fields)
        return self

    def created(self, at: datetime) -> Self:
        return self.meta(creationTimestamp=at.isoformat())

    def deleted(self, at: datetime = CREATED) -> Self:
        return self.meta(deletionTimestamp=at.isoformat())

    def status(self, value: TrainingJobStatus) -> Self:
        self._status = value
        return self

    def manifest(self) -> dict[str, Any]:
        """Return the object as the API server would store it."""
        made = {"apiVersion": API_VERSION, "kind": "TrainingJob", "metadata": self._metadata, "spec": self._spec}
        return made | ({"status": self._status.manifest()} if self._status is not None else {})

    def build(self) -> TrainingJob:
        return TrainingJob.parse(self.manifest())


class PoolBuilder:
    """Collects a TrainingPool."""

    def __init__(self, name: str) -> None:
        self._metadata: dict[str, Any] = {"name": name, "uid": f"uid-{name}", "resourceVersion": "1", "generation": 1}
        self._spec: dict[str, Any] = {"nodeSelector": {"pool": name}}

    def spot(self) -> Self:
        return self.spec(capacityType="spot")

    def namespaces(self, *names: str) -> Self:
        return self.spec(allowedNamespaces=list(names))

    def spec(self, **fields: Any) -> Self:
        """Any other field, by its name in the manifest."""
        self._spec.update(fields)
        return self

    def manifest(self) -> dict[str, Any]:
        """Return the object as the API server would store it."""
        return {"apiVersion": API_VERSION, "kind": "TrainingPool", "metadata": self._metadata, "spec": self._spec}

    def build(self) -> TrainingPool:
        return TrainingPool.parse(self.manifest())
