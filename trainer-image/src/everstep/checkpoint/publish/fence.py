"""Read which attempt an agent has given us, and whether it may still publish."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from everstep.checkpoint.format.keys import Attempt

FENCE = Path("/run/everstep/fence.json")


def get_given_attempt(environment: Mapping[str, str] = os.environ) -> Attempt | None:
    """Return the attempt that EVERSTEP_ATTEMPT names, or EVERSTEP_EPOCH and EVERSTEP_GENERATION; None where there is
    none, or where EVERSTEP_ATTEMPT says that it is counted by what is in the store. ValueError."""
    named = environment.get("EVERSTEP_ATTEMPT", "")
    if named == "counted":
        return None
    if named:
        return _parse_attempt(named)
    epoch, generation = environment.get("EVERSTEP_EPOCH"), environment.get("EVERSTEP_GENERATION")
    return Attempt(int(epoch), int(generation)) if epoch and generation else None


def explain_fence(attempt: Attempt, path: Path = FENCE) -> str | None:
    """Return why nothing of this attempt may be committed now; None when it may, or when there is no agent to ask."""
    try:
        said = json.loads(path.read_bytes())
        # An older agent names no attempt, neither here nor to its ranks.
        named = said.get("attempt")
        allowed = _parse_attempt(named) if named else Attempt(int(said["epoch"]), int(said["generation"]))
        stopped = bool(said["fenced"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path} cannot be read: {error}"  # an agent is there and cannot say yes: that is a no
    if stopped:
        return f"{path}: this node is fenced, its leader has not been heard of for too long"
    if allowed != attempt:
        return f"{path}: attempt {allowed} runs now, not {attempt}"
    return None


def _parse_attempt(text: str) -> Attempt:
    epoch, _, generation = text.partition(".")
    return Attempt(int(epoch), int(generation))
