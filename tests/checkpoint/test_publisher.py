"""A watched folder is published when it is complete, once, and never half written."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from everstep.checkpoint.catalog.candidates import list_candidates
from everstep.checkpoint.errors import CheckpointError, StoreError
from everstep.checkpoint.events import CheckpointEvent
from everstep.checkpoint.format.keys import Attempt, Key
from everstep.checkpoint.publish import folder
from everstep.checkpoint.publish.publisher import Publisher
from everstep.checkpoint.store.base import Store, open_store
from everstep.checkpoint.store.posix import PosixStore


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    path = tmp_path / "watched"
    path.mkdir()
    return path


def steps(store: Store) -> list[int]:
    return [each.step for each in list_candidates(store)]


def restored(store: Store, into: Path) -> dict[str, str]:
    folder.restore_folder(store, into, replace=True)
    return {str(path.relative_to(into)): path.read_text() for path in into.rglob("*") if path.is_file()}


def test_what_is_quiet_for_long_enough_is_published_once(store: Store, watched: Path, tmp_path: Path) -> None:
    clock = Clock()
    publisher = Publisher(store, watched, quiet=5, clock=clock)
    assert publisher.poll() == []
    (watched / "model").write_text("1")
    assert publisher.poll() == []
    clock.now += 4.9
    (watched / "more").write_text("1")
    assert publisher.poll() == []
    clock.now += 4.9
    assert publisher.poll() == []
    clock.now += 0.1
    assert len(publisher.poll()) == 1
    clock.now += 100
    assert publisher.poll() == []
    assert restored(store, tmp_path / "back") == {"model": "1", "more": "1"}


def test_what_has_its_marker_is_published_at_once_and_again_with_a_new_one(
    store: Store, watched: Path, tmp_path: Path
) -> None:
    publisher = Publisher(store, watched, marker="DONE", clock=Clock())
    (watched / "model").write_text("1")
    assert publisher.poll() == []
    (watched / "DONE").write_text("1")
    assert len(publisher.poll()) == 1
    (watched / "model").write_text("half of 2")
    assert publisher.poll() == []
    assert restored(store, tmp_path / "back") == {"model": "1", "DONE": "1"}
    (watched / "model").write_text("2")
    (watched / "DONE").write_text("2")
    assert len(publisher.poll()) == 1
    assert restored(store, tmp_path / "back") == {"model": "2", "DONE": "2"}


def test_a_marker_says_nothing_of_what_was_written_after_it(store: Store, watched: Path, tmp_path: Path) -> None:
    publisher = Publisher(store, watched, marker="DONE", clock=Clock())
    (watched / "model").write_text("1")
    (watched / "DONE").write_text("1")
    (watched / "model").write_text("half of 2")
    later = (watched / "DONE").stat().st_mtime_ns + 1
    os.utime(watched / "model", ns=(later, later))
    assert publisher.poll() == []
    (watched / "model").write_text("2")
    (watched / "DONE").write_text("2")
    assert len(publisher.poll()) == 1
    assert restored(store, tmp_path / "back") == {"model": "2", "DONE": "2"}


def test_a_clock_that_goes_back_keeps_no_later_checkpoint_from_being_published(
    store: Store, watched: Path, tmp_path: Path
) -> None:
    """A file that stays, as the settings of a model, was written by the former time."""
    publisher = Publisher(store, watched, marker="DONE", clock=Clock())
    for name in ("settings", "model", "DONE"):
        (watched / name).write_text("1")
    assert len(publisher.poll()) == 1
    an_hour_ago = (watched / "settings").stat().st_mtime_ns - 3600 * 10**9
    for name in ("model", "DONE"):
        (watched / name).write_text("2")
        os.utime(watched / name, ns=(an_hour_ago, an_hour_ago))
    assert len(publisher.poll()) == 1
    assert restored(store, tmp_path / "back") == {"settings": "1", "model": "2", "DONE": "2"}


def test_a_marker_that_stays_too_old_is_told_once(store: Store, watched: Path) -> None:
    told: list[CheckpointEvent] = []
    clock = Clock()
    publisher = Publisher(store, watched, marker="DONE", quiet=5, clock=clock, tell=told.append)
    (watched / "DONE").write_text("1")
    (watched / "model").write_text("1")
    os.utime(watched / "DONE", ns=(1, 1))
    for _ in range(3):
        assert publisher.poll() == []
        clock.now += 4
    assert publisher.poll() == []
    why = f"{watched / 'model'} was changed after DONE: write that anew when all else is written"
    assert [(event.name, event.why) for event in told] == [("failed", why)]
    (watched / "DONE").write_text("2")
    assert len(publisher.poll()) == 1


def test_what_was_never_published_is_when_a_publisher_begins_unless_it_is_older(store: Store, watched: Path) -> None:
    """As after a publisher that was not there for a while, or where a run began anew beside what was left."""

    def write(step: int, at: int) -> None:
        (watched / f"checkpoint-{step}").mkdir()
        (watched / f"checkpoint-{step}" / "model").write_text(str(step))
        os.utime(watched / f"checkpoint-{step}" / "model", ns=(at, at))

    write(1000, at=10**18)
    assert len(Publisher(store, watched, quiet=0, each="checkpoint-*").poll()) == 1
    write(500, at=10**18 - 1)  # published and removed since, perhaps
    write(600, at=10**18 + 1)
    write(1500, at=10**18 + 2)
    told: list[CheckpointEvent] = []
    again = Publisher(store, watched, quiet=0, each="checkpoint-*", tell=told.append)
    assert [manifest.key.step for manifest in again.poll()] == [600, 1500]
    assert [event.name for event in told] == ["skipped", "saved", "saved"]
    assert "checkpoint-500 is older than" in told[0].why


def test_folders_with_steps_are_published_in_their_order(store: Store, watched: Path, tmp_path: Path) -> None:
    publisher = Publisher(store, watched, each="checkpoint-*", marker="state.json")
    for step in (1000, 500):
        (watched / f"checkpoint-{step}").mkdir()
        (watched / f"checkpoint-{step}" / "state.json").write_text(str(step))
    (watched / "checkpoint-1500").mkdir()
    assert [manifest.key.step for manifest in publisher.poll()] == [500, 1000]
    (watched / "checkpoint-1500" / "state.json").write_text("1500")
    assert [manifest.key.step for manifest in publisher.poll()] == [1500]
    assert publisher.poll() == []
    assert restored(store, tmp_path / "back") == {"state.json": "1500"}


def test_a_folder_without_a_step_is_an_error(tmp_path: Path, watched: Path) -> None:
    (watched / "checkpoint-last").mkdir()
    with pytest.raises(CheckpointError, match="must end with a number"):
        Publisher(open_store(tmp_path / "store"), watched, each="checkpoint-*")


@pytest.mark.parametrize("each", [None, "checkpoint-*"])
def test_what_a_dead_publisher_has_published_is_not_published_again(
    store: Store, watched: Path, tmp_path: Path, each: str | None
) -> None:
    inner = watched if each is None else watched / "checkpoint-7"
    inner.mkdir(exist_ok=True)
    (inner / "model").write_text("1")
    assert len(Publisher(store, watched, quiet=0, each=each).poll()) == 1
    assert Publisher(store, watched, quiet=0, each=each).poll() == []
    # On another machine, where it was restored.
    elsewhere = tmp_path / "elsewhere"
    folder.restore_folder(store, elsewhere if each is None else elsewhere / "checkpoint-7")
    again = Publisher(store, elsewhere, quiet=0, each=each)
    assert again.poll() == []
    inner = elsewhere if each is None else elsewhere / "checkpoint-8"
    inner.mkdir(exist_ok=True)
    (inner / "model").write_text("2")
    (manifest,) = again.poll()
    assert manifest.key == list_candidates(store)[0]
    assert steps(store) == ([8, 7] if each else [1, 0])


class Failing(PosixStore):
    """Fails once where a name that begins with `at` and ends so is put, before or `after` that, or read."""

    def __init__(self, root: Path, at: str, ending: str = "", *, after: bool = False) -> None:
        super().__init__(str(root))
        self.at: str | None = at
        self.ending = ending
        self.after = after

    def fail(self, name: str, *, after: bool = False) -> None:
        if self.at is not None and name.startswith(self.at) and name.endswith(self.ending) and self.after is after:
            self.at = None
            raise StoreError("away", self.url, may_pass=True)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        self.fail(name)
        done = super().put_if_absent(name, data)
        self.fail(name, after=True)
        return done

    def read_into(self, name: str, offset: int, into: memoryview) -> None:
        self.fail(name)
        super().read_into(name, offset, into)


def test_a_store_that_fails_for_a_while_gets_it_later(watched: Path, tmp_path: Path) -> None:
    told: list[CheckpointEvent] = []
    (watched / "model").write_text("1")
    publisher = Publisher(Failing(tmp_path / "store", "manifests/"), watched, quiet=0, tell=told.append)
    assert publisher.poll() == []
    assert [event.name for event in told] == ["failed"]
    assert len(publisher.poll()) == 1
    assert [event.name for event in told] == ["failed", "saved"]


def test_a_store_that_is_mounted_again_under_another_number_gets_what_comes_next(watched: Path, tmp_path: Path) -> None:
    told: list[CheckpointEvent] = []
    publisher = Publisher(PosixStore(tmp_path / "store"), watched, quiet=0, each="checkpoint-*", tell=told.append)

    def published(step: int) -> list[int]:
        (watched / f"checkpoint-{step}").mkdir(exist_ok=True)
        (watched / f"checkpoint-{step}" / "model").write_text(str(step))
        return [each.key.step for each in publisher.poll()]

    assert published(1) == [1]
    (tmp_path / "store").rename(tmp_path / "away")
    assert published(2) == []
    assert "its folder is gone" in told[-1].why
    shutil.copytree(tmp_path / "away", tmp_path / "store")  # its files, in a folder of another number
    assert published(3) == [2, 3]


@pytest.mark.parametrize("each", [None, "checkpoint-*"])
def test_what_was_committed_is_published_whatever_fails_after_that(
    watched: Path, tmp_path: Path, each: str | None
) -> None:
    told: list[CheckpointEvent] = []
    first = Key(Attempt(0, 1), 0 if each is None else 1)
    store = Failing(tmp_path / "store", first.data_prefix, ".part")
    publisher = Publisher(store, watched, quiet=0, each=each, keep_last=1, tell=told.append)
    for number in (1, 2):
        inner = watched if each is None else watched / f"checkpoint-{number}"
        inner.mkdir(exist_ok=True)
        (inner / "model").write_text("x" * number)
        assert len(publisher.poll()) == 1
        assert publisher.poll() == []
    assert [event.name for event in told] == ["saved", "untidy", "saved"]
    assert steps(store) == ([1] if each is None else [2])


@pytest.mark.parametrize("each", [None, "checkpoint-*"])
def test_a_commit_whose_answer_was_lost_is_seen_at_the_next_look(
    watched: Path, tmp_path: Path, each: str | None
) -> None:
    store = Failing(tmp_path / "store", "manifests/", after=True)
    inner = watched if each is None else watched / "checkpoint-7"
    inner.mkdir(exist_ok=True)
    (inner / "model").write_text("1")
    publisher = Publisher(store, watched, quiet=0, each=each)
    assert publisher.poll() == []
    assert [manifest.key for manifest in publisher.poll()] == list_candidates(store)
    assert publisher.poll() == []


def test_a_folder_that_changes_after_all_does_not_keep_the_next_from_being_published(
    store: Store, watched: Path, tmp_path: Path
) -> None:
    told: list[CheckpointEvent] = []
    publisher = Publisher(store, watched, quiet=0, each="checkpoint-*", tell=told.append)
    (watched / "checkpoint-1").mkdir()
    for text in ("1", "changed"):
        (watched / "checkpoint-1" / "model").write_text(text)
        publisher.poll()
    (watched / "checkpoint-2").mkdir()
    (watched / "checkpoint-2" / "model").write_text("2")
    assert len(publisher.poll()) == 1
    assert [event.name for event in told] == ["saved", "failed", "saved"]
    assert told[1].key == told[0].key
    folder.restore_folder(store, tmp_path / "back", step=told[0].key)
    assert (tmp_path / "back" / "model").read_text() == "1"


def test_old_ones_go_when_a_new_one_is_verified(store: Store, watched: Path) -> None:
    publisher = Publisher(store, watched, quiet=0, keep_last=2)
    for number in range(4):
        (watched / "model").write_text("x" * (number + 1))
        publisher.poll()
    assert steps(store) == [3, 2]


def test_at_the_end_what_is_still_waiting_is_published(store: Store, watched: Path) -> None:
    publisher = Publisher(store, watched, quiet=0.05)
    (watched / "model").write_text("last")
    stop = threading.Event()
    stop.set()
    publisher.run(stop, every=0.01)
    assert steps(store) == [0]


class BusyMachine(Clock):
    """The time of a machine on which every look takes ten seconds."""

    def __call__(self) -> float:
        self.now += 10
        return self.now


def test_at_the_end_of_a_busy_machine_what_is_still_waiting_is_published(store: Store, watched: Path) -> None:
    told: list[CheckpointEvent] = []
    publisher = Publisher(store, watched, quiet=5, clock=BusyMachine(), tell=told.append)
    (watched / "model").write_text("last")
    stop = threading.Event()
    stop.set()
    publisher.run(stop, every=0.01)
    assert steps(store) == [0]
    assert [event.name for event in told] == ["saved"]


@pytest.mark.parametrize("marker", ["DONE", None])
def test_what_is_not_complete_at_the_end_is_told(store: Store, watched: Path, marker: str | None) -> None:
    """No marker comes, or not what a link leads to."""
    told: list[CheckpointEvent] = []
    publisher = Publisher(store, watched, marker=marker, quiet=0.01, tell=told.append)
    (watched / "weights").write_text("1")
    if marker is None:
        (watched / "model").symlink_to("elsewhere")
    stop = threading.Event()
    stop.set()
    publisher.run(stop, every=0.01)
    assert steps(store) == []
    assert [event.name for event in told] == ["skipped"]
    assert str(watched) in told[0].why


class Unavailable(PosixStore):
    """A store in which nothing is committed before it has been asked so often."""

    left = 0

    def put_if_absent(self, name: str, data: bytes) -> bool:
        if self.left:
            self.left -= 1
            raise StoreError("no answer", self.url, may_pass=True)
        return super().put_if_absent(name, data)


@pytest.mark.parametrize("waits", [True, False])
def test_what_a_program_wrote_last_outlives_a_store_that_is_unavailable_at_its_end(
    watched: Path, tmp_path: Path, *, waits: bool
) -> None:
    store, told = Unavailable(tmp_path / "store"), list[CheckpointEvent]()
    publisher = Publisher(store, watched, quiet=0, tell=told.append, end_outage=600.0 if waits else 0.0)
    (watched / "model").write_text("last")
    store.left = 20
    stop = threading.Event()
    stop.set()
    publisher.run(stop, every=0.001)
    assert steps(store) == ([0] if waits else [])
    assert told[0].name == "failed"
