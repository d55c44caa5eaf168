"""Consoles and words shared by the commands: log lines go to stdout, what everstep itself says to stderr."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from everstep.cli.lines import LogLine


def make_stdout() -> Console:
    from rich.console import Console

    # A log is data: no markup, no guessed highlighting, no wrapping.
    return Console(highlight=False, markup=False, soft_wrap=True)


def make_stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def format_log_line(line: LogLine) -> Text:
    """Return a line with its rank in colour."""
    from rich.text import Text

    from everstep.cli.lines import line_label, rank_colour

    style = rank_colour(line.rank) if line.rank is not None else "dim"
    text = Text(f"[{line_label(line)}] ", style=style)
    # The program's own colours stay.
    text.append_text(Text.from_ansi(line.text) if "\x1b" in line.text else Text(line.text, style="default"))
    return text


def format_duration(seconds: float) -> str:
    """Return a duration as 12.3s, 4m05s, 3h07m or 2d04h."""
    if seconds < 60:
        return f"{seconds:.1f}s" if seconds < 10 else f"{seconds:.0f}s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h{minutes:02d}m"
    return f"{hours // 24}d{hours % 24:02d}h"


def parse_time(text: object) -> datetime | None:
    """Return a Kubernetes time; None for anything else."""
    if not isinstance(text, str):
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
