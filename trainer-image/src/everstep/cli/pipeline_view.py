"""Plans as tables."""

from __future__ import annotations

from math import isinf

from rich.table import Table

from everstep.cli.transfer import format_size
from everstep.pipeline.plan import Plan, Prediction


def summarize_plan(plan: Plan) -> str:
    """Return what a plan is, in a few lines."""
    told = plan.prediction
    lines = {
        "schedule": f"{plan.schedule_name}, {plan.microbatches} micro-batches of {plan.profile.samples} samples",
        "stages": f"{len(plan.placement)} on {len(plan.actions.ranks)} ranks, of {len(plan.stage_of)} nodes",
        "step": f"{told.seconds:.6g} s, {told.bubble:.1%} longer than the work of the busiest rank",
        "memory": f"{format_size(max(told.memory, default=0))} on the fullest rank",
    }
    if told.gap is not None:
        lines["split"] = f"no split can be better by more than {told.gap:.2%}, as simulated"
    if plan.model:
        lines["model"] = plan.model
    return "\n".join(f"{name:<11} {value}" for name, value in lines.items())


def make_stage_table(plan: Plan) -> Table:
    """Return a table with one line for each stage."""
    found = _make_table(
        "STAGE", "RANK", "NODES", "FORWARD", "BACKWARD", "ACTIVATION", "PARAMETERS", "SENDS", "FIRST", "LAST"
    )
    names: list[list[str]] = [[] for _ in plan.placement]
    for node in plan.profile.graph.nodes:
        names[plan.stage_of[node.name]].append(node.name)
    sends = [0] * len(plan.placement)
    for edge in plan.stages.edges:
        sends[edge.source] += edge.size * len(
            {plan.placement[target] for target in edge.targets} - {plan.placement[edge.source]}
        )
    for index, stage in enumerate(plan.stages.stages):
        found.add_row(
            str(index),
            str(plan.placement[index]),
            str(len(names[index])),
            f"{stage.forward:.4g} s",
            f"{stage.backward:.4g} s",
            format_size(stage.activation),
            format_size(stage.parameters),
            format_size(sends[index]),
            names[index][0],
            names[index][-1],
        )
    return found


def make_rank_table(plan: Plan) -> Table:
    """Return a table with one line for each rank: what it is taken to be, and what it needs."""
    found = _make_table("RANK", "SPEED", "MEMORY", "NEEDS", "BUSY", "IDLE")
    result = plan.simulate()
    told = plan.predict()
    for rank, device in enumerate(plan.devices):
        limit = "" if device.memory is None else format_size(device.memory)
        idle = result.makespan - result.busy[rank]
        found.add_row(
            str(rank),
            f"{device.speed:g}",
            limit,
            format_size(told.memory[rank]),
            f"{result.busy[rank]:.4g} s",
            f"{idle:.4g} s",
        )
    return found


def describe_ties(plan: Plan) -> str:
    """Return the shared parameters of several stages, a line for each."""
    return "\n".join(f"{name} is shared by stages {', '.join(map(str, owners))}" for name, owners in plan.stages.ties)


def compare_predictions(before: Prediction, now: Prediction) -> Table:
    """Return a table of what was planned, and what comes out with other numbers."""
    found = _make_table("", "PLANNED", "NOW", "CHANGE")

    def row(name: str, first: float, second: float, first_text: str, second_text: str) -> None:
        found.add_row(name, first_text, second_text, f"{second / first - 1:+.1%}" if first else "")

    row("step", before.seconds, now.seconds, f"{before.seconds:.6g} s", f"{now.seconds:.6g} s")
    found.add_row("bubble", f"{before.bubble:.1%}", f"{now.bubble:.1%}", "")
    first, second = max(before.memory, default=0), max(now.memory, default=0)
    row("memory", first, second, format_size(first), format_size(second))
    return found


def describe_links(plan: Plan) -> str:
    """Return what was taken for the links, in one line."""
    if not plan.profile.links:
        return "Links were taken to cost nothing."
    every = [each for here, row in enumerate(plan.profile.links) for there, each in enumerate(row) if here != there]
    if not every:
        return "There is one rank, and no link."
    slowest = min(each.bandwidth for each in every)
    rate = "any" if isinf(slowest) else f"{format_size(slowest)}/s"
    return f"Links: {rate} and {max(each.latency for each in every):.3g} s, the slowest of {len(every)}."


def _make_table(*columns: str) -> Table:
    found = Table(box=None, pad_edge=False, header_style="")
    for column in columns:
        found.add_column(column, no_wrap=True)
    return found
