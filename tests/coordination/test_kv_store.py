"""A key-value store that ranks share: messages of any size, counters, and a host that is gone."""

from __future__ import annotations

import os
import random
import signal
import socket
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from everstep.coordination.errors import KVStoreLost
from everstep.coordination.group import RankGroup
from everstep.coordination.kv_store import LocalKVStore, SharedKVStore
from everstep.coordination.message_series import MessageSeries
from tests.checkpoint.ranks import run

pytestmark = pytest.mark.torch


def open_store() -> Any:
    return SharedKVStore.open(RankGroup(dist.group.WORLD), 30.0)


def large(rank: int) -> int:
    """Rank 0 tells what no single call of a TCPStore carries, as the manifest of a large run is."""
    store = open_store()
    message = random.Random(0).randbytes(10 << 20).hex()
    if rank == 0:
        store.leave("large", message)
    assert store.read("large", 20.0) == message
    dist.barrier()
    before = store._store.num_keys()
    dist.barrier()
    if rank == 0:
        store.remove("large")
    dist.barrier()
    assert store.read("large") is None
    freed: int = before - store._store.num_keys()
    dist.barrier()
    return freed


def test_a_message_may_be_of_any_size_and_leaves_nothing_when_it_is_removed() -> None:
    freed, same = run(2, large)
    assert freed == same > 3


def on_two_machines(rank: int) -> str:
    """A run that was not told where rank 0 is, on machines with names of their own."""
    os.environ.pop("MASTER_ADDR", None)
    os.environ["EVERSTEP_POD_IP"] = "127.0.0.2"  # what others are to be told of rank 0
    socket.gethostname = lambda: f"machine-{rank}"
    store = open_store()
    if rank == 0:
        store.leave("word", "heard")
    assert store.read("word", 20.0) == "heard"
    dist.barrier()
    return str(store._store.host)


def test_rank_0_is_found_on_another_machine_without_master_addr() -> None:
    assert run(2, on_two_machines)[1] == "127.0.0.2"


def host_dies(rank: int) -> str:
    store = open_store()
    dist.barrier()
    if rank == 0:
        os._exit(1)
    with pytest.raises(KVStoreLost) as caught:
        store.read("word", 60.0)
    return str(caught.value)


def test_a_store_whose_host_died_is_lost_at_once() -> None:
    assert "rank 0, which decides for all, cannot be reached" in run(2, host_dies, dies=[0])[1]


def test_one_process_has_a_store_of_its_own() -> None:
    store = SharedKVStore.open(RankGroup(None), 30.0)
    assert isinstance(store, LocalKVStore)
    store.leave("word", {"a": 1})
    assert store.read("word") == store.read("word") == {"a": 1}, "it stays until it is removed"
    store.remove("word")
    assert store.read("word") is None
    assert (store.count("times", 2), store.count("times", 1), store.count("others")) == (2, 3, 0)


@pytest.mark.parametrize("error", [TimeoutError, RuntimeError])
def test_what_a_signals_handler_raises_while_a_message_is_awaited_is_no_loss_of_rank_0(error: type[Exception]) -> None:
    """As that of an alarm, by which a script ends before its time is over: it may save once more."""

    def raise_error(number: int, frame: FrameType | None) -> None:
        raise error("the time of the script is over")

    store = SharedKVStore(dist.HashStore(), "secret", 2)
    before = signal.signal(signal.SIGALRM, raise_error)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(error, match=r"^the time of the script is over$"):
            store.read("word", 60.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    store.leave("word", 1)
    assert store.read("word") == 1


def send_many(rank: int) -> int:
    series = MessageSeries(open_store(), "note", rank == 0)
    for number in range(200):
        if rank == 0:
            series.leave(number, {"number": number})
        assert series.read(number, 20.0) == {"number": number}
        series.mark_read(number)
    dist.barrier()
    if rank == 0:  # it may have been far ahead until now; messages go at its next call
        series.mark_read(207)
    dist.barrier()
    kept: int = series._store._store.num_keys()  # type: ignore[attr-defined]
    dist.barrier()
    return kept


def test_messages_of_a_series_go_once_all_have_read_them() -> None:
    assert max(run(2, send_many)) < 60
