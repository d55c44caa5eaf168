"""`everstep pipeline …`: plans of pipelines, made from a profile, shown, and tried with other numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="pipeline",
    help="""Plan pipelines: which part of a model is on which rank, and in which order they work.

    A profile is what `everstep.pipeline` measures of a model; a graph without devices and links will do.

    Exit codes: 0 done; 1 it could not be done; 2 wrong usage.
    """,
    no_args_is_help=True,
    rich_markup_mode=None,
)

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan, as `everstep pipeline plan` writes it.")]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]
Memory = Annotated[str | None, typer.Option("--memory", metavar="SIZE", help="Of each device, as 16GiB.")]
Bandwidth = Annotated[
    str | None, typer.Option("--bandwidth", metavar="SIZE", help="Of all links per second, as 10GB; not as measured.")
]
Latency = Annotated[float | None, typer.Option("--latency", min=0, help="Of all links, in seconds; not as measured.")]


@app.command("plan")
def plan(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="A profile, a graph, or a plan to make anew.")],
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Of one pipeline.")],
    stages: Annotated[
        int | None, typer.Option("--stages", min=1, help="A multiple of the ranks. Default: one or two on each.")
    ] = None,
    microbatches: Annotated[
        str | None,
        typer.Option("--microbatches", metavar="M[,M…]", help="Their number; of several the best is taken."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Samples of a step. Default: micro-batches as profiled.")
    ] = None,
    schedule: Annotated[
        str, typer.Option("--schedule", metavar="NAME|FILE", help="auto, 1f1b, zb-h1 …, or a file of actions.")
    ] = "auto",
    optimize: Annotated[str, typer.Option("--optimize", help="speed or memory.")] = "speed",
    memory_weight: Annotated[
        float | None, typer.Option("--memory-weight", min=0, max=1, help="0 is time alone, 1 memory alone.")
    ] = None,
    memory: Memory = None,
    bandwidth: Bandwidth = None,
    latency: Latency = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where the plan is written.")] = Path(
        "plan.json"
    ),
) -> None:
    """Choose the schedule, the micro-batches and the split of a model, and write the plan.

    It fits the devices' memory, and the fastest step that was found is taken; how far it may be from the best split is
    told. Nothing is written if nothing fits.
    """
    from everstep.cli.errors import CliError
    from everstep.cli.pipeline_view import summary, table
    from everstep.cli.plans import given, link, numbers, order, said, size
    from everstep.cli.terminal import stderr, stdout
    from everstep.pipeline.plan import Plan
    from everstep.pipeline.planning import Wish, solve, solve_again

    if optimize not in ("speed", "memory"):
        raise CliError(f"--optimize: {optimize!r} is neither speed nor memory", 2)
    with said():
        wish = Wish(
            ranks=ranks,
            stages=stages,
            microbatches=numbers(microbatches, "--microbatches"),
            batch=batch,
            schedule=order(schedule),
            objective="memory" if optimize == "memory" else "speed",
            memory_weight=memory_weight,
            memory=size(memory, "--memory"),
            link=link(bandwidth, latency),
        )
        source = given(profile)
        made = solve_again(source, wish) if isinstance(source, Plan) else solve(source, wish)
        made.prove()
        made.save(output)
    stdout().print(summary(made))
    stdout().print()
    stdout().print(table(made))
    for reason in made.reasons:
        stderr().print(reason)
    stderr().print(f"The plan is in {output}.")


@app.command("show")
def show(
    plan: PlanFile,
    nodes: Annotated[bool, typer.Option("--nodes", help="The nodes of each stage too.")] = False,
    actions: Annotated[bool, typer.Option("--actions", help="What each rank does, a line for each; no more.")] = False,
    columns: Annotated[int, typer.Option("--columns", min=20, help="Width of the timeline.")] = 160,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw the timeline into a file.")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="As a page, with its figures.")] = None,
) -> None:
    """Show a plan: its stages, its ranks, and the timeline of a step.

    `F` is a forward, `B` a backward, `I` and `W` its two halves, small letters the second stage of a rank.
    """
    from everstep.cli import pipeline_view as view
    from everstep.cli.plans import said
    from everstep.cli.terminal import stdout
    from everstep.pipeline import schedules
    from everstep.pipeline.plan import Plan

    out = stdout()
    with said():
        found = Plan.load(plan)
        if actions:
            out.print(schedules.dump(found.prove()), end="")
            return
        result = found.simulate()
        for file, draw in ((svg, schedules.svg), (html, schedules.html)):
            if file is not None:
                file.write_text(draw(found.actions, result, found.stages))
    out.print(view.summary(found))
    out.print()
    out.print(view.table(found))
    if told := view.ties(found):
        out.print(told)
    out.print()
    out.print(view.ranks(found))
    out.print(view.links(found))
    out.print()
    out.print(schedules.text(result, columns), end="")
    if nodes:
        out.print()
        for name, stage in found.stage_of.items():
            out.print(f"{stage} {name}")


@app.command("simulate")
def simulate(
    plan: PlanFile,
    microbatches: Annotated[int | None, typer.Option("--microbatches", min=1, help="Of the same size.")] = None,
    schedule: Annotated[
        str | None, typer.Option("--schedule", metavar="NAME|FILE", help="1f1b, zb-h1 …, or a file of actions.")
    ] = None,
    speeds: Annotated[
        str | None, typer.Option("--speeds", metavar="S,S,…", help="Of the ranks' devices, as 1,1,0.5,1.")
    ] = None,
    bandwidth: Bandwidth = None,
    latency: Latency = None,
    columns: Annotated[int, typer.Option("--columns", min=20, help="Width of the timeline.")] = 160,
    as_json: Json = False,
) -> None:
    """Try a plan with other numbers.

    The split and the placement stay. `everstep pipeline plan PLAN` makes it anew.
    """
    import json
    from dataclasses import asdict

    from everstep.cli.pipeline_view import compared
    from everstep.cli.plans import link, order, said, speeds_of
    from everstep.cli.terminal import stdout
    from everstep.pipeline import schedules
    from everstep.pipeline.plan import Plan

    with said():
        found = Plan.load(plan)
        changed = found.changed(
            microbatches=microbatches,
            schedule=None if schedule is None else order(schedule),
            speeds=speeds_of(speeds, "--speeds"),
            link=link(bandwidth, latency),
        )
        now = changed.predict()
        drawn = schedules.text(changed.simulate(), columns)
    out = stdout()
    if as_json:
        out.print(json.dumps(asdict(now)))
        return
    out.print(compared(found.prediction, now))
    out.print()
    out.print(drawn, end="")
