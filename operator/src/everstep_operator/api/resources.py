"""The resources as the API server serves them: names, scope and what ``kubectl get`` shows."""

from __future__ import annotations

from dataclasses import dataclass

from everstep_operator.api.base import ApiModel
from everstep_operator.api.job import TrainingJob
from everstep_operator.api.meta import GROUP
from everstep_operator.api.pool import TrainingPool


@dataclass(frozen=True)
class Column:
    """A column of ``kubectl get``; a wide one is shown by ``-o wide`` only."""

    name: str
    path: str
    type: str = "string"
    wide: bool = False
    description: str = ""


@dataclass(frozen=True)
class Resource:
    """One kind and how it is served."""

    model: type[ApiModel]
    kind: str
    plural: str
    short_name: str
    namespaced: bool
    columns: tuple[Column, ...]
    selectable: tuple[str, ...] = ()
    """Paths that ``--field-selector`` accepts."""
    has_status: bool = False

    @property
    def crd_name(self) -> str:
        return f"{self.plural}.{GROUP}"


_AGE = Column("Age", ".metadata.creationTimestamp", "date")

TRAINING_JOBS = Resource(
    model=TrainingJob,
    kind="TrainingJob",
    plural="trainingjobs",
    short_name="tj",
    namespaced=True,
    columns=(
        Column("Phase", ".status.phase"),
        Column("Ready", ".status.readyNodes", "integer", description="Pods whose trainer runs"),
        Column("Nodes", ".spec.numNodes", "integer"),
        Column("Step", ".status.progress.step", "integer"),
        Column("Restarts", ".status.restarts.total", "integer"),
        Column("Pool", ".status.template.pool"),
        _AGE,
        Column("Of", ".status.progress.totalSteps", "integer", wide=True, description="Steps in all"),
        Column("Steps/s", ".status.progress.stepsPerSecond", "number", wide=True),
        Column("Application", ".status.restarts.application", "integer", wide=True, description="Restarts"),
        Column("Infrastructure", ".status.restarts.infrastructure", "integer", wide=True, description="Restarts"),
        Column("Preemption", ".status.restarts.preemption", "integer", wide=True, description="Restarts"),
        Column("Goodput", ".status.timings.goodput", "number", wide=True),
        Column("Last-failure", ".status.lastFailure.reason", wide=True),
    ),
    selectable=(".spec.managedBy", ".spec.suspend", ".status.phase"),
    has_status=True,
)

TRAINING_POOLS = Resource(
    model=TrainingPool,
    kind="TrainingPool",
    plural="trainingpools",
    short_name="tpool",
    namespaced=False,
    columns=(
        Column("Capacity", ".spec.capacityType"),
        Column("Instance-type", ".spec.instanceType"),
        Column("GPU", ".spec.gpuResource"),
        _AGE,
        Column("Namespaces", ".spec.allowedNamespaces", wide=True),
    ),
)

RESOURCES = (TRAINING_JOBS, TRAINING_POOLS)
