"""Adapters publish beside training: it never waits for the store before its end, and a kill costs one save at most."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from everstep.checkpoint.adapters import background  # noqa: E402
from everstep.checkpoint.adapters.published import Published  # noqa: E402
from everstep.checkpoint.catalog.candidates import list_candidates, verify_checkpoint  # noqa: E402
from everstep.checkpoint.errors import StoreError  # noqa: E402
from everstep.checkpoint.save.outcomes import SaveFailed  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402

pytestmark = pytest.mark.torch

PATIENCE = 60.0


class HeldStore(PosixStore):
    """A folder whose large writes begin, and wait in the middle until the gate is opened."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.gate, self.begun = threading.Event(), threading.Event()
        self.away = 0  # so many writes fail first

    def put_whole(self, name: str, data: Iterable[bytes | memoryview], size: int) -> None:
        if self.away:
            self.away -= 1
            raise StoreError("503", name, may_pass=True)

        def held() -> Iterable[bytes | memoryview]:
            for piece in data:
                yield piece
                self.begun.set()
                assert self.gate.wait(PATIENCE)

        super().put_whole(name, held(), size)


def held_published(folder: Path, **options: Any) -> tuple[Published, HeldStore]:
    published, store = Published(folder / "store", **options), HeldStore(str(folder / "store"))
    published.store = store
    return published, store


def written(folder: Path, step: int) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "model").write_bytes(os.urandom(1 << 16))
    return path


def steps(store: PosixStore) -> list[int]:
    return [key.step for key in list_candidates(store)]


def test_training_goes_on_while_a_folder_is_stored_and_its_end_waits(tmp_path: Path) -> None:
    published, store = held_published(tmp_path)
    path = written(tmp_path / "out", 1)
    model = (path / "model").read_bytes()
    published.publish(path, 1)
    assert store.begun.wait(PATIENCE)
    shutil.rmtree(path)  # the framework keeps none
    assert steps(store) == []
    threading.Timer(0.2, store.gate.set).start()
    published.finish()
    assert steps(store) == [1]
    restored = published.newest(lambda key: tmp_path / "back")
    assert restored is not None
    assert (restored / "model").read_bytes() == model
    assert not list((tmp_path / "out").iterdir()), "nothing of ours is left beside the folders"


def test_at_most_one_folder_waits_and_a_newer_one_takes_its_place(tmp_path: Path) -> None:
    published, store = held_published(tmp_path, keep_last=9)
    skipped: list[int] = []
    published.on("skipped", lambda event: skipped.append(event.details["step"]))
    published.publish(written(tmp_path / "out", 1), 1)
    assert store.begun.wait(PATIENCE)
    for step in (2, 3, 4):
        published.publish(written(tmp_path / "out", step), step)
    assert skipped == [2, 3]
    store.gate.set()
    published.finish()
    assert steps(store) == [4, 1]


def test_what_gave_way_is_stored_all_the_same_where_a_later_one_needs_it(tmp_path: Path) -> None:
    published, store = held_published(tmp_path, keep_last=1)
    published.publish(written(tmp_path, 4), 4)
    assert store.begun.wait(PATIENCE)
    best = written(tmp_path, 8)
    published.publish(best, 8)
    published.publish(written(tmp_path, 12), 12, needed=(best, 8))
    shutil.rmtree(best)
    store.gate.set()
    published.finish()
    assert steps(store) == [12, 8]


def test_the_end_of_training_waits_no_longer_than_its_limit(tmp_path: Path) -> None:
    published, store = held_published(tmp_path, finish_timeout=0.2)
    published.publish(written(tmp_path / "out", 7), 7)
    assert store.begun.wait(PATIENCE)
    with pytest.raises(SaveFailed, match=r"step 7 is not in the store 0\.2 s after training"):
        published.finish()
    store.gate.set()


@pytest.mark.parametrize("ends_training", [False, True])
def test_a_worker_that_is_forked_while_a_folder_is_stored_ends_at_once(ends_training: bool, tmp_path: Path) -> None:
    published, store = held_published(tmp_path)
    published.publish(written(tmp_path / "out", 1), 1)
    assert store.begun.wait(PATIENCE)
    worker = multiprocessing.get_context("fork").Process(target=published.finish if ends_training else int)
    worker.start()
    worker.join(10)
    has_ended = worker.exitcode == 0
    worker.kill()
    store.gate.set()
    published.finish()
    assert has_ended, "it waits for what only its parent stores"
    assert steps(store) == [1]


def test_an_error_of_training_is_not_hidden_by_one_of_its_last_save(tmp_path: Path) -> None:
    published, store = held_published(tmp_path, finish_timeout=0.2)
    published.publish(written(tmp_path / "out", 7), 7)
    with pytest.raises(ZeroDivisionError), contextlib.closing(SimpleNamespace(close=published.finish)):
        raise ZeroDivisionError
    store.gate.set()


def test_a_store_that_was_away_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_RETRY_SECONDS", (0.05, 0.1))
    published, store = held_published(tmp_path)
    failures: list[str] = []
    published.on("failed", lambda event: failures.append(event.why))
    store.away = 3
    store.gate.set()
    published.publish(written(tmp_path / "out", 5), 5)
    published.finish()
    assert steps(store) == [5]
    assert len(failures) == 1, "it is told once"


def saved(published: Published, folder: Path, step: int, text: str) -> None:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "model").write_text(text)
    published.publish(path, step)


def newest_text(published: Published, folder: Path) -> str:
    found = published.newest(lambda key: folder / "back")
    assert found is not None
    return (found / "model").read_text()


@pytest.mark.parametrize("again", ["the same one", "another one"])
def test_a_training_that_was_interrupted_and_is_begun_again_goes_on_from_its_last_save(
    again: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a cell of a notebook that is run again after Ctrl-C, while the save is still being stored."""
    published, store = held_published(tmp_path)
    published.publish(written(tmp_path / "out", 1), 1)
    assert store.begun.wait(PATIENCE)
    second = published if again == "the same one" else Published(tmp_path / "store")
    threading.Timer(0.2, store.gate.set).start()
    found = second.newest(lambda key: tmp_path / "back" / str(key.step))
    assert found is not None
    assert found.name == "1"
    assert not caplog.records
    second.finish()


def test_a_step_that_is_reached_again_is_saved_as_that_of_a_later_attempt(tmp_path: Path) -> None:
    published, keys = Published(tmp_path / "store", keep_last=9), []
    published.on("saved", lambda event: keys.append(str(event.key)))
    for text in ("first", "of a second training"):
        saved(published, tmp_path / "out", 4, text)
        published.finish()
        assert newest_text(published, tmp_path) == text
    saved(published, tmp_path / "out", 4, "after a restore")
    published.finish()
    assert newest_text(published, tmp_path) == "after a restore"
    assert keys == sorted(set(keys)) == sorted(map(str, list_candidates(published.store)))


def test_a_step_that_one_training_saves_twice_is_published_once_and_it_is_told(tmp_path: Path) -> None:
    published, skipped = Published(tmp_path / "store"), []
    published.on("skipped", lambda event: skipped.append(event.details["step"]))
    seen = threading.Event()
    published.on("saved", lambda event: seen.set())
    saved(published, tmp_path / "out", 4, "first")
    assert seen.wait(PATIENCE)
    saved(published, tmp_path / "out", 4, "once more")
    published.finish()
    assert skipped == [4]
    assert newest_text(published, tmp_path) == "first"


def test_where_the_attempt_was_given_a_step_that_is_reached_again_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_EPOCH", "0")
    monkeypatch.setenv("EVERSTEP_GENERATION", "3")
    published = Published(tmp_path / "store")
    saved(published, tmp_path / "out", 4, "first")
    published.finish()
    saved(published, tmp_path / "out", 4, "of a second training")
    with pytest.raises(SaveFailed, match=f"committed by process {os.getpid()} on .* Start the job anew"):
        published.finish()


def test_a_publisher_whose_store_a_later_attempt_has_taken_over_commits_nothing(tmp_path: Path) -> None:
    old, new = Published(tmp_path / "store"), Published(tmp_path / "store")
    for published in (old, new):
        saved(published, tmp_path / "out", 4, "4")
        published.finish()
    old._training.attempt = list_candidates(old.store)[-1].attempt
    saved(old, tmp_path / "out", 8, "8")
    with pytest.raises(SaveFailed, match="has taken over this store"):
        old.finish()
    assert steps(PosixStore(tmp_path / "store")) == [4, 4]


def test_a_kill_in_the_middle_loses_nothing_that_was_complete(tmp_path: Path) -> None:
    ranks.run(1, publish_and_die, tmp_path, dies=[0])
    store = PosixStore(tmp_path / "store")
    assert steps(store) == [1]
    verify_checkpoint(store, list_candidates(store)[0])
    assert ranks.run(1, newest_step, tmp_path) == ["checkpoint-1"]
    left = {each.name for each in (tmp_path / "out").iterdir()}
    assert left == {"checkpoint-1", "checkpoint-2"}, "what the dead publication held is gone"


def publish_and_die(rank: int, folder: Path) -> None:
    published, store = held_published(folder, keep_last=1)
    store.gate.set()
    published.publish(written(folder / "out", 1), 1)
    published.finish()
    store.gate.clear()
    store.begun.clear()
    published.publish(written(folder / "out", 2), 2)
    assert store.begun.wait(PATIENCE)
    os.kill(os.getpid(), signal.SIGKILL)


def newest_step(rank: int, folder: Path) -> str:
    found = Published(folder / "store").newest(lambda key: folder / "out" / f"checkpoint-{key.step}")
    assert found is not None
    return found.name


def test_a_training_that_fails_still_stores_what_it_has_handed_over(tmp_path: Path) -> None:
    import subprocess
    import sys

    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\n"
        "from everstep.checkpoint.adapters.published import Published\n"
        f"path = Path({str(tmp_path / 'out')!r})\npath.mkdir()\n(path / 'model').write_bytes(bytes(1 << 22))\n"
        f"Published({str(tmp_path / 'store')!r}).publish(path, 3)\nraise SystemExit('the training failed')\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert "the training failed" in done.stderr
    assert steps(PosixStore(tmp_path / "store")) == [3], done.stderr


def put_off(published: Published, folder: Path) -> Path:
    """Hand over step 2 while step 1 is being stored; the folder of step 2, which waits."""
    store = published.store
    assert isinstance(store, HeldStore)
    published.publish(written(folder / "out", 1), 1)
    assert store.begun.wait(PATIENCE)
    path = written(folder / "out", 2)
    (path / "optimizer").write_text("first")
    published.publish(path, 2)
    return path


def test_a_folder_that_is_written_into_while_it_waits_is_not_stored_and_it_is_told(tmp_path: Path) -> None:
    published, store = held_published(tmp_path, keep_last=9)
    path = put_off(published, tmp_path)
    (path / "optimizer").write_text("other")
    store.gate.set()
    with pytest.raises(SaveFailed, match=r"out/checkpoint-2 was written into before it was stored"):
        published.finish()
    assert steps(store) == [1]
    published.publish(path, 2)
    published.finish()
    assert steps(store) == [2, 1], "what it is now is stored when it is handed over"


def test_a_folder_that_waits_when_its_owner_begins_to_write_into_it_again_is_stored_as_it_was(tmp_path: Path) -> None:
    published, store = held_published(tmp_path, keep_last=9)
    path = put_off(published, tmp_path)
    published.begin_training()
    assert {each.name for each in path.iterdir()} == {"model", "optimizer"}, "the owner has all of it still"
    (path / "optimizer").write_text("other")
    store.gate.set()
    published.finish()
    restored = published.newest(lambda key: tmp_path / "back")
    assert restored is not None
    assert (restored / "optimizer").read_text() == "first"
    assert steps(store) == [2, 1]


def test_a_folder_with_a_link_to_a_file_is_stored_with_what_that_leads_to(tmp_path: Path) -> None:
    published = Published(tmp_path / "store")
    path = written(tmp_path / "out", 1)
    (tmp_path / "out" / "base").write_text("shared")
    (path / "link").symlink_to("../base")
    published.publish(path, 1)
    published.finish()
    restored = published.newest(lambda key: tmp_path / "back")
    assert restored is not None
    assert (restored / "link").read_text() == "shared"


def test_a_second_hugging_face_training_leaves_alone_what_waits_of_the_first(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from everstep.checkpoint.adapters.huggingface import EverstepCallback

    callback = EverstepCallback(tmp_path / "store", tmp_path / "out")
    callback._published, store = held_published(tmp_path, keep_last=9)
    path = put_off(callback._published, tmp_path)
    arguments = SimpleNamespace(output_dir=str(tmp_path / "out"))
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=9, epoch=0)
    others = [arguments, state, SimpleNamespace()]
    callback.on_train_begin(*others)
    (path / "optimizer").write_text("of the second")
    store.gate.set()
    callback.on_train_end(*others)
    restored = callback._published.newest(lambda key: tmp_path / "back")
    assert restored is not None
    assert (restored / "optimizer").read_text() == "first"
