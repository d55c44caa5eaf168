"""Random planning problems, and the best split of small ones by looking at all of them.

What a split is worth is written here a second time, from the design page and not from the code.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

from everstep.pipeline.graph import Device, Graph, GraphNode, Link, stage_graph
from everstep.pipeline.partition.blocks import contract_graph
from everstep.pipeline.partition.problem import PartitionProblem
from everstep.pipeline.partition.solve import problem_of
from everstep.pipeline.schedules.actions import Schedule
from everstep.pipeline.schedules.generators import make_schedule
from everstep.pipeline.schedules.simulation import simulate_schedule


@dataclass(frozen=True)
class Case:
    graph: Graph
    schedule: Schedule
    devices: tuple[Device, ...]
    links: tuple[tuple[Link, ...], ...] | None
    memory_weight: float
    optimizer_factor: float = 3.0

    @property
    def problem(self) -> PartitionProblem:
        return problem_of(
            contract_graph(self.graph),
            self.schedule,
            self.devices,
            self.links,
            optimizer_factor=self.optimizer_factor,
            memory_weight=self.memory_weight,
        )


def case(seed: int, *, weights: tuple[float, ...] = (0.0, 0.0, 0.5, 1.0)) -> Case:
    """Few nodes; links, colocation, shared parameters, limits and unequal devices each in some cases."""
    random_ = random.Random(seed)
    stages = random_.choice((1, 2, 2, 3, 3, 4))
    graph = dag(random_, random_.randint(max(4, stages), 8 if stages < 4 else 7))
    unequal = random_.random() < 0.4
    total = sum(node.parameters for node in graph.nodes) * 4 + sum(node.activation for node in graph.nodes) * stages
    limit = random_.choice((None, None, int(total / stages * random_.uniform(0.6, 2.0))))
    devices = tuple(
        Device(
            random_.choice((0.5, 1.0, 2.0)) if unequal else 1.0,
            None if limit is None else int(limit * (random_.uniform(0.7, 1.5) if unequal else 1.0)),
        )
        for _ in range(stages)
    )
    links = None
    if random_.random() < 0.7:
        one = Link(random_.uniform(50, 500), random_.choice((0.0, 0.2)))
        links = tuple(
            tuple(Link(random_.uniform(50, 500), random_.random() / 4) if unequal else one for _ in range(stages))
            for _ in range(stages)
        )
    name = random_.choice(("1f1b", "simple", "zb-h1"))
    return Case(
        graph, make_schedule(name, stages, stages, random_.randint(1, 9)), devices, links, random_.choice(weights)
    )


def dag(random_: random.Random, count: int) -> Graph:
    """Every node works and keeps something, so none is merged with a neighbour."""
    colocated, cheaper = random_.random() < 0.3, random_.random() < 0.4
    nodes = []
    for index in range(count):
        inputs = random_.sample(range(index), min(index, random_.choice((0, 1, 1, 1, 2, 3))))
        nodes.append(
            GraphNode(
                f"n{index}",
                tuple(f"n{each}" for each in sorted(inputs)),
                forward=random_.uniform(0.1, 2.0),
                input_grad=random_.uniform(0.1, 2.0),
                weight_grad=random_.uniform(0.0, 2.0),
                activation=random_.randint(1, 100),
                parameters=random_.randint(0, 100),
                output=random_.randint(1, 100),
                colocate=random_.choice(("", "a", "b")) if colocated else "",
                ties=("tied",) if random_.random() < 0.2 else (),
                gradient=random_.random() < 0.8,
                unsplit=random_.uniform(0.1, 5.0) if cheaper else None,
            )
        )
    return Graph(tuple(nodes), shared=(("tied", 50),))


def splits(graph: Graph, stages: int) -> Iterator[dict[str, int]]:
    """Every way to give the nodes stages: no value flows down, no stage is empty, colocated nodes are together."""

    def extend(index: int, stage_of: dict[str, int], optimizer_factor: dict[str, int]) -> Iterator[dict[str, int]]:
        if index == len(graph.nodes):
            if len(set(stage_of.values())) == stages:
                yield dict(stage_of)
            return
        node = graph.nodes[index]
        lowest = max((stage_of[name] for name in node.inputs), default=0)
        for stage in range(lowest, stages):
            if node.colocate and optimizer_factor.get(node.colocate, stage) != stage:
                continue
            new = optimizer_factor | ({node.colocate: stage} if node.colocate else {})
            yield from extend(index + 1, stage_of | {node.name: stage}, new)

    yield from extend(0, {}, {})


def worth(case: Case, stage_of: Mapping[str, int]) -> float:
    """The objective of a split; infinite if it does not fit. Seconds, or in units of a perfect split."""
    stages = len(case.devices)
    seconds = [0.0] * stages
    size = [0.0] * stages
    tied: set[int] = set()
    flight = in_flight(case.schedule)
    for node in case.graph.nodes:
        stage = stage_of[node.name]
        seconds[stage] += (node.forward + node.backward) / case.devices[stage].speed
        size[stage] += node.parameters * (1 + case.optimizer_factor) + node.activation * flight[stage]
        if node.ties:
            tied.add(stage)
        users = {stage_of[user.name] for user in case.graph.nodes if node.name in user.inputs} - {stage}
        for user in users:
            seconds[user] += hop(case, user - 1, user, node)
        if users:
            seconds[stage] += hop(case, stage, stage + 1, node)
    for stage in tied:
        size[stage] += 50 * (1 + case.optimizer_factor)
    if any(device.memory is not None and size[stage] > device.memory for stage, device in enumerate(case.devices)):
        return inf
    time, microbatches = sum(seconds), case.schedule.microbatches
    time += (microbatches - 1) * max(seconds)
    if not case.memory_weight:
        return time
    work = sum(node.forward + node.backward for node in case.graph.nodes)
    perfect = work * (microbatches - 1 + stages) / sum(device.speed for device in case.devices)
    kept = sum(node.activation for node in case.graph.nodes) * sum(flight) / stages
    parameters = sum(node.parameters for node in case.graph.nodes) + 50
    full = (parameters * (1 + case.optimizer_factor) + kept) / stages
    return (1 - case.memory_weight) * time / perfect + case.memory_weight * max(size) / full


def seen(case: Case, stage_of: dict[str, int]) -> float:
    """The simulated objective; infinite if a rank has too many bytes."""
    graph = stage_graph(case.graph, stage_of)
    result = simulate_schedule(case.schedule, graph, case.devices, case.links)
    held = [
        stage.parameters * (1 + case.optimizer_factor) + result.peak[rank] + result.waiting[rank]
        for rank, stage in enumerate(graph.stages)
    ]
    if any(device.memory is not None and size > device.memory for device, size in zip(case.devices, held, strict=True)):
        return inf
    return case.problem.objective(result.makespan, max(held))


def hop(case: Case, low: int, high: int, node: GraphNode) -> float:
    """A value from one stage to the next, and its gradient back."""
    if case.links is None:
        return 0.0
    there = case.links[low][high].seconds(node.output)
    return there + (case.links[high][low].seconds(node.output) if node.gradient else 0.0)


def in_flight(schedule: Schedule) -> list[int]:
    """GPipe keeps all; 1F1B what later stages have not brought back; ZB-H1 as much as 1F1B's first everywhere."""
    stages, most = len(schedule.ranks), schedule.microbatches
    each = {"simple": [most] * stages, "1f1b": range(stages, 0, -1), "zb-h1": [stages] * stages}
    return [min(kept, most) for kept in each[schedule.name]]
