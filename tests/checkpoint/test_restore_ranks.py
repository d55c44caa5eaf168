"""Several ranks restore the same checkpoint, read it once for each node, and hear of each other's failures."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from everstep.checkpoint.errors import CheckpointError, RankLost, StoreError  # noqa: E402
from everstep.checkpoint.format.manifest import ALIGN, CHUNK, HEADER  # noqa: E402
from everstep.checkpoint.state.kinds import PerRank  # noqa: E402
from everstep.checkpoint.state.rng import Rng  # noqa: E402
from everstep.checkpoint.store.base import StoredObject  # noqa: E402
from everstep.checkpoint.store.posix import PosixStore  # noqa: E402
from tests.checkpoint import ranks  # noqa: E402
from tests.checkpoint.restoring import NEW, OLD, Watched, filled, model, save_both  # noqa: E402

pytestmark = pytest.mark.torch


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


def asks_again(rank: int, store: Path, memory: Path) -> tuple[int, float]:
    save_both(store)
    dist.barrier()
    left = [2.0] * 3

    class Silent(PosixStore):
        """Takes a while to fail a few times, as one that does not answer: longer in all than a rank is waited for."""

        def list(self, prefix: str) -> Iterator[StoredObject]:
            if left:
                time.sleep(left.pop())
                raise StoreError("does not answer", self.url, may_pass=True)
            return super().list(prefix)

    made = model(-1)
    return ranks.restore(Silent(store), memory, {"model": made}, patience=5.0).step, filled(made)


def test_while_rank_0_asks_a_silent_store_what_there_is_nobody_gives_it_up(tmp_path: Path) -> None:
    results = ranks.run(2, asks_again, tmp_path / "store", tmp_path / "memory")
    assert results == [(NEW.step, float(NEW.step))] * 2


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
    return restored.not_restored, torch.rand(1).item()


def own_numbers(rank: int, store: Path, memory: Path) -> float:
    torch.manual_seed(100 + rank)
    save_both(store)
    expected: float = torch.rand(1).item()
    restored = ranks.restore(store, memory, {"model": model(-1), "rng": PerRank(Rng())})
    assert restored.not_restored == ()
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


def keeps_its_own(rank: int, store: Path, memory: Path) -> list[Any]:
    """A dictionary of which each rank has other keys, in a run of two ranks and then of three."""
    first = {"both": torch.ones(1), "a.0": torch.zeros(2), "b.0": torch.zeros(2)}
    if rank < 2:
        del first["b.0" if rank == 0 else "a.0"]
    world = dist.get_world_size()
    if world == 2:
        ranks.save(PosixStore(store), NEW, {"average": first | {"late": 1}, "state": {"epoch": 7}})
    given: dict[str, Any] = {key: torch.full_like(each, -1.0) for key, each in first.items()}
    if rank == 2:
        given = {}
    state: dict[str, Any] = {}
    ranks.restore(store, memory, {"average": given, "state": state})
    assert all(bool((each >= 0).all()) for each in given.values() if isinstance(each, torch.Tensor))
    return [sorted(given), state]


def test_a_rank_gets_the_keys_of_a_dictionary_that_it_holds_and_those_that_no_rank_holds(tmp_path: Path) -> None:
    one, other = ranks.run(2, keeps_its_own, tmp_path / "store", tmp_path / "memory")
    assert one == [["a.0", "both", "late"], {"epoch": 7}]
    assert other == [["b.0", "both", "late"], {"epoch": 7}]
    *same, third = ranks.run(3, keeps_its_own, tmp_path / "store", tmp_path / "memory")
    assert same == [one, other]
    assert third == [["late"], {"epoch": 7}]


def keeps_a_history(rank: int, store: Path, memory: Path, first: bool) -> list[Any]:
    """A dictionary within a state, which rank 0 alone has and fills."""
    state: dict[str, Any] = {"epoch": 0} | ({"history": {}} if rank == 0 else {})
    if first:
        told = state | {"epoch": 1} | ({"history": {"e0": 1.5}} if rank == 0 else {})
        ranks.save(PosixStore(store), NEW, {"state": told})
    ranks.restore(store, memory, {"state": state})
    return [state]


def test_what_is_in_a_dictionary_that_one_rank_holds_is_given_to_that_rank(tmp_path: Path) -> None:
    one, other = ranks.run(2, keeps_a_history, tmp_path / "store", tmp_path / "memory", True)
    assert one == [{"epoch": 1, "history": {"e0": 1.5}}]
    assert other == [{"epoch": 1}]
    (alone,) = ranks.run(1, keeps_a_history, tmp_path / "store", tmp_path / "memory", False)
    assert alone == one


def cannot_say_what_it_holds(rank: int, store: Path, memory: Path) -> list[Any]:
    """A restore in which one node finds in its memory what it cannot read."""
    save_both(store)
    (memory / str(rank)).mkdir(mode=0o700, parents=True)
    if rank == 1:
        (memory / "1" / "0").mkdir()
        (memory / "1" / "0" / "claim.json").mkdir()
    dist.barrier()
    made, began = model(-1), time.monotonic()
    with pytest.raises(CheckpointError, match=r"rank 1: slots in .*IsADirectoryError"):
        ranks.restore(store, memory, {"model": made}, nodes=2)
    return [filled(made), time.monotonic() - began < 10]


def test_a_node_that_cannot_read_its_memory_is_named_on_all_ranks_at_once(tmp_path: Path) -> None:
    assert ranks.run(2, cannot_say_what_it_holds, tmp_path / "store", tmp_path / "memory") == [[-1, True]] * 2
