"""Manifests from files, with what is wrong in them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.cli.errors import CliError

if TYPE_CHECKING:
    from everstep_operator.api.job import TrainingJob


def check_manifest(file: Path) -> tuple[list[str], list[str]]:
    """Return a verdict on each object in a file, and the mistakes in it. One of the two lists is empty."""
    from everstep_operator.api.load import ManifestError, load_text

    try:
        loaded = load_text(_read_text(file), str(file))
    except ManifestError as error:
        return [], [str(finding) for finding in error.findings]
    valid = [f"{getattr(each, 'kind', '')} {_object_name(each)} is valid" for each in loaded.objects]
    return valid + [f"{kind} was not checked: it is not a kind of everstep" for kind in loaded.skipped], []


def load_job(file: Path) -> TrainingJob:
    """Return the one TrainingJob in a file. Raises CliError with everything that is wrong."""
    from everstep_operator.api.job import TrainingJob
    from everstep_operator.api.load import ManifestError, load_text

    try:
        loaded = load_text(_read_text(file), str(file))
    except ManifestError as error:
        raise CliError(f"{file} is not valid:\n{error}") from None
    jobs = [each for each in loaded.objects if isinstance(each, TrainingJob)]
    if len(jobs) != 1:
        raise CliError(f"{file} has {len(jobs)} TrainingJobs: give a file with one")
    return jobs[0]


def _object_name(each: object) -> str:
    metadata = getattr(each, "metadata", None)
    return str(getattr(metadata, "name", "") or getattr(metadata, "generate_name", ""))


def _read_text(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except OSError as error:
        raise CliError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CliError(f"{file}: not a text file in UTF-8") from None
