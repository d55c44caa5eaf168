"""Reads what is whole of a JSON object that was cut off."""

from __future__ import annotations

import json
from typing import Any


def parse_whole_fields(text: str) -> Any:
    """Return the fields of a JSON object that are there as a whole, or None if none is.

    Args:
        text: The beginning of the object.
    """
    depth, end, in_string, escaped = 0, 0, False, False
    for at, letter in enumerate(text):
        if in_string:
            in_string, escaped = escaped or letter != '"', not escaped and letter == "\\"
        elif letter == '"':
            in_string = True
        elif letter in "{[":
            depth += 1
        elif letter in "}]":
            depth -= 1
        elif letter == "," and depth == 1:
            end = at
    try:
        return json.loads(f"{text[:end]}}}") if end else None
    except (ValueError, RecursionError):
        return None
