"""Files of manifests: where a mistake is, what it is, what to do; and YAML read as kubectl reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from everstep_operator.api.job import TrainingJob
from everstep_operator.api.load import ManifestError, load_text
from everstep_operator.api.pool import TrainingPool
from everstep_operator.api.yaml11 import YamlError, load_documents

JOB = """\
apiVersion: everstep.dev/v1alpha1
kind: TrainingJob
metadata: {name: digits}
spec:
  image: x
"""


def complaints(text: str) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        load_text(text, "job.yaml")
    return [str(finding) for finding in caught.value.findings]


def test_reads_jobs_and_pools_and_skips_other_kinds() -> None:
    loaded = load_text(
        f"{JOB}---\napiVersion: v1\nkind: Secret\n---\n\n---\n"
        "apiVersion: everstep.dev/v1alpha1\nkind: TrainingPool\nmetadata: {name: a}\nspec: {}\n",
        "all.yaml",
    )
    assert [type(made) for made in loaded.objects] == [TrainingJob, TrainingPool]
    assert loaded.skipped == ["Secret"]


def test_says_file_line_document_field_fault_and_cure() -> None:
    text = f"{JOB}---\n{JOB}  hyperparameters:\n    epochs: '10'\n    lr: 0.1\n"
    assert complaints(text) == [
        'job.yaml:14: document 2: spec.hyperparameters.lr: must be of type string: "number" (put it in quotes: "0.1")'
    ]


def test_finds_every_mistake_in_the_order_of_the_file() -> None:
    text = JOB + "  numNodes: '2'\n  pools:\n  - name: a\n  - nam: b\n  timeouts: {runtime: 29d}\n"
    assert complaints(text) == [
        'job.yaml:6: document 1: spec.numNodes: must be of type integer: "string" (write it without quotes)',
        "job.yaml:9: document 1: spec.pools[1].name: Required value (Name of the TrainingPool)",
        'job.yaml:9: document 1: spec.pools[1].nam: unknown field "spec.pools[1].nam" (did you mean name?)',
        "job.yaml:10: document 1: spec.timeouts.runtime: must be between 1s and 28d",
    ]


def test_unknown_field_without_a_likeness_lists_the_known_ones() -> None:
    assert complaints(JOB + "  restart: {zzz: 1}\n")[0].endswith(
        "(known fields: application, fencing, infrastructure, maxBackoff, onExitCodes, resetAfter, window)"
    )


def test_duration_says_how_to_write_it() -> None:
    assert complaints(JOB + "  timeouts: {startup: 5 minutes}\n")[0].endswith("(write it like 45s, 10m, 1h30m or 2d)")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no object in the file"),
        ("- a\n", 'must be of type object: "array"'),
        ("kind: TrainingJob\n", "apiVersion: Required value"),
        ("apiVersion: everstep.dev/v2\nkind: A\n", 'no matches for kind "A" in version "everstep.dev/v2"'),
        ("apiVersion: everstep.dev/v1alpha1\nkind: Job\n", "everstep.dev/v1alpha1 has TrainingJob and TrainingPool"),
        ("apiVersion: everstep.dev/v1alpha1\nkind: TrainingJob\nspec: {}\n", "metadata.name: Required value"),
        (JOB.replace("{name: digits}", ""), "metadata.name: Required value"),
        (JOB.replace("name: digits", "name: 9"), "metadata.name: must be of type string"),
        (JOB + "  image: y\n", 'job.yaml:6: document 1: <object>: no valid YAML: key "image" already set in map'),
        (JOB + " x: [\n", "no valid YAML"),
        ("a: *b\n", "no valid YAML: found undefined alias"),
        ("a: !!python/object:os.system {}\n", "no valid YAML: could not determine a constructor"),
    ],
)  # fmt: skip
def test_what_is_no_object_of_ours(text: str, says: str) -> None:
    assert says in "\n".join(complaints(text))


def only(text: str) -> Any:
    (document,) = load_documents(text)
    return document.data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("y", True), ("No", False), ("on", True), ("-5", -5),
        ("12:30", "12:30"), ("1e3", 1000.0), ("010", 8), ("0o10", 8), ("08", 8.0),
        ("0x1F", 31), ("1_000", 1000), ("2024-01-01", "2024-01-01"), ("~", None), ("null", None), ("1.", 1.0),
        ("'1'", "1"), ("1Gi", "1Gi"), ("0", 0), ("=", "="),
    ],
)  # fmt: skip
def test_values_are_what_kubectl_makes_of_them(text: str, value: object) -> None:
    read = only(f"a: {text}\n")["a"]
    assert read == value
    assert type(read) is type(value)


def test_keys_are_strings_and_may_be_merged() -> None:
    assert only("{1: a, true: b}\n") == {"1": "a", "true": "b"}
    assert only("base: &b {x: 1, y1: 2}\nall: {<<: *b, y1: 3}\n")["all"] == {"x": 1, "y1": 3}


def test_a_key_that_is_no_word_is_refused() -> None:
    for text in ("? [a, b]\n: c\n", "~: c\n"):
        with pytest.raises(YamlError, match="plain word"):
            only(text)


@pytest.mark.parametrize("indent", [None, 2, "\t"])
def test_json_is_read_as_json(indent: Any) -> None:
    said = {"lr": "\U0001f600 \\ud83d\\ude00 a\tb / é", "path": "C:\\ud83d"}
    body = {"apiVersion": "everstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "digits"}}
    text = json.dumps({**body, "spec": {"image": "i", "hyperparameters": said}}, indent=indent)
    (job,) = load_text(text, "job.json").objects
    assert isinstance(job, TrainingJob)
    assert dict(job.spec.hyperparameters) == said


@pytest.mark.parametrize("text", ["a: \0", "{a: " * 5000 + "}" * 5000])
def test_what_no_parser_reads_is_refused_with_a_line(text: str) -> None:
    with pytest.raises(ManifestError, match=r"job.yaml:1: document 1: .*no valid YAML"):
        load_text(text, "job.yaml")


def test_a_list_is_its_items() -> None:
    item = "- " + JOB.rstrip().replace("\n", "\n  ")
    loaded = load_text(f"apiVersion: v1\nkind: List\nitems:\n{item}\n- {{apiVersion: v1, kind: Secret}}\n", "job.yaml")
    assert [type(made) for made in loaded.objects] == [TrainingJob]
    assert loaded.skipped == ["Secret"]
    assert complaints(f"apiVersion: v1\nkind: List\nitems:\n{item}\n    nodes: 2\n") == [
        'job.yaml:9: document 1: items[0].spec.nodes: unknown field "spec.nodes" (did you mean numNodes?)'
    ]
    assert complaints("apiVersion: v1\nkind: List\n") == [
        'job.yaml:1: document 1: items: must be of type array: "null"'
    ]


@pytest.mark.parametrize("spec", ["&x {image: x, podTemplate: {spec: {affinity: *x}}}", "&x [*x]"])
def test_a_value_that_contains_itself_is_no_manifest(spec: str) -> None:
    text = f"apiVersion: everstep.dev/v1alpha1\nkind: TrainingJob\nmetadata: {{name: digits}}\nspec: {spec}\n"
    assert complaints(text) == ["job.yaml:1: document 1: <object>: no valid YAML: an anchor's value contains itself"]


def test_a_number_of_any_length_is_a_number() -> None:
    (found,) = complaints(f"{JOB}  hyperparameters: {{a: {'9' * 5000}}}\n")
    assert found.startswith("job.yaml:6: document 1: spec.hyperparameters.a: must be of type string")


def test_aliases_of_aliases_are_looked_at_once() -> None:
    """Each of 40 values refers twice to the one before: followed one by one, that were 2**40."""
    values = "".join(f"  - &v{number} [*v{number - 1}, *v{number - 1}]\n" for number in range(1, 41))
    assert len(next(iter(load_documents(f"v:\n  - &v0 [x]\n{values}"))).data["v"]) == 41
