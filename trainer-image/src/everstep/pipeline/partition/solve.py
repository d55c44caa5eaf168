"""Find the best splits of a graph, and how far from the best possible they are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.graph import Device, Graph, Links
from everstep.pipeline.partition import certificate
from everstep.pipeline.partition.blocks import Blocks, assign_nodes, contract_graph
from everstep.pipeline.partition.limit import LowerBound
from everstep.pipeline.partition.narrow import bound_stage_work, by_work, cuts_of, find_near_downsets
from everstep.pipeline.partition.orders import list_orders
from everstep.pipeline.partition.problem import NOWHERE, OPTIMIZER_FACTOR, Hop, PartitionProblem
from everstep.pipeline.partition.refine import FEW, Referee, climb_splits
from everstep.pipeline.schedules import ActionKind, Schedule, in_flight, make_schedule

DOWNSETS = 2500  # as many as are searched at once; their pairs are half of its square
EXACT = 400  # up to so many, splits are searched to the last: above, to a thousandth
QUESTIONS = 60
ENOUGH = 1e-3  # what neighbours of the cuts must gain, or they are not looked at again


@dataclass(frozen=True)
class SplitCandidate:
    """A split. `surrogate`: seconds of a step by the formula of the search; `simulated`: by the simulator, of the real
    schedule; `peak`: bytes of the fullest rank, as the simulator sees it.

    `bound`: what the simulated objective (seconds if memory has no weight) is at least for every split, `gap`: how far
    this one is above it, relative.
    """

    stage_of: Mapping[str, int]
    surrogate: float
    simulated: float
    peak: int
    bound: float
    gap: float


def partition_graph(
    graph: Graph,
    stages: int,
    devices: Sequence[Device],
    links: Links | None = None,
    microbatches: int = 1,
    *,
    memory_weight: float = 0.0,
    schedule: str | Schedule = "1f1b",
    split: Collection[int] | None = None,
    optimizer_factor: float = OPTIMIZER_FACTOR,
    best: int = 8,
) -> list[SplitCandidate]:
    """Return the best splits of a graph into stages, best first by the simulated objective.

    Args:
        graph: The graph, with the times and sizes of one micro-batch.
        stages: The number of stages.
        devices: The device of each rank.
        links: The links of all pairs of ranks; None if they cost nothing.
        microbatches: The number of micro-batches.
        memory_weight: The weight of memory in the objective, from 0 (time alone) to 1 (memory alone).
        schedule: A name, or a schedule of that many stages.
        split: The stages that may split their backward; None for all.
        optimizer_factor: The bytes of gradients and optimizer for each byte of parameters.
        best: The most splits to return.

    Raises:
        PipelineError: No split fits the devices (it says what would), or the graph has too few parts.
    """
    order = (
        make_schedule(schedule, stages, len(devices), microbatches, split=split)
        if isinstance(schedule, str)
        else schedule
    )
    problem = problem_of(
        contract_graph(graph), order, devices, links, optimizer_factor=optimizer_factor, memory_weight=memory_weight
    )
    found, _ = search_splits(problem)
    referee = Referee(graph, problem, order, devices, links)
    least = LowerBound(problem, min((referee.see(each).objective for each in found[:1]), default=inf), DOWNSETS)
    ranked = climb_splits(referee, [*([least.split] if least.split else []), *found], best, least.bound)
    known = min((referee.see(each).objective for each in ranked[:1]), default=inf)
    near, bound = least.near(known, referee.sights)
    ranked = sorted({*ranked, *(each for each in near if not referee.see(each).over)}, key=referee.order)[:best]
    if not ranked:
        raise PipelineError(_describe_misfit(problem, referee))
    bound = min(bound, referee.see(ranked[0]).objective)
    candidates = []
    for stages_ in ranked:
        seen = referee.see(stages_)
        candidates.append(
            SplitCandidate(
                assign_nodes(problem.blocks, stages_),
                problem.judge(stages_).seconds,
                seen.seconds,
                int(seen.peak),
                bound,
                seen.objective / bound - 1 if bound > 0 else 0.0,
            )
        )
    return candidates


def problem_of(
    blocks: Blocks,
    schedule: Schedule,
    devices: Sequence[Device],
    links: Links | None,
    *,
    optimizer_factor: float = OPTIMIZER_FACTOR,
    memory_weight: float = 0.0,
) -> PartitionProblem:
    """PipelineError if the devices are not those of the schedule, or the blocks are fewer than its stages."""
    placement, ranks = schedule.placement, len(schedule.ranks)
    if len(devices) != ranks:
        raise PipelineError(f"devices: {len(devices)} are given, schedule {schedule.name} has {ranks} ranks")
    if not 0.0 <= memory_weight <= 1.0:
        raise PipelineError(f"memory_weight: {memory_weight} is not between 0 and 1")
    if len(blocks.blocks) < len(placement):
        raise PipelineError(
            f"the graph has {len(blocks.blocks)} parts that can be stages, but {len(placement)} stages are asked for: "
            "ask for fewer, or look into its modules more deeply"
        )
    return PartitionProblem(
        blocks=blocks,
        placement=placement,
        speed=tuple(devices[rank].speed for rank in placement),
        memory=tuple(devices[rank].memory for rank in placement),
        hops=tuple(
            NOWHERE if links is None or here == there else Hop(links[here][there], links[there][here])
            for here, there in pairwise(placement)
        ),
        in_flight=in_flight(schedule),
        microbatches=schedule.microbatches,
        optimizer_factor=optimizer_factor,
        memory_weight=memory_weight,
        links=links,
        split=tuple(
            any(action.stage == stage and action.kind is ActionKind.INPUT_GRAD for action in schedule.ranks[rank])
            for stage, rank in enumerate(placement)
        ),
    )


def search_splits(problem: PartitionProblem) -> tuple[list[tuple[int, ...]], float]:
    """Good splits by the surrogate (the stage of each block), best first, and a bound of the objective.

    Exact over all downsets while they are few, else over some prefixes of some orders, and then over all that are near
    what was cut, and its neighbours. The list is empty if no split was found that fits.
    """
    from everstep.pipeline.partition.search import Search
    from everstep.pipeline.partition.space import Space, list_downsets, list_neighbours, list_prefixes

    everything = list_downsets(problem.blocks, DOWNSETS)
    lines = [] if everything else [list_prefixes(order) for order in list_orders(problem.blocks)]
    step = -(-sum(map(len, lines)) // DOWNSETS)
    pool = set(everything or (each for line in lines for each in line[::step]))
    found: dict[tuple[int, ...], tuple[float, float, float]] = {}

    def run(variant: PartitionProblem, space: Space) -> float:
        small = space.size <= EXACT
        outcome = Search(space, variant).run(tolerance=1e-9 if small else 1e-3, most=QUESTIONS * (5 if small else 1))
        for cuts in outcome.cuts:
            stages = space.stages(cuts)
            found[stages] = problem.judge(stages).order
        return outcome.bound

    known = inf
    if len(pool) > EXACT:  # then pairs that are dearer than all of a split that is known are not looked at
        first = by_work(problem)
        pool |= cuts_of(first)
        known = problem.judge(first).objective
        if known < inf:
            found[first] = problem.judge(first).order
    space = Space(problem.blocks, pool, bound_stage_work(problem, known))
    bound = min(known, run(problem, space))
    if everything is not None:
        for cuts in Search(space, problem).every(FEW):
            found[space.stages(cuts)] = problem.judge(space.stages(cuts)).order
    for variant in _iterate_variants(problem):
        run(variant, space)
    while everything is None and found:
        best = min(found, key=lambda each: found[each])
        over, known, _ = found[best]
        places = cuts_of(best)
        pool = places.union(
            find_near_downsets(problem, lines, best), *(list_neighbours(problem.blocks, cut) for cut in places)
        )
        run(problem, Space(problem.blocks, pool, bound_stage_work(problem, known)))
        if min(found.values()) >= (over, known * (1 - ENOUGH)):
            break
    if everything is None or problem.ranks < problem.stages:
        bound = certificate.compute_bound(problem)
    return sorted(found, key=lambda each: found[each]), bound


def _iterate_variants(problem: PartitionProblem) -> Iterable[PartitionProblem]:
    """The same with links that cost nothing, as where messages overlap with work; and, where ranks have several
    stages, with the memory shared alike."""
    if any(hop != NOWHERE for hop in problem.hops):
        yield replace(problem, hops=(NOWHERE,) * len(problem.hops))
    if problem.ranks < problem.stages and any(limit is not None for limit in problem.memory):
        each = problem.stages // problem.ranks
        yield replace(problem, memory=tuple(None if limit is None else limit // each for limit in problem.memory))


def _describe_misfit(problem: PartitionProblem, referee: Referee) -> str:
    """Describe why nothing fits, with the numbers of the rank that lacks most in the split that comes nearest."""
    free = replace(problem, memory=(None,) * problem.stages, memory_weight=1.0)
    splits, _ = search_splits(free)
    rank, held, most = referee.lacking(min(splits[: referee.sights], key=referee.order))
    return (
        f"no split into {problem.stages} stages fits the memory: in the one that comes nearest, rank {rank} needs "
        f"{held:,} bytes of parameters, optimizer and activations, and has {most:,}; take more ranks, smaller "
        "micro-batches, activation checkpointing, or a schedule that keeps fewer micro-batches"
    )
