"""Find what a script leaves to its job: the store, how often one saves, and how many checkpoints are kept.

An everstep job tells it in EVERSTEP_CHECKPOINT (from `spec.checkpoint`), which anybody may set for a run without one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everstep.checkpoint.errors import CheckpointError

VARIABLE = "EVERSTEP_CHECKPOINT"
DEFAULT_FOLDER = "checkpoints"
DEFAULT_KEEP_LAST = 3
_INTERVAL = frozenset({"every", "every_steps"})
_NAMES = frozenset({"keep_last"}) | _INTERVAL
_BY_HAND = _NAMES | {"store"}
_SAID = _BY_HAND | {"missing"}  # why the job has no store


def fill_arguments(given: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the arguments of a session, with those of the job where the script gave none.

    Args:
        given: What the script gave, by name; None for what it did not give.
        environ: The environment of this process.

    Raises:
        ValueError: EVERSTEP_CHECKPOINT is not a JSON object, or has unknown names.
        CheckpointError: Neither the script nor the job names a store, and the nodes share no folder.
    """
    filled = dict(given)
    said = read_job_arguments(environ)
    has_interval = any(given.get(name) is not None for name in _INTERVAL)
    for name in _NAMES - (_INTERVAL if has_interval else frozenset()):
        if filled.get(name) is None and said.get(name) is not None:
            filled[name] = said[name]
    if filled.get("store") is None:
        filled["store"] = find_default_store(environ)
    if filled.get("keep_last") is None:
        filled["keep_last"] = DEFAULT_KEEP_LAST
    return filled


def read_job_arguments(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what the job says of its checkpoints, by the names of the arguments.

    Args:
        environ: The environment of this process.

    Raises:
        ValueError: It is not a JSON object, or has other names. In a job these are a newer operator's, and left alone.
    """
    text = environ.get(VARIABLE, "")
    if not text:
        return {}
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise ValueError(f'{VARIABLE} is {text!r}, and must be a JSON object, as {{"store": "s3://bucket/run"}}')
    if not environ.get("EVERSTEP_JOB") and (unknown := said.keys() - _SAID):
        raise ValueError(
            f"{VARIABLE} has {', '.join(sorted(map(repr, unknown)))}, and may have {', '.join(sorted(_BY_HAND))}: each "
            "is spelled as an argument of everstep.checkpointer()"
        )
    return {name: said[name] for name in _SAID & said.keys()}


def has_checkpoint_store() -> bool:
    """Return whether `everstep.checkpointer()` without arguments has a store: scripts may run with one and without.

    Returns:
        False in a job of several nodes whose manifest names neither a store nor a volume in `spec.checkpoint`.

    Raises:
        ValueError: EVERSTEP_CHECKPOINT is not a JSON object, or has unknown names.
    """
    try:
        return bool(find_default_store(os.environ))
    except CheckpointError:
        return False


def find_default_store(environ: Mapping[str, str]) -> str:
    """Return where checkpoints of a run are kept whose script names no store: what the job names, else its folder, else
    one in the working folder.

    Args:
        environ: The environment of this process.

    Raises:
        ValueError: EVERSTEP_CHECKPOINT is not a JSON object, or has unknown names.
        CheckpointError: The job has several nodes, which share no folder.
    """
    said = read_job_arguments(environ)
    if said.get("store"):
        return str(said["store"])
    if said.get("missing"):
        raise CheckpointError(str(said["missing"]))
    model = environ.get("SM_MODEL_DIR", "")  # of the container contract, which has a folder for checkpoints beside it
    if environ.get("EVERSTEP_JOB") and model:
        return str(Path(model).parent / DEFAULT_FOLDER)
    return str(Path.cwd() / DEFAULT_FOLDER)
