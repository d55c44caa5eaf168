"""A reader beside a run holds the checkpoint that it reads; one that was just removed is not called damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint.catalog.candidates import list_candidates
from everstep.checkpoint.catalog.leases import list_leases
from everstep.checkpoint.catalog.verification import VerifiedCheckpoints
from everstep.checkpoint.errors import CheckpointError, Denied, Removed
from everstep.checkpoint.format.keys import DATA, LEASES, Key
from everstep.checkpoint.publish import folder
from everstep.checkpoint.publish.copying import copy_checkpoint
from everstep.checkpoint.retention.pruning import prune_by_hand
from everstep.checkpoint.retention.retention import prune_store
from everstep.checkpoint.store.base import ObjectReader, open_store
from everstep.checkpoint.store.posix import PosixStore
from tests.checkpoint.builders import key
from tests.cli.command import Done, in_process


class Beside(PosixStore):
    """A store in which a run saves step 30 and removes what is older, once: before a lease, or a part is read."""

    def __init__(self, root: Path, at: str) -> None:
        super().__init__(root)
        self.at = at
        (root.parent / "model").mkdir(parents=True, exist_ok=True)
        self._saved = root.parent / "model"
        for step in (10, 20):
            self._save(step)

    def _save(self, step: int) -> None:
        (self._saved / "weights").write_text(str(step))
        folder.save_folder(PosixStore(self.url), key(step), self._saved)

    def _goes_on(self, name: str) -> None:
        if self.at and name.startswith(self.at) and (self.at == LEASES or name.endswith(".part")):
            self.at = ""
            self._save(30)
            prune_store(PosixStore(self.url), [key(30)], keep_last=1)

    def replace(self, name: str, data: bytes) -> None:
        self._goes_on(name)
        super().replace(name, data)

    @contextmanager
    def open_object(self, name: str) -> Iterator[ObjectReader]:
        self._goes_on(name)
        with super().open_object(name) as opened:
            yield opened


def copied(store: Beside, folder_: Path) -> Key:
    copy_checkpoint(store, open_store(folder_ / "copy"), key(20))
    (found,) = list_candidates(open_store(folder_ / "copy"))
    return found


def restored(store: Beside, folder_: Path) -> Key:
    manifest, bad = folder.restore_folder(store, folder_ / "back")
    assert bad == []
    assert (folder_ / "back" / "weights").read_text() == str(manifest.key.step)
    return manifest.key


@pytest.fixture
def everstep(tmp_path: Path) -> Callable[..., Done]:
    return partial(in_process, tmp_path)


@pytest.mark.parametrize("read", [copied, restored])
def test_what_is_read_stays_while_a_run_goes_on(read: Callable[[Beside, Path], Key], tmp_path: Path) -> None:
    store = Beside(tmp_path / "store", at=DATA)
    assert read(store, tmp_path) == key(20)
    assert list_candidates(store) == [key(30), key(20)]
    assert list_leases(store) == {}


def test_what_was_removed_before_it_was_held_is_not_called_damaged(tmp_path: Path) -> None:
    assert restored(Beside(tmp_path / "one" / "store", at=LEASES), tmp_path / "one") == key(30)
    (tmp_path / "two").mkdir()
    with pytest.raises(Removed, match="was removed while it was read: its store keeps newer ones"):
        copied(Beside(tmp_path / "two" / "store", at=LEASES), tmp_path / "two")


def test_the_command_verifies_what_is_there(
    everstep: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[Any] = []
    monkeypatch.setattr("everstep.cli.places.open_named_store", lambda uri: opened[-1])
    for at, printed in ((DATA, ["0.1-20"]), (LEASES, ["0.1-30"])):
        opened.append(Beside(tmp_path / at / "store", at=at))
        done = everstep("checkpoint", "verify", "store")
        assert done.returncode == 0, done.stderr
        assert [line.split()[0] for line in done.stdout.splitlines()] == printed
        assert "not good" not in done.stderr
    opened.append(Beside(tmp_path / "all" / "store", at=LEASES))
    done = everstep("checkpoint", "verify", "store", "--all")
    assert "not good" not in done.stderr
    assert "was removed while it was read" in done.stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("copy", "store", "copies"), "0.1-30 is copied to"),
        (("copy", "store", "copies", "--all"), "0.1-30 is copied to"),
        (("prune", "store", "--keep-last", "1"), ""),
        (("prune", "store", "--keep-last", "1", "--dry-run"), ""),
        (("show", "store"), "checkpoint  0.1-30"),
        (("show", "store", "--json"), '"step":30'),
        (("diff", "store", "--other-key", "30"), ""),
    ],
)
def test_a_command_that_names_no_checkpoint_takes_a_newer_one_where_a_run_removes_what_it_listed(
    command: tuple[str, ...],
    said: str,
    everstep: Callable[..., Done],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    store = Beside(tmp_path / "store", at=LEASES)
    monkeypatch.setattr(
        "everstep.cli.places.open_named_store", lambda uri: store if uri == "store" else open_store(tmp_path / uri)
    )
    done = everstep("checkpoint", *command)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert "good: nothing" not in done.stderr
    assert list_candidates(store) == [key(30)]
    assert list_leases(store) == {}


def test_what_prune_counts_on_stays_until_it_has_removed_the_others(
    everstep: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = Beside(tmp_path / "store", at=DATA)
    monkeypatch.setattr("everstep.cli.places.open_named_store", lambda uri: store)
    done = everstep("checkpoint", "prune", "store", "--keep-last", "1")
    assert done.returncode == 0, done.stderr
    assert "0.1-20 is good and is kept" in done.stderr
    assert list_candidates(store) == [key(30), key(20)], "the run removed all that nobody held while 20 was read"
    assert list_leases(store) == {}


def test_pruning_ends_where_everything_is_removed_before_it_can_be_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Beside(tmp_path / "store", at="")
    saved = iter(range(30, 1000))

    def removed_first(name: str, data: bytes) -> None:
        """Before each lease the run saves, and removes all others."""
        latest = next(saved)
        store._save(latest)
        prune_store(PosixStore(store.url), [key(latest)], keep_last=1)
        PosixStore.replace(store, name, data)

    monkeypatch.setattr(store, "replace", removed_first)
    with pytest.raises(CheckpointError, match="removed by somebody else faster than they can be verified"):
        prune_by_hand(VerifiedCheckpoints(store, mark=False, believe_marks=False), keep_last=1)
    assert len(list_candidates(store)) == 1


def test_who_may_not_write_reads_without_a_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Beside(tmp_path / "store", at="")

    def refuse(name: str, data: bytes) -> None:
        raise Denied("may not be written", name)

    monkeypatch.setattr(store, "replace", refuse)
    assert restored(store, tmp_path) == key(20)


@pytest.mark.torch
def test_what_is_loaded_or_exported_stays_while_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    import everstep
    from everstep.checkpoint.exchange import exporting
    from everstep.checkpoint.load import api as load_module

    for at, expected in ((DATA, 20), (LEASES, 30)):
        reads: list[Any] = [everstep.load, partial(exporting.export_dcp, folder=tmp_path / f"{expected}")]
        for number, read in enumerate(reads):
            store = Beside(tmp_path / at / str(number) / "store", at=at)
            for module in (load_module, exporting):
                monkeypatch.setattr(module, "open_store", lambda uri, held=store: held)
            found = read("store")
            assert found.step == expected
            assert getattr(found, "fell_back", {}) == {}
    monkeypatch.setattr(load_module, "open_store", lambda uri: Beside(tmp_path / "gone" / "store", at=LEASES))
    with pytest.raises(Removed):
        everstep.load("store", step=20)


@pytest.mark.torch
def test_an_export_holds_all_of_it_from_its_first_file_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from everstep.checkpoint.exchange import exporting
    from everstep.checkpoint.load.api import load as real
    from tests.checkpoint import ranks

    store = PosixStore(tmp_path / "store")
    ranks.save(store, key(20), {"model": {name: torch.ones(100) for name in "abc"}})

    def load(*arguments: Any, **options: Any) -> Any:
        """Between any two reads of the export a run saves, and removes what is older and not held."""
        found = real(*arguments, **options)
        latest = key(list_candidates(store)[0].step + 1)
        ranks.save(store, latest, {"model": {"a": torch.zeros(1)}})
        prune_store(store, [latest], keep_last=1)
        return found

    monkeypatch.setattr(exporting, "load", load)
    done = exporting.export_safetensors(store.url, tmp_path / "out", step=20, max_shard_bytes=400)
    assert done == key(20)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) == 3
