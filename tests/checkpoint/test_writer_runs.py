"""One run after another on a node: what a writer takes over, leaves alone, and leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint.catalog.candidates import list_candidates
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.keys import RUN
from everstep.checkpoint.slots import slot_files
from everstep.checkpoint.slots.slots import Claim, SlotState
from everstep.checkpoint.store.base import open_store
from everstep.checkpoint.writer import control
from everstep.checkpoint.writer.control import WriterLost
from everstep.checkpoint.writer.writer import Writer
from tests.checkpoint.builders import key
from tests.checkpoint.s3_server import ENVIRONMENT
from tests.checkpoint.writers import PATIENCE, Node, Site, until


def test_a_new_attempt_finds_the_old_ones_writer_at_work(site: Site) -> None:
    old = site.node(nodes=2, world=2, ranks=(0,))  # waits for node 1
    old.save(key(10))
    until(lambda: old.slots[0].state is SlotState.STORED, "node 0 has written its part")
    old.die()
    new = site.node(attempt="0000000000.0000000002")
    assert new.pid == old.pid
    new.save(key(5, generation=2))
    new.report("saved")
    assert list_candidates(site.store) == [key(5, generation=2)]


@pytest.mark.integration
def test_a_run_that_begins_with_renewed_credentials_saves_by_a_writer_that_had_others(
    site: Site, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "has expired")
    old = site.node(url=s3_url)
    old.save(key(10))
    old.report("failed")
    old.die()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", ENVIRONMENT["AWS_SECRET_ACCESS_KEY"])
    new = site.node(url=s3_url, attempt="0000000000.0000000002")
    assert new.pid == old.pid
    new.save(key(20, generation=2))
    new.report("saved")
    assert list_candidates(open_store(s3_url))[0] == key(20, generation=2)


@pytest.mark.integration
def test_credentials_that_are_renewed_in_a_file_count_after_a_save_that_was_rejected(
    site: Site, s3_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"
    name = ENVIRONMENT["AWS_ACCESS_KEY_ID"]
    write = "[default]\naws_access_key_id = {}\naws_secret_access_key = {}\n".format
    file.write_text(write(name, "has expired"))
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    node = site.node(url=s3_url)
    node.save(key(10))
    node.report("failed")
    file.write_text(write(name, ENVIRONMENT["AWS_SECRET_ACCESS_KEY"]))
    node.save(key(20))
    assert node.report("saved")["key"] == str(key(20))


def test_a_rank_of_another_version_hears_how_to_end_the_writer(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays for some minutes after a run that was killed, and the next one may have an upgraded library."""
    node = site.node()
    node.die()
    monkeypatch.setattr(control, "PROTOCOL", control.PROTOCOL + 1)
    with pytest.raises(CheckpointError, match=f"another everstep, .* end it: kill {node.pid}$"):
        site.node(attempt="0000000000.0000000002")
    os.kill(node.pid, signal.SIGTERM)
    until(lambda: not node.runs, "it has ended")


def test_an_attempt_that_is_over_is_sent_away(site: Site) -> None:
    site.node(attempt="0000000000.0000000002")
    with pytest.raises(CheckpointError, match=r"attempt 0000000000\.0000000002 runs on this node"):
        site.node(attempt="0000000000.0000000001")


@pytest.mark.parametrize("attempt", [1, 2], ids=["in the same attempt", "in the next attempt"])
def test_the_late_end_of_an_old_connection_voids_nothing_newer(site: Site, attempt: int) -> None:
    old = site.node()
    held = [os.dup(link._peer.fileno()) for link in old.links]  # as a child does that outlives its rank
    old.die()
    new = site.node(attempt=f"0000000000.{attempt:010d}")
    number = new.begin(key(10, attempt))
    for file in held:
        os.close(file)
    until(lambda: new.links[0].call("ranks") == [0, 1], "the old connections are gone")
    for local in (0, 1):
        new.fill(key(10, attempt), number, local)
    new.report("saved")


def make_anew(site: Site, run: str) -> None:
    """Somebody deletes the store, and another run begins there."""
    shutil.rmtree(site.store.url, ignore_errors=True)
    assert open_store(site.store.url).put_if_absent(RUN, run.encode())


@pytest.mark.parametrize("runs", [True, False], ids=["its writer runs", "its writer is gone"])
def test_what_the_run_of_a_deleted_store_left_in_memory_is_nobodys(site: Site, runs: bool) -> None:
    old = site.node(attempt="0000000000.0000000003", run="old", linger=30.0 if runs else 0.1, commit_timeout=2.0)
    old.slots.create(old.directory / "peer", 2)[0].claim(Claim(key(10), 2, 1, 2, "old"))
    shutil.rmtree(site.store.url)
    Path(site.store.url).write_text("not a folder")
    old.save(key(10, generation=3))
    old.report("failed")
    old.die()
    until(lambda: old.runs == runs, "its writer has ended if nobody comes back")
    assert old.slots.whole()
    Path(site.store.url).unlink()
    Path(site.store.url).mkdir()
    make_anew(site, "new")
    new = site.node(run="new")
    assert [slot.state for slot in new.slots] == [SlotState.EMPTY, SlotState.EMPTY]
    assert new.slots.create(new.directory / "peer", 2)[0].claimed() is None
    new.save(key(5))
    new.report("saved")
    assert list_candidates(site.store) == [key(5)]


def test_a_run_whose_store_was_made_anew_is_over(site: Site) -> None:
    old = site.node(nodes=2, ranks=(0,), run="old")  # waits for node 1
    old.save(key(10))
    until(lambda: old.slots[0].state is SlotState.STORED, "node 0 has written its part")
    make_anew(site, "new")
    site.node(run="new")
    with pytest.raises(WriterLost):
        old.links[0].reports(PATIENCE)
    with pytest.raises(CheckpointError, match="deleted and made anew since, for another run"):
        site.node(run="old")


def test_nothing_is_committed_into_a_store_that_was_made_anew(site: Site) -> None:
    old = site.node(run="old")
    old.save(key(10))
    old.report("saved")
    make_anew(site, "new")
    old.save(key(20))
    assert "deleted and made anew" in old.report("failed")["why"]
    assert list_candidates(site.store) == []


def test_a_fenced_attempt_commits_nothing(site: Site) -> None:
    fence = site.folder / "fence.json"
    node = site.node(fence=str(fence))
    fence.write_text(json.dumps({"epoch": 0, "generation": 2, "fenced": False}))
    node.save(key(10))
    assert "attempt 0000000000.0000000002 runs now" in node.report("failed")["why"]
    fence.write_text(json.dumps({"epoch": 0, "generation": 1, "fenced": True}))
    node.save(key(20))
    assert "this node is fenced" in node.report("failed")["why"]
    fence.write_text(json.dumps({"epoch": 0, "generation": 1, "fenced": False}))
    node.save(key(30))
    node.report("saved")
    assert list_candidates(site.store) == [key(30)]


def test_after_a_clean_end_nothing_is_left(site: Site) -> None:
    node = site.node()
    node.save(key(10))
    node.leave()  # before it is stored
    until(lambda: not node.runs, "the writer has ended")
    assert not node.directory.exists()
    assert site.good(key(10))


def test_a_rank_that_comes_while_a_writer_ends_gets_another_one(site: Site) -> None:
    """One that had given its memory back answered, and was gone when the rank asked for memory."""
    directory = site.folder / "memory-0"
    slot_files.secure_directory(directory)

    async def serve_until_a_rank_comes() -> None:
        writer = Writer(directory, 30.0)
        wait = writer._membership.wait_for_place

        async def wait_and_end(*rank: Any) -> None:
            await wait(*rank)
            writer._ended.set()

        writer._membership.wait_for_place = wait_and_end  # type: ignore[assignment,method-assign]
        await writer.serve()

    ending = threading.Thread(target=asyncio.run, args=(serve_until_a_rank_comes(),))
    ending.start()
    until((directory / control.SOCKET).exists, "the writer listens")
    node = site.node()
    assert node.pid != os.getpid()
    node.save(key(10))
    node.report("saved")
    ending.join(PATIENCE)
    assert not ending.is_alive()


@pytest.mark.parametrize("stored", [True, False])
def test_a_writer_whose_ranks_do_not_come_back_leaves_memory_only_for_what_is_nowhere_else(
    site: Site, stored: bool
) -> None:
    node = site.node(linger=0.3)
    if not stored:
        Path(site.store.url).write_text("not a folder")
    node.save(key(10))
    node.report("saved" if stored else "failed")
    node.die()
    until(lambda: not node.runs, "the writer has ended")
    assert node.directory.exists() != stored


def test_the_only_whole_copy_stays_after_a_clean_end_and_is_stored_when_the_store_is_back(site: Site) -> None:
    node = site.node()
    store = Path(site.store.url)
    store.write_text("not a folder")
    node.save(key(10))
    node.report("failed")
    node.leave()
    assert node.slots.whole()
    store.unlink()
    until(lambda: list_candidates(site.store) == [key(10)], "the writer has tried again")
    assert site.good(key(10))
    until(lambda: not node.runs, "nothing is left to do")
    assert not node.directory.exists()


def test_an_attempt_commits_nothing_once_a_later_one_has(site: Site) -> None:
    old = site.node()
    old.save(key(10))
    old.report("saved")
    new_key = key(5, generation=2)
    site.store.put_if_absent(new_key.manifest_name, b"committed by a run on another machine")
    old.save(key(20))
    assert old.report("failed")["why"].endswith("attempt 0000000000.0000000002 has taken over this store")
    assert list_candidates(site.store) == [new_key, key(10)]


def of_another_process(node: Node, local: int) -> subprocess.Popen[bytes]:
    """A live process that takes part as this local rank."""
    script = (
        "import json, sys, time\n"
        "from pathlib import Path\n"
        "from everstep.checkpoint.writer.control import WriterConfig, WriterLink\n"
        "link = WriterLink.connect(Path(sys.argv[1]))\n"
        "link.hello(WriterConfig(**json.loads(sys.argv[2])), int(sys.argv[3]))\n"
        "print('there', flush=True)\n"
        "time.sleep(600)\n"
    )
    config = json.dumps(vars(node.config), default=str)
    command = [sys.executable, "-c", script, str(node.directory), config, str(local)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"there\n"
    return process


def test_a_run_whose_processes_are_alive_is_not_taken_over_and_they_are_named(site: Site) -> None:
    node = site.node(linger=60.0)
    node.die()
    with of_another_process(node, 0) as process:
        try:
            for attempt in ("0000000000.0000000001", "0000000000.0000000002"):
                with pytest.raises(CheckpointError, match=f"which is alive: process {process.pid}"):
                    site.node(attempt=attempt)
        finally:
            process.kill()
    # Killed, and not yet waited for a moment ago: a zombie has nothing any more.
    new = site.node(attempt="0000000000.0000000002")
    assert new.pid == node.pid
    new.save(key(10, generation=2))
    new.report("saved")


def test_a_run_whose_processes_die_meanwhile_is_taken_over(site: Site) -> None:
    node = site.node(linger=60.0)
    node.die()
    with of_another_process(node, 0) as process:
        threading.Timer(1.0, process.kill).start()
        new = site.node(attempt="0000000000.0000000002")
    assert new.pid == node.pid


def test_a_message_about_a_save_of_another_attempt_is_rejected(site: Site) -> None:
    node = site.node(attempt="0000000000.0000000002")
    for verb in ("begin", "filled", "void"):
        with pytest.raises(CheckpointError, match="is not of attempt"):
            node.links[0].call(verb, key=str(key(10)), why="")
    assert [slot.state for slot in node.slots] == [SlotState.EMPTY, SlotState.EMPTY]


def test_a_writer_whose_directory_was_removed_leaves_the_one_of_the_next_run_alone(site: Site) -> None:
    old = site.node(linger=2.0)
    old.save(key(10))
    old.report("saved")
    old.die()
    shutil.rmtree(old.directory)
    new = site.node(attempt="0000000000.0000000002")
    new.save(key(20, generation=2))
    new.report("saved")
    until(lambda: not old.runs, "the writer of the run that is over has ended")
    assert new.pid != old.pid
    new.save(key(30, generation=2))
    new.report("saved")
    assert site.good(key(30, generation=2))


def test_a_writer_whose_directory_was_removed_says_so_of_the_save_under_way(site: Site) -> None:
    """Before, the rank whose connection it closed first was said to have left."""
    node = site.node(linger=0.2)
    number = node.begin(key(10))
    node.fill(key(10), number, 1)
    shutil.rmtree(node.directory)
    for local in range(2):
        assert f"{node.directory} was removed by another process" in node.report("failed", local)["why"]
    until(lambda: not node.runs, "the writer, which has nothing left, has ended")


def test_a_run_whose_writer_may_not_linger_finds_one_and_ends_it(site: Site) -> None:
    """Before, each writer that was started had ended before a rank could connect."""
    node = site.node(linger=0.0)
    node.save(key(10))
    node.report("saved")
    node.die()
    until(lambda: not node.directory.exists(), "its ranks are gone, and the memory is given back")
