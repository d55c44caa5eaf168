"""`spec.checkpoint`: where a job's checkpoints are kept, how often one is saved, and what memory copies may take."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any, ClassVar

from pydantic import Field

from everstep_operator.api.base import ApiModel
from everstep_operator.api.rules import Rule
from everstep_operator.api.scalars import (
    DURATION,
    DnsName,
    Duration,
    Pattern,
    Quantity,
    Whole,
    duration_seconds_cel,
    limit_duration,
    parse_duration,
)

FOLDER = "/opt/ml/checkpoints"
_STORE = "^([a-z][-a-z0-9+.]*://[!-~]+|/[!-~]+)$"
_EVERY = f"^(auto|{DURATION[1:-1]})$"
_MAX_EVERY = "28d"


def parse_interval(text: str) -> timedelta | None:
    """Return the time between two saves; None for `auto`.

    Args:
        text: What the field says.

    Raises:
        ValueError: It is no duration.
    """
    return None if text == "auto" else parse_duration(text)


class SecretReference(ApiModel):
    """A Secret in the namespace of the job."""

    name: DnsName
    """Name of the Secret."""


class CheckpointVolume(ApiModel):
    """A volume for checkpoints, in the words of a pod's volumes: exactly one of the fields. Its content is checked when
    the first pod is created."""

    persistent_volume_claim: dict[str, Any] | None = None
    """A PersistentVolumeClaim. With several nodes it must be ReadWriteMany."""
    ephemeral: dict[str, Any] | None = None
    """A claim of each pod, which ends with the pod."""
    nfs: dict[str, Any] | None = None
    """A folder of an NFS server."""
    csi: dict[str, Any] | None = None
    """An inline volume of a CSI driver."""
    host_path: dict[str, Any] | None = None
    """A folder of the node, which the operator's configuration must allow."""

    rules: ClassVar = (
        Rule(
            "[has(self.persistentVolumeClaim), has(self.ephemeral), has(self.nfs), has(self.csi), has(self.hostPath)]"
            ".filter(given, given).size() == 1",
            "set exactly one of persistentVolumeClaim, ephemeral, nfs, csi, hostPath",
            lambda value: len(value.model_dump(exclude_none=True)) == 1,
        ),
    )


class FolderPublishing(ApiModel):
    """Says how files that the program writes into `/opt/ml/checkpoints` in its own way come into the store: they are
    published whole, in the background, and restored before the first rank starts."""

    image: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Image of the containers that restore and publish, with `python3` and the package `everstep[checkpoint,s3]`.
    Absent: the trainer's."""
    marker: Annotated[str, Pattern("^[!-.0-~]+$", 255)] | None = None
    """Name of the file that the program writes last, when all others are complete."""
    quiet: Annotated[Duration, limit_duration("1s", "1h")] | None = None
    """Without `marker`: time without a change after which the folder is complete. For programs that rename finished
    files into place: what a program leaves half-written when it is killed would be published too."""
    each: Annotated[str, Pattern("^[!-.0-~]+$", 255)] | None = None
    """Pattern of folders that are published one by one, such as `checkpoint-*`; their names end with the step. Absent:
    the folder is published as a whole."""

    rules: ClassVar = (
        Rule(
            "has(self.marker) != has(self.quiet)",
            "set either marker, the name of the file that the program writes last, or quiet, for a program that "
            "renames finished files into place",
            lambda value: (value.marker is None) != (value.quiet is None),
        ),
    )


class CheckpointPolicy(ApiModel):
    """Says where checkpoints are kept and how often they are saved. `everstep.checkpointer()` takes it from here; what
    a program gives as an argument counts instead."""

    store: Annotated[str, Pattern(_STORE, 1024)] | None = None
    """A URL such as `s3://bucket/run`, or a folder of a volume that all nodes share. Absent: `/opt/ml/checkpoints`."""
    secret_ref: SecretReference | None = None
    """A Secret whose keys become environment variables of the trainer, such as `AWS_ACCESS_KEY_ID`."""
    volume: CheckpointVolume | None = None
    """A volume that is mounted at `/opt/ml/checkpoints`."""
    folder: FolderPublishing | None = None
    """For programs that only write files into `/opt/ml/checkpoints`, without everstep's library. Pod 0 publishes them
    into the store, and pods begin with them. A job with several nodes also needs a `volume` that they share."""
    every: (
        Annotated[
            str,
            Pattern(_EVERY, 32),
            Rule(
                f"self == 'auto' || {duration_seconds_cel('self')} >= 1 && {duration_seconds_cel('self')} <= 2419200",
                f"must be auto, or between 1s and {_MAX_EVERY}, like 90s, 10m or 1h30m",
                lambda text: (
                    text == "auto"
                    or (len(text) > 1 and timedelta(seconds=1) <= parse_duration(text) <= parse_duration(_MAX_EVERY))
                ),
            ),
        ]
        | None
    ) = None
    """Time between two saves; `auto`: by what a save costs and how often the job fails. Absent, with no `everySteps`:
    10m."""
    every_steps: Annotated[int, Field(ge=1, le=1_000_000_000), Whole] | None = None
    """Number of steps between two saves."""
    keep_last: Annotated[int, Field(ge=1, le=10_000), Whole] = 3
    """Number of newest checkpoints that are kept."""
    memory: Quantity | None = None
    """Size of each pod's memory volume for copies of checkpoints, a part of `resources.limits.memory`: two copies of
    the state of the pod's ranks, and as much again with several nodes. Absent: half of the pod's memory, or
    1Gi where its `resources` name none."""

    rules: ClassVar = (
        Rule(
            "!has(self.store) || !has(self.volume) || has(self.folder) || self.store.startsWith('/')",
            "store is a URL: remove it and checkpoints are kept in the volume, or remove volume",
            lambda value: (
                value.store is None or value.volume is None or value.folder is not None or value.store.startswith("/")
            ),
            ".store",
        ),
        Rule(
            "!has(self.folder) || has(self.store) && !self.store.startsWith('/')",
            "folder needs a store that is a URL, such as s3://bucket/run",
            lambda value: value.folder is None or (value.store is not None and not value.store.startswith("/")),
            ".folder",
        ),
        Rule(
            "!has(self.folder) || !has(self.every) && !has(self.everySteps) && !has(self.memory)",
            "with folder the program decides when it saves: remove every, everySteps and memory",
            lambda value: value.folder is None or (value.every, value.every_steps, value.memory) == (None,) * 3,
            ".folder",
        ),
    )

    @property
    def interval(self) -> timedelta | None:
        """Return the time between two saves; None where the library decides, or steps alone count."""
        if self.every is not None:
            return parse_interval(self.every)
        return timedelta(minutes=10) if self.every_steps is None else None

    def describe_for_library(self, folder: str = FOLDER) -> dict[str, Any]:
        """Return what the checkpoint library is told, by the names of `everstep.checkpointer`'s arguments.

        Args:
            folder: Stands for the store where none is named.
        """
        said = {
            "store": self.store or folder,
            "every": self.every,
            "every_steps": self.every_steps,
            "keep_last": self.keep_last,
        }
        return {name: value for name, value in said.items() if value is not None}
