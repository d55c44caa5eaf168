"""The frozen template of one epoch: the resolved pod and job that every replacement is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FrozenTemplate:
    """The immutable ConfigMap `<job>-<t>` of the current template epoch, as it was read, its signature verified."""

    epoch: int
    pod: Mapping[str, Any]  # template.json
    job: Mapping[str, Any]  # job.json
