"""Labels that the operator gives pods, ConfigMaps and Secrets of a job."""

from __future__ import annotations

LABEL_JOB = "everstep.dev/job"
LABEL_INDEX = "everstep.dev/index"
LABEL_EPOCH = "everstep.dev/epoch"
LABEL_TEMPLATE = "everstep.dev/template"
LABEL_CAPACITY = "everstep.dev/capacity-type"
