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
DEEPEST = 100  # dictionaries and lists within each other, which every reader can follow


def pack_metadata(metadata: Mapping[str, Any]) -> dict[str, object]:
    """Return the value that a manifest holds for a user's metadata; none for an empty one.

    Raises:
        CheckpointError: It is no JSON object, or larger than LIMIT.
    """
    if not isinstance(metadata, Mapping):
        raise CheckpointError(f"metadata is a {type(metadata).__name__}: give a dictionary, as {{'loss': 0.5}}")
    if not metadata:
        return {}
    plain = {str(name): _to_json_value(value, str(name), 1) for name, value in metadata.items()}
    try:
        text = json.dumps(plain)
    except ValueError as error:
        raise CheckpointError(f"metadata cannot be written as JSON: {error}") from error
    if len(text) > LIMIT:
        raise CheckpointError(
            f"metadata has {len(text)} bytes as JSON, most of them in {_find_largest(plain)!r}, and may have "
            f"{LIMIT}: save what is large as state"
        )
    return {VALUE: text}


def _find_largest(plain: Mapping[str, Any]) -> str:
    return max(plain, key=lambda name: len(json.dumps(plain[name])))


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


def _to_json_value(value: Any, name: str, depth: int) -> Any:
    """Return a value as JSON has it; a number of NumPy or a tensor of one element as the number that it is."""
    if depth > DEEPEST:
        top = name.partition(".")[0].partition("[")[0]
        raise CheckpointError(
            f"metadata {top!r} is nested more than {DEEPEST} deep, or holds itself: note what is flat"
        )
    if isinstance(value, Mapping):
        return {str(key): _to_json_value(each, f"{name}.{key}", depth + 1) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(each, f"{name}[{place}]", depth + 1) for place, each in enumerate(value)]
    why: Exception | None = None
    try:
        item = getattr(value, "item", None)
        value = item() if callable(item) else value
    except (TypeError, ValueError, RuntimeError) as error:
        why = error
    if why is None and (value is None or isinstance(value, bool | int | float | str)):
        return value
    raise CheckpointError(
        f"metadata {name!r} is a {type(value).__name__}, which cannot be written as JSON{f' ({why})' if why else ''}: "
        "give numbers, text, booleans, None, lists and dictionaries of these"
    ) from why
