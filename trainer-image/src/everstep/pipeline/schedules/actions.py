"""Actions, schedules, and their text: one line per rank.

A token is `<stage><kind><micro-batch>`: `2F0`, `2B0`, `2I0`, `2W0`. Stage 2 sends the value `h.3` to stage 5 as
`2S0>5:h.3` and gets its gradient as `2R0<5^h.3`; `2D` reduces the gradients of stage 2, `2T:wte` sums those of
the shared parameter `wte` over its owners.
Tokens are separated by white space or commas, `-` is a rank without actions, `#` begins a comment. Files of
computations only, as torch.distributed.pipelining writes them, are of this form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from everstep.pipeline.errors import PipelineError


class ActionKind(StrEnum):
    """The kind of an action. BACKWARD is INPUT_GRAD and WEIGHT_GRAD at once; TIE and REDUCE have no micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    SEND = "S"
    RECEIVE = "R"
    REDUCE = "D"
    TIE = "T"


COMPUTE = frozenset({ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD})
MESSAGES = frozenset({ActionKind.SEND, ActionKind.RECEIVE})


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank: a computation, a message, a reduction or a tie.

    With SEND and RECEIVE, `peer` is the other stage, and `value` the name of what travels, itself or its gradient. With
    TIE, `value` is the shared parameter, and `stage` the lowest that owns it on this rank.
    """

    kind: ActionKind
    stage: int
    microbatch: int = -1
    peer: int = -1
    value: str = ""
    gradient: bool = False

    def __str__(self) -> str:
        if self.kind in MESSAGES:
            arrow, mark = ">" if self.kind is ActionKind.SEND else "<", "^" if self.gradient else ":"
            return f"{self.stage}{self.kind}{self.microbatch}{arrow}{self.peer}{mark}{self.value}"
        microbatch = self.microbatch if self.microbatch >= 0 else ""
        return f"{self.stage}{self.kind}{microbatch}{':' if self.value else ''}{self.value}"


@dataclass(frozen=True)
class Schedule:
    """The list of actions of each rank. It is not proven yet: see `validate_schedule`.

    Attributes:
        placement: The rank of each stage.
        ranks: The actions of each rank, in order.
    """

    name: str
    placement: tuple[int, ...]
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def lowered(self) -> bool:
        """Tell whether the schedule says what is sent, reduced and tied, not only what is computed."""
        return any(action.kind not in COMPUTE for actions in self.ranks for action in actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, at in enumerate(self.placement) if at == rank)


_TOKEN = re.compile(
    r"(?P<stage>\d+)(?:(?P<kind>[FBIW])(?P<mb>\d+)"
    r"|(?P<message>[SR])(?P<of>\d+)(?P<arrow>[<>])(?P<peer>\d+)(?P<mark>[:^])(?P<value>\S+)"
    r"|(?P<reduce>D)|(?P<tie>T):(?P<name>\S+))"
)


def dump_schedule(schedule: Schedule) -> str:
    """Return the text of a schedule; `parse_schedule` reads it back."""
    lines = (" ".join(map(str, actions)) or "-" for actions in schedule.ranks)
    return "\n".join((f"# {schedule.name}", *lines, ""))


def parse_schedule(text: str, name: str = "") -> Schedule:
    """The schedule of a text; a stage is on the rank whose line computes it. `name`: of the schedule, unless the first
    line, a comment, gives it.

    PipelineError names the line and the token that cannot be read, a stage that is missing or on two ranks.
    """
    first = text.lstrip().split("\n", 1)[0]
    name = name or (first[1:].strip() if first.startswith("#") else "") or "file"
    lines = [(number, line.split("#")[0].strip()) for number, line in enumerate(text.split("\n"), 1)]
    ranks = [parse_rank(line, number) for number, line in lines if line]
    home: dict[int, int] = {}
    for rank, actions in enumerate(ranks):
        for action in actions:
            if home.setdefault(action.stage, rank) != rank:
                raise PipelineError(f"{name}: stage {action.stage} is on ranks {home[action.stage]} and {rank}")
    if sorted(home) != list(range(len(home))) or not home:
        raise PipelineError(f"{name}: stages must be 0, 1, 2 … without gaps, but there are {sorted(home)}")
    microbatches = 1 + max(action.microbatch for actions in ranks for action in actions)
    return Schedule(name, tuple(home[stage] for stage in range(len(home))), microbatches, tuple(ranks))


def parse_rank(line: str, number: int = 1) -> tuple[Action, ...]:
    """The actions of one line, without a look at the others. PipelineError names `number` and the token."""
    tokens: Sequence[str] = [] if line == "-" else [token for token in re.split(r"[\s,]+", line) if token]
    return tuple(_parse_action(number, token) for token in tokens)


def _parse_action(number: int, token: str) -> Action:
    found = _TOKEN.fullmatch(token)
    if found is None or (found["message"] and (found["message"] == "S") != (found["arrow"] == ">")):
        raise PipelineError(
            f"line {number}: {token!r} is no action: one is 2F0, 2B0, 2I0, 2W0, 2S0>5:name, 2R0<5^name, 2D or 2T:name"
        )
    stage = int(found["stage"])
    if found["message"]:
        kind, microbatch, peer = ActionKind(found["message"]), int(found["of"]), int(found["peer"])
        return Action(kind, stage, microbatch, peer, found["value"], found["mark"] == "^")
    if found["kind"]:
        return Action(ActionKind(found["kind"]), stage, int(found["mb"]))
    return Action(ActionKind.REDUCE, stage) if found["reduce"] else Action(ActionKind.TIE, stage, value=found["name"])
