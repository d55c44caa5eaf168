"""Find the checkpoints of runs on this machine: a run that did not succeed is continued by the next one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everstep.cli.errors import CliError

CHECKPOINT_VARIABLE = "EVERSTEP_CHECKPOINT"
# Each run on this machine is of epoch 1: the checkpoint library counts attempts by what is in the store.
COUNTED_VARIABLE = "EVERSTEP_ATTEMPT"
_NEXT = Path("checkpoints") / "next"  # the number of the next run, once one has succeeded


def find_default_base(name: str, file: Path, *, anew: bool = False) -> Path:
    """Return the folder for a run: that of the last run of the same manifest, if it was interrupted, or a new one.

    Args:
        name: Name of the job.
        file: Its manifest.
        anew: Whether it is to be a new one in any case.
    """
    digest = hashlib.sha256(f"{file.absolute()}\0{name}".encode()).hexdigest()[:12]
    latest = _make_private_folder() / f"{name}-{digest}"  # a link to the last run's folder
    if not anew and latest.is_dir() and _is_own(latest.resolve()) and not (latest / _NEXT).exists():
        return latest.resolve()
    base = Path(tempfile.mkdtemp(prefix=f"everstep-{name}-"))
    link = latest.with_name(f"{latest.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # then the next run begins anew
        link.symlink_to(base)
        link.replace(latest)
    return base


def _make_private_folder() -> Path:
    """Return the folder of links, which others could point elsewhere if it were theirs."""
    folder = Path(tempfile.gettempdir()) / f"everstep-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if not folder.is_symlink() and _is_own(folder):
            return folder
    return Path(tempfile.mkdtemp(prefix="everstep-"))


def _is_own(folder: Path) -> bool:
    return folder.stat().st_uid == os.getuid()


class LocalCheckpoints:
    """The folder for checkpoints of the next run."""

    def __init__(self, base: Path, policy: Mapping[str, Any], *, anew: bool = False) -> None:
        """Find the folder.

        Args:
            base: The folder of the runs.
            policy: What the manifest says, by the names of the library's arguments.
            anew: Whether an earlier run that did not succeed is not to be continued.
        """
        self._record, self._policy = base / _NEXT, policy
        self._number = self._read_number()
        if anew and self.continues:
            self._number += 1
            self._write_number()

    @property
    def folder(self) -> Path:
        """Return the folder of this run's checkpoints."""
        return self._record.parent / str(self._number)

    @property
    def continues(self) -> bool:
        """Tell whether an earlier run has left checkpoints."""
        return self.folder.is_dir() and any(self.folder.iterdir())

    def claim(self, job: str) -> None:
        """Note whose checkpoints these are.

        Args:
            job: The name of the job that runs now.

        Raises:
            CliError: They are of another job, whose last run did not succeed.
        """
        if CHECKPOINT_VARIABLE in os.environ:
            return  # the ranks save elsewhere
        owner = self.folder.with_suffix(".job")
        known = owner.read_text() if self.continues and owner.exists() else job
        if known != job:
            raise CliError(
                f"{self.folder} holds checkpoints of the job {known}, which has not succeeded yet: give {job} another "
                f"folder with --base, or leave those of {known} behind with --new"
            )
        owner.parent.mkdir(parents=True, exist_ok=True)
        owner.write_text(job)

    def list_notes(self) -> list[str]:
        """Return what differs from a cluster, for the user to know."""
        notes = []
        store = self._policy.get("store")
        if store is not None and CHECKPOINT_VARIABLE not in os.environ:
            notes.append(f"checkpoints are kept in {self.folder}, not in {store}; {CHECKPOINT_VARIABLE} names another")
        if self.continues:
            notes.append(f"continues from the checkpoints of an earlier run in {self.folder}; --new begins anew")
        return notes

    def make_variables(self) -> dict[str, str]:
        """Return the variables by which the library in the ranks finds the folder. What this process was given wins."""
        said = {**self._policy, "store": str(self.folder)}
        given = os.environ.get(CHECKPOINT_VARIABLE)
        return {CHECKPOINT_VARIABLE: given or json.dumps(said, sort_keys=True), COUNTED_VARIABLE: "counted"}

    def note_success(self) -> None:
        """Have the next run begin anew."""
        self._number += 1
        self._write_number()

    def _read_number(self) -> int:
        try:
            return max(1, int(self._record.read_text()))
        except (OSError, ValueError):
            return 1

    def _write_number(self) -> None:
        self._record.parent.mkdir(parents=True, exist_ok=True)
        written = self._record.with_suffix(".new")
        written.write_text(str(self._number))
        written.replace(self._record)
