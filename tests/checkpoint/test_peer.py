"""Copies in another node's memory: verified as they come, from those who know the secret, and no matter to a save."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from everstep.checkpoint.errors import CheckpointError
from everstep.checkpoint.format.keys import Key
from everstep.checkpoint.format.manifest import CHUNK, HEADER, Manifest, encode_manifest
from everstep.checkpoint.peers import replica_slots
from everstep.checkpoint.peers.peer_link import Address, PeerLink, PeerLost
from everstep.checkpoint.peers.peer_parts import PeerParts, Share
from everstep.checkpoint.peers.peer_server import PeerServer
from everstep.checkpoint.peers.replica_sender import send_slot
from everstep.checkpoint.slots.slots import Claim, Slot, Slots, SlotState
from everstep.checkpoint.writer import control
from everstep.checkpoint.writer.persist import Mappings, SaveProgress, sum_slot
from tests.checkpoint.builders import key
from tests.checkpoint.slot_builders import content, fill
from tests.checkpoint.writers import PATIENCE, SECRET, SIZES, Site, until

PARTS = [HEADER + CHUNK + 5000, 9000]


class Away:
    """A node with two ranks whose slots are copied, and one that keeps the copies; the latter is a thread of ours."""

    def __init__(self, folder: Path) -> None:
        self.here = folder / "keeper"
        self.slots = Slots.create(folder / "node", 2)
        self.slots.reserve(PARTS, 2)
        self.here.mkdir(0o700)
        self.server = PeerServer(self.here)
        self.address: Address = ("127.0.0.1", self.server.trust(SECRET, 2) or 0)

    def whole(self, number: int, key: Key) -> tuple[Slot, Claim, Manifest]:
        slot = self.slots[number]
        claim = Claim(key, 2, 1, 2)
        slot.claim(claim)
        for local, size in enumerate(PARTS):
            fill(self.slots, number, key, local, size, rank=2 + local, world=4)
        with ThreadPoolExecutor(1) as pool:
            return slot, claim, sum_slot(self.slots, slot, Mappings(), pool, SaveProgress())

    def send(self, number: int, key: Key) -> None:
        send_slot(self.address, SECRET, *self.whole(number, key))

    def begin(self, slot: Slot, claim: Claim, manifest: Manifest) -> PeerLink:
        """A copy whose parts are to follow."""
        data = encode_manifest(manifest)
        link = PeerLink.connect(self.address, SECRET)
        link.tell({"verb": "put", **vars(claim), "key": str(claim.key), "size": len(data)})
        link.put(data)
        link.answer()
        return link

    @property
    def kept(self) -> list[Key]:
        return [manifest.key for _, manifest in replica_slots.open_peer_copies(self.here).whole()]


@pytest.fixture
def away(tmp_path: Path) -> Away:
    return Away(tmp_path)


def test_a_copy_is_the_same_to_the_byte_and_can_be_read_from_there(away: Away) -> None:
    away.send(0, key(10))
    [(slot, manifest)] = replica_slots.open_peer_copies(away.here).whole()
    assert manifest == away.slots[0].manifest()
    assert slot.claimed() == away.slots[0].claimed()
    for local, size in enumerate(PARTS):
        assert slot.part(local).read_bytes() == content(key(10), 2 + local, size)
    names = {part.name: 1 for part in manifest.parts}
    with closing(PeerParts(key(10), [[], [("127.0.0.1", 1), away.address]], names, SECRET)) as parts:
        assert key(10).part_name(2) in parts
        got = bytearray(CHUNK + 10)
        parts.read_into(key(10).part_name(2), 4000, memoryview(got))
        assert got == content(key(10), 2, PARTS[0])[4000 : 4000 + len(got)]


def test_two_copies_are_kept_and_the_oldest_goes_first(away: Away) -> None:
    for number, step in enumerate((10, 20, 30)):
        away.send(number % 2, key(step))
    assert away.kept == [key(30), key(20)]


def test_a_copy_waits_until_a_process_that_restores_has_read_the_slot_that_it_needs(away: Away) -> None:
    away.server.trust(SECRET, 1)
    away.send(0, key(10))
    slot, claim, manifest = away.whole(1, key(20))
    kept = replica_slots.open_peer_copies(away.here)[0]
    with closing(PeerLink.connect(away.address, SECRET)) as link:
        with kept.reading():
            data = encode_manifest(manifest)
            link.tell({"verb": "put", **vars(claim), "key": str(claim.key), "size": len(data)})
            link.put(data)
            link._peer.settimeout(0.5)
            with pytest.raises(PeerLost, match="timed out"):
                link.answer()
            assert away.kept == [key(10)]
            link._peer.settimeout(PATIENCE)
        link.answer()
        for local, part in enumerate(manifest.parts):
            link.put(slot.part(local).read_bytes()[: part.size])
        link.answer()
    assert away.kept == [key(20)]


def test_with_one_slot_one_copy_is_kept(away: Away) -> None:
    away.server.trust(SECRET, 1)
    for step in (10, 20):
        away.send(0, key(step))
        assert away.kept == [key(step)]


def test_the_last_copy_stays_whole_while_the_next_one_comes_and_breaks_off(away: Away) -> None:
    away.send(0, key(10))
    slot, claim, manifest = away.whole(1, key(20))
    with closing(away.begin(slot, claim, manifest)) as link:
        link.put(slot.part(0).read_bytes()[: CHUNK + HEADER + 1])
        assert away.kept == [key(10)]
    until(lambda: replica_slots.open_peer_copies(away.here)[1].state is SlotState.EMPTY, "the torn copy is given up")
    assert away.kept == [key(10)]


@pytest.mark.parametrize("at", [20, HEADER + 7, HEADER + CHUNK + 7])
def test_a_copy_that_came_otherwise_than_it_was_summed_is_not_kept(away: Away, at: int) -> None:
    slot, claim, manifest = away.whole(0, key(10))
    with slot.part(0).open("r+b") as file:
        file.seek(at)
        file.write(b"spoilt")
    with pytest.raises(PeerLost, match="came otherwise"):
        send_slot(away.address, SECRET, slot, claim, manifest)
    assert away.kept == []


def test_a_slot_that_is_filled_anew_while_it_is_sent_is_no_copy(away: Away) -> None:
    slot, claim, manifest = away.whole(0, key(10))
    slot.claim(Claim(key(30), 2, 1, 2))
    with pytest.raises(CheckpointError, match="filled anew"):
        send_slot(away.address, SECRET, slot, claim, manifest)
    assert away.kept == []


def test_a_copy_of_an_older_attempt_takes_no_newer_ones_place(away: Away) -> None:
    away.send(0, key(5, generation=2))
    slot, claim, manifest = away.whole(1, key(1000, generation=1))
    with pytest.raises(PeerLost, match="a newer copy is here"):
        send_slot(away.address, SECRET, slot, claim, manifest)
    assert away.kept == [key(5, generation=2)]


def test_a_frozen_sender_does_not_hold_up_the_next_copy(away: Away) -> None:
    slot, claim, manifest = away.whole(0, key(10))
    with closing(away.begin(slot, claim, manifest)) as frozen:
        frozen.put(slot.part(0).read_bytes()[:CHUNK])
        done = threading.Thread(target=away.send, args=(1, key(20)), daemon=True)
        done.start()
        done.join(10)  # less than what a sender may be silent
        assert away.kept == [key(20)]


def test_a_slot_that_another_node_reads_is_not_taken_for_a_new_copy(
    away: Away, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_slots, "READ_TIMEOUT", 0.1)
    away.send(0, key(10))
    away.send(1, key(20))
    with closing(Share(away.address, SECRET, key(10), 1)):
        with pytest.raises(PeerLost, match="every copy here is being read"):
            away.send(0, key(30))
        assert away.kept == [key(20), key(10)]
    until(lambda: not replica_slots.open_peer_copies(away.here)[0].is_read, "the reader is gone")
    away.send(0, key(30))
    assert away.kept == [key(30), key(20)]


def test_a_peer_that_hangs_up_ends_no_process_that_has_the_default_action_of_sigpipe(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    before = signal.signal(signal.SIGPIPE, lambda number, frame: pytest.fail("by default this ends the process"))
    ours, theirs = socket.socketpair()
    theirs.close()
    try:
        with closing(PeerLink(ours, "a peer")) as link, file.open("rb") as opened, pytest.raises(PeerLost):
            link.put_file(opened.fileno(), 0, 1 << 20)
        assert signal.SIGPIPE not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.signal(signal.SIGPIPE, before)


def test_what_is_not_here_is_not_given_out(away: Away) -> None:
    away.send(0, key(10))
    for other, node in ((key(20), 1), (key(10), 0)):
        with pytest.raises(PeerLost, match="is not here"):
            Share(away.address, SECRET, other, node)
    share = Share(away.address, SECRET, key(10), 1)
    with closing(share), pytest.raises(PeerLost, match="has no bytes"):
        share.read_into(key(10).part_name(3), PARTS[1], memoryview(bytearray(1)))


def test_who_does_not_know_the_secret_learns_nothing_and_leaves_nothing(away: Away) -> None:
    away.send(0, key(10))
    with pytest.raises(PeerLost, match="does not know this attempt"):
        PeerLink.connect(away.address, "a guess")
    with socket.create_connection(away.address) as plain:
        plain.settimeout(PATIENCE)
        heard = plain.recv(1000)
        plain.sendall(b'{"verb": "open"}'.ljust(64))  # as long as an answer to the challenge
        assert plain.recv(1000) == b""
    assert SECRET.encode() not in heard
    # And who listens at that port instead of a writer cannot pass for one.
    with socket.create_server(("127.0.0.1", 0)) as false:

        def pretend() -> None:
            peer, _ = false.accept()
            with peer:
                peer.sendall(heard[:48])
                peer.recv(64, socket.MSG_WAITALL)
                peer.sendall(bytes(32))

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(PeerLost, match="does not know this attempt's secret"):
            PeerLink.connect(false.getsockname(), SECRET)
    for secret in ("the next attempt's", ""):
        away.server.trust(secret, 2)
        for guess in (SECRET, ""):
            with pytest.raises(PeerLost, match="does not know this attempt"):
                PeerLink.connect(away.address, guess)


def test_a_copy_that_finds_no_room_is_refused_with_the_reason(away: Away, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 10_000_000))
    with pytest.raises(PeerLost, match=r"2 copies of another node's slots need 16.8 MB more memory, the file system"):
        away.send(0, key(10))
    assert away.kept == []


# ---- writers


def is_stored(slot: Slot) -> bool:
    return slot.state is SlotState.STORED


def test_each_save_is_kept_by_the_other_node_too(site: Site) -> None:
    first, second = site.pair()
    for step in (10, 20):
        first.save(key(step))
        assert first.report("copied")["key"] == str(key(step))
    assert second.copies() == [key(20), key(10)]
    [(slot, _), _] = replica_slots.open_peer_copies(second.directory).whole()
    assert slot.part(0).read_bytes() == content(key(20), 0, SIZES[0])
    for node in (first, second):
        told = (node.directory / control.LOG).read_text() + Path(f"/proc/{node.pid}/cmdline").read_text()
        assert SECRET not in told + Path(f"/proc/{node.pid}/environ").read_text(errors="replace")


def test_a_run_that_wants_no_copies_opens_no_port(site: Site) -> None:
    node = site.node()
    assert node.links[0].port is None
    assert not (node.directory / "port").exists()


def test_a_copy_that_fails_is_told_and_the_save_is_stored_all_the_same(site: Site) -> None:
    first, second = site.pair()
    os.kill(second.pid, signal.SIGKILL)
    first.save(key(10))
    assert "cannot be reached" in first.report("copy_failed")["why"]
    until(partial(is_stored, first.slots[0]), "its part is in the store")


def test_a_keeper_that_is_frozen_holds_up_neither_saves_nor_slots(site: Site) -> None:
    first, second = site.pair()
    os.kill(second.pid, signal.SIGSTOP)
    for step in (10, 20, 30):
        stored = first.slots[first.save(key(step))]
        until(partial(is_stored, stored), "its part is in the store")


def test_the_next_writer_of_a_node_listens_where_the_last_one_did(site: Site) -> None:
    first, second = site.pair()
    first.save(key(10))
    first.report("copied")
    os.kill(second.pid, signal.SIGKILL)
    until(lambda: not second.runs, "the writer is gone")
    again = site.node(node=1, ranks=(1,), nodes=2, secret=SECRET)
    assert again.links[0].port == second.links[0].port
    assert again.copies() == [key(10)]
    first.save(key(20))
    first.report("copied")
    assert again.copies() == [key(20), key(10)]


def test_copies_go_with_the_run_at_its_clean_end(site: Site) -> None:
    first, second = site.pair()
    first.save(key(10))
    first.report("copied")
    second.leave()
    until(lambda: not second.runs, "the writer has ended")
    assert not second.directory.exists()


def test_where_copies_find_no_room_a_run_that_insists_is_told_and_another_goes_on(site: Site) -> None:
    first, _second = site.pair()
    why = first.links[0].call("reserve", sizes=SIZES[:1], kept=[1 << 50])
    assert "2 slots for checkpoints and 2 copies of another node's slots need" in why
    assert "MemoryOptions(peers=0)" in why
    first.save(key(10))
    until(partial(is_stored, first.slots[0]), "its part is in the store")
    insists = site.node(node=2, ranks=(0,), nodes=2, secret=SECRET, insist=True)
    with pytest.raises(CheckpointError, match="2 copies of another node's slots"):
        insists.links[0].call("reserve", sizes=SIZES[:1], kept=[1 << 50])


def test_ranks_may_die_as_soon_as_they_have_filled(site: Site) -> None:
    first, second = site.pair()
    first.save(key(10))
    first.die()
    until(lambda: second.copies() == [key(10)], "the dead ranks' checkpoint is copied")
