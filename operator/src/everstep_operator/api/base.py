"""Base classes that all models of the API share: names, strictness and null handling of the API server."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from everstep_operator.api.rules import Rule, UpdateRule, add_rules, raise_broken_rules


class ApiModel(BaseModel):
    """A piece of the API: camelCase outside, snake_case inside, no conversion between types, no unknown field.

    Instances are frozen; ``model_copy(update={...})`` makes another one. Manifests are read with :meth:`parse`.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        strict=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()
    update_rules: ClassVar[tuple[UpdateRule, ...]] = ()

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Read what the API server sends or a user wrote: camelCase names only.

        Raises ``pydantic.ValidationError``; ``everstep_operator.api.load.explain_errors`` puts it into a user's words.
        """
        return cls.model_validate(value, by_alias=True, by_name=False)

    def manifest(self) -> dict[str, Any]:
        """Return the object as JSON data with camelCase names and without absent fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        # The API server drops nulls of known fields that are not nullable, and applies defaults. None of ours is.
        if isinstance(value, dict) and None in value.values():
            known = {field.alias for field in cls.model_fields.values()}
            return {name: item for name, item in value.items() if item is not None or name not in known}
        return value

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        raise_broken_rules(self.rules, self)
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        made = handler.resolve_ref_schema(handler(schema))
        made.update(add_rules(made, [*cls.rules, *cls.update_rules]))
        return made


class StatusModel(ApiModel):
    """A piece of a status. A newer operator may have written fields that this one does not know: they are ignored."""

    model_config = ConfigDict(extra="ignore")
