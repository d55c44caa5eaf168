"""What is loaded is the newest checkpoint that is good for every rank, or nothing is touched."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from everstep.checkpoint import slot_marks  # noqa: E402
from everstep.checkpoint.errors import CheckpointError, Denied, RankLost, RestoreFailed, StoreError  # noqa: E402
from everstep.checkpoint.format import ALIGN, CHUNK, HEADER  # noqa: E402
from everstep.checkpoint.keys import HINT, Key  # noqa: E402
from everstep.checkpoint.leases import leases  # noqa: E402
from everstep.checkpoint.manifests import read_manifest  # noqa: E402
from everstep.checkpoint.restore import NoGoodCheckpoint  # noqa: E402
from everstep.checkpoint.rng import Rng  # noqa: E402
from everstep.checkpoint.slots import Claim, Slots  # noqa: E402
from everstep.checkpoint.state.kinds import PerRank, StateMismatch  # noqa: E402
from everstep.checkpoint.store.base import Entry, ObjectReader  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.builders import newer  # noqa: E402

pytestmark = pytest.mark.torch

OLD, NEW = ranks.key(10), ranks.key(20)


class Watched(PosixStore):
    """A folder that counts the bytes that are read of parts and tells `on_read(name, offset)` before each read.

    With `far` it is on another machine, as far as the restore knows.
    """

    is_local = True

    def __init__(
        self, folder: Path, on_read: Callable[[str, int], None] = lambda name, offset: None, *, far: bool = False
    ) -> None:
        super().__init__(folder)
        self.is_local = not far
        self.bytes = 0
        self.manifests = 0
        self._on_read = on_read
        self._lock = threading.Lock()

    def read(self, name: str) -> bytes:
        self.manifests += name.startswith("manifests/")
        return super().read(name)

    @contextmanager
    def open_object(self, name: str) -> Iterator[ObjectReader]:
        self._on_read(name, 0)
        with super().open_object(name) as opened:
            yield _WatchedObject(self, name, opened)

    def was_read(self, name: str, offset: int, into: memoryview) -> None:
        """May change what came."""
        self._on_read(name, offset)
        with self._lock:
            self.bytes += len(into)


class _WatchedObject:
    def __init__(self, store: Watched, name: str, opened: ObjectReader) -> None:
        self._store, self._name, self._opened = store, name, opened

    def read_into(self, offset: int, into: memoryview) -> None:
        self._opened.read_into(offset, into)
        self._store.was_read(self._name, offset, into)

    def expect(self, offset: int, length: int) -> None:
        self._opened.expect(offset, length)


def model(fill: float, size: int = 40) -> nn.Module:
    made = nn.Linear(size, size)
    for param in made.parameters():
        nn.init.constant_(param, fill)
    return made


def filled(made: nn.Module) -> float:
    values: set[float] = {value.item() for param in made.parameters() for value in torch.aminmax(param)}
    assert len(values) == 1, "a mixture of two checkpoints"
    return values.pop()


def save_both(store: Path, size: int = 40) -> None:
    for key in (OLD, NEW):
        ranks.save(PosixStore(store), key, {"model": model(key.step, size), "rng": PerRank(Rng())})


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def weight_at(store: Path, key: Key) -> int:
    """Where the model's weight begins in the part of rank 0; the generators' bytes lie there too."""
    [shard] = read_manifest(PosixStore(store), key).tensors["model.weight"].shards
    return shard.chunks[0].offset


def touched(store: PosixStore, tmp_path: Path) -> tuple[Any, float]:
    """What a restore by one rank says, and what the model holds then."""
    made = model(-1)
    return ranks.restore(store, tmp_path / "memory", {"model": made}), filled(made)


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
        def list(self, prefix: str) -> Iterable[Entry]:  # type: ignore[override]
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
    store = Watched(tmp_path / "store", lambda name, offset: seen.extend(key for key, _ in leases(store).values()))
    touched(store, tmp_path)
    assert set(seen) == {NEW}
    assert leases(store) == {}


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


# ---- several ranks


def one_bad_read(rank: int, store: Path, memory: Path, nodes: int, far: bool) -> dict[str, Any]:
    save_both(store)
    dist.barrier()

    class Rots(Watched):
        def was_read(self, name: str, offset: int, into: memoryview) -> None:
            # Good in the store, and for the other rank: only what this one gets last is not what was written.
            if rank == 1 and name == NEW.part_name(1):
                into[-1] ^= 1

    made = model(-1)
    restored = ranks.restore(Rots(store, far=far), memory, {"model": made}, nodes=nodes)
    return {"key": restored.key, "fell_back": restored.fell_back, "fill": filled(made)}


@pytest.mark.parametrize("far", [False, True], ids=["a folder", "another machine"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_one_bad_chunk_on_one_rank_sends_all_ranks_to_the_same_older_checkpoint(
    nodes: int, far: bool, tmp_path: Path
) -> None:
    results = ranks.run(2, one_bad_read, tmp_path / "store", tmp_path / "memory", nodes, far)
    assert results[0] == results[1]
    assert (results[0]["key"], results[0]["fill"]) == (OLD, 10)
    assert "rank 1" in results[0]["fell_back"][str(NEW)]


def changes_between_the_passes(rank: int, store: Path, memory: Path) -> tuple[str, str, float]:
    save_both(store)
    dist.barrier()
    reads: list[str] = []

    class Changes(Watched):
        def was_read(self, name: str, offset: int, into: memoryview) -> None:
            # Good when it was verified, for all ranks; what rank 1 loads is another byte.
            if name == NEW.part_name(1):
                reads.append(name)
                if rank == 1 and len(reads) > verified:
                    into[-1] ^= 1

    verified = 10**9
    ranks.restore(Changes(store), memory / "counted", {"model": model(-1)})
    verified, reads[:] = len(reads) - 1, []
    with pytest.raises(CheckpointError) as caught:
        ranks.restore(Changes(store), memory / "changed", {"model": model(-1)})
    made = model(-1)
    again = ranks.restore(store, memory / "again", {"model": made})
    assert again.key == NEW
    return type(caught.value).__name__, str(caught.value), filled(made)


def test_bytes_that_change_after_they_were_verified_are_an_error_of_all_ranks_that_says_what_is_undefined(
    tmp_path: Path,
) -> None:
    results = ranks.run(2, changes_between_the_passes, tmp_path / "store", tmp_path / "memory")
    assert results[0] == results[1]
    kind, message, fill = results[0]
    assert (kind, fill) == ("RestoreFailed", 20)
    assert f"rank 1: {NEW.part_name(1)}: bytes" in message
    assert "are undefined now" in message


def test_what_goes_into_new_tensors_is_read_once_and_what_objects_hold_twice(tmp_path: Path) -> None:
    """New tensors are nobody's until all is verified, so that one pass does for them."""
    size = 700
    made = model(NEW.step, size)
    optimizer = torch.optim.AdamW(made.parameters())
    for param in made.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    weights = 4 * (size * size + size)
    ranks.save(PosixStore(tmp_path / "store"), NEW, {"model": made, "optimizer": optimizer})
    other = model(-1, size)
    other_optimizer = torch.optim.AdamW(other.parameters())
    store = Watched(tmp_path / "store")
    ranks.restore(store, tmp_path / "memory", {"model": other, "optimizer": other_optimizer})
    expected, found = optimizer.state_dict()["state"], other_optimizer.state_dict()["state"]
    assert all(torch.equal(expected[i][name], found[i][name]) for i in expected for name in expected[i])
    assert torch.equal(made.weight, other.weight)
    assert 4 * weights <= store.bytes <= 4 * weights + 2 * HEADER, "the weights twice, both moments once"


def test_a_transposed_model_and_one_of_another_kind_of_memory_are_filled_bit_for_bit(tmp_path: Path) -> None:
    """Tensors that cannot be read right into place go through other memory; a chunk lies across its borders."""
    whole = torch.arange(3_000_000, dtype=torch.float32).view(1500, 2000)
    ranks.save(PosixStore(tmp_path / "store"), NEW, {"state": {"whole": whole}})
    turned = torch.zeros(2000, 1500).t()

    class Holder(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("whole", turned)

    ranks.save(PosixStore(tmp_path / "module"), NEW, {"state": Holder()})
    with torch.no_grad():
        turned.copy_(whole)
    holder = Holder()
    ranks.save(PosixStore(tmp_path / "module"), ranks.key(30), {"state": holder})
    turned.zero_()
    assert not holder.whole.is_contiguous()
    ranks.restore(tmp_path / "module", tmp_path / "memory", {"state": holder})
    assert torch.equal(holder.whole, whole)


def count(rank: int, store: Path, memory: Path, nodes: int, size: int) -> tuple[int, int]:
    watched = Watched(store, far=True)
    made = model(-1, size)
    ranks.restore(watched, memory, {"model": made}, nodes=nodes)
    assert filled(made) == NEW.step
    return watched.bytes, watched.manifests


@pytest.mark.parametrize(
    ("world", "nodes", "size"),
    [(4, 1, 2500), (4, 2, 2500), pytest.param(8, 1, 15_811, marks=[pytest.mark.chaos, pytest.mark.timeout(1200)])],
    ids=["4 ranks", "2 nodes of 2 ranks", "8 ranks and 1 GB"],
)
def test_the_bytes_of_a_checkpoint_leave_a_store_on_another_machine_once_for_each_node(
    world: int, nodes: int, size: int, tmp_path: Path
) -> None:
    ranks.save(PosixStore(tmp_path / "store"), NEW, {"model": model(NEW.step, size)})
    results = ranks.run(world, count, tmp_path / "store", tmp_path / "memory", nodes, size, timeout=600)
    whole = 4 * (size * size + size)
    read = sum(count for count, _ in results)
    assert nodes * whole <= read <= nodes * (whole + HEADER + ALIGN)
    assert sum(manifests for _, manifests in results) == nodes
    assert max(count for count, _ in results) <= nodes * whole / world + CHUNK, "the ranks of a node share the work"


def count_in_a_folder(rank: int, store: Path, memory: Path, size: int) -> int:
    watched = Watched(store)
    made = model(-1, size)
    ranks.restore(watched, memory, {"model": made})
    assert filled(made) == NEW.step
    assert not list(memory.rglob("*.part")), "no memory is taken for what is in files"
    return watched.bytes


def test_the_ranks_of_a_node_share_the_verification_of_a_folder_and_take_no_memory_for_it(tmp_path: Path) -> None:
    size = 2500
    ranks.save(PosixStore(tmp_path / "store"), NEW, {"model": model(NEW.step, size)})
    results = ranks.run(4, count_in_a_folder, tmp_path / "store", tmp_path / "memory", size)
    whole = 4 * (size * size + size)
    assert 5 * whole <= sum(results) <= 5 * (whole + HEADER), "once together, and once by each for its own model"


def one_dies(rank: int, store: Path, memory: Path) -> tuple[int, ...]:
    save_both(store)
    dist.barrier()

    def die(name: str, offset: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    made = model(-1)
    with pytest.raises(RankLost, match=r"rank 1 gave no sign of life for 2 s") as caught:
        ranks.restore(Watched(store, die), memory, {"model": made}, patience=2.0)
    assert filled(made) == -1
    return caught.value.ranks


def test_a_rank_that_dies_in_a_restore_is_named_by_the_others(tmp_path: Path) -> None:
    results = ranks.run(3, one_dies, tmp_path / "store", tmp_path / "memory", dies=[1])
    assert results == [(1,), None, (1,)]


def fails_alike(rank: int, store: Path, memory: Path) -> list[str]:
    save_both(store)
    messages = []
    for made in (model(-1, size=41 if rank == 1 else 40), Explodes() if rank == 1 else model(-1)):
        try:
            ranks.restore(store, memory, {"model": made})
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


class Explodes(nn.Linear):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(40, 40)

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        raise KeyError("somebody's own mistake")


def test_what_one_rank_cannot_load_is_an_error_of_all(tmp_path: Path) -> None:
    first, second = ranks.run(2, fails_alike, tmp_path / "store", tmp_path / "memory")
    assert first[0] == second[0]
    assert "rank 1: model.weight has shape [40, 40] in the checkpoint, [41, 41] here" in first[0]
    assert first[1] == 'CheckpointError: rank 1: "somebody\'s own mistake"'
    assert second[1] == 'KeyError: "somebody\'s own mistake"'


def other_world(rank: int, store: Path, memory: Path) -> tuple[Any, ...]:
    made = model(-1)
    torch.manual_seed(rank)
    restored = ranks.restore(store, memory, {"model": made, "rng": PerRank(Rng())})
    return restored.left, torch.rand(1).item()


def own_numbers(rank: int, store: Path, memory: Path) -> float:
    torch.manual_seed(100 + rank)
    save_both(store)
    expected: float = torch.rand(1).item()
    restored = ranks.restore(store, memory, {"model": model(-1), "rng": PerRank(Rng())})
    assert restored.left == ()
    assert torch.rand(1).item() == expected
    return expected


def test_each_rank_gets_its_own_generators_back_and_keeps_them_at_another_number_of_ranks(tmp_path: Path) -> None:
    drawn = ranks.run(2, own_numbers, tmp_path / "store", tmp_path / "memory")
    assert len(set(drawn)) == 2
    for rank, (left, number) in enumerate(ranks.run(3, other_world, tmp_path / "store", tmp_path / "memory")):
        torch.manual_seed(rank)
        assert (left, number) == (("rng",), torch.rand(1).item())


def disagree(rank: int, store: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        ranks.save(PosixStore(store), NEW, {"epoch": {"number": rank}})
    return str(caught.value)


def test_plain_values_that_ranks_disagree_about_are_no_checkpoint(tmp_path: Path) -> None:
    for message in ranks.run(2, disagree, tmp_path / "store"):
        assert message == "epoch.number: two writers disagree about this value: 0, 1"


def test_a_manifest_that_only_looks_right_is_not_believed(tmp_path: Path) -> None:
    save_both(tmp_path / "store")
    store = PosixStore(tmp_path / "store")
    manifest = (tmp_path / "store" / OLD.manifest_name).read_bytes()
    (tmp_path / "store" / NEW.manifest_name).write_bytes(manifest)
    restored, fill = touched(store, tmp_path)
    assert (restored.key, fill) == (OLD, 10)
    assert "of another checkpoint" in restored.fell_back[str(NEW)]
