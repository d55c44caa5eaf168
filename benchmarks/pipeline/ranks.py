"""Ranks as processes of this machine, one thread each, and arms that alternate on all of them."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

LIMIT = 900.0  # seconds that all arms of one row may take


class RankFailed(RuntimeError):
    """An exception that a rank raised, with its own trace."""


def run(world: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `work(rank, *args)` on every rank of a gloo group, and return what each returned."""
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, world, port, theirs, work, args))
        process.start()
        theirs.close()
        started.append((ours, process))
    try:
        return [_result(pipe, rank) for rank, (pipe, _) in enumerate(started)]
    finally:
        for _, process in started:
            process.kill()
            process.join()


def _result(pipe: Connection, rank: int) -> Any:
    if not pipe.poll(LIMIT):
        raise RankFailed(f"rank {rank} has not ended in {LIMIT:.0f} s")
    try:
        failure, result = pipe.recv()
    except EOFError:
        raise RankFailed(f"rank {rank} died") from None
    if failure:
        raise RankFailed(f"rank {rank}: {failure}")
    return result


def _rank(rank: int, world: int, port: int, pipe: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
        pipe.send((None, work(rank, *args)))
        dist.barrier()
    except BaseException:
        pipe.send((traceback.format_exc(), None))


@dataclass
class Times:
    """Seconds of each round by the name of the arm: the same on all ranks.

    Attributes:
        wall: By the clock, until the slowest rank has ended.
        processor: Of a processor, of all ranks together.
    """

    wall: dict[str, list[float]]
    processor: dict[str, list[float]]


def alternate(arms: Mapping[str, Callable[[], object]], repeats: int) -> Times:
    """Measure each arm in turn, from when all ranks begin; the first round only warms.

    Every other round begins with the last arm, so that none always follows the same one.

    Args:
        arms: What each rank does, by name.
        repeats: Rounds that are measured.
    """
    import torch
    import torch.distributed as dist

    times = Times({name: [] for name in arms}, {name: [] for name in arms})
    for number in range(repeats + 1):
        for name, arm in list(arms.items())[:: -1 if number % 2 else 1]:
            dist.barrier()
            began, processor = time.perf_counter(), time.process_time()
            arm()
            wall = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            spent = torch.tensor(time.process_time() - processor, dtype=torch.float64)
            dist.all_reduce(wall, dist.ReduceOp.MAX)
            dist.all_reduce(spent)
            if number:
                times.wall[name].append(wall.item())
                times.processor[name].append(spent.item())
    return times
