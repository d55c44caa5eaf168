"""The environment variables, resources and devices that the trainer container is given."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from everstep_operator.api.base import ApiModel
from everstep_operator.api.rules import Rule
from everstep_operator.api.scalars import Argument, DnsLabel, DropNulls, ListMap, Pattern, Quantity, limit_keys

SETTABLE_VARIABLES = ("EVERSTEP_FAILURE_DOMAIN", "EVERSTEP_CHECKPOINT_MEMORY")  # of ours, by the checkpoint library


class EnvVar(ApiModel):
    """An environment variable of the trainer."""

    name: Annotated[str, Pattern("^[ -<>-~]+$", 256)]
    """Any printable ASCII characters but `=`."""
    value: Argument | None = None
    """A plain value; `$(NAME)` refers to a variable before it."""
    value_from: dict[str, Any] | None = None
    """A Kubernetes EnvVarSource; its content is checked when the first pod is created."""

    rules: ClassVar = (
        Rule(
            "!has(self.value) || self.value == '' || !has(self.valueFrom)",
            "set value or valueFrom, not both",
            lambda env: not env.value or env.value_from is None,
        ),
        Rule(
            f"!self.name.startsWith('EVERSTEP_') || self.name in {list(SETTABLE_VARIABLES)}",
            "names that start with EVERSTEP_ belong to everstep: choose another name, or one of "
            + " and ".join(SETTABLE_VARIABLES),
            lambda env: not env.name.startswith("EVERSTEP_") or env.name in SETTABLE_VARIABLES,
            ".name",
        ),
    )


ResourceList = Annotated[
    dict[str, Quantity],
    Field(max_length=32),
    limit_keys("^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$", 317,
         "keys must be resource names, like cpu or nvidia.com/gpu"),
    DropNulls,
]  # fmt: skip


class ClaimReference(ApiModel):
    """One of the pod's resource claims that the trainer uses."""

    name: DnsLabel
    """As in `podTemplate.spec.resourceClaims`."""
    request: DnsLabel | None = None
    """One of the requests of the claim. Absent: all of them."""


class TrainerResources(ApiModel):
    """Resources of the trainer container of each pod."""

    requests: ResourceList = Field(default_factory=dict)
    """Each pod reserves these amounts."""
    limits: ResourceList = Field(default_factory=dict)
    """Each pod may use these amounts at most. GPUs are asked for here, or by `claims`."""
    claims: Annotated[list[ClaimReference], Field(max_length=32), ListMap("name", lambda claim: claim.name)] = Field(
        default_factory=list
    )
    """Devices by dynamic resource allocation: of `podTemplate.spec.resourceClaims` those that the trainer uses. Set
    `numProcPerNode` too, whose default counts the GPUs of `limits` alone."""
