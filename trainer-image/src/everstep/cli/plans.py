"""Plans, profiles and numbers as they are named on a command line, and how what is wrong with them is said."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.cli.errors import CliError

if TYPE_CHECKING:
    from everstep.pipeline.graph import Link, Profile
    from everstep.pipeline.plan import Plan
    from everstep.pipeline.schedules import Schedule

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)[bB]?", re.ASCII)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Turn errors of pipelines into those of a command."""
    from everstep.pipeline.errors import PipelineError

    try:
        yield
    except (PipelineError, OSError) as error:
        raise CliError(str(error)) from error
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise CliError(f"{error.name} is not installed: pip install 'everstep[pipeline]'") from error
    except KeyboardInterrupt:
        raise CliError("interrupted", 130) from None


def read_profile(path: Path) -> Profile | Plan:
    """Return a profile, a plan, or the profile of a graph.

    Raises:
        PipelineError: It cannot be read; the message names the file and what is wrong in it.
    """
    from everstep.pipeline.errors import PipelineError
    from everstep.pipeline.graph import Graph, Profile
    from everstep.pipeline.plan import Plan

    text = path.read_bytes()
    try:
        kind = _read_kind(text)
        if kind == "plan":
            return Plan.from_json(text)
        return Profile(Graph.from_json(text)) if kind == "graph" else Profile.from_json(text)
    except PipelineError as error:
        raise PipelineError(f"{path}: {error}") from error


def _read_kind(text: bytes) -> object:
    try:
        data = json.loads(text)
    except ValueError:
        return None
    return data.get("everstep") if isinstance(data, dict) else None


def read_schedule(text: str) -> str | Schedule:
    """Return the name of a schedule, or the schedule of a file."""
    from everstep.pipeline.errors import PipelineError
    from everstep.pipeline.schedules import complete_schedule, parse_schedule

    path = Path(text)
    if not path.is_file():
        return text
    try:
        return complete_schedule(parse_schedule(path.read_text(), path.stem))
    except UnicodeDecodeError as error:
        raise PipelineError(f"{path}: not a text file, so it is no schedule") from error


def parse_numbers(text: str | None, option: str) -> tuple[int, ...]:
    """Return the numbers of `8,16`; none for nothing."""
    try:
        return tuple(int(each) for each in text.split(",")) if text else ()
    except ValueError:
        raise CliError(f"{option}: {text!r} is not a number or a list: write 8 or 8,16", 2) from None


def parse_speeds(text: str | None, option: str) -> tuple[float, ...] | None:
    """Return the speeds of `1,1,0.5`, each above 0; None for nothing."""
    try:
        found = tuple(float(each) for each in text.split(",")) if text else None
        if found is None or min(found) > 0:
            return found
    except ValueError:
        pass
    raise CliError(f"{option}: {text!r}: write a number above 0 for each rank, as 1,1,0.5,1", 2)


def parse_size(text: str | None, option: str) -> int | None:
    """Return the bytes of `16GiB`, `10GB` or a number; None for nothing."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise CliError(f"{option}: {text!r} is not a size: write 16GiB, 10GB, or a number of bytes", 2)
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kMGT".index(unit.replace("K", "k") or " "))


def parse_link(bandwidth: str | None, latency: float | None) -> Link | None:
    """Return what is told of all links; None if nothing is."""
    from everstep.pipeline.graph import Link

    if bandwidth is None and latency is None:
        return None
    rate = parse_size(bandwidth, "--bandwidth")
    if rate == 0:
        raise CliError("--bandwidth: a link of 0 bytes per second carries nothing", 2)
    return Link(latency=latency or 0.0) if rate is None else Link(float(rate), latency or 0.0)
