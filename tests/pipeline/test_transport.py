"""The in-process transport keeps the strictest rules, and says which of them was broken."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch

from everstep.pipeline.transport.base import Spec, Tag, Transport, TransportError
from everstep.pipeline.transport.grid import make_grid
from tests.pipeline.inprocess import Deadlock, Fabric

pytestmark = pytest.mark.torch

TWO = Spec((2,), torch.float32)


def test_the_kth_send_of_a_directed_pair_meets_its_kth_receive() -> None:
    def work(transport: Transport) -> list[float]:
        if transport.rank == 0:
            works = [transport.send(torch.full((2,), float(i)), 1, Tag("x", i)) for i in range(3)]
            for each in works:
                each.wait()
            return []
        arrivals = [transport.receive(TWO, 0, Tag("x", i)) for i in range(3)]
        return [float(arrival.wait()[0]) for arrival in arrivals]

    assert Fabric(2).run(work)[1] == [0.0, 1.0, 2.0]


def test_a_receive_that_expects_another_message_is_an_error_that_names_both() -> None:
    def work(transport: Transport) -> None:
        if transport.rank == 0:
            transport.send(torch.zeros(2), 1, Tag("x", 3)).wait()
        else:
            transport.receive(TWO, 0, Tag("x", 3, gradient=True)).wait()

    with pytest.raises(TransportError, match=r"rank 0 sends x .micro-batch 3., but rank 1 expects the gradient of x"):
        Fabric(2).run(work)


def test_a_tensor_of_another_shape_than_expected_is_an_error() -> None:
    def work(transport: Transport) -> None:
        if transport.rank == 0:
            transport.send(torch.zeros(3), 1, Tag("x", 0)).wait()
        else:
            transport.receive(TWO, 0, Tag("x", 0)).wait()

    with pytest.raises(TransportError, match=r"rank 0 sends x .* as \(\(3,\)"):
        Fabric(2).run(work)


@pytest.mark.parametrize("blocking", [True, False])
def test_ranks_that_wait_for_each_other_are_named_instead_of_hanging(blocking: bool) -> None:
    def work(transport: Transport) -> None:
        other = 1 - transport.rank
        sent = transport.send(torch.zeros(2), other, Tag(f"from{transport.rank}", 0))
        sent.wait()
        transport.receive(TWO, other, Tag(f"from{other}", 0)).wait()

    with pytest.raises(Deadlock, match=r"rank 0 sends from0 .* to rank 1; rank 1 sends from1 .* to rank 0"):
        Fabric(2, blocking=blocking).run(work)


def test_only_a_blocking_fabric_holds_up_a_send_that_nobody_waits_for() -> None:
    def work(transport: Transport) -> float:
        other = 1 - transport.rank
        sent = transport.send(torch.ones(2), other, Tag("x", 0))
        found = transport.receive(TWO, other, Tag("x", 0)).wait()
        sent.wait()
        return float(found[0])

    assert Fabric(2).run(work) == [1.0, 1.0]
    with pytest.raises(Deadlock):
        Fabric(2, blocking=True).run(work)


def test_a_rank_that_waits_for_one_that_has_ended_is_a_deadlock() -> None:
    def work(transport: Transport) -> None:
        if transport.rank == 1:
            transport.hear(0)

    with pytest.raises(Deadlock, match="rank 1 waits for a word of rank 0"):
        Fabric(2).run(work)


def test_a_failure_of_one_rank_ends_the_others_and_is_what_is_raised() -> None:
    def work(transport: Transport) -> None:
        if transport.rank == 0:
            raise KeyError("mine")
        transport.hear(0)

    with pytest.raises(KeyError, match="mine"):
        Fabric(3).run(work)


def test_a_reduction_gives_all_members_the_same_bits() -> None:
    def work(transport: Transport) -> tuple[float, float]:
        column = transport.group([transport.rank], replicas=True)
        tensor = torch.tensor([0.1 * (transport.replica + 1), 1.0])
        transport.all_reduce(tensor, column).wait()
        return float(tensor[0]), float(tensor[1])

    found = Fabric(2, 3).run(work)
    assert len(set(found)) == 1
    assert found[0][0] == pytest.approx(0.6)
    assert found[0][1] == 3.0


def test_words_do_not_overtake_each_other_and_wait_for_nobody() -> None:
    def work(transport: Transport) -> list[bytes]:
        if transport.rank == 0:
            for word in (b"one", b"two"):
                transport.tell(word, 1)
            return []
        return [transport.hear(0), transport.hear(0)]

    assert Fabric(2, blocking=True).run(work)[1] == [b"one", b"two"]


def test_a_seed_is_an_order_of_events_that_can_be_had_again() -> None:
    def order(seed: int) -> list[int]:
        seen: list[int] = []

        def work(transport: Transport) -> None:
            for i in range(3):
                seen.append(transport.rank)
                transport.all_reduce(torch.zeros(1), transport.group(range(3), replicas=False)).wait()
                transport.send(torch.zeros(2), (transport.rank + 1) % 3, Tag("x", i))
                transport.receive(TWO, (transport.rank - 1) % 3, Tag("x", i)).wait()

        Fabric(3, seed=seed).run(work)
        return seen

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(6)}) > 1


def test_the_right_most_letter_of_a_placement_changes_between_neighbours() -> None:
    assert make_grid(6, 3).processes == ((0, 1, 2), (3, 4, 5))
    assert make_grid(6, 3, "spread").processes == ((0, 2, 4), (1, 3, 5))
    assert make_grid(6, 3, "PTD").processes == make_grid(6, 3, "spread").processes
    assert make_grid(6, 3, "TDP").processes == make_grid(6, 3, "cluster").processes
