"""Generated files are up to date, structural, and small enough for plain `kubectl apply`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from everstep_operator.api import crdgen, docgen
from everstep_operator.api.resources import RESOURCES, CustomResource

ROOT = Path(__file__).parents[2]

ALLOWED = {
    "additionalProperties", "anyOf", "default", "description", "enum", "exclusiveMaximum", "exclusiveMinimum", "format",
    "items", "maxItems", "maxLength", "maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum",
    "pattern", "properties", "required", "type", "x-kubernetes-int-or-string", "x-kubernetes-list-map-keys",
    "x-kubernetes-list-type", "x-kubernetes-preserve-unknown-fields", "x-kubernetes-validations",
}  # fmt: skip


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in a schema, with its path."""
    yield path, schema
    for name, below in schema.get("properties", {}).items():
        yield from nodes(below, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield from nodes(schema[name], f"{path}[]")


@pytest.mark.parametrize("name", crdgen.render_crds())
def test_crds_are_up_to_date(name: str) -> None:
    assert (ROOT / "crds" / name).read_text() == crdgen.render_crds()[name], (
        "run `python -m everstep_operator.api.crdgen`"
    )


@pytest.mark.parametrize("name", docgen.render_pages())
def test_reference_is_up_to_date(name: str) -> None:
    page = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert page == docgen.render_pages()[name], "run `python -m everstep_operator.api.docgen`"


@pytest.mark.parametrize("name", crdgen.render_crds())
def test_plain_kubectl_apply_can_carry_the_crd(name: str) -> None:
    assert len(yaml.safe_dump(yaml.safe_load(crdgen.render_crds()[name]))) < crdgen.MAX_CRD_BYTES


@pytest.mark.parametrize("resource", RESOURCES, ids=lambda resource: resource.kind)
class TestStructuralSchema:
    """https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/"""

    def test_knows_only_openapi_words(self, resource: CustomResource) -> None:
        for path, schema in nodes(crdgen.build_schema(resource)):
            assert set(schema) <= ALLOWED, path

    def test_every_value_has_a_type(self, resource: CustomResource) -> None:
        for path, schema in nodes(crdgen.build_schema(resource)):
            assert "type" in schema or "x-kubernetes-int-or-string" in schema, path

    def test_fixed_and_free_keys_are_not_mixed(self, resource: CustomResource) -> None:
        for path, schema in nodes(crdgen.build_schema(resource)):
            assert not {"properties", "additionalProperties"} <= set(schema), path

    def test_whatever_grows_has_a_limit(self, resource: CustomResource) -> None:
        """Without limits a rule's estimated cost is unlimited, and the API server refuses the CRD."""
        limits = {"array": "maxItems", "string": "maxLength", "object": "maxProperties"}
        for path, schema in nodes(crdgen.build_schema(resource)["properties"]["spec"]):
            kind = schema.get("type", "")
            if (kind == "object" and "additionalProperties" not in schema) or "enum" in schema:
                continue
            assert limits.get(kind, kind) in schema or kind in ("", "boolean", "integer", "number"), path

    def test_default_of_the_schema_is_that_of_the_model(self, resource: CustomResource) -> None:
        spec = resource.model.model_fields["spec"].annotation
        assert spec is not None
        for name, field in spec.model_fields.items():
            schema = crdgen.build_schema(resource)["properties"]["spec"]["properties"][field.alias]
            if "default" in schema:
                parsed = spec.__pydantic_validator__.validate_assignment(
                    spec.model_construct(), name, schema["default"]
                )
                assert getattr(parsed, name) == field.get_default(), name

    def test_nothing_is_filled_into_the_items_of_lists(self, resource: CustomResource) -> None:
        """Argo CD compares lists of custom resources as a whole: a job would differ from its manifest for ever."""
        schema = crdgen.build_crd(resource)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        lists = {path: below["items"] for path, below in nodes(schema) if "items" in below}
        assert lists
        assert not [path for path, items in lists.items() if any("default" in found for _, found in nodes(items))]

    def test_status_has_no_defaults(self, resource: CustomResource) -> None:
        status = crdgen.build_schema(resource)["properties"].get("status", {})
        assert not [path for path, schema in nodes(status) if "default" in schema]
