"""A restore loads the newest checkpoint that is verified on every rank, or changes nothing."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from everstep.checkpoint.catalog.leases import list_leases  # noqa: E402
from everstep.checkpoint.errors import CheckpointError, Denied, RestoreFailed, StoreError  # noqa: E402
from everstep.checkpoint.format.keys import HINT, Attempt, Key  # noqa: E402
from everstep.checkpoint.format.manifest import HEADER  # noqa: E402
from everstep.checkpoint.ranks.topology import Topology  # noqa: E402
from everstep.checkpoint.restore.proposals import Proposals, make_proposal  # noqa: E402
from everstep.checkpoint.restore.restorer import NoGoodCheckpoint  # noqa: E402
from everstep.checkpoint.slots import slot_marks  # noqa: E402
from everstep.checkpoint.slots.slots import Claim, Slots  # noqa: E402
from everstep.checkpoint.state.kinds import PerRank, StateMismatch  # noqa: E402
from everstep.checkpoint.state.rng import Rng  # noqa: E402
from everstep.checkpoint.store.base import StoredObject  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.builders import newer  # noqa: E402
from tests.checkpoint.restoring import NEW, OLD, Watched, filled, flip, model, save_both, touched, weight_at  # noqa: E402

pytestmark = pytest.mark.torch


def test_the_newest_is_loaded_and_a_bad_one_is_passed_over(tmp_path: Path) -> None:
    store = PosixStore(tmp_path / "store")
    save_both(tmp_path / "store")
    restored, fill = touched(store, tmp_path)
    assert (restored.key, restored.tier, restored.fell_back, fill) == (NEW, "store", {}, 20)
    for offset, where in ((weight_at(tmp_path / "store", NEW) + 100, "tensor"), (20, "header")):
        flip(tmp_path / "store" / NEW.part_name(0), offset)
        restored, fill = touched(store, tmp_path)
        assert (restored.key, fill) == (OLD, 10), where
        assert NEW.part_name(0) in restored.fell_back[str(NEW)]
        flip(tmp_path / "store" / NEW.part_name(0), offset)
    flip(tmp_path / "store" / NEW.manifest_name, 30)
    restored, fill = touched(store, tmp_path)
    assert (restored.key, fill) == (OLD, 10)


def test_where_nothing_is_good_nothing_is_touched_and_the_reasons_are_told(tmp_path: Path) -> None:
    save_both(tmp_path / "store")
    flip(tmp_path / "store" / OLD.part_name(0), weight_at(tmp_path / "store", OLD))
    (tmp_path / "store" / NEW.part_name(0)).unlink()
    made = model(-1)
    with pytest.raises(NoGoodCheckpoint) as caught:
        ranks.restore(tmp_path / "store", tmp_path / "memory", {"model": made})
    assert set(caught.value.reasons) == {str(OLD), str(NEW)}
    assert filled(made) == -1


def test_where_nothing_was_saved_it_is_a_fresh_start(tmp_path: Path) -> None:
    restored, fill = touched(PosixStore(tmp_path / "store"), tmp_path)
    assert (restored.step, restored.key, fill) == (0, None, -1)


def test_a_store_that_cannot_be_listed_is_no_fresh_start(tmp_path: Path) -> None:
    class Unreachable(PosixStore):
        def list(self, prefix: str) -> Iterable[StoredObject]:  # type: ignore[override]
            raise StoreError("timed out", self.url, may_pass=True)

    with pytest.raises(StoreError, match=r"timed out"):
        touched(Unreachable(tmp_path / "store"), tmp_path)


class Away(Watched):
    """A folder whose files cannot be read the next `failures` times, as of a store that answers 503."""

    def __init__(self, folder: Path, failures: int, *, may_pass: bool = True) -> None:
        super().__init__(folder)
        self.failures = failures
        self._may_pass = may_pass
        self._lock = threading.Lock()

    def _fail(self, name: str) -> None:
        with self._lock:
            if name.startswith(("manifests/", "data/")) and self.failures > 0:
                self.failures -= 1
                raise StoreError("503 Service Unavailable", name, may_pass=self._may_pass)

    def read(self, name: str) -> bytes:
        self._fail(name)
        return super().read(name)

    def was_read(self, name: str, offset: int, into: memoryview) -> None:
        self._fail(name)
        super().was_read(name, offset, into)


def test_what_passes_is_no_reason_to_go_back(tmp_path: Path) -> None:
    save_both(tmp_path / "store")
    restored, fill = touched(Away(tmp_path / "store", failures=2), tmp_path)
    assert (restored.key, restored.fell_back, fill) == (NEW, {}, 20)


def test_a_store_that_stays_away_ends_the_restore_and_nothing_older_is_loaded(tmp_path: Path) -> None:
    save_both(tmp_path / "store")
    made = model(-1)
    with pytest.raises(StoreError, match="503 Service Unavailable"):
        ranks.restore(Away(tmp_path / "store", failures=1000), tmp_path / "memory", {"model": made})
    assert filled(made) == -1


def test_who_may_not_read_a_part_is_told_so_and_gets_nothing_older(tmp_path: Path) -> None:
    class Closed(Watched):
        def was_read(self, name: str, offset: int, into: memoryview) -> None:
            raise Denied("permission denied", name)

    save_both(tmp_path / "store")
    with pytest.raises(Denied):
        ranks.restore(Closed(tmp_path / "store"), tmp_path / "memory", {"model": model(-1)})


def test_a_file_that_can_never_be_read_is_passed_over(tmp_path: Path) -> None:
    """A bad block of a disk, for one."""
    save_both(tmp_path / "store")
    restored, fill = touched(Away(tmp_path / "store", failures=1, may_pass=False), tmp_path)
    assert (restored.key, fill) == (OLD, 10)


def restore_what_is_newer(rank: int, store: Path, memory: Path) -> str:
    save_both(store)
    if rank == 0:
        path = store / NEW.manifest_name
        path.write_bytes(newer(path.read_bytes()))
    dist.barrier()
    made = model(-1)
    with pytest.raises(CheckpointError) as caught:
        ranks.restore(store, memory, {"model": made, "rng": PerRank(Rng())})
    assert filled(made) == -1
    return str(caught.value)


def test_an_older_version_beside_a_newer_one_loads_nothing_older_and_says_so_on_all_ranks(tmp_path: Path) -> None:
    for message in ranks.run(2, restore_what_is_newer, tmp_path / "store", tmp_path / "memory"):
        assert "has format 77; this version of everstep reads format" in message


def test_a_checkpoint_that_vanishes_while_it_is_read_is_passed_over_for_what_is_there_now(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    save_both(folder)
    newest = ranks.key(30)
    once = threading.Lock()  # several threads read

    def replaced(name: str, offset: int) -> None:
        with once:
            if name.startswith(NEW.data_prefix) and not (folder / newest.manifest_name).exists():
                ranks.save(PosixStore(folder), newest, {"model": model(30)})
                (folder / NEW.manifest_name).unlink()
                shutil.rmtree(folder / NEW.data_prefix)

    restored, fill = touched(Watched(folder, replaced), tmp_path)
    assert (restored.key, fill) == (newest, 30)
    assert "no such object" in restored.fell_back[str(NEW)]


def test_a_lease_is_held_while_a_checkpoint_is_read_and_given_back(tmp_path: Path) -> None:
    save_both(tmp_path / "store")
    seen: list[Key] = []
    store = Watched(tmp_path / "store", lambda name, offset: seen.extend(key for key, _ in list_leases(store).values()))
    touched(store, tmp_path)
    assert set(seen) == {NEW}
    assert list_leases(store) == {}


def test_a_reader_that_may_not_write_reads_all_the_same(tmp_path: Path) -> None:
    class ReadOnly(PosixStore):
        def replace(self, name: str, data: bytes) -> None:
            raise StoreError("permission denied", name)

    save_both(tmp_path / "store")
    restored, fill = touched(ReadOnly(tmp_path / "store"), tmp_path)
    assert (restored.key, fill) == (NEW, 20)


def test_what_does_not_fit_is_no_reason_to_fall_back(tmp_path: Path) -> None:
    save_both(tmp_path / "store")
    wide = model(-1, size=41)
    with pytest.raises(StateMismatch, match=r"model.weight has shape"):
        ranks.restore(tmp_path / "store", tmp_path / "memory", {"model": wide})
    assert filled(wide) == -1
    narrow = nn.Linear(40, 40, bias=False)
    with pytest.raises(StateMismatch, match=r"model.bias is in the checkpoint, and nothing here has it"):
        ranks.restore(tmp_path / "store", tmp_path / "memory", {"model": narrow})
    with pytest.raises(StateMismatch, match=r"nothing in the checkpoint is called scaler"):
        ranks.restore(tmp_path / "store", tmp_path / "memory", {"model": model(-1), "scaler": {"scale": 1.0}})


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "complex64", "int8", "bool"])
def test_every_kind_of_tensor_comes_back_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    kind = getattr(torch, dtype)
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (3, 8), dtype=torch.uint8)
    tensors = {"t": raw.view(kind), "empty": torch.empty(0, 3, dtype=kind), "scalar": raw.view(kind)[0, 0].clone()}
    tensors["turned"] = raw.view(kind).t()
    ranks.save(PosixStore(tmp_path / "store"), NEW, {"state": tensors})
    loaded: dict[str, Any] = {}
    ranks.restore(tmp_path / "store", tmp_path / "memory", {"state": loaded})
    assert {name: each.dtype for name, each in loaded.items()} == dict.fromkeys(tensors, kind)
    assert ranks.same(bits(loaded), bits(tensors))


def bits(tensors: dict[str, Any]) -> dict[str, Any]:
    return {
        name: each.contiguous().reshape(-1).view(torch.uint8).reshape(*each.shape, -1)
        for name, each in tensors.items()
        if each.numel()
    }


def in_memory(memory: Path, store: Path, key: Key) -> None:
    """Leaves the checkpoint of a run with one rank in a slot as its writer does."""
    made = model(key.step)
    manifest = ranks.save(PosixStore(store), key, {"model": made})
    slots = Slots.create(memory / "0", 2)
    slot = slots[key.step // 10 % 2]
    slot.claim(Claim(key, 1, 0, 1))
    slot.part(0).write_bytes((store / key.part_name(0)).read_bytes())
    slot.complete(manifest)


def test_what_is_in_the_nodes_memory_is_not_read_from_the_store(tmp_path: Path) -> None:
    for key in (OLD, NEW):
        in_memory(tmp_path / "memory", tmp_path / "store", key)
    # The newest was never committed: the ranks died while it was stored.
    for name in (NEW.manifest_name, HINT):
        (tmp_path / "store" / name).unlink()
    store = Watched(tmp_path / "store")
    restored, fill = touched(store, tmp_path)
    assert (restored.key, restored.tier, fill) == (NEW, "memory", 20)
    assert (store.bytes, store.manifests) == (0, 0)


@pytest.mark.parametrize("name", ["claim.json", "slot.json"])
def test_without_the_store_nothing_older_is_loaded_than_what_may_be_in_a_damaged_slot(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in (OLD, NEW):
        in_memory(tmp_path / "memory", tmp_path / "store", key)
    slots, topology = Slots(tmp_path / "memory" / "0"), Topology(0, 1, 0, 1, (0,))
    store = PosixStore(tmp_path / "store")

    def fail(prefix: str) -> Iterable[StoredObject]:
        raise StoreError("timed out", store.url)

    monkeypatch.setattr(store, "list", fail)

    def propose() -> Any:
        later = Attempt(NEW.attempt.epoch, NEW.attempt.generation + 1)
        offer = make_proposal(slots.directory, topology)
        return Proposals(store, topology, reach=False, attempt=later).next([offer])["key"]

    assert propose() == str(NEW)
    older, newer = (slots[key.step // 10 % 2].path / name for key in (OLD, NEW))
    kept = older.read_bytes()
    older.write_bytes(b"{")
    assert propose() == str(NEW)
    older.write_bytes(kept)
    newer.write_bytes(b"{")
    with pytest.raises(StoreError, match="timed out"):
        propose()


def test_a_bad_copy_in_memory_is_passed_over_for_the_same_checkpoint_in_the_store(tmp_path: Path) -> None:
    in_memory(tmp_path / "memory", tmp_path / "store", NEW)
    flip(tmp_path / "memory" / "0" / "0" / "0.part", HEADER + 7)
    restored, fill = touched(PosixStore(tmp_path / "store"), tmp_path)
    assert (restored.key, restored.tier, restored.fell_back, fill) == (NEW, "store", {}, 20)


def test_what_the_writer_has_verified_is_read_once(tmp_path: Path) -> None:
    """So its sums are checked on their way into the model; should one not hold, the mark is believed no more."""
    in_memory(tmp_path / "memory", tmp_path / "store", NEW)
    slot = Slots(tmp_path / "memory" / "0")[0]
    manifest = slot.manifest()
    assert manifest is not None
    mark = slot_marks.verify_slot(slot, manifest)
    assert mark is not None
    slot_marks.leave_mark(slot, mark)
    restored, fill = touched(PosixStore(tmp_path / "store"), tmp_path)
    assert (restored.tier, restored.bytes, fill) == ("memory", 0, 20), "nothing was left to verify"
    flip(slot.part(0), HEADER + 7)
    with pytest.raises(RestoreFailed, match=r"in this node's memory: bytes .* are undefined now"):
        touched(PosixStore(tmp_path / "store"), tmp_path)
    restored, fill = touched(PosixStore(tmp_path / "store"), tmp_path)
    assert (restored.key, restored.tier, fill) == (NEW, "store", 20)


def test_a_slot_is_not_filled_anew_while_it_is_read(tmp_path: Path) -> None:
    in_memory(tmp_path / "memory", tmp_path / "store", NEW)
    slot = Slots(tmp_path / "memory" / "0")[0]
    seen: list[bool] = []

    class Asks(nn.Linear):  # type: ignore[misc]  # torch is not where types are checked
        def load_state_dict(self, *args: Any, **options: Any) -> Any:
            seen.append(slot.is_read)
            return super().load_state_dict(*args, **options)

    restored = ranks.restore(tmp_path / "store", tmp_path / "memory", {"model": Asks(40, 40)})
    assert (restored.tier, seen, slot.is_read) == ("memory", [True], False)


def test_a_manifest_that_only_looks_right_is_not_believed(tmp_path: Path) -> None:
    save_both(tmp_path / "store")
    store = PosixStore(tmp_path / "store")
    manifest = (tmp_path / "store" / OLD.manifest_name).read_bytes()
    (tmp_path / "store" / NEW.manifest_name).write_bytes(manifest)
    restored, fill = touched(store, tmp_path)
    assert (restored.key, fill) == (OLD, 10)
    assert "of another checkpoint" in restored.fell_back[str(NEW)]
