"""The form of every manifest: one line of JSON, and one line with its checksum. Pure.

Every later format begins with such a first line, so that an older version of everstep can tell that it is one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from everstep.checkpoint.errors import Damaged, UnknownFormat
from everstep.checkpoint.format.checksum import ALGORITHMS, compute_checksum

FORMAT = 2

_HEX = frozenset("0123456789abcdef")


def encode_line(fields: dict[str, Any]) -> bytes:
    """Return the fields as one line; keys are sorted so that equal fields are equal bytes, whoever writes them."""
    return json.dumps(fields, separators=(",", ":"), sort_keys=True, allow_nan=False).encode() + b"\n"


def seal_lines(fields: dict[str, Any], checksum: str) -> bytes:
    """Return the two lines of these fields."""
    first = encode_line({"format": FORMAT, **fields})
    return first + f"{checksum} {compute_checksum(checksum, first)}\n".encode()


def unseal_lines(data: bytes, name: str) -> dict[str, Any]:
    """Return the fields that seal_lines() was given.

    Args:
        data: The bytes of the object.
        name: What the object is called in messages.

    Raises:
        Damaged: These are not the bytes of a manifest.
        UnknownFormat: They are those of another version of everstep.
    """
    first, newline, second = data.partition(b"\n")
    algorithm = second.split(b" ")[0].decode("ascii", "replace")
    if not newline or algorithm not in ALGORITHMS:
        _check_format(_parse_first_line(first), name)  # a later format may have other checksums
        raise Damaged(name, "is no manifest: its second line is missing or names no known checksum")
    if second != f"{algorithm} {compute_checksum(algorithm, first + newline)}\n".encode():
        raise Damaged(name, "its first line does not have the checksum that its second line says")
    fields = _parse_first_line(first)
    _check_format(fields, name)
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise Damaged(name, "has a checksum that holds but says no format")
    return fields


def require_number(value: object) -> int:
    """Return the value if it is a number of something, else raise ValueError."""
    if type(value) is not int or value < 0:
        raise ValueError(f"not a number of something: {value!r}")
    return value


def require_numbers(values: Sequence[Any]) -> tuple[int, ...]:
    """Return the values if each is a number of something, else raise ValueError."""
    for each in values:
        if type(each) is not int or each < 0:
            raise ValueError(f"not a number of something: {each!r}")
    return tuple(values)


def require_seconds(value: object) -> float:
    """Return the value if it is a time, else raise ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"not a time: {value!r}")
    return float(value)


def require_text(value: object) -> str:
    """Return the value if it is a text, else raise ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"not a text: {value!r}")
    return value


def is_sum(value: str, digits: int) -> bool:
    """Tell whether the text has the form of a checksum of so many hex digits."""
    return len(value) == digits and _HEX.issuperset(value)


def as_text(value: object) -> str:
    """Return a packed value as text, to compare it by: for Python 1, 1.0 and True are equal."""
    return json.dumps(value, sort_keys=True)


def shorten_value(value: object) -> str:
    """Return a packed value as a text that fits into a message."""
    found = as_text(value)
    return found if len(found) <= 60 else found[:57] + "..."


def _parse_first_line(first: bytes) -> object:
    try:
        return json.loads(first)
    except (ValueError, RecursionError):
        return None


def _check_format(fields: object, name: str) -> None:
    found = fields.get("format") if isinstance(fields, dict) else None
    if type(found) is int and found != FORMAT:
        raise UnknownFormat(name, found, FORMAT)
