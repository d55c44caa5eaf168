"""The same transport between processes: the same results, also for what is large, and an end for who waits."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

from everstep.pipeline.transport.base import Spec, Tag, TransportError
from everstep.pipeline.transport.gloo import ProcessGroups
from everstep.pipeline.transport.grid import make_grid
from tests.checkpoint.ranks import run
from tests.pipeline.training import Setting, Trained, alone, apart, merged, train

pytestmark = pytest.mark.torch


def _talk(rank: int) -> tuple[list[float], bytes, float]:
    transport = ProcessGroups(make_grid(4, 2), timeout=60)
    other = 1 - transport.rank
    transport.tell(b"w" * 2000 + str(rank).encode(), other)
    sent = [transport.send(torch.full((3,), 10.0 * rank + i), other, Tag("x", i)) for i in range(3)]
    arrivals = [transport.receive(Spec((3,), torch.float32), other, Tag("x", i)) for i in range(3)]
    found = [float(arrival.wait()[0]) for arrival in arrivals]
    for work in sent:
        work.wait()
    total = torch.tensor([float(rank)])
    columns = [transport.group([column], replicas=True) for column in range(2)]
    transport.all_reduce(total, columns[transport.rank]).wait()
    word = transport.hear(other)
    transport.settle()
    return found, word[-1:], float(total)


def test_tensors_words_and_sums_find_their_ranks() -> None:
    found = run(4, _talk)
    assert [tensors for tensors, _, _ in found] == [
        [10.0, 11.0, 12.0],
        [0.0, 1.0, 2.0],
        [30.0, 31.0, 32.0],
        [20.0, 21.0, 22.0],
    ]
    assert [word for _, word, _ in found] == [b"1", b"0", b"3", b"2"]
    assert [total for _, _, total in found] == [2.0, 4.0, 2.0, 4.0]


Links = list[tuple[int, ...]]


def _train_over_pairs(rank: int, setting: Setting) -> tuple[Trained, Links, Links]:
    """Train as with NCCL, whose groups are pretended by those of gloo. Groups of two that were made for links, by their
    processes, and the directed pairs over which this process has sent something."""
    made, used, new = list[tuple[int, ...]](), set[tuple[int, ...]](), dist.new_group

    def pretended(ranks: Any = None, backend: str = "gloo", **options: Any) -> Any:
        return new(ranks, backend="gloo", **options)

    class Watched(ProcessGroups):
        def connect(self, links: Any) -> None:
            def counted(ranks: Any = None, **options: Any) -> Any:
                made.append(tuple(ranks))
                return pretended(ranks, **options)

            dist.new_group = counted
            super().connect(links)
            dist.new_group = pretended

        def send(self, tensor: Any, to: int, tag: Tag) -> Any:
            used.add((self._process(self.rank), self._process(to)))
            return super().send(tensor, to, tag)

    dist.new_group = pretended
    transport = Watched(make_grid(setting.ranks * setting.replicas, setting.ranks), nccl=True, timeout=60)
    trained = train(setting, transport)
    again = len(made)
    train(setting, transport)
    assert len(made) == again, "links that are there were made once more"
    own = transport.rank
    with pytest.raises(TransportError, match=f"no link from rank {own} to rank {own}"):
        transport.receive(Spec((1,), torch.float32), own, Tag("x", 0))
    dist.barrier()
    transport.abort("it is over")
    with pytest.raises(TransportError, match="it is over"):
        transport.hear(1 - own)
    return trained, made, sorted(used)


@pytest.mark.parametrize(("ranks", "replicas", "links"), [(4, 1, 6), (2, 2, 4)])
def test_groups_are_made_for_the_links_of_the_schedule_and_no_others(ranks: int, replicas: int, links: int) -> None:
    setting = Setting("mlp", "1f1b", ranks, ranks, replicas=replicas, samples=16)
    found = run(4, _train_over_pairs, setting)
    assert apart(merged([trained for trained, _, _ in found]), alone(setting)) < 1e-10
    every = [made for _, made, _ in found]
    assert all(made == every[0] for made in every)  # all processes make all groups, in the same order
    assert len(every[0]) == links
    used = sorted(pair for _, _, pairs in found for pair in pairs)
    assert sorted(tuple(sorted(pair)) for pair in used) == sorted(every[0])


def _wait_in_vain(rank: int, what: str) -> tuple[str, float]:
    transport = ProcessGroups(make_grid(2, 2), timeout=60)
    group = transport.group([0, 1], replicas=False)
    if rank == 1:
        with pytest.raises(TransportError):
            transport.hear(0)  # ended by the other's abort, too
        return "", 0.0
    aborter = threading.Timer(0.3, transport.abort, ["rank 1 is late"])
    aborter.start()
    began = time.monotonic()
    waits: dict[str, Callable[[], object]] = {
        "receive": lambda: transport.receive(Spec((3,), torch.float32), 1, Tag("x", 0)).wait(),
        "send": lambda: transport.send(torch.zeros(3), 1, Tag("x", 0)).wait(),
        "reduce": lambda: transport.all_reduce(torch.zeros(3), group).wait(),
        "hear": lambda: transport.hear(1),
    }
    with pytest.raises(TransportError) as caught:
        waits[what]()
    aborter.join()
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize("what", ["receive", "send", "reduce", "hear"])
def test_an_abort_from_another_thread_ends_every_kind_of_wait(what: str) -> None:
    (reason, took), _ = run(2, _wait_in_vain, what)
    assert reason == "rank 1 is late"
    assert took < 50  # the transport's own limit is 60 s


def _abort_beside_another_connection(rank: int, port: int) -> list[bytes]:
    """Connections that other threads open while groups are made: to a server elsewhere, and within this process."""
    opened: list[socket.socket] = []
    make = dist.new_group

    def make_beside(*given: Any, **options: Any) -> Any:
        group = make(*given, **options)
        own = socket.create_server(("127.0.0.1", 0))
        opened.extend([socket.create_connection(own.getsockname()), own.accept()[0]])
        opened.append(socket.create_connection(("127.0.0.1", port)))
        return group

    dist.new_group = make_beside
    transport = ProcessGroups(make_grid(2, 2), timeout=60)
    transport.group([0, 1], replicas=False)
    transport.abort("one is lost")
    with pytest.raises(TransportError):
        transport.hear(1 - rank)
    answers = []
    for client, served, remote in zip(opened[::3], opened[1::3], opened[2::3], strict=True):
        client.sendall(b"within")
        remote.sendall(b"beside")
        answers += [served.recv(6), remote.recv(6)]
    return answers


def test_an_abort_leaves_the_connections_of_others_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo(connection: socket.socket) -> None:
            with connection:
                connection.sendall(connection.recv(6))

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=echo, args=server.accept()[:1], daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        for answers in run(2, _abort_beside_another_connection, server.getsockname()[1]):
            assert len(answers) >= 4
            assert set(answers) == {b"within", b"beside"}
