"""The terminal during a local run: log lines scroll, one bar stays at the bottom. Without a terminal, lines only."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from everstep.cli.lines import LogLine
from everstep.cli.terminal import format_duration, format_log_line, make_stderr, make_stdout


class _EstimateBar(ProgressColumn):
    """Nothing until the total is known: a job need not report progress."""

    def __init__(self) -> None:
        super().__init__()
        self._bar = BarColumn(bar_width=30)

    def render(self, task: Task) -> Any:
        return self._bar.render(task) if task.total else Text("")


class LiveScreen:
    """Log lines go to stdout and everstep's own to stderr, as with any program; a terminal shows both above the bar."""

    def __init__(self, name: str) -> None:
        self._out, self._err = make_stdout(), make_stderr()
        self._name = name
        self._progress: Progress | None = None
        if self._out.is_terminal:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                _EstimateBar(),
                TextColumn("{task.fields[words]}"),
                TimeElapsedColumn(),
                console=self._out,
                transient=True,
            )
            self._task = self._progress.add_task(name, total=None, words="")

    def __enter__(self) -> LiveScreen:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._progress:
            self._progress.stop()

    def log(self, line: LogLine) -> None:
        self._out.print(format_log_line(line))

    def say(self, words: str, style: str = "bold") -> None:
        # Two consoles would tear the bar apart: while there is one, all goes through its own.
        (self._out if self._progress else self._err).print(Text(f"everstep: {words}", style=style))

    def show(self, state: Mapping[str, Any]) -> None:
        """Show a leader's state in the bar."""
        if self._progress is None:
            return
        self._progress.update(self._task, **describe_progress(self._name, state))


def describe_progress(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the bar says: description, words, and the progress if the ranks report any."""
    progress = state.get("progress") or {}
    step, total, rate = progress.get("step"), progress.get("totalSteps"), progress.get("stepsPerSecond")
    words = [] if state["phase"] == "running" else [str(state["phase"])]
    if state["joined"] < state["nodes"]:
        words.append(f"{state['joined']} of {state['nodes']} nodes")
    if step is not None:
        words.append(f"step {step}" + (f" of {total}" if total else ""))
    if rate:
        words.append(f"{rate:.3g}/s")
        if total and step is not None and total > step:
            words.append(f"{format_duration((total - step) / rate)} left")
    words += [f"{key} {value:.4g}" for key, value in sorted((progress.get("metrics") or {}).items())]
    return {
        "description": f"{name} {state['epoch']}.{state['generation']}",
        "total": total,
        "completed": step or 0,
        "words": "  ".join(words),
    }
