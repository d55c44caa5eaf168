"""A rule is written once and enforced twice: as CEL by the API server and as a function by the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

RULE_ERROR = "rule"


@dataclass(frozen=True)
class Rule:
    """One validation rule of the API.

    As an item of ``ApiModel.rules`` it judges an object, inside ``Annotated[...]`` a single value.

    ``cel`` sees the value as ``self``; ``check`` gets the parsed value and returns whether it holds; ``message`` tells
    the user what to do. ``field`` is the path of the field at fault below the object, such as ``.name``.
    """

    cel: str
    message: str
    check: Callable[[Any], bool]
    field: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def judge(value: Any) -> Any:
            raise_broken_rules([self], value)
            return value

        return core_schema.no_info_after_validator_function(judge, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return add_rules(handler(schema), [self])


@dataclass(frozen=True)
class UpdateRule:
    """A rule on updates: ``cel`` sees the stored object as ``oldSelf``; ``check`` gets (new, old)."""

    cel: str
    message: str
    check: Callable[[Any, Any], bool]
    field: str = ""


def raise_broken_rules(rules: Iterable[Rule], value: Any) -> None:
    """Raise one error that carries every rule that ``value`` breaks: pydantic keeps one error per place."""
    failed = [rule for rule in rules if not rule.check(value)]
    if failed:
        text = "; ".join(rule.message for rule in failed)
        raise PydanticCustomError(
            RULE_ERROR, "{text}", {"text": text, "failed": [(r.field, r.message) for r in failed]}
        )


def add_rules(schema: JsonSchemaValue, rules: Sequence[Rule | UpdateRule]) -> JsonSchemaValue:
    """Return ``schema`` with ``rules`` appended to its ``x-kubernetes-validations``."""
    if not rules:
        return schema
    known = schema.get("x-kubernetes-validations", [])
    return {**schema, "x-kubernetes-validations": [*known, *(_render_validation(rule) for rule in rules)]}


def _render_validation(rule: Rule | UpdateRule) -> dict[str, str]:
    shown = {"rule": rule.cel, "message": rule.message}
    return shown | ({"fieldPath": rule.field} if rule.field else {})
