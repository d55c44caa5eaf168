"""Manifests made from the schema itself: mostly right, with mistakes. New fields are covered unasked."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from everstep_operator.api.crdgen import Schema, build_schema
from everstep_operator.api.meta import API_VERSION
from everstep_operator.api.resources import CustomResource
from everstep_operator.api.scalars import DURATION

Json = st.SearchStrategy[Any]

NAMES = [
    "a",
    "trainer",
    "log",
    "everstep-x",
    "cpu",
    "nvidia.com/gpu",
    "A_B",
    "EVERSTEP_X",
    "example.com/a",
    "x/y/z",
    "",
]
DURATIONS = ["0s", "1s", "59s", "10m", "60m", "61m", "1h30m", "24h", "1d", "1d1s", "28d", "28d1s", "365d", "366d"]
WORDS = ["", "a", "1", "true", "-1", " ", "a b", "ä", "日本", "a\n", "x" * 70, *NAMES, *DURATIONS]

leaves: Json = st.none() | st.booleans() | st.integers(-3, 70) | st.floats(-3, 3, width=16) | st.sampled_from(WORDS)
leaves |= st.sampled_from([2**31, 2**63, -(2**63), 10**30, 1e30, 1.0, 2.0])
junk: Json = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=4,
)


def likely(schema: Schema, field: str = "") -> Json:
    """Values that fit the schema, though perhaps not the rules beside it."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if field == "distribution":
        one: Json = st.sampled_from(list(schema["properties"])).map(lambda name: {name: {}})
        return one | one | _object(schema)
    if schema.get("x-kubernetes-int-or-string"):
        return st.integers(0, 9) | _matching(schema)
    match schema["type"]:
        case "string":
            return _string(schema)
        case "integer" | "number":
            low, high = schema.get("minimum", -2), schema.get("maximum", 100)
            return st.sampled_from([low, high]) | st.integers(low, high)
        case "boolean":
            return st.booleans()
        case "array":
            low = schema.get("minItems", 0)
            return st.lists(likely(schema["items"]), min_size=low, max_size=3)
        case _ if "additionalProperties" in schema:
            return st.dictionaries(st.sampled_from(NAMES[:-1]), likely(schema["additionalProperties"]), max_size=3)
        case _:
            return _object(schema)


def _object(schema: Schema) -> Json:
    fields = {name: likely(sub, name) for name, sub in schema.get("properties", {}).items()}
    required = {name: fields.pop(name) for name in schema.get("required", [])}
    # A few fields at a time: with all of them, hardly any object would be without a mistake.
    chosen = st.sets(st.sampled_from(sorted(fields)), max_size=4) if fields else st.just(set[str]())
    return chosen.flatmap(
        lambda names: st.fixed_dictionaries({**required, **{name: fields[name] for name in sorted(names)}})
    )


def _string(schema: Schema) -> Json:
    if schema.get("pattern") == DURATION:
        return st.sampled_from(DURATIONS) | _matching(schema)
    if "pattern" in schema:
        return _matching(schema)
    return st.sampled_from([word for word in WORDS if word]) | st.text(min_size=schema.get("minLength", 0), max_size=10)


def _matching(schema: Schema) -> Json:
    return st.from_regex(schema["pattern"], alphabet=st.characters(codec="utf-8")).filter(lambda text: len(text) < 300)


@st.composite
def manifests(draw: st.DrawFn, resource: CustomResource) -> dict[str, Any]:
    """Objects of a kind with up to two mistakes in their spec."""
    schema = build_schema(resource)["properties"]["spec"]
    made = {
        "apiVersion": API_VERSION,
        "kind": resource.kind,
        "metadata": {"name": draw(st.sampled_from(["a", "digits", "a1", "a-b"]))},
        "spec": draw(_object(schema)),
    }
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2]))):
        _spoil(draw, made["spec"])
    return made


def _spoil(draw: st.DrawFn, value: Any) -> None:
    """Put something else in one place of ``value``, or something new, or take something away."""
    below: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    deeper = [key for key in below if isinstance(value[key], dict | list)]
    if deeper and draw(st.booleans()) is True:
        _spoil(draw, value[draw(st.sampled_from(deeper))])
    elif below and draw(st.integers(0, 3)) > 0:
        key = draw(st.sampled_from(below))
        if draw(st.integers(0, 4)):
            value[key] = draw(junk)
        else:
            del value[key]
    elif isinstance(value, dict):
        value[draw(st.sampled_from([*NAMES, "name", "torch", "value"]))] = draw(junk)
    else:
        value.append(draw(junk))
