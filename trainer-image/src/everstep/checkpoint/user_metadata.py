"""Metadata that a user notes about a checkpoint beside its state: a small JSON object, kept as one value, its text.

The writer reads it for retention: this module must not import torch, nor what knows of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from everstep.checkpoint.errors import CheckpointError

VALUE = "%metadata"  # no object's name can begin with a bare %
LIMIT = 64 << 10  # bytes as JSON


def pack_metadata(metadata: Mapping[str, Any]) -> dict[str, object]:
    """Return the value that a manifest holds for a user's metadata; none for an empty one.

    Raises:
        CheckpointError: It is no JSON object, or larger than LIMIT.
    """
    if not isinstance(metadata, Mapping):
        raise CheckpointError(f"metadata is a {type(metadata).__name__}: give a dictionary, as {{'loss': 0.5}}")
    if not metadata:
        return {}
    try:
        plain = {str(name): _plain(value) for name, value in metadata.items()}
        text = json.dumps(plain)
    except (TypeError, ValueError, RecursionError, RuntimeError) as error:
        raise CheckpointError(
            f"metadata cannot be written as JSON ({error}): give numbers, text, booleans, None, lists and dictionaries "
            "of these"
        ) from error
    if len(text) > LIMIT:
        raise CheckpointError(
            f"metadata has {len(text)} bytes as JSON, and may have {LIMIT}: save what is large as state"
        )
    return {VALUE: text}


def read_metadata(values: Mapping[str, object]) -> dict[str, Any]:
    """Return what pack_metadata() was given; {} where there was none, or what is there cannot be read."""
    text = values.get(VALUE)
    if not isinstance(text, str):
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _plain(value: Any) -> Any:
    """A number of NumPy or a tensor of one element as the number that it is."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    item = getattr(value, "item", None)
    return item() if callable(item) else value
