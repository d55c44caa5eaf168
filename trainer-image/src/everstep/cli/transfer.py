"""A progress bar of bytes on stderr: only for people, so only on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def show_transfer(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show the bar, and give a function that is told how many bytes more are done, from any thread. `total` in
    bytes."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from everstep.cli.terminal import make_stderr

    console = make_stderr()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def make_renewing_counter(renew: Callable[[], None], on_bytes: Callable[[int], None]) -> Callable[[int], None]:
    """Return a function that is told how many bytes more are read, and holds what is read for longer."""

    def advance(count: int) -> None:
        renew()
        on_bytes(count)

    return advance


def format_size(count: float) -> str:
    """Return a size as 1023 B, 1.0 KiB or 3.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} PiB"
