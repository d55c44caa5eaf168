"""Runs on this machine: one that did not succeed is continued, one that did is not."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from everstep.cli.errors import CliError
from everstep.cli.local_checkpoints import LocalCheckpoints, find_default_base


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("EVERSTEP_CHECKPOINT", raising=False)


def leave_checkpoint(base: Path) -> LocalCheckpoints:
    checkpoints = LocalCheckpoints(base, {})
    (checkpoints.folder / "manifests").mkdir(parents=True)
    return checkpoints


def test_the_same_manifest_goes_on_in_the_same_folder(tmp_path: Path) -> None:
    base = find_default_base("digits", tmp_path / "job.yaml")
    leave_checkpoint(base)
    assert find_default_base("digits", tmp_path / "job.yaml") == base
    assert LocalCheckpoints(base, {}).continues
    assert find_default_base("digits", tmp_path / "other.yaml") != base


def test_after_a_success_the_next_run_begins_anew(tmp_path: Path) -> None:
    base = find_default_base("digits", tmp_path / "job.yaml")
    done = leave_checkpoint(base)
    done.note_success()
    assert find_default_base("digits", tmp_path / "job.yaml") != base
    again = LocalCheckpoints(base, {})
    assert not again.continues
    assert again.folder == done.folder
    assert (base / "checkpoints" / "1" / "manifests").exists(), "what was trained stays"


def test_whoever_asks_begins_anew(tmp_path: Path) -> None:
    base = find_default_base("digits", tmp_path / "job.yaml")
    first = leave_checkpoint(base).folder
    assert find_default_base("digits", tmp_path / "job.yaml", anew=True) != base
    anew = LocalCheckpoints(base, {}, anew=True)
    assert not anew.continues
    assert first.exists(), "what was trained stays"
    assert LocalCheckpoints(base, {}).folder == anew.folder


def test_another_job_in_the_same_folder_does_not_go_on_from_checkpoints_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would train on with the weights of the other one, and succeed."""
    first = leave_checkpoint(tmp_path)
    LocalCheckpoints(tmp_path, {}).claim("digits")  # an earlier version has left nobody's name
    LocalCheckpoints(tmp_path, {}).claim("digits")
    with pytest.raises(CliError, match="of the job digits, which has not succeeded yet: give letters another folder"):
        LocalCheckpoints(tmp_path, {}).claim("letters")
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("EVERSTEP_CHECKPOINT", '{"store": "s3://bucket/letters"}')
        LocalCheckpoints(tmp_path, {}).claim("letters")
    anew = LocalCheckpoints(tmp_path, {}, anew=True)
    anew.claim("letters")
    (anew.folder / "manifests").mkdir(parents=True)
    with pytest.raises(CliError, match="of the job letters"):
        LocalCheckpoints(tmp_path, {}).claim("digits")
    anew.note_success()
    LocalCheckpoints(tmp_path, {}).claim("digits")
    assert first.folder.exists(), "what was trained stays"


def test_a_link_in_the_folder_for_all_that_is_not_ours_is_not_followed(tmp_path: Path) -> None:
    base = find_default_base("digits", tmp_path / "job.yaml")
    links = next(tmp_path.glob("everstep-*/digits-*")).parent
    links.rename(tmp_path / "kept")
    links.symlink_to(tmp_path / "kept")
    assert find_default_base("digits", tmp_path / "job.yaml") != base


def test_the_store_of_a_cluster_is_not_written_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = LocalCheckpoints(tmp_path, {"store": "s3://bucket/run", "every_steps": 5})
    said = json.loads(checkpoints.make_variables()["EVERSTEP_CHECKPOINT"])
    assert said == {"store": str(checkpoints.folder), "every_steps": 5}
    assert any("not in s3://bucket/run" in note for note in checkpoints.list_notes())
    monkeypatch.setenv("EVERSTEP_CHECKPOINT", '{"store": "s3://mine"}')
    assert checkpoints.make_variables()["EVERSTEP_CHECKPOINT"] == '{"store": "s3://mine"}'
    assert checkpoints.list_notes() == []
