"""`everstep pipeline …`: plans of pipelines, made from a profile, shown, and tried with other numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="pipeline",
    help="""Plan pipelines: which rank runs which part of a model, and in which order.

    `everstep.pipeline` measures a profile of a model. A graph without devices and links is sufficient.

    Exit codes: 0 success; 1 error; 2 wrong usage.
    """,
    no_args_is_help=True,
    rich_markup_mode=None,
)

PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan, as `everstep pipeline plan` writes it.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
MemoryOption = Annotated[str | None, typer.Option("--memory", metavar="SIZE", help="Memory of each device, as 16GiB.")]
BandwidthOption = Annotated[
    str | None,
    typer.Option(
        "--bandwidth", metavar="SIZE", help="Bytes per second of all links, as 10GB, instead of the profile's."
    ),
]
LatencyOption = Annotated[
    float | None, typer.Option("--latency", min=0, help="Latency of all links in seconds, instead of the profile's.")
]


@app.command("plan")
def plan(
    profile: Annotated[Path, typer.Argument(metavar="PROFILE", help="A profile, a graph, or a plan to solve again.")],
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Ranks of one pipeline.")],
    stages: Annotated[
        int | None, typer.Option("--stages", min=1, help="A multiple of the ranks. Default: one or two on each.")
    ] = None,
    microbatches: Annotated[
        str | None,
        typer.Option("--microbatches", metavar="M[,M…]", help="Number of micro-batches; the best of several."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", min=1, help="Samples of a step. Default: micro-batches as profiled.")
    ] = None,
    schedule: Annotated[
        str, typer.Option("--schedule", metavar="NAME|FILE", help="auto, 1f1b, zb-h1 …, or a file of actions.")
    ] = "auto",
    optimize: Annotated[str, typer.Option("--optimize", help="Objective: speed or memory.")] = "speed",
    memory_weight: Annotated[
        float | None, typer.Option("--memory-weight", min=0, max=1, help="0 is time alone, 1 memory alone.")
    ] = None,
    memory: MemoryOption = None,
    bandwidth: BandwidthOption = None,
    latency: LatencyOption = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="File to write the plan to.")] = Path(
        "plan.json"
    ),
) -> None:
    """Choose the schedule, the micro-batches and the split of a model, and write the plan.

    The plan fits the devices' memory and has the fastest step that was found. The command prints how far it may be from
    the best split. It writes nothing if no plan fits.
    """
    from everstep.cli.errors import CliError
    from everstep.cli.pipeline_view import make_stage_table, summarize_plan
    from everstep.cli.plans import parse_link, parse_numbers, parse_size, read_profile, read_schedule, translate_errors
    from everstep.cli.terminal import make_stderr, make_stdout
    from everstep.pipeline.plan import Plan
    from everstep.pipeline.planning import Wish, solve_again, solve_plan

    if optimize not in ("speed", "memory"):
        raise CliError(f"--optimize: {optimize!r}: give speed or memory", 2)
    with translate_errors():
        wish = Wish(
            ranks=ranks,
            stages=stages,
            microbatches=parse_numbers(microbatches, "--microbatches"),
            batch=batch,
            schedule=read_schedule(schedule),
            objective="memory" if optimize == "memory" else "speed",
            memory_weight=memory_weight,
            memory=parse_size(memory, "--memory"),
            link=parse_link(bandwidth, latency),
        )
        source = read_profile(profile)
        made = solve_again(source, wish) if isinstance(source, Plan) else solve_plan(source, wish)
        made.prove()
        made.save(output)
    make_stdout().print(summarize_plan(made))
    make_stdout().print()
    make_stdout().print(make_stage_table(made))
    for reason in made.reasons:
        make_stderr().print(reason)
    make_stderr().print(f"Wrote the plan to {output}.")


@app.command("show")
def show(
    plan: PlanArgument,
    nodes: Annotated[bool, typer.Option("--nodes", help="List the nodes of each stage too.")] = False,
    actions: Annotated[bool, typer.Option("--actions", help="Print only the actions, one line for each rank.")] = False,
    columns: Annotated[int, typer.Option("--columns", min=20, help="Width of the timeline.")] = 160,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw the timeline into a file.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with timeline and figures.")
    ] = None,
) -> None:
    """Show a plan: its stages, its ranks, and the timeline of a step.

    `F` is a forward, `B` a backward, `I` and `W` its two halves, small letters the second stage of a rank.
    """
    from everstep.cli import pipeline_view as view
    from everstep.cli.plans import translate_errors
    from everstep.cli.terminal import make_stdout
    from everstep.pipeline import schedules
    from everstep.pipeline.plan import Plan

    out = make_stdout()
    with translate_errors():
        found = Plan.load(plan)
        if actions:
            out.print(schedules.dump_schedule(found.prove()), end="")
            return
        result = found.simulate()
        for file, draw in ((svg, schedules.render_svg), (html, schedules.render_html)):
            if file is not None:
                file.write_text(draw(found.actions, result, found.stages))
    out.print(view.summarize_plan(found))
    out.print()
    out.print(view.make_stage_table(found))
    if told := view.describe_ties(found):
        out.print(told)
    out.print()
    out.print(view.make_rank_table(found))
    out.print(view.describe_links(found))
    out.print()
    out.print(schedules.render_text(result, columns), end="")
    if nodes:
        out.print()
        for name, stage in found.stage_of.items():
            out.print(f"{stage} {name}")


@app.command("simulate")
def simulate(
    plan: PlanArgument,
    microbatches: Annotated[
        int | None, typer.Option("--microbatches", min=1, help="Number of micro-batches, of the same size.")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option("--schedule", metavar="NAME|FILE", help="1f1b, zb-h1 …, or a file of actions.")
    ] = None,
    speeds: Annotated[
        str | None, typer.Option("--speeds", metavar="S,S,…", help="Speeds of the ranks' devices, as 1,1,0.5,1.")
    ] = None,
    bandwidth: BandwidthOption = None,
    latency: LatencyOption = None,
    columns: Annotated[int, typer.Option("--columns", min=20, help="Width of the timeline.")] = 160,
    as_json: JsonOption = False,
) -> None:
    """Simulate a plan with other numbers.

    The split and the placement stay. `everstep pipeline plan PLAN` makes it anew.
    """
    import json
    from dataclasses import asdict

    from everstep.cli.pipeline_view import compare_predictions
    from everstep.cli.plans import parse_link, parse_speeds, read_schedule, translate_errors
    from everstep.cli.terminal import make_stdout
    from everstep.pipeline import schedules
    from everstep.pipeline.plan import Plan

    with translate_errors():
        found = Plan.load(plan)
        changed = found.changed(
            microbatches=microbatches,
            schedule=None if schedule is None else read_schedule(schedule),
            speeds=parse_speeds(speeds, "--speeds"),
            link=parse_link(bandwidth, latency),
        )
        now = changed.predict()
        drawn = schedules.render_text(changed.simulate(), columns)
    out = make_stdout()
    if as_json:
        out.print(json.dumps(asdict(now)))
        return
    out.print(compare_predictions(found.prediction, now))
    out.print()
    out.print(drawn, end="")
