"""A store is one job's: another cannot take it, however often it starts, and the job itself goes on under its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from everstep.checkpoint.catalog.candidates import list_candidates
from everstep.checkpoint.errors import StoreError
from everstep.checkpoint.format.keys import ATTEMPTS, Attempt
from everstep.checkpoint.publish import attempts
from everstep.checkpoint.publish.attempts import OWNER, RunIdentity, StoreTaken, Superseded
from everstep.checkpoint.publish.copying import copy_checkpoint
from everstep.checkpoint.publish.fence import explain_fence, get_given_attempt
from everstep.checkpoint.publish.publisher import Publisher, publish_folder
from everstep.checkpoint.store.base import Store
from everstep.checkpoint.store.posix import PosixStore


def claim(store: Store, job: str, attempt: str) -> None:
    attempts.claim_for_job(store, job)
    attempts.claim_given_attempt(store, Attempt(*map(int, attempt.split("."))), RunIdentity(job, ("machine",)))


def test_another_job_is_refused_at_each_of_its_starts(store: Store) -> None:
    claim(store, "team/first", "1795712345.1")
    for generation in range(1, 5):
        with pytest.raises(StoreTaken, match="is the store of job team/first, and this is job team/second: give each"):
            claim(store, "team/second", f"1795719999.{generation}")
    claim(store, "team/first", "1795712345.2")


def test_a_job_of_the_same_name_in_another_namespace_is_another_job(store: Store) -> None:
    claim(store, "team/digits", "1795712345.1")
    with pytest.raises(StoreTaken, match="job team/digits, and this is job others/digits"):
        claim(store, "others/digits", "1795719999.1")


def test_of_two_jobs_that_begin_at_once_one_has_the_store(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put_if_absent = store.put_if_absent

    def lose(name: str, data: bytes) -> bool:
        if name == OWNER:
            assert put_if_absent(OWNER, b"team/first")
        return put_if_absent(name, data)

    monkeypatch.setattr(store, "put_if_absent", lose)
    with pytest.raises(StoreTaken, match="job team/first"):
        attempts.claim_for_job(store, "team/second")


@pytest.mark.parametrize("told", ["first", "team/first", "team/first/5b1c-uid"])
def test_a_store_of_before_stores_had_jobs_is_that_of_its_last_one(store: Store, told: str) -> None:
    store.put_if_absent(f"{ATTEMPTS}{Attempt(1, 1)}", json.dumps({"job": "old", "machines": []}).encode())
    store.put_if_absent(f"{ATTEMPTS}{Attempt(2, 1)}", json.dumps({"job": told, "machines": []}).encode())
    store.put_if_absent(f"{ATTEMPTS}{Attempt(2, 2)}", b"")  # counted
    with pytest.raises(StoreTaken, match="is the store of job"):
        attempts.claim_for_job(store, "team/second")
    attempts.claim_for_job(store, "team/first")
    attempts.claim_for_job(store, "team/first")
    with pytest.raises(StoreTaken, match="job team/first"):
        attempts.claim_for_job(store, "team/old")


@pytest.mark.parametrize("is_named", [True, False], ids=["of now", "of before stores had jobs"])
def test_who_is_refused_has_the_store_once_a_person_has_written_so_into_it(store: Store, is_named: bool) -> None:
    store.put_if_absent(f"{ATTEMPTS}{Attempt(2, 1)}", json.dumps({"job": "team/first", "machines": []}).encode())
    if is_named:
        attempts.claim_for_job(store, "team/first")
    with pytest.raises(StoreTaken, match=f"write team/second into {OWNER} in it"):
        attempts.claim_for_job(store, "team/second")
    store.replace(OWNER, b"team/second\n")  # as by echo
    claim(store, "team/second", "1795719999.1")
    with pytest.raises(StoreTaken, match="is the store of job team/second, and this is job team/first"):
        attempts.claim_for_job(store, "team/first")


def test_who_publishes_folders_in_another_jobs_store_is_refused(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / "model").write_text("weights")
    for job, attempt in (("first", "1795712347.1"), ("second", "1795719999.1")):
        for name, value in (("JOB_NAMESPACE", "team"), ("JOB", job), ("ATTEMPT", attempt)):
            monkeypatch.setenv(f"EVERSTEP_{name}", value)
        if job == "first":
            publish_folder(store, tmp_path / "step-7")
            continue
        with pytest.raises(StoreTaken, match="job team/first, and this is job team/second"):
            publish_folder(store, tmp_path / "step-7")
        (tmp_path / "step-7" / "model").write_text("others")
        with pytest.raises(StoreTaken, match="job team/first, and this is job team/second"):
            Publisher(store, tmp_path, quiet=0, each="step-*").poll()
    assert [key.attempt.epoch for key in list_candidates(store)] == [1795712347]


def test_a_job_that_is_older_than_what_was_copied_into_its_store_is_told_what_to_do(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "model").write_text("weights")
    other = PosixStore(tmp_path / "of the first job")
    for job, attempt in (("first", "1795719999.1"), ("second", "1795712347.1"), ("second", "1795720005.1")):
        for name, value in (("JOB_NAMESPACE", "team"), ("JOB", job), ("ATTEMPT", attempt)):
            monkeypatch.setenv(f"EVERSTEP_{name}", value)
        if job == "first":
            key = publish_folder(other, tmp_path / "files", step=1).key
            copy_checkpoint(other, store, key)
        elif attempt < "1795719999":
            with pytest.raises(Superseded, match="as a later attempt: delete the job and apply it again"):
                publish_folder(store, tmp_path / "files", step=2)
        else:
            publish_folder(store, tmp_path / "files", step=2)
    assert [key.step for key in list_candidates(store)] == [2, 1]


def test_a_run_without_a_job_claims_no_store(store: Store) -> None:
    attempts.claim_for_job(store, "")
    claim(store, "team/first", "1.1")
    attempts.claim_for_job(store, "")


def test_a_store_that_is_unavailable_is_not_taken_for_ones_own(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> bytes:
        raise StoreError("no answer", store.url, may_pass=True)

    monkeypatch.setattr(store, "read", fail)
    with pytest.raises(StoreError, match="no answer"):
        attempts.claim_for_job(store, "team/first")


def test_an_agent_names_the_attempt_and_its_fence_speaks_of_the_same(tmp_path: Path) -> None:
    variables = {"EVERSTEP_EPOCH": "2", "EVERSTEP_GENERATION": "3", "EVERSTEP_ATTEMPT": "1795712347.3"}
    given = get_given_attempt(variables)
    assert given == Attempt(1795712347, 3)
    fence = tmp_path / "fence.json"
    fence.write_text(json.dumps({"epoch": 2, "generation": 3, "attempt": "1795712347.3", "fenced": False}))
    assert explain_fence(given, fence) is None
    fence.write_text(json.dumps({"epoch": 2, "generation": 4, "attempt": "1795712347.4", "fenced": False}))
    assert "runs now" in str(explain_fence(given, fence))
    fence.write_text(json.dumps({"epoch": 2, "generation": 3, "attempt": 7, "fenced": False}))
    assert "cannot be read" in str(explain_fence(given, fence))


def test_an_older_agent_names_none_and_epochs_count(tmp_path: Path) -> None:
    given = get_given_attempt({"EVERSTEP_EPOCH": "2", "EVERSTEP_GENERATION": "3"})
    fence = tmp_path / "fence.json"
    fence.write_text(json.dumps({"epoch": 2, "generation": 3, "fenced": False}))
    assert given == Attempt(2, 3)
    assert explain_fence(given, fence) is None
