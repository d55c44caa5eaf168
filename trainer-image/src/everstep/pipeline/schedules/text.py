"""A timeline in plain characters: a line for each rank, time from left to right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from everstep.pipeline.schedules.actions import MESSAGES, Action
from everstep.pipeline.schedules.simulation import Result, SimulatedAction


def render_text(result: Result, columns: int = 160) -> str:
    """At most `columns` characters a line, fewer where that shows as much.

    `F3` is the forward of micro-batch 3, `B` a full backward, `I` and `W` its halves, `S` and `R` a send and a receive
    that hold the rank. Small letters are the second stage of a rank; where a rank has more, a number before the letter
    is the stage. Where there is no room for a name, its kind stands alone or nothing. Dots are idle time.
    """
    ranks = [[event for event in result.timeline if event.rank == rank] for rank in range(len(result.spans))]
    names = {event: name for events in ranks for event, name in zip(events, _format_pids(events), strict=True)}
    margin = len(f"rank {len(ranks) - 1} ")
    scale = _choose_scale(result, names, columns - margin - 1)
    lines = []
    for rank, events in enumerate(ranks):
        cells = ["."] * (round(result.makespan * scale) + 1)
        for event in events:
            start, end = round(event.start * scale), round(event.end * scale)
            if end > start:
                inner = next((name for name in (names[event], event.action.kind) if len(name) < end - start), "")
                cells[start:end] = f"|{inner:{end - start - 1}}"
            cells[end] = "|"  # what comes next writes over it
        lines.append(f"{f'rank {rank}':{margin}}{''.join(cells)}")
    return "\n".join(lines) + "\n"


def label_action(action: Action, with_stage: bool) -> str:
    """`F3`, or `2F3` with its stage; of messages also the value's name."""
    name = f":{action.value}" if action.kind in MESSAGES else ""
    return f"{action.stage if with_stage else ''}{action.kind}{action.microbatch}{name}"


def _format_pids(events: Sequence[SimulatedAction]) -> Iterator[str]:
    stages = sorted({event.action.stage for event in events})
    for event in events:
        name = label_action(event.action, len(stages) > 2)
        second = len(stages) == 2 and event.action.stage == stages[1]
        yield name[0].lower() + name[1:] if second else name


def _choose_scale(result: Result, names: dict[SimulatedAction, str], columns: int) -> float:
    """Characters per second: as many as the longest name in the shortest action needs, if there are as many."""
    shortest = min((event.end - event.start for event in names if event.end > event.start), default=0.0)
    if not shortest:
        return 0.0
    most = columns / result.makespan
    wanted = (max(map(len, names.values())) + 1) / shortest
    # Of equal actions, all are equally long if the shortest has a whole number of characters.
    return min(wanted, int(most * shortest) / shortest if most * shortest >= 1 else most)
