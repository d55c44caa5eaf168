"""The frozen template of one epoch: the resolved pod and job that every replacement is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FrozenTemplate:
    """The immutable ConfigMap of the current template epoch, as it was read, its signature verified."""

    epoch: int
    pod: Mapping[str, Any]  # template.json
    job: Mapping[str, Any]  # job.json
    on_demand: Mapping[str, Any] | None = None  # template.json of the first pods, where they are in another pool
    num_on_demand: int = 0  # how many those are

    def find_pod(self, index: int) -> Mapping[str, Any]:
        """Return the template of the pod with this index."""
        return self.on_demand if self.on_demand is not None and index < self.num_on_demand else self.pod
