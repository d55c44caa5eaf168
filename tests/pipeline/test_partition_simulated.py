"""Against the best of all splits, as the simulator of the real schedule sees them: what the search by formula costs."""

from __future__ import annotations

from math import inf
from statistics import median

import pytest

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.graph import Device, Link, make_uniform_links, stage_graph
from everstep.pipeline.partition.blocks import assign_nodes, contract_graph
from everstep.pipeline.partition.refine import Referee
from everstep.pipeline.partition.solve import partition_graph, problem_of
from everstep.pipeline.schedules import make_schedule, simulate_schedule
from tests.pipeline.partition_cases import case, seen, splits, worth


def losses(seeds: range) -> list[float]:
    """Return by how much each plan is above the best one, relative."""
    found = []
    for seed in seeds:
        given = case(seed)
        best = min((seen(given, split) for split in splits(given.graph, len(given.devices))), default=inf)
        try:
            made = partition_graph(
                given.graph,
                len(given.devices),
                given.devices,
                given.links,
                memory_weight=given.memory_weight,
                schedule=given.schedule,
            )
        except PipelineError:
            assert best == inf, f"case {seed} can be split"
            continue
        assert made[0].bound <= best * (1 + 1e-9), f"case {seed}: no split is below the bound"
        found.append(seen(given, dict(made[0].stage_of)) / best - 1)
    return found


def test_plans_are_the_best_as_simulated() -> None:
    assert max(losses(range(60))) <= 1e-9


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_thousand_plans_are_near_the_best_as_simulated() -> None:
    found = losses(range(1000, 2000))
    print(f"{len(found)} plans: median {median(found):.3%}, mean {sum(found) / len(found):.4%}, worst {max(found):.2%}")
    assert median(found) <= 1e-9
    assert max(found) <= 0.01


def test_stages_of_one_rank_are_planned_together() -> None:
    """Interleaved: the work of a rank counts, not that of a stage."""
    given = case(5)
    graph = given.graph
    order = make_schedule("interleaved", 4, 2, 4)
    made = partition_graph(graph, 4, [Device()] * 2, make_uniform_links(2, Link(1e3)), 4, schedule=order)
    best = min(
        simulate_schedule(order, stage_graph(graph, split), None, make_uniform_links(2, Link(1e3))).makespan
        for split in splits(graph, 4)
    )
    assert made[0].simulated == pytest.approx(best, rel=0.02)


def test_what_a_candidate_says_of_itself_is_what_the_simulator_says() -> None:
    given = case(7)
    problem = problem_of(contract_graph(given.graph), given.schedule, given.devices, given.links)
    referee = Referee(given.graph, problem, given.schedule, given.devices, given.links)
    for candidate in partition_graph(
        given.graph, len(given.devices), given.devices, given.links, schedule=given.schedule, microbatches=1
    ):
        split = tuple(candidate.stage_of[block.nodes[0]] for block in problem.blocks.blocks)
        assert referee.see(split).seconds == candidate.simulated
        assert problem.judge(split).seconds == candidate.surrogate
        assert assign_nodes(problem.blocks, split) == candidate.stage_of
        assert candidate.simulated == pytest.approx(candidate.bound * (1 + candidate.gap))
        assert worth(given, dict(candidate.stage_of)) == pytest.approx(candidate.surrogate) or given.memory_weight
