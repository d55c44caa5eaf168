"""Choose the schedule, the number of micro-batches and the number of stages on each rank.

Every named combination is simulated, those that do not fit the memory are put aside, the fastest of the rest is taken,
and the choice is explained in words.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from everstep.pipeline.errors import PipelineError
from everstep.pipeline.graph import Device, Links, StageGraph
from everstep.pipeline.schedules import NAMES, Result, find_schedule, make_schedule, simulate_schedule

CLOSE = 0.005  # of the step: below what a profile can tell apart


@dataclass(frozen=True)
class Alternative:
    """One choice and what it costs; `memory` in bytes, of each rank; `result` is None if it cannot be made, `why` then
    says the reason, or why it is not the choice."""

    schedule: str
    stages: int
    microbatches: int
    result: Result | None = None
    memory: tuple[int, ...] = ()
    fits: bool = False
    why: str = ""

    @property
    def seconds(self) -> float:
        return self.result.makespan if self.result else float("inf")


@dataclass(frozen=True)
class Advice:
    """`choice`, and all `alternatives`, the fastest that fit first; `reasons`: why, in sentences."""

    choice: Alternative
    alternatives: tuple[Alternative, ...]
    reasons: tuple[str, ...]

    def table(self, rows: int = 12) -> str:
        """The best `rows` alternatives, as lines of text."""
        lines = [f"{'schedule':<15}{'stages':>7}{'m':>5}{'step, s':>12}{'bubble':>9}{'memory, GB':>12}  "]
        for one in self.alternatives[:rows]:
            start = f"{one.schedule:<15}{one.stages:>7}{one.microbatches:>5}"
            if one.result:
                start += f"{one.seconds:>12.5g}{one.result.bubble_ratio:>9.1%}{max(one.memory) / 1e9:>12.4g}"
            lines.append(f"{start:<60}  {'chosen' if one is self.choice else one.why}".rstrip())
        if len(self.alternatives) > rows:
            lines.append(f"… and {len(self.alternatives) - rows} more")
        return "\n".join(lines) + "\n"


def advise(
    stage_graph: Callable[[int, int], StageGraph],
    ranks: int,
    microbatches: Collection[int],
    *,
    devices: Sequence[Device] | None = None,
    links: Links | None = None,
    chunks: Collection[int] = (1, 2, 3, 4),
    schedules: Collection[str] = NAMES,
    optimizer_factor: float = 3.0,
    split: Callable[[int, int], Collection[int] | None] = lambda stages, microbatches: None,
) -> Advice:
    """Return the schedule of the fastest step that fits the devices' memory.

    Of those within 0.5 % of the fastest, the one of least memory, then of fewest stages, is taken.

    Args:
        stage_graph: A function of (stages, microbatches) that returns the model in so many stages, with the times and
            sizes of one micro-batch when there are so many; it may reject them with a PipelineError.
        ranks: The number of ranks.
        microbatches: The numbers of micro-batches to try.
        devices: The devices of the ranks.
        links: The links of all pairs of ranks.
        chunks: The numbers of stages on each rank to try.
        schedules: The names of the schedules to try.
        optimizer_factor: The bytes of gradients and optimizer states for each byte of parameters.
        split: A function of (stages, microbatches) that returns the stages that may split their backward, as in
            `make_schedule`.

    Raises:
        PipelineError: Nothing fits; it has what comes nearest.
    """
    found = [
        _simulate_alternative(name, stages, m, ranks, stage_graph, devices, links, optimizer_factor, split)
        for name in schedules
        for stages in sorted({ranks * chunk for chunk in chunks})
        for m in sorted(set(microbatches))
        if find_schedule(name).is_worth_trying(stages // ranks)
    ]
    fitting = [one for one in found if one.fits]
    if not fitting:
        raise PipelineError(_explain_misfit(found, devices))
    fastest = min(one.seconds for one in fitting)
    choice = min(
        (one for one in fitting if one.seconds <= fastest * (1 + CLOSE)),
        key=lambda one: (max(one.memory), one.stages, one.seconds),
    )
    rest = sorted((one for one in found if one is not choice), key=lambda one: (not one.fits, one.seconds))
    told = tuple(_compare_with_choice(one, choice) for one in rest)
    return Advice(choice, (choice, *told), tuple(_explain_choice(choice, told, devices)))


def _simulate_alternative(
    name: str,
    stages: int,
    microbatches: int,
    ranks: int,
    stage_graph: Callable[[int, int], StageGraph],
    devices: Sequence[Device] | None,
    links: Links | None,
    optimizer_factor: float,
    split: Callable[[int, int], Collection[int] | None],
) -> Alternative:
    try:
        graph = stage_graph(stages, microbatches)
        schedule = make_schedule(name, stages, ranks, microbatches, split(stages, microbatches))
        result = simulate_schedule(schedule, graph, devices, links)
    except PipelineError as error:
        return Alternative(name, stages, microbatches, why=str(error))
    parameters = [0] * ranks
    for stage, rank in zip(graph.stages, schedule.placement, strict=True):
        parameters[rank] += stage.parameters
    memory = tuple(
        round(own * (1 + optimizer_factor)) + kept + waiting
        for own, kept, waiting in zip(parameters, result.peak, result.waiting, strict=True)
    )
    over, rank = _find_excess(memory, devices)
    why = f"rank {rank} needs {memory[rank] / 1e9:.4g} GB, it has {(memory[rank] - over) / 1e9:.4g}" if over > 0 else ""
    return Alternative(name, stages, microbatches, result, memory, not why, why)


def _find_excess(memory: Sequence[int], devices: Sequence[Device] | None) -> tuple[int, int]:
    """Return by how many bytes the rank that lacks most is over its limit, and that rank."""
    return max(
        (-1 if limit is None else own - limit, rank)
        for rank, (own, limit) in enumerate(zip(memory, _list_memory_limits(devices, len(memory)), strict=True))
    )


def _list_memory_limits(devices: Sequence[Device] | None, ranks: int) -> list[int | None]:
    return [device.memory for device in devices] if devices else [None] * ranks


def _compare_with_choice(one: Alternative, choice: Alternative) -> Alternative:
    if not one.fits:
        return one
    slower = one.seconds / choice.seconds - 1 if choice.seconds else 0.0
    if abs(slower) > CLOSE:
        return replace(one, why=f"{slower:.1%} slower")
    return replace(one, why="as fast, but no less memory and no fewer stages")


def _explain_choice(
    choice: Alternative, rest: Sequence[Alternative], devices: Sequence[Device] | None
) -> Iterator[str]:
    assert choice.result is not None
    most = max(range(len(choice.memory)), key=choice.memory.__getitem__)
    limit = _list_memory_limits(devices, len(choice.memory))[most]
    yield (
        f"{_name_alternative(choice)}: a step of {choice.seconds:.5g} s, {choice.result.bubble_ratio:.1%} longer than "
        f"the work of its busiest rank; rank {most} needs most memory, {choice.memory[most] / 1e9:.4g} GB"
        f"{'' if limit is None else f' of {limit / 1e9:.4g}'}."
    )
    faster = [one for one in rest if one.result and not one.fits and one.seconds < choice.seconds * (1 - CLOSE)]
    if faster:
        best = min(faster, key=lambda one: one.seconds)
        yield f"{_name_alternative(best)} would be {1 - best.seconds / choice.seconds:.1%} faster, but {best.why}."
    by_schedule = {one.schedule: one for one in reversed(rest) if one.fits and one.schedule != choice.schedule}
    for one in sorted(by_schedule.values(), key=lambda one: one.seconds)[:2]:
        yield f"The best of another schedule is {_name_alternative(one)}: {one.why}."
    refused = next((one for one in rest if one.result is None), None)
    if refused:
        yield f"{_name_alternative(refused)} cannot be: {refused.why}."


def _explain_misfit(found: Sequence[Alternative], devices: Sequence[Device] | None) -> str:
    made = [one for one in found if one.result]
    if not made:
        return f"no schedule can be made: {found[0].why}" if found else "there is no schedule to choose from"
    nearest = min(made, key=lambda one: _find_excess(one.memory, devices))
    return (
        f"no schedule fits the memory; {_name_alternative(nearest)} comes nearest, but {nearest.why}: "
        "take more ranks, smaller micro-batches, or recompute activations"
    )


def _name_alternative(one: Alternative) -> str:
    return f"{one.schedule} with {one.stages} stages and {one.microbatches} micro-batches"
