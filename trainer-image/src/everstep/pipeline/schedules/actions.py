"""Actions, schedules, and their text: one line per rank.

A token is `<stage><kind><micro-batch>`: `2F0`, `2B0`, `2I0`, `2W0`. Stage 2 sends the value `h.3` to stage 5 as
`2S0>5:h.3` and gets its gradient as `2R0<5^h.3`; `2D` reduces the gradients of stage 2, `2T` sums those of its ties.
Tokens are separated by white space or commas, `-` is a rank without actions, `#` begins a comment. Files of
computations only, as torch.distributed.pipelining writes them, are of this form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from everstep.pipeline.errors import PipelineError


class Kind(StrEnum):
    """What an action does. BACKWARD is INPUT_GRAD and WEIGHT_GRAD at once; TIE and REDUCE have no micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    SEND = "S"
    RECEIVE = "R"
    REDUCE = "D"
    TIE = "T"


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD})
MESSAGES = frozenset({Kind.SEND, Kind.RECEIVE})


@dataclass(frozen=True, slots=True)
class Action:
    """Of SEND and RECEIVE: `peer` is the other stage, `value` the name of what travels, or its gradient."""

    kind: Kind
    stage: int
    microbatch: int = -1
    peer: int = -1
    value: str = ""
    gradient: bool = False

    def __str__(self) -> str:
        if self.kind in MESSAGES:
            arrow, mark = ">" if self.kind is Kind.SEND else "<", "^" if self.gradient else ":"
            return f"{self.stage}{self.kind}{self.microbatch}{arrow}{self.peer}{mark}{self.value}"
        return f"{self.stage}{self.kind}{self.microbatch if self.microbatch >= 0 else ''}"


@dataclass(frozen=True)
class Schedule:
    """`placement`: the rank of each stage; `ranks`: what each rank does, in order. Not proven yet: see `validate`."""

    name: str
    placement: tuple[int, ...]
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, at in enumerate(self.placement) if at == rank)


_TOKEN = re.compile(
    r"(?P<stage>\d+)(?P<kind>[FBIWSRDT])(?P<mb>\d*)(?:(?P<arrow>[<>])(?P<peer>\d+)(?P<mark>[:^])(?P<value>\S+))?"
)


def dump(schedule: Schedule) -> str:
    """The text of a schedule; `parse` reads it back."""
    lines = (" ".join(map(str, actions)) or "-" for actions in schedule.ranks)
    return "\n".join((f"# {schedule.name}", *lines, ""))


def parse(text: str, name: str = "") -> Schedule:
    """The schedule of a text; a stage is on the rank whose line computes it. `name`: of the schedule, unless the first
    line, a comment, gives it.

    PipelineError names the line and the token that cannot be read, a stage that is missing or on two ranks.
    """
    first = text.lstrip().split("\n", 1)[0]
    name = name or (first[1:].strip() if first.startswith("#") else "") or "file"
    lines = [(number, line.split("#")[0].strip()) for number, line in enumerate(text.split("\n"), 1)]
    ranks = [_line(number, line) for number, line in lines if line]
    home: dict[int, int] = {}
    for rank, actions in enumerate(ranks):
        for action in actions:
            if home.setdefault(action.stage, rank) != rank:
                raise PipelineError(f"{name}: stage {action.stage} is on ranks {home[action.stage]} and {rank}")
    if sorted(home) != list(range(len(home))) or not home:
        raise PipelineError(f"{name}: stages must be 0, 1, 2 … without gaps, but there are {sorted(home)}")
    microbatches = 1 + max(action.microbatch for actions in ranks for action in actions)
    return Schedule(name, tuple(home[stage] for stage in range(len(home))), microbatches, tuple(ranks))


def _line(number: int, line: str) -> tuple[Action, ...]:
    tokens: Sequence[str] = [] if line == "-" else [token for token in re.split(r"[\s,]+", line) if token]
    return tuple(_action(number, token) for token in tokens)


def _action(number: int, token: str) -> Action:
    found = _TOKEN.fullmatch(token)
    kind = Kind(found["kind"]) if found else None
    if found is None or kind is None:
        raise PipelineError(
            f"line {number}: {token!r} is no action; one is 2F0, 2B0, 2I0, 2W0, 2S0>5:name, 2R0<5^name, 2D or 2T"
        )
    if (kind in MESSAGES) != bool(found["arrow"]) or (kind in (Kind.REDUCE, Kind.TIE)) == bool(found["mb"]):
        raise PipelineError(f"line {number}: {token!r}: what it lacks or has too much of does not fit {kind.name}")
    if found["arrow"] and (found["arrow"] == ">") != (kind is Kind.SEND):
        raise PipelineError(f"line {number}: {token!r}: a send has >, a receive <")
    return Action(
        kind,
        int(found["stage"]),
        int(found["mb"] or -1),
        int(found["peer"] or -1),
        found["value"] or "",
        found["mark"] == "^",
    )
