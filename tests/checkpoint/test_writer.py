"""The writer: a process that stores what ranks filled, whatever becomes of them."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.checkpoint.catalog.candidates import list_candidates, verify_checkpoint
from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.keys import Attempt
from everstep.checkpoint.slots.slots import Claim, Slots, SlotState
from everstep.checkpoint.writer import control
from everstep.checkpoint.writer.control import WriterConfig, WriterLost
from tests.checkpoint.builders import key
from tests.checkpoint.slot_builders import fill
from tests.checkpoint.writers import PATIENCE, SIZES, Site, until


def test_what_all_ranks_filled_is_committed_and_both_hear_of_it(site: Site) -> None:
    node = site.node()
    number = node.save(key(10))
    for local in (0, 1):
        assert node.report("saved", local)["key"] == str(key(10))
    assert site.good(key(10))
    assert node.slots[number].state is SlotState.STORED


def test_ranks_may_die_once_they_have_filled(site: Site) -> None:
    node = site.node()
    node.save(key(10))
    node.die()
    until(lambda: list_candidates(site.store), "the dead ranks' checkpoint is committed")
    assert site.good(key(10))


def test_a_rank_that_dies_before_it_has_filled_voids_the_save(site: Site) -> None:
    node = site.node()
    number = node.begin(key(10))
    node.fill(key(10), number, 0)
    node.links[1].close()
    assert "rank 1 left" in node.report("failed")["why"]
    assert node.slots[number].state is SlotState.EMPTY
    assert list_candidates(site.store) == []


def test_a_rank_that_has_ended_its_session_is_named_as_that_by_a_save_that_comes_later(site: Site) -> None:
    node = site.node()
    node.links[1].call("bye")
    node.links[1].close()
    until(lambda: node.links[0].call("lost") == [1], "it is gone")
    with pytest.raises(CheckpointError, match="rank 1 has ended its session before this save: call save"):
        node.links[0].call("begin", key=str(key(10)))


def test_a_writer_that_was_killed_is_followed_by_one_that_stores_what_it_left(site: Site) -> None:
    node = site.node()
    os.kill(node.pid, signal.SIGSTOP)  # so that it cannot have begun
    for local in (0, 1):
        with pytest.raises(WriterLost, match="did not answer"):
            node.links[local].call("begin", 0.05, key=str(key(10)))
    os.kill(node.pid, signal.SIGKILL)
    node.die()
    until(lambda: not node.runs, "the writer is gone")
    # It had accepted the save, and the ranks had filled their parts, when it died.
    node.slots[0].claim(Claim(key(10), 2, 0, 1))
    for local, size in enumerate(SIZES):
        fill(node.slots, 0, key(10), local, size)
    site.node()
    until(lambda: list_candidates(site.store), "the new writer has committed")
    assert site.good(key(10))


def test_a_rank_that_lost_its_writer_hears_from_the_next_one_how_its_saves_ended(site: Site) -> None:
    node = site.node()
    node.save(key(10))
    node.report("saved")
    number = node.begin(key(11))
    node.fill(key(11), number, 0)
    os.kill(node.pid, signal.SIGKILL)
    until(lambda: not node.runs, "it is gone")
    node.die()
    again = site.node()

    def ends() -> dict[str, str]:
        found = again.links[0].call("ended", keys=[str(key(step)) for step in (10, 11)])
        return {each["key"]: each["event"] for each in found}

    until(lambda: ends() == {str(key(10)): "saved", str(key(11)): "failed"}, f"both have ended: {ends()}")


def test_a_slot_that_a_dead_writer_left_half_filled_is_free(site: Site) -> None:
    slots = Slots.create(site.folder / "memory-0", 2)
    slots.reserve(SIZES, 2)
    slots[0].claim(Claim(key(10), 2, 0, 1))
    fill(slots, 0, key(10), 0, SIZES[0])
    node = site.node()
    assert slots[0].state is SlotState.EMPTY
    node.save(key(20))
    node.report("saved")
    assert list_candidates(site.store) == [key(20)]


def test_what_a_rank_has_voided_is_not_begun_by_another_that_comes_later(site: Site) -> None:
    node = site.node()
    node.links[1].call("begin", key=str(key(10)))
    node.links[1].call("void", key=str(key(10)), why="other tensors")
    with pytest.raises(CheckpointError, match="was given up: other tensors"):
        node.links[0].call("begin", key=str(key(10)))
    assert [slot.state for slot in node.slots] == [SlotState.EMPTY, SlotState.EMPTY]


def test_what_a_rank_has_voided_stays_so_when_that_rank_connects_again(site: Site) -> None:
    node = site.node()
    node.links[0].call("void", key=str(key(10)), why="other tensors")
    node.links[0].close()
    node.links[0] = control.join_writer(node.directory, node.config, 0, 30.0)
    with pytest.raises(CheckpointError, match="was given up: other tensors"):
        node.links[1].call("begin", key=str(key(10)))


def test_a_save_that_one_rank_is_past_takes_no_slot_from_later_ones(site: Site) -> None:
    """Rank 0 has given up step 10 beside a writer that is dead by now, and rank 1 fills it alone beside the next."""
    node = site.node()
    node.fill(key(10), int(node.links[1].call("begin", key=str(key(10)))), 1)
    for step in (20, 30, 40):
        node.save(key(step))
        while node.report("saved")["key"] != str(key(step)):
            pass
    assert sorted(list_candidates(site.store)) == [key(20), key(30), key(40)]


def test_a_part_that_a_rank_could_not_announce_is_taken_when_it_is_at_a_newer_save(site: Site) -> None:
    node = site.node()
    number = node.begin(key(10))
    fill(node.slots, number, key(10), 1, SIZES[1], rank=1)  # and its word is lost
    node.fill(key(10), number, 0)
    node.save(key(20))
    until(lambda: len(list_candidates(site.store)) == 2, "both are committed")
    assert site.good(key(10))


def test_memory_that_cannot_be_allocated_is_told_with_the_reason_and_the_ranks_stay_connected(site: Site) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max(SIZES) // 2, hard))  # of the writer, which inherits it
    try:
        link = control.join_writer(site.folder / "memory", site.config(ranks=(0,), world=1), 0, 30.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    site.pids.append(link.pid)
    with pytest.raises(CheckpointError, match=r"up to 0\.3 MB, and a file of this user 0\.1 MB at most \(ulimit -f\)"):
        link.call("reserve", sizes=SIZES[:1], kept=[])
    assert link.call("ranks") == [0]
    link.close()


def test_an_error_that_nobody_expects_is_an_answer_and_the_next_save_is_good(site: Site) -> None:
    node = site.node()
    claims = [slot.path / "claim.json" for slot in node.slots]
    for claim in claims:
        claim.mkdir()
    for link in node.links:
        with pytest.raises(CheckpointError, match=r"IsADirectoryError.*claim\.json"):
            link.call("begin", key=str(key(10)))
    for claim in claims:
        claim.rmdir()
    node.save(key(20))
    assert node.report("saved")["key"] == str(key(20))


def test_what_is_saved_while_a_store_is_not_mounted_is_in_it_when_it_is_back(site: Site) -> None:
    node = site.node(run="this")
    node.save(key(10))
    node.report("saved")
    away, folder = Path(f"{site.store.url}.away"), Path(site.store.url)
    folder.rename(away)
    folder.mkdir()  # the mount point
    node.save(key(20))
    assert "has no object named run any more" in node.report("retrying")["why"]
    assert list(folder.iterdir()) == [], "nothing is written where it would be lost from sight"
    folder.rmdir()
    away.rename(folder)
    node.report("saved")
    assert site.good(key(20))


def test_the_newest_whole_slot_is_never_filled_anew(site: Site) -> None:
    node = site.node()
    used = []
    for step in (10, 20, 30):
        used.append(node.save(key(step)))
        node.report("saved")
    assert used == [0, 1, 0]


def test_with_one_slot_each_save_takes_it(site: Site) -> None:
    node = site.node(slots=1)
    for step in (10, 20):
        assert node.save(key(step)) == 0
        node.report("saved")


def test_a_slot_that_is_being_read_is_left_alone(site: Site) -> None:
    node = site.node()
    node.save(key(10))
    node.report("saved")
    with node.slots[1].reading(), pytest.raises(CheckpointError, match="slot 1 is empty and being read"):
        node.begin(key(20))
    assert node.begin(key(20)) == 1


def test_the_first_save_of_a_run_waits_until_a_process_that_restores_has_read_its_slot(site: Site) -> None:
    node = site.node()
    node.save(key(10))
    node.report("saved")
    program = f"""
from pathlib import Path
from everstep.checkpoint.slots.slots import Slots
with Slots(Path({str(node.directory)!r}))[1].reading():
    print("reads", flush=True)
    input()
"""
    reader = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reads\n"
        begun = node.links[0].tell("begin", key=str(key(20)))
        # The writer has answered this many by the time at which it has looked for a slot.
        for _ in range(20):
            node.links[1].call("ranks")
        reader.communicate("it has read all")
        assert node.links[0].answer(begun) == 1
    finally:
        reader.kill()
        reader.wait()
    node.save(key(20))
    node.report("saved")


@pytest.mark.parametrize("end", ["its reader ends", "its reader never ends"])
def test_the_writer_of_a_run_that_has_ended_waits_for_who_reads_its_slots_but_not_for_ever(
    site: Site, end: str
) -> None:
    node = site.node(linger=60.0 if end == "its reader ends" else 1.0)
    node.save(key(10))
    node.report("saved")
    with node.slots[0].reading():
        node.leave()
        log = node.directory / control.LOG
        if end == "its reader ends":
            until(lambda: "still read" in log.read_text(), "the writer waits")
            assert node.runs
            assert node.slots[0].state is SlotState.STORED
        else:
            until(lambda: not node.runs, "the writer gives the reader up")
            assert not node.directory.exists()
    until(lambda: not node.runs, "the writer has ended")
    assert not node.directory.exists()


def test_a_save_waits_for_the_slot_that_another_rank_still_fills(site: Site) -> None:
    node = site.node()
    node.save(key(10))
    node.report("saved")
    filled = node.begin(key(20))
    node.fill(key(20), filled, 0)
    begun = node.links[0].tell("begin", key=str(key(30)))
    for _ in range(20):
        node.links[1].call("ranks")
    node.fill(key(20), filled, 1)
    number = node.links[0].answer(begun)
    assert number == node.links[1].call("begin", key=str(key(30)))
    assert number != filled
    for local in (0, 1):
        node.fill(key(30), number, local)
    until(lambda: site.store and key(30) in list_candidates(site.store), "both are stored")
    assert site.good(key(30))


@pytest.mark.parametrize("how", ["the older is void", "the newer is void", "its rank dies"])
def test_a_save_that_waits_for_a_slot_hears_that_the_other_rank_gives_up(site: Site, how: str) -> None:
    node = site.node()
    node.save(key(10))
    node.report("saved")
    node.fill(key(20), node.begin(key(20)), 0)
    begun = node.links[0].tell("begin", key=str(key(30)))
    for _ in range(20):
        node.links[1].call("ranks")
    if how == "its rank dies":
        node.links[1].close()
        with pytest.raises(CheckpointError, match="rank 1 left"):
            node.links[0].answer(begun)
        return
    older = how == "the older is void"
    node.links[1].call("void", key=str(key(20 if older else 30)), why="its GPU failed")
    if older:
        assert node.links[0].answer(begun) == 1
    else:
        with pytest.raises(CheckpointError, match="was given up: its GPU failed"):
            node.links[0].answer(begun)


def test_a_save_takes_the_slot_of_an_earlier_one_that_its_rank_has_not_filled(site: Site) -> None:
    node = site.node()
    node.begin(key(10))
    for passed, step in ((10, 20), (20, 30)):
        node.begin(key(step))
        report = node.report("failed")
        assert report["key"] == str(key(passed))
        assert report["why"] == f"rank 0 has not taken part in it, and is at step {step} by now"


def test_a_store_that_refuses_fails_the_save_and_not_the_next_one(site: Site) -> None:
    node = site.node()
    store = Path(site.store.url)
    store.write_text("not a folder")
    node.save(key(10))
    assert node.report("failed")["why"]
    store.unlink()
    node.save(key(20))
    node.report("saved")
    assert list_candidates(site.store) == [key(20)]


def test_node_0_commits_when_all_nodes_have_written(site: Site) -> None:
    first = site.node(nodes=2, ranks=(0,))
    second = site.node(nodes=2, node=1, ranks=(1,))
    first.save(key(10))
    second.links[0].call("begin", key=str(key(10)))
    fill(second.slots, 0, key(10), 0, SIZES[0], rank=1)
    assert list_candidates(site.store) == []
    second.links[0].call("filled", key=str(key(10)))
    assert first.report("saved")["bytes"] == 2 * SIZES[0]
    assert [part.name for part in verify_checkpoint(site.store, key(10)).parts] == [
        key(10).part_name(r) for r in (0, 1)
    ]


def test_a_save_that_others_void_is_not_waited_for(site: Site) -> None:
    node = site.node(nodes=2, ranks=(0,))
    node.save(key(10))
    until(lambda: node.slots[0].state is SlotState.STORED, "node 0 has written its part")
    node.links[0].call("void", key=str(key(10)), why="rank 1 has other tensors")
    assert node.report("failed")["why"] == "rank 1 has other tensors"


def test_a_node_that_never_writes_is_not_waited_for_for_ever(site: Site) -> None:
    node = site.node(nodes=2, ranks=(0,), commit_timeout=0.5)
    node.save(key(10))
    assert "0.5 s" in node.report("failed")["why"]


def test_who_waits_long_says_so(site: Site) -> None:
    node = site.node(nodes=2, ranks=(0,), stall_after=0.1)
    node.save(key(10))
    report = node.report("stalled")
    assert report["why"] == "waiting for the other nodes"
    assert report["seconds"] >= 0.1


def test_old_checkpoints_go_after_a_newer_one_was_verified(site: Site) -> None:
    node = site.node(keep_last=2)
    for step in (10, 20, 30):
        node.save(key(step))
        node.report("saved")
    until(lambda: list_candidates(site.store) == [key(30), key(20)], "the oldest one is removed")
    until(lambda: not list(site.store.list(key(10).data_prefix)), "its data is removed")


def test_a_lost_writer_is_known_at_once(site: Site) -> None:
    node = site.node()
    os.kill(node.pid, signal.SIGKILL)
    with pytest.raises(WriterLost, match="the writer is gone"):
        node.links[0].reports(PATIENCE)


def test_a_writer_that_ends_after_a_report_and_before_its_answer_is_known_at_once() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setblocking(False)
    link = control.WriterLink(ours)
    with theirs:
        number = link.tell("reserve", sizes=[1], kept=[])
        theirs.recv(1000)
        theirs.sendall(b'{"event": "saved"}\n')
    with pytest.raises(WriterLost, match="the writer is gone"):
        link.answer(number, timeout=5.0)
    assert [each["event"] for each in link.reports()] == ["saved"], "its last words are kept"
    link.close()


def test_tokens_are_read_as_they_are_written() -> None:
    with pytest.raises(ValueError, match="not an attempt"):
        WriterConfig("s", {}, "1.2", 0, 1, 1, (0,))
    assert Attempt.parse(WriterConfig("s", {}, "0000000001.0000000002", 0, 1, 1, (0,)).attempt) == Attempt(1, 2)


def test_what_nobody_wants_is_not_tried_again(site: Site) -> None:
    node = site.node(nodes=2, ranks=(0,))
    node.save(key(10))
    until(lambda: node.slots[0].state is SlotState.STORED, "node 0 has written its part")
    node.links[0].call("void", key=str(key(10)), why="rank 1 has other tensors")
    node.report("failed")
    node.leave()
    until(lambda: not node.runs, "the writer has ended")
    assert not node.directory.exists()
    assert list_candidates(site.store) == []
