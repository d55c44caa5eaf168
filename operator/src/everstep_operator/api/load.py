"""From a file of manifests to models, with errors that say where, what and what to do.

The words are the API server's own where it has any, so that a message means the same before and after `kubectl apply`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from everstep_operator.api.base import ApiModel
from everstep_operator.api.crdgen import Schema, build_schema
from everstep_operator.api.meta import API_VERSION, GROUP
from everstep_operator.api.resources import RESOURCES, CustomResource
from everstep_operator.api.rules import RULE_ERROR
from everstep_operator.api.scalars import DURATION, QUANTITY
from everstep_operator.api.yaml11 import YamlError, load_documents

FieldPath = tuple[str | int, ...]

_EXPECTED = {
    "string_type": "string", "int_type": "integer", "int_from_float": "integer", "bool_type": "boolean",
    "float_type": "number", "list_type": "array", "dict_type": "object", "model_type": "object",
    "int_or_string": "integer,string",
}  # fmt: skip
_HINTS = {DURATION: "write it like 45s, 10m, 1h30m or 2d", QUANTITY: "write it like 500m, 2, 1.5 or 4Gi"}


@dataclass(frozen=True)
class ValidationProblem:
    """One thing that is wrong with an object."""

    path: FieldPath
    message: str
    hint: str = ""
    """What to do, where the message does not say it."""

    @property
    def field(self) -> str:
        """Return the path as the API server writes it: ``spec.pools[1].name``."""
        return format_path(self.path)

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" + (f" ({self.hint})" if self.hint else "")


@dataclass(frozen=True)
class LocatedProblem:
    """A problem and where it is written."""

    file: str
    line: int
    document: int
    problem: ValidationProblem

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: document {self.document}: {self.problem}"


class ManifestError(ValueError):
    """A file has mistakes; ``findings`` are all of them."""

    def __init__(self, findings: Sequence[LocatedProblem]) -> None:
        super().__init__("\n".join(str(finding) for finding in findings))
        self.findings = tuple(findings)


@dataclass(frozen=True)
class LoadedManifests:
    """The objects that a file of manifests holds, and the documents that were skipped."""

    objects: list[ApiModel] = field(default_factory=list)
    """TrainingJobs and TrainingPools."""
    skipped: list[str] = field(default_factory=list)
    """Kinds of other groups, which are not judged."""


def load_text(text: str, name: str) -> LoadedManifests:
    """Read manifests; ``name`` stands for the file in messages. Raises :class:`ManifestError`."""
    loaded, findings, document = LoadedManifests(), [], 0
    try:
        for found in load_documents(text):
            document = found.number
            problems = _parse_list(found.data, loaded) if _is_list(found.data) else _parse_object(found.data, loaded)
            made = [LocatedProblem(name, found.line(p.path), document, p) for p in problems]
            findings += sorted(made, key=lambda finding: finding.line)
    except YamlError as error:
        findings.append(
            LocatedProblem(name, error.line, document + 1, ValidationProblem((), f"no valid YAML: {error}"))
        )
    if not findings and not loaded.objects and not loaded.skipped:
        findings.append(LocatedProblem(name, 1, 1, ValidationProblem((), "no object in the file")))
    if findings:
        raise ManifestError(findings)
    return loaded


def _is_list(data: Any) -> bool:
    """Tell whether this is several objects in one, as `kubectl get -o yaml` prints them."""
    return isinstance(data, dict) and data.get("apiVersion") == "v1" and data.get("kind") == "List"


def _parse_list(data: dict[str, Any], loaded: LoadedManifests) -> Iterator[ValidationProblem]:
    items = data.get("items")
    if not isinstance(items, list):
        yield ValidationProblem(("items",), f'must be of type array: "{_type_name(items)}"')
        return
    for number, item in enumerate(items):
        for problem in _parse_object(item, loaded):
            yield replace(problem, path=("items", number, *problem.path))


def _parse_object(data: Any, loaded: LoadedManifests) -> Iterator[ValidationProblem]:
    if not isinstance(data, dict):
        yield ValidationProblem(
            (), f'must be of type object: "{_type_name(data)}"', "a manifest starts with apiVersion and kind"
        )
        return
    version, kind = data.get("apiVersion"), data.get("kind")
    for name, value in (("apiVersion", version), ("kind", kind)):
        if not isinstance(value, str):
            yield ValidationProblem(
                (name,), "Required value", f"everstep's are {API_VERSION}, TrainingJob and TrainingPool"
            )
            return
    if str(version).partition("/")[0] != GROUP:
        loaded.skipped.append(str(kind))
        return
    resource = next((r for r in RESOURCES if r.kind == kind), None)
    if version != API_VERSION or resource is None:
        known = " and ".join(resource.kind for resource in RESOURCES)
        yield ValidationProblem(
            (), f'no matches for kind "{kind}" in version "{version}"', f"{API_VERSION} has {known}"
        )
        return
    if not data.get("metadata", {}) or not isinstance(data["metadata"], dict) or not _has_name(data["metadata"]):
        yield ValidationProblem(("metadata", "name"), "Required value", "name or generateName is required")
        return
    try:
        loaded.objects.append(resource.model.parse(data))
    except ValidationError as error:
        yield from explain_errors(error, resource)


def _has_name(metadata: dict[str, Any]) -> bool:
    return bool(metadata.get("name") or metadata.get("generateName"))


def explain_errors(error: ValidationError, resource: CustomResource) -> list[ValidationProblem]:
    """Return what ``resource.model.parse`` found, in the API server's words.

    Args:
        error: The error that pydantic raised.
        resource: The kind of the object, whose schema has the descriptions of its fields.
    """
    return [problem for details in error.errors(include_url=False) for problem in _explain_error(details, resource)]


def _explain_error(error: ErrorDetails, resource: CustomResource) -> Iterator[ValidationProblem]:
    path, given, context = tuple(error["loc"]), error["input"], error.get("ctx", {})
    match error["type"]:
        case "missing":
            yield ValidationProblem(path, "Required value", _field_description(path, resource))
        case "extra_forbidden":
            yield ValidationProblem(path, f'unknown field "{format_path(path)}"', _suggest_fields(path, resource))
        case kind if kind in _EXPECTED:
            yield ValidationProblem(
                path, f'must be of type {_EXPECTED[kind]}: "{_type_name(given)}"', _quoting_hint(kind, given)
            )
        case "literal_error" | "enum":
            known = ", ".join(json.dumps(value) for value in _schema_at(path, resource).get("enum", []))
            yield ValidationProblem(path, f"Unsupported value: {json.dumps(given)}: supported values: {known}")
        case "greater_than_equal":
            yield ValidationProblem(path, f"should be greater than or equal to {_format_number(context['ge'])}")
        case "less_than_equal":
            yield ValidationProblem(path, f"should be less than or equal to {_format_number(context['le'])}")
        case "string_too_long":
            yield ValidationProblem(path, f"Too long: may not be more than {context['max_length']} bytes")
        case "string_too_short":
            yield ValidationProblem(path, f"should be at least {context['min_length']} chars long")
        case "too_long":
            yield ValidationProblem(path, f"Too many: {len(given)}: must have at most {context['max_length']} items")
        case "too_short":
            yield ValidationProblem(path, f"should have at least {context['min_length']} items")
        case "pattern" | "string_pattern_mismatch":
            yield ValidationProblem(path, f"should match '{context['pattern']}'", _HINTS.get(context["pattern"], ""))
        case kind if kind == RULE_ERROR:
            for below, message in context["failed"]:
                yield ValidationProblem((*path, *below.split(".")[1:]), message)
        case _:
            yield ValidationProblem(path, error["msg"])


def format_path(path: FieldPath) -> str:
    """Return ``("spec", "pools", 1, "name")`` as ``spec.pools[1].name``."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".") or "<object>"


def _type_name(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _format_number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _quoting_hint(kind: str, given: Any) -> str:
    if kind == "string_type" and isinstance(given, bool | int | float):
        return f"put it in quotes: {json.dumps(json.dumps(given))}"
    if kind in ("int_type", "bool_type", "float_type") and isinstance(given, str):
        return "write it without quotes"
    return ""


@cache
def _cached_schema(resource: CustomResource) -> Schema:
    return build_schema(resource)


def _schema_at(path: FieldPath, resource: CustomResource) -> Schema:
    schema = _cached_schema(resource)
    for step in path:
        below = schema.get("items") if isinstance(step, int) else schema.get("properties", {}).get(step)
        schema = below or schema.get("additionalProperties") or {}
    return schema


def _field_description(path: FieldPath, resource: CustomResource) -> str:
    text: str = _schema_at(path, resource).get("description", "")
    return text.rstrip(".")


def _suggest_fields(path: FieldPath, resource: CustomResource) -> str:
    known = list(_schema_at(path[:-1], resource).get("properties", {}))
    close = difflib.get_close_matches(str(path[-1]), known, n=1)
    return f"did you mean {close[0]}?" if close else f"known fields: {', '.join(sorted(known))}" if known else ""
