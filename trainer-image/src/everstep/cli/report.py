"""Renders what `everstep status` shows, out of a TrainingJob's status alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from everstep.cli.cluster import FINISHED_PHASES, ApiObject
from everstep.cli.terminal import format_duration, parse_time
from everstep.cli.transfer import format_size

if TYPE_CHECKING:
    from everstep_operator.plan.node_failures import NodeFailure

PHASE_STYLES = {
    "Running": "bold green",
    "Succeeded": "bold green",
    "Failed": "bold red",
    "Restarting": "bold yellow",
    "Stopping": "bold yellow",
    "Suspended": "bold blue",
}
# In the order in which a job goes through them.
SECONDS = ("pending", "scheduling", "starting", "running", "recovering")
LOG_TAIL_LINES = 15
PLACES_BY_TIER = {
    "memory": " from the nodes' memory",
    "peer": " from another node's memory",
    "store": " from the store",
}


def render_status(job: ApiObject, now: datetime) -> RenderableType:
    """Render all that is known, the parts that are empty left out."""
    status = job.get("status", {})
    parts: list[RenderableType] = [_render_head(job, status, now), _render_facts(job, status, now)]
    for part in (
        _render_failure(status),
        _render_timings(status),
        _render_usage(status),
        _render_conditions(status, now),
    ):
        if part is not None:
            parts += ["", part]
    return Group(*parts)


def _render_head(job: ApiObject, status: dict[str, Any], now: datetime) -> RenderableType:
    meta = job["metadata"]
    phase = str(status.get("phase") or "Pending")
    text = Text.assemble(
        (meta["name"], "bold"), " in ", meta.get("namespace", "default"), "  ", (phase, PHASE_STYLES.get(phase, "bold"))
    )
    if born := parse_time(meta.get("creationTimestamp")):
        text.append(f"  created {_format_age(born, now)}", "dim")
    if meta.get("deletionTimestamp"):
        text.append("  being deleted", "bold yellow")
    return text


def _render_facts(job: ApiObject, status: dict[str, Any], now: datetime) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    for name, value in _list_facts(job, status, now):
        table.add_row(name, value)
    return table


def _list_facts(job: ApiObject, status: dict[str, Any], now: datetime) -> Iterator[tuple[str, RenderableType]]:
    spec = job.get("spec", {})
    nodes = status.get("nodes", spec.get("numNodes", 1))
    line = str(nodes) if status.get("phase") in FINISHED_PHASES else f"{status.get('readyNodes', 0)} of {nodes} ready"
    if pool := (status.get("template") or {}).get("pool"):
        line += f" in pool {pool}"
    if status.get("generation"):
        line += f", generation {status.get('epoch', 0)}.{status['generation']}"
    yield "nodes", line
    if progress := status.get("progress"):
        yield "progress", _render_progress(progress)
    checkpoint = status.get("checkpoint") or {}
    if words := _describe_checkpoint(checkpoint, now):
        yield "checkpoint", words
    if restored := checkpoint.get("restored"):
        yield "restored", _describe_restore(restored)
    yield "restarts", _describe_restarts(status.get("restarts") or {}, spec.get("restart") or {})


def _render_progress(progress: dict[str, Any]) -> RenderableType:
    step, total, rate = progress.get("step"), progress.get("totalSteps"), progress.get("stepsPerSecond")
    words = f"step {step}" + (f" of {total}" if total else "")
    if rate:
        words += f", {rate:.3g} steps/s"
        if total and step is not None and total > step:
            words += f", {format_duration((total - step) / rate)} left"
    if not total or step is None:
        return Text(words)
    row = Table.grid(padding=(0, 1))
    row.add_row(ProgressBar(total=total, completed=min(step, total), width=30), words)
    return row


def _describe_checkpoint(checkpoint: dict[str, Any], now: datetime) -> str:
    parts = []
    if checkpoint.get("step") is not None:
        parts.append(f"step {checkpoint['step']}")
        if saved := parse_time(checkpoint.get("time")):
            parts.append(_format_age(saved, now))
        if checkpoint.get("bytes") is not None:
            parts.append(format_size(checkpoint["bytes"]))
        if checkpoint.get("stallSeconds") is not None:
            parts.append(f"training held up for {checkpoint['stallSeconds']:.3f} s")
    if failed := checkpoint.get("failedSaves"):
        parts.append(f"{failed} saves failed" + (" since" if parts else ""))
    return ", ".join(parts)


def _describe_restore(restored: dict[str, Any]) -> str:
    if not restored.get("step"):
        return "nothing: there was no checkpoint"
    words = f"step {restored['step']}{PLACES_BY_TIER.get(restored.get('tier', ''), '')}"
    if restored.get("seconds") is not None:
        words += f" in {restored['seconds']:.2f} s"
    if passed := restored.get("passedOver"):
        words += f", past {passed} newer ones that are damaged"
    if lost := restored.get("lostSteps"):
        words += f"; {lost} steps trained again"
    return words


def _describe_restarts(restarts: dict[str, Any], limits: dict[str, Any]) -> str:
    words = []
    for cause in ("application", "infrastructure"):
        limit = f" of {limits[cause]}" if cause in limits else ""
        words.append(f"{cause} {restarts.get(cause, 0)}{limit}")
    words.append(f"pre-emption {restarts.get('preemption', 0)} (free)")
    return ", ".join(words)


def _render_failure(status: dict[str, Any]) -> RenderableType | None:
    failure = status.get("lastFailure")
    if not failure:
        return None
    head = Text("last failure", style="bold")
    reason = failure.get("reason")
    about = [str(failure.get("cause", ""))]
    if reason and reason != failure.get("cause"):
        about[0] += f" ({reason})"
    about += [f"{name} {failure[key]}" for key, name in (("node", "node"), ("rank", "rank")) if key in failure]
    if "exitCode" in failure:
        about.append(f"exit code {failure['exitCode']}")
    head.append("  " + ", ".join(about), "yellow")
    lines: list[RenderableType] = [head]
    if failure.get("message"):
        lines.append(Padding(Text(str(failure["message"])), (0, 0, 0, 2)))
    tail = failure.get("logTail") or []
    lines += [Padding(Text(f"| {line}", style="dim"), (0, 0, 0, 2)) for line in tail[-LOG_TAIL_LINES:]]
    return Group(*lines)


def _render_timings(status: dict[str, Any]) -> RenderableType | None:
    timings = status.get("timings") or {}
    spent = [(name, float(timings[name])) for name in SECONDS if timings.get(name)]
    total = sum(seconds for _, seconds in spent)
    if not total:
        return None
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    for name, seconds in spent:
        table.add_row(
            name,
            format_duration(seconds),
            f"{seconds / total:.0%}",
            ProgressBar(total=total, completed=seconds, width=30),
        )
    title = Text("where the time went", style="bold")
    if timings.get("goodput") is not None:
        title.append(f"  goodput {float(timings['goodput']):.1%}", "green")
    return Group(title, table)


def _render_usage(status: dict[str, Any]) -> RenderableType | None:
    """Render what the nodes have cost so far; nothing where no pool has a price."""
    usage = status.get("usage") or {}
    spot, on_demand = (float(usage.get(f"{kind}NodeSeconds") or 0) for kind in ("spot", "onDemand"))
    unpriced = float(usage.get("unpricedNodeSeconds") or 0)
    if not spot + on_demand or unpriced >= spot + on_demand:
        return None
    parts = [f"{seconds / 3600:.1f} node-hours {kind}" for seconds, kind in ((spot, "spot"), (on_demand, "on-demand"))]
    text = Text("cost", style="bold")
    text.append(f"  {float(usage.get('cost') or 0):.2f}", "green")
    text.append(", " + ", ".join(part for part, seconds in zip(parts, (spot, on_demand), strict=True) if seconds))
    if usage.get("savings"):
        text.append(f", {float(usage['savings']):.2f} saved by spot nodes")
    if unpriced:
        text.append(f"; without {unpriced / 3600:.1f} node-hours that have no price")
    return text


def _render_conditions(status: dict[str, Any], now: datetime) -> RenderableType | None:
    conditions = status.get("conditions") or []
    if not conditions:
        return None
    table = Table.grid(padding=(0, 2))
    for each in conditions:
        since = parse_time(each.get("lastTransitionTime"))
        table.add_row(
            str(each.get("type")),
            Text(str(each.get("status")), style="bold" if each.get("status") == "True" else "dim"),
            str(each.get("reason", "")),
            Text(_format_age(since, now) if since else "", style="dim"),
            str(each.get("message", "")),
        )
    return Group(Text("conditions", style="bold"), table)


def make_node_table(failures: Mapping[str, Sequence[NodeFailure]], now: datetime) -> Table:
    """Return a table with one line for each node on which jobs have failed, those with the newest failures first."""
    table = Table("NODE", "FAILURES", "NAMESPACES", "LAST REASON", "LAST JOB", "AGE", box=None, pad_edge=False)
    for node, each in sorted(failures.items(), key=lambda found: -found[1][-1].time):
        last, spaces = each[-1], sorted({failure.namespace for failure in each})
        age = _format_age(datetime.fromtimestamp(last.time, UTC), now)
        table.add_row(node, str(len(each)), ", ".join(spaces), last.reason, f"{last.namespace}/{last.job}", age)
    return table


def _format_age(then: datetime, now: datetime) -> str:
    return f"{format_duration(max(0.0, (now - then).total_seconds()))} ago"
