"""The leader's state (001, `/v1/state`), read with suspicion: it comes out of a pod that runs the user's code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_LEDGER = 64
MAX_LIST = 4096
MAX_TEXT = 1024
MAX_TAIL = 20
MAX_ORDINAL = 999_999_999  # of an epoch or a generation: what the id of a charge has room for
PHASES = frozenset({"forming", "starting", "running", "stopping", "backoff", "ended"})
RESULTS = frozenset({"succeeded", "failed", "stopped"})


@dataclass(frozen=True, slots=True)
class Progress:
    step: int | None = None
    total_steps: int | None = None
    steps_per_second: float | None = None
    at: float | None = None


@dataclass(frozen=True, slots=True)
class Unclean:
    """A pod whose processes would not die: nothing may run there again."""

    index: int
    uid: str  # of the pod; empty from an agent that does not say
    message: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One ended generation."""

    id: str  # epoch.generation
    cause: str  # Application | OutOfMemory | PodLost | Leaving | Stopped | Fenced
    index: int | None = None
    rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    message: str = ""
    log_tail: tuple[str, ...] = ()
    started_at: float | None = None
    ended_at: float | None = None  # at the latest when the operator first heard of it

    @property
    def order(self) -> tuple[int, int]:
        return id_order(self.id)


@dataclass(frozen=True, slots=True)
class Outcome:
    result: str  # succeeded | failed | stopped
    exit_code: int | None = None
    message: str = ""
    failure: str = ""  # id of the ledger entry that ended the job


@dataclass(frozen=True, slots=True)
class LeaderView:
    """The last answer of the leader, and whether it still answers.

    `reachable` is the poller's opinion of its last attempt; a view that was never filled has `answered_at` None.
    `epoch` and `generation` are the leader's own (0 in a view that was never filled).
    """

    reachable: bool
    asked_since: float = 0.0  # when the operator, as it runs now, began to ask this leader
    answered_at: float | None = None
    incarnation: str = ""
    version: int = 0
    epoch: int = 0
    generation: int = 0
    phase: str = "forming"
    nodes: int = 0
    joined: int = 0
    missing: tuple[int, ...] = ()
    unclean: tuple[Unclean, ...] = ()
    running_since: float | None = None  # when the operator was first told that this generation runs (its own clock)
    progress: Progress | None = None
    ledger: tuple[Entry, ...] = ()
    outcome: Outcome | None = None


def leader_view(
    raw: Any, *, answered_at: float, reachable: bool = True, before: LeaderView | None = None
) -> LeaderView:
    """Parse `/v1/state`. Fields that are missing or of another type are as if they had not been sent.

    Args:
        raw: The decoded JSON.
        answered_at: When the answer came (Unix seconds).
        reachable: Whether the last attempt had an answer.
        before: The last view of this leader, if there was one: an entry ended no later than when it was first told of,
            and a generation runs since it was first told to run. The leader's own clock may be hours off.
    """
    data = _mapping(raw)
    incarnation = _text(data.get("incarnation"), 64)
    asked_since = before.asked_since if before is not None else answered_at
    if before is not None and before.incarnation != incarnation:
        before = None
    ended = {entry.id: entry.ended_at for entry in (before.ledger if before is not None else ())}
    phase = _text(data.get("phase"), 32)
    generation = ordinal(data.get("generation"))
    running_since = None
    if phase == "running":
        known = before.running_since if before is not None and before.generation == generation else None
        running_since = answered_at if known is None else known
    return LeaderView(
        reachable=reachable,
        asked_since=asked_since,
        answered_at=answered_at,
        incarnation=incarnation,
        version=_count(data.get("version")) or 0,
        epoch=ordinal(data.get("epoch")),
        generation=generation,
        phase=phase if phase in PHASES else "forming",
        nodes=_count(data.get("nodes")) or 0,
        joined=_count(data.get("joined")) or 0,
        missing=tuple(i for i in map(_count, _list(data.get("missing"), MAX_LIST)) if i is not None),
        unclean=tuple(_unclean(item) for item in _list(data.get("unclean"), MAX_LIST) if _has_index(item)),
        running_since=running_since,
        progress=progress_in(data.get("progress")),
        ledger=tuple(sorted(_entries(data.get("ledger"), ended, answered_at), key=lambda e: e.order)),
        outcome=_outcome(data.get("outcome")),
    )


def id_order(ledger_id: str) -> tuple[int, int]:
    """Return ("2.3" -> (2, 3)) by which generations are ordered. Anything else sorts before all of them."""
    epoch, dot, generation = ledger_id.partition(".")
    # isdecimal alone accepts digits of every script; more than nine of them no charge can hold
    plain = ledger_id.isascii() and epoch.isdecimal() and generation.isdecimal()
    if dot and plain and max(len(epoch), len(generation)) <= len(str(MAX_ORDINAL)):
        return int(epoch), int(generation)
    return -1, -1


def _unclean(item: Any) -> Unclean:
    return Unclean(_count(item["index"]) or 0, _text(item.get("uid"), 64), _text(item.get("message")))


def _has_index(item: Any) -> bool:
    return isinstance(item, Mapping) and _count(item.get("index")) is not None


def _entries(raw: Any, ended: Mapping[str, float | None], answered_at: float) -> list[Entry]:
    entries = []
    for item in _list(raw, MAX_LEDGER):
        data = _mapping(item)
        name = _text(data.get("id"), 32)
        if id_order(name) < (0, 0):
            continue
        entries.append(
            Entry(
                id=name,
                cause=_text(data.get("cause"), 32),
                index=_count(data.get("index")),
                rank=_count(data.get("rank")),
                exit_code=_integer(data.get("exitCode")),
                signal=_count(data.get("signal")),
                message=_text(data.get("message")),
                log_tail=tuple(_text(line, 512) for line in _list(data.get("logTail"), MAX_TAIL)),
                started_at=_number(data.get("startedAt")),
                ended_at=_not_after(_number(data.get("endedAt")), ended.get(name) or answered_at),
            )
        )
    return entries


def entries_in_words(raw: Any) -> tuple[Entry, ...]:
    """Return the generation history of a termination message: "epoch.generation cause" each, in the order of
    generations."""
    found = []
    for item in _list(raw, MAX_LEDGER):
        name, _, cause = _text(item, 64).partition(" ")
        if id_order(name) > (0, 0) and cause:
            found.append(Entry(name, cause))
    return tuple(sorted(found, key=lambda e: e.order))


def _not_after(at: float | None, limit: float) -> float | None:
    """Return a time, or the limit if that is earlier. A node's clock may be ahead of the API server's, which dates the
    pods: a replacement would look like the lost pod."""
    return None if at is None else min(at, limit)


def progress_in(raw: Any) -> Progress | None:
    data = _mapping(raw)
    if not data:
        return None
    rate = _number(data.get("stepsPerSecond"))
    return Progress(
        _count(data.get("step")),
        _count(data.get("totalSteps")),
        rate if rate is None or rate >= 0 else None,  # a status with a negative one would be refused, and the job stuck
        _number(data.get("at")),
    )


def _outcome(raw: Any) -> Outcome | None:
    data = _mapping(raw)
    result = _text(data.get("result"), 32)
    if result not in RESULTS:
        return None
    failure = _text(data.get("failure"), 32)
    return Outcome(result, _integer(data.get("exitCode")), _text(data.get("message")), failure)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any, limit: int) -> list[Any]:
    return value[-limit:] if isinstance(value, list) else []


def _text(value: Any, limit: int = MAX_TEXT) -> str:
    # JSON can spell half of a surrogate pair; such text is not UTF-8, and no status can hold it.
    return value[:limit].encode(errors="replace").decode() if isinstance(value, str) else ""


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else None


def ordinal(value: Any, default: int = 0) -> int:
    """Return an epoch, generation or index that was read, or `default` for what is none, or more than a charge holds.

    Args:
        value: An integer, or as labels have it its digits.
        default: Stands for anything else.
    """
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= len(str(MAX_ORDINAL)):
        return int(value)
    number = _count(value)
    return number if number is not None and number <= MAX_ORDINAL else default


def _count(value: Any) -> int | None:
    number = _integer(value)
    return number if number is not None and number >= 0 else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None
