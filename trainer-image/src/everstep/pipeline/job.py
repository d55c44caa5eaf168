"""Read what a TrainingJob says of its pipeline (`distribution.pipeline`), for what the script leaves open."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Literal

VARIABLE = "EVERSTEP_PIPELINE"


@dataclass(frozen=True)
class PipelineJob:
    """The fields of `distribution.pipeline`; without a job there are none. `plan_from` a file: it must be there."""

    stages: int | None = None
    microbatches: int | None = None
    schedule: str = "auto"
    optimize: Literal["speed", "memory"] | None = None
    plan_from: Literal["profile", "file"] = "profile"
    plan_file: str | None = None


def read_job() -> PipelineJob:
    """Return the pipeline section of this process's job.

    Fields that are not known here belong to a later version, and are left out.
    """
    given = json.loads(os.environ.get(VARIABLE) or "{}")
    names = {
        "stages": "stages",
        "microbatches": "microbatches",
        "schedule": "schedule",
        "optimize": "optimize",
        "planFrom": "plan_from",
        "planFile": "plan_file",
    }
    return PipelineJob(**{names[key]: value for key, value in given.items() if key in names})
