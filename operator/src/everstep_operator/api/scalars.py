"""Values of the API that JSON has no type for: durations, quantities, times, names.

Each accepts exactly the strings that the pattern in the CRD accepts. Patterns are RE2 (the API server's), used here
with ``fullmatch``, because Python's ``$`` also matches before a final newline.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, PlainSerializer, WithJsonSchema
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from everstep_operator.api.rules import Rule

DURATION = r"^([0-9]{1,7}d)?([0-9]{1,7}h)?([0-9]{1,7}m)?([0-9]{1,7}s)?$"
_DURATION = re.compile(DURATION)
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}

# k8s.io/apimachinery/pkg/api/resource, without signs: nothing here is negative.
QUANTITY = r"^([0-9]{1,18}(\.[0-9]{0,9})?|\.[0-9]{1,9})([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?$"
_QUANTITY = re.compile(QUANTITY)
_SUFFIXES = {
    "": Decimal(1), "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "k": Decimal(1000),
    "M": Decimal("1e6"), "G": Decimal("1e9"), "T": Decimal("1e12"), "P": Decimal("1e15"), "E": Decimal("1e18"),
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", 1)},
}  # fmt: skip

_DNS_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DNS_NAME = rf"{_DNS_LABEL}(\.{_DNS_LABEL})*"
_QUALIFIED = "([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9]"
DNS_LABEL = f"^{_DNS_LABEL}$"
DNS_NAME = f"^{_DNS_NAME}$"
LABEL_KEY = f"^({_DNS_NAME}/)?{_QUALIFIED}$"
LABEL_VALUE = f"^({_QUALIFIED})?$"


class Pattern:
    """A string pattern of the schema, checked as the API server does: the whole string, in RE2 terms."""

    def __init__(self, pattern: str, max_length: int) -> None:
        self.pattern, self.max_length = pattern, max_length

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._judge, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(schema) | {"pattern": self.pattern, "maxLength": self.max_length}

    def _judge(self, value: str) -> str:
        if len(value) > self.max_length:
            raise PydanticCustomError("string_too_long", "{text}", {"text": "too long", "max_length": self.max_length})
        if not re.fullmatch(self.pattern, value):
            raise PydanticCustomError("pattern", "should match '{pattern}'", {"pattern": self.pattern})
        return value


def _whole_number(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = BeforeValidator(_whole_number)
"""The outermost annotation of an integer field: JSON has one number type, and the API server takes 2.0 for 2."""
Argument = Annotated[str, Field(max_length=131072)]
"""At most what Linux takes as one argument or variable (MAX_ARG_STRLEN)."""
DnsLabel = Annotated[str, Pattern(DNS_LABEL, 63)]
DnsName = Annotated[str, Pattern(DNS_NAME, 253)]
LabelValue = Annotated[str, Pattern(LABEL_VALUE, 63)]
LabelKey = Annotated[str, Pattern(LABEL_KEY, 317)]


def parse_duration(text: str) -> timedelta:
    """Return the time span that a string such as ``1d``, ``1h30m`` or ``45s`` spells.

    The units are d, h, m and s, each at most once and in this order.

    Raises:
        ValueError: The text is no duration.
    """
    found = _DURATION.fullmatch(text)
    if found is None or len(text) < 2:
        raise ValueError(f"{text!r} is no duration: write it like 45s, 10m, 1h30m or 2d")
    return timedelta(seconds=sum(int(part[:-1]) * _UNITS[part[-1]] for part in found.groups() if part))


def format_duration(value: timedelta) -> str:
    """Return the shortest spelling of a duration, such as ``1h30m``; parts of a second are dropped."""
    rest, text = int(value.total_seconds()), ""
    for unit, seconds in _UNITS.items():
        count, rest = divmod(rest, seconds)
        text += f"{count}{unit}" if count else ""
    return text or "0s"


def duration_seconds_cel(expression: str) -> str:
    """Return CEL for the seconds in a duration string. CEL's own ``duration()`` knows no days and overflows."""
    part = "int('0' + {0}.find('[0-9]+{1}').replace('{1}', ''))"
    return " + ".join(f"{part.format(expression, unit)} * {seconds}" for unit, seconds in _UNITS.items())


def _read_duration(value: Any) -> Any:
    if isinstance(value, timedelta):
        return value
    if not isinstance(value, str):
        raise PydanticCustomError("string_type", "Input should be a valid string")
    try:
        return parse_duration(value)
    except ValueError as error:
        raise PydanticCustomError("pattern", "{text}", {"pattern": DURATION, "text": str(error)}) from None


Duration = Annotated[
    timedelta,
    BeforeValidator(_read_duration),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema({"type": "string", "pattern": DURATION, "minLength": 2, "maxLength": 32}),
]
"""A span of time with a resolution of one second; a ``timedelta`` in Python."""


def limit_duration(least: str, most: str) -> Rule:
    """Return the rule that limits a duration to at least ``least`` and at most ``most``."""
    low, high = parse_duration(least), parse_duration(most)
    seconds = duration_seconds_cel("self")
    bounds = [f"{seconds} <= {int(high.total_seconds())}"]
    if low:
        bounds.insert(0, f"{seconds} >= {int(low.total_seconds())}")
    message = f"must be between {least} and {most}" if low else f"must be at most {most}"
    return Rule(" && ".join(bounds), message, lambda value: low <= value <= high)


def parse_quantity(text: str | int) -> Decimal:
    """Return the number that a Kubernetes quantity such as ``500m``, ``2Gi`` or ``1e3`` spells, in base units (cores,
    bytes, pieces).

    Raises:
        ValueError: The text is no quantity.
    """
    found = _QUANTITY.fullmatch(str(text))
    if found is None:
        raise ValueError(f"{text!r} is no quantity: write it like 500m, 2, 1.5 or 4Gi")
    number, suffix = Decimal(found[1]), found[3] or ""
    return number * (
        Decimal(f"1{suffix}") if len(suffix) > 1 and suffix[0] in "eE" and suffix[1] != "i" else _SUFFIXES[suffix]
    )


def _read_quantity(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise PydanticCustomError("int_or_string", "must be of type integer or string")
    try:
        parse_quantity(value)
    except ValueError as error:
        raise PydanticCustomError("pattern", "{text}", {"pattern": QUANTITY, "text": str(error)}) from None
    return str(value)


Quantity = Annotated[
    str,
    BeforeValidator(_read_quantity),
    WithJsonSchema({
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "x-kubernetes-int-or-string": True, "pattern": QUANTITY, "maxLength": 32,
    }),
]  # fmt: skip
"""A Kubernetes quantity, kept as written; :func:`parse_quantity` gives its value."""


def _read_time(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise PydanticCustomError("date_time", "must be a time like 2026-01-31T12:00:00Z") from None
        if value.tzinfo is None:
            raise PydanticCustomError("date_time", "must be a time with a zone, like 2026-01-31T12:00:00Z")
        return value.astimezone(UTC)
    return value


def format_time(value: datetime) -> str:
    """RFC 3339 in UTC, with microseconds only where there are any."""
    return value.astimezone(UTC).isoformat().replace("+00:00", "Z")


Time = Annotated[
    datetime,
    BeforeValidator(_read_time),
    PlainSerializer(format_time, return_type=str),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]


class Atomic:
    """A list that has one owner: server-side apply replaces it as a whole."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(schema) | {"x-kubernetes-list-type": "atomic"}


@dataclass(frozen=True)
class ListMap:
    """A list whose items have one name each: server-side apply merges it item by item, and a name may occur once."""

    key: str
    of: Callable[[Any], Hashable]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._judge, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(schema) | {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [self.key]}

    def _judge(self, items: Sequence[Any]) -> Sequence[Any]:
        seen: set[Hashable] = set()
        for item in items:
            name = self.of(item)
            if name in seen:
                text = f'Duplicate value: {{"{self.key}":"{name}"}}'
                raise PydanticCustomError("duplicate", "{text}", {"text": text})
            seen.add(name)
        return items


def limit_keys(pattern: str, most: int, hint: str) -> Rule:
    """Return the rule that the keys of a map match a pattern, which a schema cannot state.

    Args:
        pattern: The pattern in RE2 syntax, anchored at both ends.
        most: Largest length of a key, in characters.
        hint: The message for a key that does not match.
    """
    compiled = re.compile(pattern)
    escaped = pattern.replace("\\", "\\\\")
    return Rule(
        f"self.all(key, size(key) <= {most} && key.matches('{escaped}'))",
        hint,
        lambda value: all(len(key) <= most and compiled.fullmatch(key) for key in value),
    )


def _drop_null_values(value: Any) -> Any:
    # As for objects: the API server drops a map's null values.
    return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


DropNulls = BeforeValidator(_drop_null_values)
"""The outermost annotation of a map."""
NodeSelector = Annotated[
    dict[str, LabelValue],
    Field(max_length=64),
    limit_keys(LABEL_KEY, 317, "keys must be label names, like example.com/zone"),
    DropNulls,
]
