"""Make a plan from a profile: the schedule, the micro-batches and the split together, also when the ranks change."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal

from everstep.pipeline.advise import Alternative, advise
from everstep.pipeline.errors import PipelineError
from everstep.pipeline.graph import Device, Graph, Link, Profile, find_worst_link, make_uniform_links, stage_graph
from everstep.pipeline.plan import OPTIMIZER_FACTOR, Plan
from everstep.pipeline.schedules import ALIASES, NAMES, Schedule, dump_schedule, make_schedule, parse_schedule

if TYPE_CHECKING:
    from everstep.pipeline.partition.solve import SplitCandidate

AUTO = "auto"
Objective = Literal["speed", "memory"]
WEIGHTS: dict[Objective, float] = {"speed": 0.0, "memory": 0.8}  # of memory


@dataclass(frozen=True)
class Wish:
    """The request for a plan.

    Attributes:
        ranks: The number of ranks of the pipeline.
        stages: The number of stages; None for as many as are best (one or two on each rank).
        microbatches: The numbers of micro-batches to choose from; none for some multiples of the ranks.
        batch: The samples of a step of one replica; None to take micro-batches of as many samples as the profile has.
        schedule: A name, `auto`, or a schedule that was read from a file.
        objective: What the plan is best for: `speed` or `memory`.
        memory_weight: The weight of memory in the objective; None for that of `objective`.
        memory: The bytes of each device, in the place of what the profile says.
        link: The link of all pairs of ranks, in the place of what the profile says.
        optimizer_factor: The bytes of gradients and optimizer for each byte of parameters that are not frozen.
        split: The stages that may split their backward; None for all.
    """

    ranks: int
    stages: int | None = None
    microbatches: tuple[int, ...] = ()
    batch: int | None = None
    schedule: str | Schedule = AUTO
    objective: Objective = "speed"
    memory_weight: float | None = None
    memory: int | None = None
    link: Link | None = None
    optimizer_factor: float = OPTIMIZER_FACTOR
    split: tuple[int, ...] | None = None

    @property
    def weight(self) -> float:
        """Return the weight of memory in the objective: that which is asked for, or that of the objective."""
        return WEIGHTS[self.objective] if self.memory_weight is None else self.memory_weight


def solve_plan(profile: Profile, wish: Wish, *, model: str = "") -> Plan:
    """Return the best plan that was found; the PipelineError names the part of the request that cannot be, and what
    could be."""
    return _Solver(fit_devices(profile, wish), wish, model).plan()


def solve_again(plan: Plan, wish: Wish) -> Plan:
    """Return a plan for the same model and the same batch on other ranks or stages, from what the first one was made
    of.

    It has as many micro-batches as before, unless the request says others. It raises PipelineError as `solve_plan`
    does.
    """
    batch = wish.batch or plan.profile.samples * plan.microbatches
    wish = replace(wish, batch=batch, microbatches=wish.microbatches or (plan.microbatches,))
    return solve_plan(plan.profile, wish, model=plan.model)


class _Solver:
    def __init__(self, profile: Profile, wish: Wish, model: str) -> None:
        self.profile, self.wish, self.model = profile, wish, model
        if wish.ranks < 1:
            raise PipelineError(f"ranks: {wish.ranks}, there must be one or more")
        self.partition = cache(self._partition)

    def plan(self) -> Plan:
        wish = self.wish
        if isinstance(wish.schedule, Schedule):
            return self._given(wish.schedule)
        name, stages, microbatches, reasons = self._choice()
        best = self.partition(stages, microbatches, name)[0]
        return self._plan(best, name, microbatches, reasons)

    def _given(self, schedule: Schedule) -> Plan:
        wish = self.wish
        if len(schedule.ranks) != wish.ranks:
            raise PipelineError(f"schedule: the file is for {len(schedule.ranks)} ranks, but ranks is {wish.ranks}")
        if wish.stages not in (None, schedule.stages):
            raise PipelineError(f"schedule: the file is for {schedule.stages} stages, but stages is {wish.stages}")
        best = self._partition(schedule.stages, schedule.microbatches, schedule)[0]
        return self._plan(best, dump_schedule(schedule), schedule.microbatches, ())

    def _choice(self) -> tuple[str, int, int, tuple[str, ...]]:
        wish = self.wish
        assert isinstance(wish.schedule, str)
        name = ALIASES.get(wish.schedule, wish.schedule)
        if name not in (*NAMES, AUTO):
            raise PipelineError(f"schedule: there is no {name!r}; there are {', '.join((AUTO, *NAMES))}, and files")
        if wish.stages is not None and (wish.stages < wish.ranks or wish.stages % wish.ranks):
            raise PipelineError(f"stages: {wish.stages} are not a multiple of {wish.ranks} ranks")
        chunks = (1, 2) if wish.stages is None else (wish.stages // wish.ranks,)
        microbatches = self._microbatches()
        if name != AUTO and wish.stages is not None and len(microbatches) == 1:
            return name, wish.stages, microbatches[0], ()
        advice = advise(
            lambda stages, m: stage_graph(
                self._weighed(m), self.partition(stages, m, _describe_counts(stages, wish.ranks))[0].stage_of
            ),
            wish.ranks,
            microbatches,
            devices=self.profile.devices,
            links=self.profile.links or None,
            chunks=chunks,
            schedules=NAMES if name == AUTO else (name,),
            optimizer_factor=wish.optimizer_factor,
            split=lambda stages, m: wish.split,
        )
        choice = advice.choice
        if wish.objective == "memory":
            choice = self._leanest([one for one in advice.alternatives if one.fits])
        return choice.schedule, choice.stages, choice.microbatches, advice.reasons if choice is advice.choice else ()

    def _leanest(self, choices: Sequence[Alternative]) -> Alternative:
        weight = self.wish.weight
        seconds = min(one.seconds for one in choices) or 1.0
        memory = min(max(one.memory) for one in choices) or 1
        return min(choices, key=lambda one: (1 - weight) * one.seconds / seconds + weight * max(one.memory) / memory)

    def _microbatches(self) -> tuple[int, ...]:
        wish = self.wish
        found = wish.microbatches or tuple(wish.ranks * factor for factor in (1, 2, 4, 8))
        if wish.batch is not None:
            found = tuple(each for each in found if each <= wish.batch) or (() if wish.microbatches else (wish.batch,))
        elif not wish.microbatches:
            raise PipelineError("microbatches: give their number, or the batch to choose them by")
        if not found or min(found) < 1:
            most = "1 or more" if wish.batch is None else f"1 to {wish.batch}, the samples of a replica's batch"
            raise PipelineError(f"microbatches: {', '.join(map(str, wish.microbatches))}; there can be {most}")
        return found

    def _graph(self, microbatches: int) -> Graph:
        if self.wish.batch is None:
            return self.profile.graph
        return scale_graph(self.profile.graph, self._samples(microbatches) / self.profile.samples)

    def _weighed(self, microbatches: int) -> Graph:
        return self._graph(microbatches).weigh_parameters(self.wish.optimizer_factor)

    def _samples(self, microbatches: int) -> int:
        """Return the number of samples of the largest micro-batch."""
        return self.profile.samples if self.wish.batch is None else -(-self.wish.batch // microbatches)

    def _partition(self, stages: int, microbatches: int, schedule: str | Schedule) -> list[SplitCandidate]:
        from everstep.pipeline.partition.solve import partition_graph

        return partition_graph(
            self._weighed(microbatches),
            stages,
            self.profile.devices,
            self.profile.links or None,
            microbatches,
            memory_weight=self.wish.weight,
            schedule=schedule,
            split=self.wish.split,
            optimizer_factor=self.wish.optimizer_factor,
        )

    def _plan(self, best: SplitCandidate, schedule: str, microbatches: int, reasons: Collection[str]) -> Plan:
        wish = self.wish
        stages = len(set(best.stage_of.values()))
        order = (
            parse_schedule(schedule)
            if "\n" in schedule
            else make_schedule(schedule, stages, wish.ranks, microbatches, wish.split)
        )
        plan = Plan(
            profile=replace(self.profile, graph=self._graph(microbatches), samples=self._samples(microbatches)),
            stage_of=best.stage_of,
            placement=order.placement,
            schedule=schedule,
            microbatches=microbatches,
            split=wish.split,
            objective=wish.objective,
            memory_weight=wish.weight,
            optimizer_factor=wish.optimizer_factor,
            model=self.model,
            reasons=tuple(reasons),
        )
        return replace(plan, prediction=plan.predict(best.bound, best.gap))


def scale_graph(graph: Graph, factor: float) -> Graph:
    """The graph for micro-batches of `factor` times as many samples: times and values grow alike, parameters do not."""
    return replace(
        graph,
        nodes=tuple(
            replace(
                node,
                forward=node.forward * factor,
                input_grad=node.input_grad * factor,
                weight_grad=node.weight_grad * factor,
                unsplit=None if node.unsplit is None else node.unsplit * factor,
                activation=round(node.activation * factor),
                output=round(node.output * factor),
            )
            for node in graph.nodes
        ),
    )


def _describe_counts(stages: int, ranks: int) -> str:
    return "1f1b" if stages == ranks else "interleaved"


def fit_devices(profile: Profile, wish: Wish) -> Profile:
    """Return the profile with devices and links for as many ranks as are asked for.

    Those of another number of ranks are not known one by one: the worst that was measured stands for all.
    """
    devices = profile.devices or (Device(),)
    if len(devices) != wish.ranks:
        limits = [device.memory for device in devices if device.memory is not None]
        devices = (Device(min(device.speed for device in devices), min(limits) if limits else None),) * wish.ranks
    if wish.memory is not None:
        devices = tuple(replace(device, memory=wish.memory) for device in devices)
    links = profile.links if wish.link is None else make_uniform_links(wish.ranks, wish.link)
    if links and len(links) != wish.ranks:
        between = [link for here, row in enumerate(links) for there, link in enumerate(row) if here != there]
        links = make_uniform_links(wish.ranks, find_worst_link(between))
    return replace(profile, devices=devices, links=links)
