"""A timeline as SVG, and as a page of HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from everstep.pipeline.graph import StageGraph
from everstep.pipeline.schedules.actions import ActionKind, Schedule
from everstep.pipeline.schedules.simulation import Result, SimulatedAction, trace_memory
from everstep.pipeline.schedules.text import label_action

WIDTH, ROW, LEFT, TOP = 1200, 30, 64, 8  # pixels
CURVE = 22  # height of a rank's memory curve
NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRAD: "input gradient",
    ActionKind.WEIGHT_GRAD: "weight gradient",
    ActionKind.SEND: "send",
    ActionKind.RECEIVE: "receive",
}
STYLE = """
text { font: 11px system-ui, sans-serif; fill: #222 }
.row { fill: #eee } .F { fill: #9cc4f0 } .B { fill: #f2b179 } .I { fill: #f6cf92 } .W { fill: #a9d8a0 }
.S, .R { fill: #c9b3e6 } rect[class] { stroke: #fff; stroke-width: .5 } .odd { fill-opacity: .62 }
.axis { stroke: #999 } .memory { fill: none; stroke: #b0413e; stroke-width: 1.2 }
"""


def render_svg(schedule: Schedule, result: Result, graph: StageGraph | None = None) -> str:
    """A row for each rank, the box of each action with its times as a tooltip; with `graph`, the activations that a
    rank keeps as a curve under its row, all to one scale. Every second stage of a rank is paler."""
    row = ROW + (CURVE if graph else 0) + 6
    height = TOP + row * len(schedule.ranks) + 24
    scale = (WIDTH - LEFT - 8) / (result.makespan or 1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="100%" role="img">',
        f"<title>{escape(schedule.name)}</title><style>{STYLE}</style>",
    ]
    for rank in range(len(schedule.ranks)):
        top = TOP + row * rank
        parts.append(f'<text x="4" y="{top + ROW / 2 + 4}">rank {rank}</text>')
        parts.append(f'<rect class="row" x="{LEFT}" y="{top}" width="{result.makespan * scale:.2f}" height="{ROW}"/>')
        events = [event for event in result.timeline if event.rank == rank]
        parts += _draw_boxes(events, schedule.stages_of(rank), top, scale)
        if graph:
            parts.append(_draw_memory_curve(result, graph, rank, top + ROW + CURVE, scale))
    parts += _draw_axis(result.makespan, TOP + row * len(schedule.ranks), scale)
    return "\n".join((*parts, "</svg>\n"))


def render_html(schedule: Schedule, result: Result, graph: StageGraph | None = None) -> str:
    """The picture, its legend, and the figures of each rank. No script, nothing from elsewhere."""
    legend = " ".join(
        f'<span><svg width="12" height="12"><rect class="{kind}" width="12" height="12"/></svg> {name}</span>'
        for kind, name in NAMES.items()
        if any(event.action.kind is kind for event in result.timeline)
    )
    rows = "".join(
        f"<tr><td>{rank}<td>{', '.join(map(str, schedule.stages_of(rank)))}<td>{result.busy[rank]:.6g}"
        f"<td>{result.makespan - result.busy[rank]:.6g}<td>{result.peak[rank]:,}<td>{result.waiting[rank]:,}"
        for rank in range(len(schedule.ranks))
    )
    title = (
        f"{schedule.name}: {schedule.stages} stages, {len(schedule.ranks)} ranks, {schedule.microbatches} micro-batches"
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{escape(schedule.name)}</title>
<style>body {{ font: 14px system-ui, sans-serif; margin: 2em; max-width: 90em }}
td, th {{ padding: .2em .8em; text-align: right }} span {{ margin-right: 1em }} {STYLE}</style>
<h1>{escape(title)}</h1>
<p>One step takes {result.makespan:.6g} s, {result.bubble:.6g} s ({result.bubble_ratio:.1%}) more than the work of its
busiest rank.</p>
<p>{legend}</p>
{render_svg(schedule, result, graph)}
<table><tr><th>rank<th>stages<th>busy, s<th>idle, s<th>activations, bytes<th>values waiting, bytes{rows}</table>
</html>
"""


def _draw_boxes(events: list[SimulatedAction], stages: tuple[int, ...], top: float, scale: float) -> Iterator[str]:
    for event in events:
        left, width = LEFT + event.start * scale, (event.end - event.start) * scale
        name = label_action(event.action, len(stages) > 1)
        pale = " odd" if stages.index(event.action.stage) % 2 else ""
        told = f"stage {event.action.stage}, {NAMES[event.action.kind]} of micro-batch {event.action.microbatch}"
        told += f" {event.action.value}: {event.start:.6g} to {event.end:.6g} s"
        yield (
            f'<g><title>{escape(told)}</title><rect class="{event.action.kind}{pale}" x="{left:.2f}" y="{top}" '
            f'width="{width:.2f}" height="{ROW}"/>'
        )
        if width > 7 * len(name):
            middle = f'x="{left + width / 2:.2f}" y="{top + ROW / 2 + 4}"'
            yield f'<text {middle} text-anchor="middle" pointer-events="none">{escape(name)}</text>'
        yield "</g>"


def _draw_memory_curve(result: Result, graph: StageGraph, rank: int, bottom: float, scale: float) -> str:
    most = max(result.peak) or 1
    path, height = f"M{LEFT} {bottom}", bottom
    for at, kept in trace_memory(result, graph, rank):
        height = bottom - (CURVE - 2) * kept / most
        path += f"H{LEFT + at * scale:.2f}V{height:.2f}"
    told = f"rank {rank}: at most {result.peak[rank]:,} bytes of activations"
    return f'<g><title>{told}</title><path class="memory" d="{path}H{LEFT + result.makespan * scale:.2f}"/></g>'


def _draw_axis(makespan: float, y: float, scale: float) -> Iterator[str]:
    right = LEFT + makespan * scale
    yield f'<line class="axis" x1="{LEFT}" y1="{y}" x2="{right:.2f}" y2="{y}"/>'
    for tenth in range(0, 11, 2):
        at = makespan * tenth / 10
        anchor = "end" if tenth == 10 else "middle" if tenth else "start"
        yield f'<text x="{LEFT + at * scale:.2f}" y="{y + 16}" text-anchor="{anchor}">{at:.4g} s</text>'
