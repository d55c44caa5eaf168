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
from everstep.pipeline.transport.grid import grid
from tests.checkpoint.ranks import run

pytestmark = pytest.mark.torch


def _talk(rank: int) -> tuple[list[float], bytes, float]:
    transport = ProcessGroups(grid(4, 2), timeout=60)
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


def _wait_in_vain(rank: int, what: str) -> tuple[str, float]:
    transport = ProcessGroups(grid(2, 2), timeout=60)
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
    transport = ProcessGroups(grid(2, 2), timeout=60)
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
