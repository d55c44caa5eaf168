"""The resources as the API server serves them: names, scope and what ``kubectl get`` shows."""

from __future__ import annotations

from dataclasses import dataclass

from everstep_operator.api.base import ApiModel
from everstep_operator.api.job import TrainingJob
from everstep_operator.api.meta import GROUP
from everstep_operator.api.pool import TrainingPool


@dataclass(frozen=True)
class PrinterColumn:
    """A column of ``kubectl get``; a wide one is shown by ``-o wide`` only."""

    name: str
    path: str
    type: str = "string"
    wide: bool = False
    description: str = ""


@dataclass(frozen=True)
class CustomResource:
    """One kind and how it is served."""

    model: type[ApiModel]
    kind: str
    plural: str
    short_name: str
    namespaced: bool
    columns: tuple[PrinterColumn, ...]
    selectable: tuple[str, ...] = ()
    """Paths that ``--field-selector`` accepts."""
    has_status: bool = False

    @property
    def crd_name(self) -> str:
        return f"{self.plural}.{GROUP}"


_AGE = PrinterColumn("Age", ".metadata.creationTimestamp", "date")

TRAINING_JOBS = CustomResource(
    model=TrainingJob,
    kind="TrainingJob",
    plural="trainingjobs",
    short_name="tj",
    namespaced=True,
    columns=(
        PrinterColumn("Phase", ".status.phase"),
        PrinterColumn("Ready", ".status.readyNodes", "integer", description="Pods whose trainer runs"),
        PrinterColumn("Nodes", ".spec.numNodes", "integer"),
        PrinterColumn("Step", ".status.progress.step", "integer"),
        PrinterColumn("Checkpoint", ".status.checkpoint.step", "integer", description="Step of the newest one"),
        PrinterColumn("Restarts", ".status.restarts.total", "integer"),
        PrinterColumn("Pool", ".status.template.pool"),
        _AGE,
        PrinterColumn("Of", ".status.progress.totalSteps", "integer", wide=True, description="Steps in all"),
        PrinterColumn("Steps/s", ".status.progress.stepsPerSecond", "number", wide=True),
        PrinterColumn("Application", ".status.restarts.application", "integer", wide=True, description="Restarts"),
        PrinterColumn(
            "Infrastructure", ".status.restarts.infrastructure", "integer", wide=True, description="Restarts"
        ),
        PrinterColumn("Preemption", ".status.restarts.preemption", "integer", wide=True, description="Restarts"),
        PrinterColumn("Lost-steps", ".status.checkpoint.lostSteps", "integer", wide=True, description="Trained again"),
        PrinterColumn("Goodput", ".status.timings.goodput", "number", wide=True),
        PrinterColumn("Cost", ".status.usage.cost", "number", wide=True, description="By the prices of the pools"),
        PrinterColumn("Last-failure", ".status.lastFailure.reason", wide=True),
    ),
    selectable=(".spec.managedBy", ".spec.suspend", ".status.phase"),
    has_status=True,
)

TRAINING_POOLS = CustomResource(
    model=TrainingPool,
    kind="TrainingPool",
    plural="trainingpools",
    short_name="tpool",
    namespaced=False,
    columns=(
        PrinterColumn("Capacity", ".spec.capacityType"),
        PrinterColumn("Instance-type", ".spec.instanceType"),
        PrinterColumn("GPU", ".spec.gpuResource"),
        PrinterColumn("Price/h", ".spec.pricePerHour", "number"),
        _AGE,
        PrinterColumn("Namespaces", ".spec.allowedNamespaces", wide=True),
    ),
)

RESOURCES = (TRAINING_JOBS, TRAINING_POOLS)
