"""TrainingPool: where jobs may run, in words that only the platform team needs to know."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from everstep_operator.api.base import ApiModel
from everstep_operator.api.meta import ObjectMeta
from everstep_operator.api.newer import StoredResource
from everstep_operator.api.rules import Rule
from everstep_operator.api.scalars import DNS_LABEL, LABEL_KEY, LabelKey, LabelValue, NodeSelector, Pattern, Whole

ALL_NAMESPACES = "*"
NamespaceChoice = Annotated[str, Pattern(rf"^\*$|{DNS_LABEL}", 63)]


class Toleration(ApiModel):
    """A Kubernetes toleration."""

    key: Annotated[str, Pattern(f"^$|{LABEL_KEY}", 317)] = ""
    """Taint key; empty matches every taint (with `Exists`)."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """`Exists` matches every value."""
    value: LabelValue | None = None
    """The taint's value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Absent: all effects."""
    toleration_seconds: Annotated[int, Field(ge=0, le=2**31 - 1), Whole] | None = None
    """How long a `NoExecute` taint is tolerated; absent: forever."""

    rules: ClassVar = (
        Rule(
            "has(self.operator) && self.operator == 'Exists' || has(self.key) && self.key != ''",
            "a toleration without a key matches every taint: say so with operator: Exists",
            lambda value: value.operator == "Exists" or value.key != "",
            ".operator",
        ),
        Rule(
            "!has(self.operator) || self.operator == 'Equal' || !has(self.value) || self.value == ''",
            "operator Exists has no value: remove value, or use operator: Equal",
            lambda value: value.operator == "Equal" or not value.value,
            ".value",
        ),
        Rule(
            "!has(self.tolerationSeconds) || has(self.effect) && self.effect == 'NoExecute'",
            "tolerationSeconds needs effect: NoExecute",
            lambda value: value.toleration_seconds is None or value.effect == "NoExecute",
            ".effect",
        ),
    )


class TrainingPoolSpec(ApiModel):
    """A class of nodes."""

    node_selector: NodeSelector = Field(default_factory=dict)
    """Labels that the pool's nodes have."""
    tolerations: list[Toleration] = Field(default_factory=list, max_length=32)
    """Taints of the pool's nodes that its jobs tolerate."""
    gpu_resource: LabelKey = "nvidia.com/gpu"
    """Resource name that counts GPUs on these nodes."""
    capacity_type: Literal["spot", "on-demand"] = "on-demand"
    """Whether the provider may reclaim the nodes. Pods carry it as label `everstep.dev/capacity-type`."""
    price_per_hour: Annotated[float, Field(ge=0, le=1_000_000)] | None = None
    """Price of one node for an hour, in one currency for all pools. Jobs report their cost by it."""
    on_demand_price_per_hour: Annotated[float, Field(ge=0, le=1_000_000)] | None = None
    """Price of a node of a spot pool on demand, by which jobs report their savings. Default: `pricePerHour` of the
    first on-demand pool that the job names."""
    instance_type: Annotated[str, Pattern("^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", 63)] | None = None
    """Name of the machine type in the container contract. Default: the pool's name."""
    allowed_namespaces: list[NamespaceChoice] = Field(default=[ALL_NAMESPACES], max_length=512)
    """Namespaces whose jobs may use the pool; `"*"` is all. Not a security boundary: a pod can select nodes itself."""

    rules: ClassVar = (
        Rule(
            "!has(self.onDemandPricePerHour) || self.capacityType == 'spot'",
            "onDemandPricePerHour is for spot pools: the price of an on-demand pool is pricePerHour",
            lambda spec: spec.on_demand_price_per_hour is None or spec.capacity_type == "spot",
            ".onDemandPricePerHour",
        ),
    )


class TrainingPool(StoredResource):
    """A class of nodes that TrainingJobs can request by name."""

    api_version: Literal["everstep.dev/v1alpha1"] = "everstep.dev/v1alpha1"
    kind: Literal["TrainingPool"] = "TrainingPool"
    metadata: ObjectMeta
    spec: TrainingPoolSpec

    @property
    def instance_type(self) -> str:
        """Return the machine type that programs see."""
        return self.spec.instance_type or self.metadata.name

    @property
    def is_on_demand(self) -> bool:
        """Return whether the provider does not reclaim the nodes."""
        return self.spec.capacity_type == "on-demand"

    def allows(self, namespace: str) -> bool:
        """Return whether jobs of ``namespace`` may use the pool."""
        return ALL_NAMESPACES in self.spec.allowed_namespaces or namespace in self.spec.allowed_namespaces
