"""Measure the time of messages between ranks, over a process group as training will use it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.graph import Device, Link, Profile

SMALL, LARGE = 1 << 10, 8 << 20  # bytes
BESIDE = 6  # times as long as a message a rank computes, to see what that costs


def measure_links(
    group: Any = None, *, device: Any = "cpu", repeats: int = 9, large: int = LARGE
) -> tuple[tuple[Link, ...], ...]:
    """Measure the link of every pair of the group's ranks, there and back. Collective.

    Pairs that have no rank in common are measured at the same time, as they will be used. Latency is half of the median
    round trip of a small message; bandwidth is what a large one adds; and by how much computing takes longer beside a
    large one, says for how long it holds its ends.

    Args:
        group: The process group; None for the default group.
        device: The device of the messages.
        repeats: The number of round trips of each size.
        large: The bytes of a large message.

    Returns:
        The links as `links[i][j]`, the same on all ranks.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    found: dict[tuple[int, int], Link] = {}
    for pairs in pair_ranks(world):
        dist.barrier(group)
        for one, other in pairs:
            if rank in (one, other):
                peer = other if rank == one else one
                first = rank == one
                small = _round_trip(peer, SMALL, first, group, device, repeats)
                big = _round_trip(peer, large, first, group, device, repeats)
                free = fit_link(small, big, SMALL, large)
                found[rank, peer] = replace(free, held=_measure_held_share(peer, large, free, group, device, repeats))
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, found, group=group)
    known: dict[tuple[int, int], Link] = {}
    for each in gathered:
        known |= each
    return tuple(tuple(known.get((a, b), Link()) for b in range(world)) for a in range(world))


def fit_link(small: float, large: float, small_bytes: int, large_bytes: int) -> Link:
    """Return the link that two round trips, in seconds, show."""
    # On a busy machine the small one may take longer; a large message is never all latency.
    per_byte = max(large - small, large / 4) / 2 / (large_bytes - small_bytes)
    return Link(1 / per_byte, max(small / 2 - small_bytes * per_byte, 0.0))


def pair_ranks(world: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs, in as few rounds as can be in which no rank has two peers (the circle method of tournaments)."""
    circle = list(range(world + world % 2))
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if max(a, b) < world]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def combine_on_all_ranks(profile: Profile, links: Sequence[Sequence[Link]], group: Any = None) -> Profile:
    """Combine the profiles that all ranks have made of the same graph into one, the same on all ranks. Collective.

    The times are the medians over ranks, spreads the largest; a rank's speed is the median of all ranks' sums over its
    own.

    Raises:
        PipelineError: The ranks have measured different graphs.
    """
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, profile.to_json(), group=group)
    return combine_profiles([Profile.from_json(text) for text in every], links)


def combine_profiles(profiles: Sequence[Profile], links: Sequence[Sequence[Link]] = ()) -> Profile:
    """Combine profiles as `combine_on_all_ranks` does, but of profiles that are here."""
    first = profiles[0]
    names = [node.name for node in first.graph.nodes]
    if any([node.name for node in each.graph.nodes] != names for each in profiles):
        raise PipelineError("the ranks have profiled different models: give all ranks the same model")
    nodes = []
    for versions in zip(*(each.graph.nodes for each in profiles), strict=True):
        times = {
            key: median(getattr(each, key) for each in versions) for key in ("forward", "input_grad", "weight_grad")
        }
        whole = [each.unsplit for each in versions if each.unsplit is not None]
        nodes.append(replace(versions[0], **times, unsplit=median(whole) if whole else None))
    totals = [sum(node.forward + node.backward for node in each.graph.nodes) for each in profiles]
    middle = median(totals)
    devices = tuple(
        Device(middle / total if total else 1.0, each.devices[0].memory if each.devices else None)
        for total, each in zip(totals, profiles, strict=True)
    )
    spread = {name: max(each.spread.get(name, 0.0) for each in profiles) for name in first.spread}
    graph = replace(first.graph, nodes=tuple(nodes))
    return replace(first, graph=graph, devices=devices, links=tuple(map(tuple, links)), spread=spread)


def _measure_held_share(peer: int, size: int, link: Link, group: Any, device: Any, repeats: int) -> float:
    """The share of a message's time in which this rank does not compute, while one goes and one comes."""
    matrix, took = torch.full((256, 256), 1 / 256, device=device), 0.0
    sent, coming = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    target = dist.get_global_rank(group, peer) if group is not None else peer
    times: dict[bool, list[float]] = {False: [], True: []}
    products = 8
    while took < BESIDE * size / link.bandwidth:
        products *= 2
        took = _time_products(matrix, products, [])
    for number in range(2 * repeats + 2):
        beside = number % 2 == 1
        messages = [dist.P2POp(dist.isend, sent, target, group), dist.P2POp(dist.irecv, coming, target, group)]
        seconds = _time_products(matrix, products, messages if beside else [])
        if number > 1:
            times[beside].append(seconds)
    return min(max(median(times[True]) - median(times[False]), 0.0) / 2 / (size / link.bandwidth), 1.0)


def _time_products(matrix: Any, products: int, messages: Sequence[Any]) -> float:
    """Return the seconds that so many products take, begun beside messages, until all is done."""
    start = time.perf_counter()
    passing = dist.batch_isend_irecv(list(messages)) if messages else []
    for _ in range(products):
        matrix @ matrix
    for each in passing:
        each.wait()
    if matrix.is_cuda:
        torch.cuda.synchronize(matrix.device)
    return time.perf_counter() - start


def _round_trip(peer: int, size: int, first: bool, group: Any, device: Any, repeats: int) -> float:
    """Seconds, the median, of a message there and one back."""
    tensor = torch.zeros(size, dtype=torch.uint8, device=device)
    target = dist.get_global_rank(group, peer) if group is not None else peer
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        for step in (first, not first):
            if step:
                dist.send(tensor, target, group=group)
            else:
                dist.recv(tensor, target, group=group)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        times.append(time.perf_counter() - start)
    return median(times[2:])
