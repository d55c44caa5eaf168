"""`everstep.checkpointer()` without arguments takes them from the job; a script's own arguments win."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.publish.fence import get_given_attempt
from everstep.checkpoint.session.job_arguments import fill_arguments, find_default_store

NOTHING = {"store": None, "every": None, "every_steps": None, "keep_last": None}
JOB = {"store": "s3://bucket/run", "every": "5m", "every_steps": 500, "keep_last": 2}


def filled(job: dict[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    environ = {} if job is None else {"EVERSTEP_CHECKPOINT": json.dumps(job)}
    return fill_arguments({**NOTHING, **given}, environ)


def test_a_script_that_says_nothing_gets_all_of_it_from_the_job() -> None:
    assert filled(JOB) == JOB


def test_what_a_script_says_wins() -> None:
    assert filled(JOB, store="/data", keep_last=9) == {**JOB, "store": "/data", "keep_last": 9}


@pytest.mark.parametrize("said", [{"every": "1h"}, {"every_steps": 7}])
def test_a_script_that_says_when_it_saves_says_all_of_it(said: dict[str, Any]) -> None:
    assert filled(JOB, **said) == {**JOB, "every": None, "every_steps": None, **said}


def test_without_a_job_there_is_a_folder_beside_the_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert filled() == {**NOTHING, "store": str(tmp_path / "checkpoints"), "keep_last": 3}


def test_a_job_that_says_nothing_has_the_folder_of_the_container_contract() -> None:
    environ = {"EVERSTEP_JOB": "digits", "SM_MODEL_DIR": "/opt/ml/model"}
    assert find_default_store(environ) == "/opt/ml/checkpoints"


def test_a_job_whose_nodes_share_no_place_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"missing": "the job digits has 2 nodes and no store that they share: set spec.checkpoint.store"}
    with pytest.raises(CheckpointError, match=r"set spec\.checkpoint\.store"):
        filled(said)
    assert filled(said, store="/shared")["store"] == "/shared"
    monkeypatch.setenv("EVERSTEP_CHECKPOINT", json.dumps(said))
    assert not everstep.has_checkpoint_store()
    monkeypatch.setenv("EVERSTEP_CHECKPOINT", json.dumps(JOB))
    assert everstep.has_checkpoint_store()


def test_a_store_without_a_name_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a template writes it of a value that is not set."""
    monkeypatch.chdir(tmp_path)
    assert filled({"store": ""}) == filled()
    monkeypatch.setenv("EVERSTEP_CHECKPOINT", '{"store": ""}')
    assert everstep.has_checkpoint_store()
    with pytest.raises(CheckpointError, match="no store that they share"):
        filled({"store": "", "missing": "the job digits has 2 nodes and no store that they share"})


@pytest.mark.parametrize("text", ["s3://bucket", "[]", "{"])
def test_what_is_no_object_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"EVERSTEP_CHECKPOINT is .* and must be a JSON object"):
        fill_arguments(NOTHING, {"EVERSTEP_CHECKPOINT": text})


def test_words_of_a_newer_operator_are_left_alone() -> None:
    environ = {"EVERSTEP_JOB": "digits", "EVERSTEP_CHECKPOINT": json.dumps({**JOB, "compression": "zstd"})}
    assert fill_arguments(NOTHING, environ) == JOB


@pytest.mark.parametrize("wrong", ["keepLast", "everySteps", "every_step", "keep_best"])
def test_a_name_that_nobody_knows_is_refused_without_a_job(wrong: str) -> None:
    """As a manifest spells it: the default would remove checkpoints that were to stay."""
    with pytest.raises(ValueError, match=rf"EVERSTEP_CHECKPOINT has '{wrong}', and may have .*keep_last"):
        filled({"store": "/data", wrong: 9})


def test_attempts_of_runs_on_one_machine_are_counted_by_what_is_in_the_store() -> None:
    given = {"EVERSTEP_EPOCH": "1", "EVERSTEP_GENERATION": "2"}
    assert get_given_attempt(given) is not None
    assert get_given_attempt({**given, "EVERSTEP_ATTEMPT": "counted"}) is None
