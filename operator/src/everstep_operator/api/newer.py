"""Reads stored objects to which newer CRDs have added something, so that an older operator knows the rest of them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import PrivateAttr, ValidationError

from everstep_operator.api.base import ApiModel

FieldPath = tuple[str | int, ...]


def list_newer_parts(error: ValidationError) -> list[FieldPath]:
    """Return the paths of the parts of an object that only a newer version knows: fields, and conditions of new types.

    Args:
        error: The error that reading the object has raised.
    """
    parts: set[FieldPath] = set()
    for each in error.errors(include_url=False, include_context=False, include_input=False):
        path = tuple(each["loc"])
        if each["type"] == "extra_forbidden":
            parts.add(path)
        elif path[:2] == ("status", "conditions") and path[3:] == ("type",) and each["type"] == "enum":
            parts.add(path[:3])
    return sorted(parts, key=str)


def drop_newer_parts(value: Mapping[str, Any], parts: Sequence[FieldPath]) -> dict[str, Any]:
    """Return a copy of an object without these parts of it.

    Args:
        value: The object, as the API server gives it.
        parts: Their paths, as `list_newer_parts` returns them.
    """
    rest = copy.deepcopy(dict(value))
    # Of one list the last first, so that the others keep their places.
    for path in sorted(parts, key=lambda path: [(isinstance(step, int), step) for step in path], reverse=True):
        at: Any = rest
        for step in path[:-1]:
            at = at[step]
        del at[path[-1]]
    return rest


class StoredResource(ApiModel):
    """An object that the API server stores, maybe by CRDs that are newer than this operator.

    An upgrade brings the CRDs before the operator, and a field with a default is then in every object at once.
    """

    _unknown_fields: tuple[str, ...] = PrivateAttr(())

    @classmethod
    def parse_stored(cls, value: Mapping[str, Any]) -> Self:
        """Read what the API server has stored. What is unknown of the spec is left out, and named in `unknown_fields`.

        Args:
            value: The object, as the API server gives it.

        Raises:
            pydantic.ValidationError: It breaks a rule.
        """
        try:
            return cls.parse(value)
        except ValidationError as error:
            newer = list_newer_parts(error)
            if not newer:
                raise
        made = cls.parse(drop_newer_parts(value, newer))
        made._unknown_fields = tuple(".".join(map(str, path)) for path in newer if path[0] == "spec")
        return made

    @property
    def unknown_fields(self) -> tuple[str, ...]:
        """Return the paths of fields of the spec that this version does not know."""
        return self._unknown_fields
