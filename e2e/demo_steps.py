"""The steps of `make demo` on this machine: told beforehand, with their cost, and shown as a bar while they are done.

The costs are those of a run from nothing, its seconds computed from the processor time that the parts took beside each
other on two cores. They are there to be told, and nothing waits by them.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table

from e2e.cache import cache_dir
from e2e.cluster import binaries
from e2e.images import engine
from e2e.images.catalogue import Image


@dataclass(frozen=True)
class StepCost:
    """The cost of a part from nothing: seconds on two cores, megabytes that are loaded, megabytes that stay."""

    seconds: int
    download: int = 0
    stored: int = 0

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(self.seconds + other.seconds, self.download + other.download, self.stored + other.stored)


@dataclass(frozen=True)
class DemoStep:
    """One part of the work; ``name`` is what `deploy.load` calls it when it is done."""

    name: str
    what: str
    cost: StepCost


# By the folder of the Go module. What is stored there are the programs: Go's own caches are Go's.
MODULES = {
    "etcd": StepCost(60, 70, 27),
    "kubernetes": StepCost(430, 140, 485),
    "pause": StepCost(3, 0, 2),
    "coredns": StepCost(130, 90, 76),
    "helm": StepCost(120, 60, 61),
    "kind": StepCost(30, 10, 11),
}
IMAGES = {
    "operator": StepCost(160, 150, 600),
    "trainer": StepCost(480, 3000, 6500),
}
# An image of which an older build is there takes its heavy layers from that.
REBUILT = StepCost(30, 0, 50)
UNKNOWN = StepCost(60)


def program_steps(names: Iterable[str]) -> list[DemoStep]:
    """Return the modules that have to be compiled for the programs ``names``."""
    return [
        DemoStep(folder, f"compile {', '.join(programs)}", MODULES.get(folder, UNKNOWN))
        for folder, programs in binaries.by_module(binaries.missing(names)).items()
    ]


def image_steps(images: Iterable[Image]) -> list[DemoStep]:
    """Return the images that have to be built; asked without installing anything."""
    can_ask = engine.is_present()
    found = []
    for image in images:
        if not (can_ask and image.built):
            cost = REBUILT if can_ask and image.exists else IMAGES.get(image.short_name, UNKNOWN)
            found.append(DemoStep(image.name, f"build the image {image.short_name}", cost))
    return found


@dataclass
class Track:
    """Steps that are done one after the other."""

    title: str
    steps: list[DemoStep]
    finished: set[str] = field(default_factory=set)
    since: float = 0.0

    @property
    def seconds(self) -> int:
        return sum(step.cost.seconds for step in self.steps)

    @property
    def current(self) -> DemoStep | None:
        return next((step for step in self.steps if step.name not in self.finished), None)

    def finish(self, name: str, now: float) -> None:
        """Note that a step is done; of another track's steps nothing is noted."""
        if any(step.name == name for step in self.steps):
            self.finished.add(name)
            self.since = now

    def estimate(self, now: float) -> float:
        """Return the seconds' worth of work that is done: a step that takes longer than it should stays just below its
        end."""
        done = sum(step.cost.seconds for step in self.steps if step.name in self.finished)
        current = self.current
        return done + (min(now - self.since, 0.95 * current.cost.seconds) if current else 0)


def announce(console: Console, tracks: Sequence[Track], afterwards: int, packages: Sequence[str] = ()) -> StepCost:
    """Say what will be done, how long it takes, how much it loads and stores; return the sum.

    Args:
        console: Where it is said.
        tracks: What is done side by side.
        afterwards: Seconds for what comes after all tracks.
        packages: Debian packages that are installed on this machine.
    """
    steps = [step for track in tracks for step in track.steps]
    total = sum((step.cost for step in steps), StepCost(0))
    total = dataclasses.replace(total, seconds=max(track.seconds for track in tracks))
    if steps:
        table = Table(title="What is built, once on this machine", title_justify="left")
        table.add_column("what")
        for column in ("minutes", "download", "kept"):
            table.add_column(column, justify="right")
        for step in steps:
            table.add_row(step.what, *_row(step.cost))
        table.add_row("all, images beside programs", *_row(total), style="bold")
        console.print(table)
        console.print(
            f"Kept in {cache_dir()} for later runs (EVERSTEP_CACHE names another place). "
            "Go's own caches grow by about 5 GB; `go clean -cache -modcache` empties them."
        )
    if packages:
        console.print(f"Debian packages that are installed: {', '.join(packages)}.")
    console.print(f"This takes about {_minutes(total.seconds + afterwards)} minutes on two idle cores.")
    return total


def missing_disk(cost: StepCost) -> str | None:
    """Say what is wrong if the disk has no room for it; None if nothing is."""
    folder = next(path for path in (cache_dir(), *cache_dir().parents) if path.exists())
    free = shutil.disk_usage(folder).free // 1_000_000
    # While an image is built, its layers are there twice; Go's own caches may lie on the same disk.
    needed = 2 * cost.stored
    if free >= needed:
        return None
    return (
        f"{folder} has {_megabytes(free)} free and this needs {_megabytes(needed)}: free some, or set EVERSTEP_CACHE "
        "to a folder on a larger disk."
    )


class _EstimatedBar(ProgressColumn):
    """Drawn from the track at each refresh: between the ends of two steps it goes by the clock."""

    def render(self, task: Task) -> ProgressBar:
        track: Track = task.fields["track"]
        return ProgressBar(total=track.seconds, completed=track.estimate(time.monotonic()), width=30)


class _CurrentStep(ProgressColumn):
    def render(self, task: Task) -> str:
        track: Track = task.fields["track"]
        return track.current.what if track.current else "done"


@contextmanager
def bars(console: Console, tracks: Iterable[Track]) -> Iterator[None]:
    """Show a bar for each track that has something to do, for the time of the block."""
    columns = (TextColumn("{task.description}"), _EstimatedBar(), TimeElapsedColumn(), _CurrentStep())
    with Progress(*columns, console=console, transient=True) as progress:
        for track in tracks:
            track.since = time.monotonic()
            if track.steps:
                progress.add_task(track.title, total=track.seconds, track=track)
        yield


def _row(cost: StepCost) -> tuple[str, str, str]:
    return _minutes(cost.seconds), _megabytes(cost.download), _megabytes(cost.stored)


def _minutes(seconds: int) -> str:
    return "< 1" if seconds < 60 else str(round(seconds / 60))


def _megabytes(count: int) -> str:
    return "" if count == 0 else f"{count} MB" if count < 1000 else f"{count / 1000:.1f} GB"
