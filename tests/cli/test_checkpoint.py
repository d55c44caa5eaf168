"""`everstep checkpoint …` as a user runs it: what it says and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint.catalog.candidates import list_candidates, read_manifest
from everstep.checkpoint.catalog.verification import verify_and_mark
from everstep.checkpoint.errors import StoreError
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.publish import folder as folders
from everstep.checkpoint.store.base import Store, open_store
from everstep.cli import checkpoint_folder
from tests.checkpoint.builders import Training, key
from tests.cli.command import Done

Everstep = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path) -> Store:
    """A store `run` with steps 10, 20 and 30 of a training."""
    store = open_store(tmp_path / "run")
    for step in (10, 20, 30):
        Training().save(store, key(step))
    return store


def damage(folder: Path, key: Key) -> None:
    part = folder / key.part_name(1)
    data = bytearray(part.read_bytes())
    data[5000] ^= 1
    part.write_bytes(data)


def test_help_names_every_command_and_the_exit_codes(everstep: Everstep) -> None:
    done = everstep("checkpoint", "--help")
    assert done.returncode == 0
    for command in ("ls", "verify", "show", "diff", "prune", "copy", "publish", "restore", "export", "import"):
        assert f"\n  {command} " in done.stdout
    assert "Exit codes: 0" in done.stdout
    assert "..." not in done.stdout.partition("Commands:")[2]


def test_ls_shows_the_newest_first(everstep: Everstep, run: Store) -> None:
    done = everstep("checkpoint", "ls", "run")
    assert done.returncode == 0
    header, *lines = done.stdout.splitlines()
    assert header.split()[:5] == ["STEP", "ATTEMPT", "AGE", "SIZE", "RANKS"]
    assert [line.split()[:2] for line in lines] == [["30", "0.1"], ["20", "0.1"], ["10", "0.1"]]


def test_ls_for_programs(everstep: Everstep, run: Store, tmp_path: Path) -> None:
    (tmp_path / "run" / key(20).manifest_name).write_text("{")
    done = everstep("checkpoint", "ls", "run", "--json")
    newest, broken, _ = map(json.loads, done.stdout.splitlines())
    assert (newest["step"], newest["world"], newest["tensors"]) == (30, 2, 2)
    assert newest["bytes"] == sum(len(Training().part(key(30), rank)[0]) for rank in range(2))
    assert "is no manifest" in broken["damaged"]


def test_nothing_is_no_error_for_ls_and_one_for_verify_and_prune(everstep: Everstep) -> None:
    done = everstep("checkpoint", "ls", "run")
    assert (done.returncode, done.stdout) == (0, "")
    assert "no checkpoints" in done.stderr
    for command in (["verify", "run"], ["prune", "run", "--keep-last", "1"]):
        done = everstep("checkpoint", *command)
        assert done.returncode == 3
        assert "there are no checkpoints in" in done.stderr


def test_verify_reads_what_was_asked_for(everstep: Everstep, run: Store, tmp_path: Path) -> None:
    damage(tmp_path / "run", key(20))
    done = everstep("checkpoint", "verify", "run")
    assert (done.returncode, done.stdout.split(",")[0]) == (0, "0.1-30 is good")
    done = everstep("checkpoint", "verify", "run", "--key", "20")
    assert done.returncode == 3
    assert f"0.1-20 is not good: {key(20).part_name(1)}: bytes" in done.stderr
    done = everstep("checkpoint", "verify", "run", "--all")
    assert done.returncode == 3
    assert [line.split(",")[0] for line in done.stdout.splitlines()] == ["0.1-30 is good", "0.1-10 is good"]


@pytest.mark.parametrize("wanted", ["40", "2.1-30"])
def test_a_checkpoint_that_is_not_there(everstep: Everstep, run: Store, wanted: str) -> None:
    done = everstep("checkpoint", "show", "run", "--key", wanted)
    assert done.returncode == 3
    assert f"there is no checkpoint {wanted}" in done.stderr
    assert "choose one of 0.1-30, 0.1-20, 0.1-10" in done.stderr


def test_what_is_no_key_or_no_store_is_wrong_usage(everstep: Everstep, run: Store) -> None:
    done = everstep("checkpoint", "show", "run", "--key", "last")
    assert done.returncode == 2
    assert "'last' is not a checkpoint" in done.stderr
    done = everstep("checkpoint", "ls", "carrier-pigeon://coop")
    assert done.returncode == 1
    assert "no store serves carrier-pigeon://" in done.stderr


def test_show_tells_tensors_and_values(everstep: Everstep, run: Store) -> None:
    done = everstep("checkpoint", "show", "run", "--key", "0.1-20", "--values")
    assert done.returncode == 0
    assert "checkpoint  0.1-20" in done.stdout
    assert [line.split()[:2] for line in done.stdout.splitlines() if "uint8" in line] == [
        ["own", "uint8"],
        ["shared", "uint8"],
    ]
    assert "rank.1.seed" in done.stdout
    manifest = json.loads(everstep("checkpoint", "show", "run", "--json").stdout)
    assert (manifest["format"], manifest["step"]) == (2, 30)


def test_diff_names_what_differs(everstep: Everstep, run: Store, tmp_path: Path) -> None:
    done = everstep("checkpoint", "diff", "run", "--other-key", "20")
    assert done.returncode == 3
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        "own",
        "shared",
        "rank.0.seed",
        "rank.1.seed",
        "step",
    ]
    everstep("checkpoint", "copy", "run", "other")
    done = everstep("checkpoint", "diff", "run", "other")
    assert done.returncode == 0
    assert "have the same content" in done.stderr
    assert everstep("checkpoint", "diff", "run").returncode == 2


def test_prune_keeps_the_newest_good_one(everstep: Everstep, run: Store, tmp_path: Path) -> None:
    damage(tmp_path / "run", key(30))
    done = everstep("checkpoint", "prune", "run", "--keep-last", "1", "--dry-run")
    assert (done.returncode, done.stdout) == (0, "0.1-10 would be removed\n")
    assert len(list_candidates(run)) == 3
    done = everstep("checkpoint", "prune", "run", "--keep-last", "1")
    assert (done.returncode, done.stdout) == (0, "0.1-10 is removed\n")
    assert "0.1-30 is not good" in done.stderr
    assert list_candidates(run) == [key(30), key(20)]
    damage(tmp_path / "run", key(20))
    done = everstep("checkpoint", "prune", "run", "--keep-last", "1")
    assert done.returncode == 3
    assert "nothing was removed" in done.stderr


def test_prune_takes_how_many_of_the_best_stay(everstep: Everstep, run: Store) -> None:
    done = everstep("checkpoint", "prune", "run", "--keep-last", "1", "--keep-best", "1", "--best-mode", "most")
    assert (done.returncode, "--best-mode most: give min or max" in done.stderr) == (2, True)
    options = ["--best-metric", "accuracy", "--best-mode", "max"]
    done = everstep("checkpoint", "prune", "run", "--keep-last", "2", *options)
    assert (done.returncode, "give --keep-best" in done.stderr) == (2, True)
    assert list_candidates(run) == [key(30), key(20), key(10)]


def test_prune_removes_nothing_where_no_checkpoint_has_the_number_of_the_best(everstep: Everstep, run: Store) -> None:
    options = ["--keep-best", "1", "--best-metric", "accuracy", "--best-mode", "max"]
    for more in ([], ["--dry-run"]):
        done = everstep("checkpoint", "prune", "run", "--keep-last", "2", *options, *more)
        assert (done.returncode, done.stdout) == (1, "")
        assert "none of 3 checkpoints has a number called 'accuracy' in its metadata; there are" in done.stderr
        assert "nothing is removed" in done.stderr
    assert list_candidates(run) == [key(30), key(20), key(10)]
    done = everstep("checkpoint", "prune", "run", "--keep-last", "3", *options)
    assert (done.returncode, done.stdout) == (0, ""), "none would go"


def test_prune_believes_no_mark(everstep: Everstep, run: Store, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        verify_and_mark(run, key(step))
    damage(tmp_path / "run", key(20))
    done = everstep("checkpoint", "prune", "run", "--keep-last", "2")
    assert (done.returncode, done.stdout) == (0, "")
    assert "0.1-20 is not good" in done.stderr
    assert list_candidates(run) == [key(30), key(20), key(10)]


def test_copy_takes_all_or_one(everstep: Everstep, run: Store, tmp_path: Path) -> None:
    assert everstep("checkpoint", "copy", "run", "one", "--key", "20").returncode == 0
    assert list_candidates(open_store(tmp_path / "one")) == [key(20)]
    assert everstep("checkpoint", "copy", "run", "all", "--all").returncode == 0
    assert list_candidates(open_store(tmp_path / "all")) == list_candidates(run)
    again = everstep("checkpoint", "copy", "run", "one", "--key", "20")
    assert (again.returncode, "exists already, and is good" in again.stdout) == (0, True)
    damage(tmp_path / "one", key(20))
    again = everstep("checkpoint", "copy", "run", "one", "--key", "20")
    assert (again.returncode, "was not good, and is repaired" in again.stdout) == (0, True)
    assert everstep("checkpoint", "verify", "one").returncode == 0


def test_of_a_step_the_greatest_attempt_that_is_good_is_taken(everstep: Everstep, run: Store, tmp_path: Path) -> None:
    Training().save(run, key(20, 2))
    damage(tmp_path / "run", key(20, 2))
    done = everstep("checkpoint", "verify", "run", "--key", "20")
    assert (done.returncode, done.stdout.split(",")[0]) == (3, "0.1-20 is good")
    assert "0.2-20 is not good" in done.stderr
    done = everstep("checkpoint", "copy", "run", "one", "--key", "20")
    assert done.returncode == 0, done.stderr
    assert "0.2-20 is skipped" in done.stderr
    assert list_candidates(open_store(tmp_path / "one")) == [key(20)]
    done = everstep("checkpoint", "copy", "run", "two", "--key", "0.2-20")
    assert done.returncode == 3
    (tmp_path / "run" / key(20, 2).manifest_name).write_text("{")
    assert "checkpoint  0.1-20" in everstep("checkpoint", "show", "run", "--key", "20").stdout


def test_copy_takes_the_newest_that_is_good_and_of_all_those_that_are(
    everstep: Everstep, run: Store, tmp_path: Path
) -> None:
    damage(tmp_path / "run", key(30))
    done = everstep("checkpoint", "copy", "run", "newest")
    assert (done.returncode, done.stdout.split(" is")[0]) == (0, "0.1-20"), done.stderr
    assert f"0.1-30 is skipped: {key(30).part_name(1)}: bytes" in done.stderr
    assert list_candidates(open_store(tmp_path / "newest")) == [key(20)]
    damage(tmp_path / "run", key(20))
    damage(tmp_path / "run", key(30))  # the same bit again: it is good
    done = everstep("checkpoint", "copy", "run", "every", "--all")
    assert done.returncode == 3
    assert f"0.1-20 is skipped: {key(20).part_name(1)}: bytes" in done.stderr
    assert list_candidates(open_store(tmp_path / "every")) == [key(30), key(10)]
    for step in (10, 30):
        damage(tmp_path / "run", key(step))
    for command in (["copy", "run", "none"], ["copy", "run", "none", "--all"]):
        done = everstep("checkpoint", *command)
        assert (done.returncode, done.stdout) == (3, "")
        assert all(f"0.1-{step} is" in done.stderr or key(step).part_name(1) in done.stderr for step in (10, 20, 30))
    assert list_candidates(open_store(tmp_path / "none")) == []


def test_show_and_diff_pass_over_what_cannot_be_read(everstep: Everstep, run: Store, tmp_path: Path) -> None:
    (tmp_path / "run" / key(30).manifest_name).write_text("{")
    done = everstep("checkpoint", "show", "run")
    assert "checkpoint  0.1-20" in done.stdout
    assert "0.1-30 is skipped" in done.stderr
    assert everstep("checkpoint", "show", "run", "--key", "30").returncode == 3
    assert (
        "0.1-20 and 0.1-20 have the same content" in everstep("checkpoint", "diff", "run", "--other-key", "20").stderr
    )


def test_a_folder_is_published_and_restored(everstep: Everstep, tmp_path: Path) -> None:
    model = tmp_path / "checkpoint-7" / "model.bin"
    model.parent.mkdir()
    model.write_bytes(os.urandom(1000))
    done = everstep("checkpoint", "publish", "checkpoint-7", "store")
    assert (done.returncode, done.stdout) == (0, "checkpoint-7 is published as 0.1-7\n")
    done = everstep("checkpoint", "restore", "store", "back")
    assert (done.returncode, done.stdout) == (0, "back is restored from 0.1-7\n")
    assert (tmp_path / "back" / "model.bin").read_bytes() == model.read_bytes()
    done = everstep("checkpoint", "restore", "store", "back")
    assert done.returncode == 1
    assert "not empty" in done.stderr
    assert everstep("checkpoint", "restore", "store", "back", "--replace").returncode == 0


def test_a_first_start_has_nothing_to_restore(everstep: Everstep, tmp_path: Path) -> None:
    assert everstep("checkpoint", "restore", "store", "back").returncode == 3
    done = everstep("checkpoint", "restore", "store", "back", "--if-any")
    assert done.returncode == 0
    assert not (tmp_path / "back").exists()


def test_a_program_that_starts_again_keeps_the_folder_that_it_left(everstep: Everstep, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("stored")
    everstep("checkpoint", "publish", "model", "store", "--step", "1")
    (tmp_path / "back").mkdir()
    assert everstep("checkpoint", "restore", "store", "back", "--if-empty").returncode == 0
    (tmp_path / "back" / "weights").write_text("newer")
    done = everstep("checkpoint", "restore", "store", "back", "--if-any", "--if-empty")
    assert (done.returncode, "left as it is" in done.stderr) == (0, True)
    assert (tmp_path / "back" / "weights").read_text() == "newer"


def test_of_pods_that_restore_into_one_volume_the_first_is_enough(
    everstep: Everstep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("stored")
    everstep("checkpoint", "publish", "model", "store", "--step", "1")
    fill = folders._fill_folder

    def fill_beside_another(*args: Any) -> None:
        fill(*args)
        (tmp_path / "back").mkdir()
        (tmp_path / "back" / "weights").write_text("of the first")

    monkeypatch.setattr(folders, "_fill_folder", fill_beside_another)
    done = everstep("checkpoint", "restore", "store", "back", "--if-any", "--if-empty")
    assert (done.returncode, "restored by another process" in done.stderr) == (0, True)
    assert (tmp_path / "back" / "weights").read_text() == "of the first"


def test_a_store_that_is_unavailable_for_a_moment_is_waited_for(
    everstep: Everstep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("stored")
    everstep("checkpoint", "publish", "model", "store", "--step", "1")
    read, failed = read_manifest, [0]

    def fail_twice(*args: Any) -> Any:
        failed[0] += 1
        if failed[0] <= 2:
            raise StoreError("no answer", "store", may_pass=True)
        return read(*args)

    monkeypatch.setattr(folders, "read_manifest", fail_twice)
    monkeypatch.setattr(checkpoint_folder, "PAUSE_SECONDS", 0.0)
    done = everstep("checkpoint", "restore", "store", "back", "--wait", "0")
    assert (done.returncode, "no answer" in done.stderr) == (1, True)
    failed[0] = 0
    done = everstep("checkpoint", "restore", "store", "back", "--wait", "600")
    assert (done.returncode, done.stderr.count("not restored yet, trying again")) == (0, 2)
    assert (tmp_path / "back" / "weights").read_text() == "stored"


@pytest.mark.parametrize("epoch", ["1", "7", "9"])
def test_a_store_that_another_job_has_used_is_refused_before_the_program_starts(
    everstep: Everstep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epoch: str
) -> None:
    """Whatever its attempts: an earlier, the same or a later one."""
    command = ("checkpoint", "restore", "store", "back", "--if-any", "--if-empty", "--resume")

    def begin(job: str, epoch: str) -> Done:
        for name, value in (("JOB", job), ("EPOCH", epoch), ("GENERATION", "0")):
            monkeypatch.setenv(f"EVERSTEP_{name}", value)
        return everstep(*command)

    assert begin("team/a/1", "7").returncode == 0
    assert begin("team/a/1", "7").returncode == 0, "an init container may run again"
    assert begin("team/a/2", "8" if epoch == "1" else "7").returncode == 0, "it was deleted and applied again"
    (tmp_path / "back").mkdir(exist_ok=True)
    (tmp_path / "back" / "left").write_text("by an earlier pod")
    done = begin("team/b/2", epoch)
    assert (done.returncode, "is the store of job team/a, and" in done.stderr) == (1, True), done.stderr


def test_a_pod_that_does_not_publish_restores_no_files_of_another_job(
    everstep: Everstep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no attempt: it may be of an earlier epoch than the one that publishes."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("of the first job")
    for job, attempt in (("team/a/1", "1795712348.0"), ("team/a/1", ""), ("team/b/2", "")):
        monkeypatch.setenv("EVERSTEP_JOB", job)
        monkeypatch.setenv("EVERSTEP_GENERATION", "0")
        monkeypatch.setenv("EVERSTEP_ATTEMPT", attempt)
        if attempt:
            assert everstep("checkpoint", "publish", "model", "store").returncode == 0
            continue
        into = job.replace("/", "-")
        done = everstep("checkpoint", "restore", "store", into, "--if-any", "--if-empty", "--resume")
        if job == "team/a/1":
            assert (tmp_path / into / "weights").read_text() == "of the first job", done.stderr
        else:
            assert (done.returncode, "is the store of job team/a, and" in done.stderr) == (1, True), done.stderr
            assert not (tmp_path / into).exists()


@pytest.mark.parametrize("command", ["restore s3://b/run back --wait 600", "publish back s3://b/run --watch"])
def test_whoever_waits_for_a_store_ends_when_it_is_told_to(tmp_path: Path, command: str) -> None:
    """A pod that is deleted meanwhile is not kept for its whole grace."""
    nowhere = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    process = subprocess.Popen(
        [sys.executable, "-m", "everstep.cli", "checkpoint", *command.split()],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **nowhere, "AWS_DEFAULT_REGION": "x", "COLUMNS": "200"},
    )
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert "yet, trying again" in said
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == (143 if command.startswith("restore") else 1)


def test_damaged_is_not_taken_for_a_first_start(everstep: Everstep, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(bytes(9000))
    everstep("checkpoint", "publish", "model", "store", "--step", "1")
    (part,) = (tmp_path / "store").rglob("*.part")
    part.write_bytes(part.read_bytes()[:-1])
    done = everstep("checkpoint", "restore", "store", "back", "--if-any")
    assert done.returncode == 3
    assert "no checkpoint is good" in done.stderr


def test_watching_publishes_until_it_is_told_to_stop(tmp_path: Path) -> None:
    watched = tmp_path / "watched"
    watched.mkdir()
    store = open_store(tmp_path / "store")
    command = [
        sys.executable,
        "-m",
        "everstep.cli",
        "checkpoint",
        "publish",
        "watched",
        "store",
        "--watch",
        "--marker",
        "DONE",
    ]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        (watched / "model").write_text("1")
        (watched / "DONE").write_text("1")
        deadline = time.monotonic() + 60
        while not list_candidates(store):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (watched / "model").write_text("2")
        (watched / "DONE").write_text("2")
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert out.splitlines() == ["watched is published as 0.1-0", "watched is published as 0.1-1"]
    assert [each.step for each in list_candidates(store)] == [1, 0]


def test_a_store_that_cannot_be_reached_is_named(everstep: Everstep) -> None:
    done = everstep("checkpoint", "ls", "s3://bucket/run?profile=nobody-has-this")
    assert done.returncode == 1
    assert done.stderr.startswith("everstep: s3://bucket/run?profile=nobody-has-this: ")
