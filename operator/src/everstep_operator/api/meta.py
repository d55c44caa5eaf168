"""The head of every object. The API server owns it; only the name's form is our rule."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from everstep_operator.api.base import ApiModel
from everstep_operator.api.scalars import DropNulls, Time

GROUP = "everstep.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"


class OwnerReference(ApiModel):
    """An object whose deletion deletes this one."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None
    block_owner_deletion: bool | None = None


class ObjectMeta(ApiModel):
    """Kubernetes object metadata."""

    name: str = ""
    namespace: str | None = None
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: Time | None = None
    deletion_timestamp: Time | None = None
    deletion_grace_period_seconds: int | None = None
    labels: Annotated[dict[str, str], DropNulls] = Field(default_factory=dict)
    annotations: Annotated[dict[str, str], DropNulls] = Field(default_factory=dict)
    owner_references: list[OwnerReference] = Field(default_factory=list)
    finalizers: list[str] = Field(default_factory=list)
    generate_name: str = ""
    self_link: str = ""
    managed_fields: list[dict[str, Any]] = Field(default_factory=list)
