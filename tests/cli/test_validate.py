"""`everstep validate`: every mistake, where it is, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.cli.command import Done

EXAMPLES = Path(__file__).parents[2] / "examples"
Everstep = Callable[..., Done]

HEAD = "apiVersion: everstep.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: x}\n"


def test_every_example_is_valid(everstep: Everstep) -> None:
    manifests = sorted(map(str, EXAMPLES.glob("*/trainingjob*.yaml")))
    assert manifests
    done = everstep("validate", *(word for manifest in manifests for word in ("-f", manifest)))
    assert done.returncode == 0, done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines() if "is valid" in line] == manifests


def test_all_mistakes_are_told_at_once_with_their_lines(everstep: Everstep, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(HEAD + "spec:\n  image: a\n  numNode: 2\n  timeouts: {runtime: 5x}\n")
    done = everstep("validate", "-f", "job.yaml")
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert first.startswith("job.yaml:6:")
    assert "did you mean numNodes?" in first
    assert second.startswith("job.yaml:7:")
    assert "spec.timeouts.runtime" in second


def test_one_bad_file_of_several_is_a_failure(everstep: Everstep, tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(HEAD + "spec: {image: a}\n")
    (tmp_path / "bad.yaml").write_text(HEAD + "spec: {}\n")
    done = everstep("validate", "-f", "good.yaml", "-f", "bad.yaml")
    assert done.returncode == 1
    assert "good.yaml: TrainingJob x is valid" in done.stdout
    assert "spec.image" in done.stderr


def test_a_manifest_can_come_through_a_pipe(everstep: Everstep) -> None:
    assert everstep("validate", "-f", "-", stdin=HEAD + "spec: {image: a}\n").returncode == 0


def test_objects_of_others_are_named_and_left_unchecked(everstep: Everstep) -> None:
    done = everstep("validate", "-f", "-", stdin="apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\n")
    assert done.returncode == 0
    assert "ConfigMap was not checked" in done.stdout


def test_a_missing_file_is_said_in_one_line(everstep: Everstep) -> None:
    done = everstep("validate", "-f", "nowhere.yaml")
    assert done.returncode == 1
    assert done.stderr == "everstep: nowhere.yaml: No such file or directory\n"
