"""The leader's state (001, `/v1/state`), read with suspicion: it comes out of a pod that runs the user's code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_HISTORY_ENTRIES = 64
MAX_LIST_ITEMS = 4096
MAX_SICK_GPUS = 32
MAX_TEXT_CHARS = 1024
MAX_TAIL_LINES = 20
MAX_ORDINAL = 999_999_999  # of an epoch or a generation: what the id of a charge has room for
PHASES = frozenset({"forming", "starting", "running", "stopping", "backoff", "ended"})
TIERS = frozenset({"memory", "peer", "store"})
MAX_TIME = 253_402_300_799.0  # the end of the year 9999
# An answer is no older than this when it comes, so what is not in it had not happened by then.
ANSWER_AGE_SECONDS = 10.0
RESULTS = frozenset({"succeeded", "failed", "stopped"})


@dataclass(frozen=True, slots=True)
class LeaderProgress:
    step: int | None = None
    total_steps: int | None = None
    steps_per_second: float | None = None
    at: float | None = None


@dataclass(frozen=True, slots=True)
class RequestedCheckpoint:
    """The newest request for a checkpoint that the leader has had."""

    id: str
    saved_step: int | None = None  # of the checkpoint that was saved for it, once that is committed


@dataclass(frozen=True, slots=True)
class ReportedRestore:
    """The start of a generation from a checkpoint, or from none."""

    id: str  # of the generation
    step: int
    tier: str = ""  # memory, peer or store; empty: not told
    seconds: float | None = None
    passed_over: int = 0  # newer checkpoints that are damaged
    lost_steps: int | None = None  # None: the last step before it was told to another leader


@dataclass(frozen=True, slots=True)
class ReportedCheckpoint:
    """The newest checkpoint, and saves that failed since then."""

    step: int | None = None
    bytes: int | None = None
    at: float | None = None
    stall_seconds: float | None = None  # that the newest save held up training
    failed_saves: int = 0
    restored: ReportedRestore | None = None
    every: int | None = None  # seconds between two saves; 0: not by time
    trained_step: int | None = None  # the last step, counted as checkpoints are
    steps_per_second: float | None = None  # of these


@dataclass(frozen=True, slots=True)
class UncleanPod:
    """A pod whose processes would not die: nothing may run there again."""

    index: int
    uid: str  # of the pod
    message: str


@dataclass(frozen=True, slots=True)
class SickGpu:
    """A device of which an agent reports a problem."""

    index: int  # of its pod
    name: str  # the model
    problem: str


@dataclass(frozen=True, slots=True)
class ReportedGeneration:
    """One ended generation."""

    id: str  # epoch.generation
    cause: str  # Application | OutOfMemory | Hang | PodLost | Leaving | Stopped | Fenced
    index: int | None = None
    rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    message: str = ""
    log_tail: tuple[str, ...] = ()
    started_at: float | None = None
    ended_at: float | None = None  # between the last answer without it and the first one with it

    @property
    def order(self) -> tuple[int, int]:
        return parse_generation_id(self.id)


@dataclass(frozen=True, slots=True)
class LeaderOutcome:
    result: str  # succeeded | failed | stopped
    exit_code: int | None = None
    message: str = ""
    failure: str = ""  # id of the entry that ended the job


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
    quiet: tuple[int, ...] = ()  # agents that have missed some heartbeats; most will be heard again
    unclean: tuple[UncleanPod, ...] = ()
    sick_gpus: tuple[SickGpu, ...] = ()
    # When the operator was first told that this generation runs, by its own clock. None too if it ran already when this
    # process first asked: that may be years ago, or it has just broken and the leader does not know yet.
    running_since: float | None = None
    progress: LeaderProgress | None = None
    checkpoint: ReportedCheckpoint | None = None
    checkpoint_request: RequestedCheckpoint | None = None
    history: tuple[ReportedGeneration, ...] = ()
    outcome: LeaderOutcome | None = None


def parse_leader_state(raw: Any, *, answered_at: float, before: LeaderView | None = None) -> LeaderView:
    """Parse `/v1/state`. Fields that are missing or of another type are as if they had not been sent.

    Args:
        raw: The decoded JSON.
        answered_at: When the answer came (Unix seconds).
        before: The last view of this leader, if there was one: what is new has happened since then, and no later than
            it was first told, and a generation runs since it was first told to run. The leader's own clock may be hours
            off, or stand behind by as long as its machine was suspended.
    """
    data = _as_mapping(raw)
    incarnation = _as_text(data.get("incarnation"), 64)
    asked_since = before.asked_since if before is not None else answered_at
    is_first = before is None or before.answered_at is None
    if before is not None and before.incarnation != incarnation:
        before = None
    ended = {entry.id: entry.ended_at for entry in (before.history if before is not None else ())}
    earliest = before.answered_at - ANSWER_AGE_SECONDS if before is not None and before.answered_at is not None else 0.0
    phase = _as_text(data.get("phase"), 32)
    generation = parse_ordinal(data.get("generation"))
    running_since = None
    if phase == "running" and not is_first:
        goes_on = before is not None and (before.phase, before.generation) == ("running", generation)
        running_since = before.running_since if before is not None and goes_on else answered_at
    return LeaderView(
        reachable=True,
        asked_since=asked_since,
        answered_at=answered_at,
        incarnation=incarnation,
        version=_as_count(data.get("version")) or 0,
        epoch=parse_ordinal(data.get("epoch")),
        generation=generation,
        phase=phase if phase in PHASES else "forming",
        nodes=_as_count(data.get("nodes")) or 0,
        joined=_as_count(data.get("joined")) or 0,
        missing=_parse_indices(data.get("missing")),
        quiet=_parse_indices(data.get("quiet")),
        unclean=tuple(
            _parse_unclean(item) for item in _as_list(data.get("unclean"), MAX_LIST_ITEMS) if _has_index(item)
        ),
        sick_gpus=tuple(
            _parse_sick_gpu(item)
            for item in _as_list(_as_mapping(data.get("gpus")).get("devices"), MAX_SICK_GPUS)
            if _has_index(item)
        ),
        running_since=running_since,
        progress=parse_progress(data.get("progress")),
        checkpoint=parse_checkpoint(
            data.get("checkpoint"), answered_at, earliest, before.checkpoint if before is not None else None
        ),
        checkpoint_request=_parse_checkpoint_request(data.get("checkpointRequest")),
        history=tuple(
            sorted(_parse_history(data.get("generationHistory"), ended, earliest, answered_at), key=lambda e: e.order)
        ),
        outcome=_parse_outcome(data.get("outcome")),
    )


def parse_generation_id(generation_id: str) -> tuple[int, int]:
    """Return ("2.3" -> (2, 3)) by which generations are ordered. Anything else sorts before all of them."""
    epoch, dot, generation = generation_id.partition(".")
    # isdecimal alone accepts digits of every script; more than nine of them no charge can hold
    plain = generation_id.isascii() and epoch.isdecimal() and generation.isdecimal()
    if dot and plain and max(len(epoch), len(generation)) <= len(str(MAX_ORDINAL)):
        return int(epoch), int(generation)
    return -1, -1


def _parse_indices(raw: Any) -> tuple[int, ...]:
    return tuple(i for i in map(_as_count, _as_list(raw, MAX_LIST_ITEMS)) if i is not None)


def _parse_unclean(item: Any) -> UncleanPod:
    return UncleanPod(_as_count(item["index"]) or 0, _as_text(item.get("uid"), 64), _as_text(item.get("message")))


def _parse_sick_gpu(item: Any) -> SickGpu:
    return SickGpu(_as_count(item["index"]) or 0, _as_text(item.get("name"), 64), _as_text(item.get("problem"), 128))


def _has_index(item: Any) -> bool:
    return isinstance(item, Mapping) and _as_count(item.get("index")) is not None


def _parse_history(
    raw: Any, ended: Mapping[str, float | None], earliest: float, answered_at: float
) -> list[ReportedGeneration]:
    entries = []
    for item in _as_list(raw, MAX_HISTORY_ENTRIES):
        data = _as_mapping(item)
        name = _as_text(data.get("id"), 32)
        if parse_generation_id(name) < (0, 0):
            continue
        entries.append(
            ReportedGeneration(
                id=name,
                cause=_as_text(data.get("cause"), 32),
                index=_as_count(data.get("index")),
                rank=_as_count(data.get("rank")),
                exit_code=_as_integer(data.get("exitCode")),
                signal=_as_count(data.get("signal")),
                message=_as_text(data.get("message")),
                log_tail=tuple(_as_text(line, 512) for line in _as_list(data.get("logTail"), MAX_TAIL_LINES)),
                started_at=_as_number(data.get("startedAt")),
                ended_at=ended.get(name) or _clamp_time(_as_number(data.get("endedAt")), earliest, answered_at),
            )
        )
    return entries


def parse_history_words(raw: Any) -> tuple[ReportedGeneration, ...]:
    """Return the generation history of a termination message: "epoch.generation cause" each, in the order of
    generations."""
    found = []
    for item in _as_list(raw, MAX_HISTORY_ENTRIES):
        name, _, cause = _as_text(item, 64).partition(" ")
        if parse_generation_id(name) > (0, 0) and cause:
            found.append(ReportedGeneration(name, cause))
    return tuple(sorted(found, key=lambda e: e.order))


def _clamp_time(at: float | None, earliest: float, latest: float) -> float | None:
    """Return the possible time that is nearest to the one that is told.

    A node's clock may be ahead of the API server's, which dates the pods: a replacement would look like the lost pod.
    Or behind it: the lost pod would look like its replacement, and each save as if it were overdue.
    """
    return None if at is None else min(max(at, earliest), latest)


def parse_progress(raw: Any) -> LeaderProgress | None:
    data = _as_mapping(raw)
    if not data:
        return None
    return LeaderProgress(
        _as_count(data.get("step")),
        _as_count(data.get("totalSteps")),
        _as_amount(data.get("stepsPerSecond")),
        _as_number(data.get("at")),
    )


def parse_checkpoint(
    raw: Any, answered_at: float, earliest: float = 0.0, before: ReportedCheckpoint | None = None
) -> ReportedCheckpoint | None:
    """Return what is said of the job's checkpoints; None where nothing is.

    Args:
        raw: The decoded JSON.
        answered_at: When it came, in Unix seconds: nothing was saved later.
        earliest: What is new in it was not saved before (Unix seconds).
        before: What was last said.
    """
    data = _as_mapping(raw)
    if not data:
        return None
    step, at = _as_count(data.get("step")), _clamp_time(_as_time(data.get("at")), earliest, answered_at)
    if before is not None and before.step == step and before.at is not None:
        at = before.at
    return ReportedCheckpoint(
        step=step,
        bytes=_as_count(data.get("bytes")),
        at=at,
        stall_seconds=_as_amount(data.get("stallSeconds")),
        failed_saves=_as_count(data.get("failedSaves")) or 0,
        restored=_parse_restore(data.get("restored")),
        every=_as_count(data.get("every")),
        trained_step=_as_count(data.get("trainedStep")),
        steps_per_second=_as_amount(data.get("stepsPerSecond")),
    )


def _parse_restore(raw: Any) -> ReportedRestore | None:
    data = _as_mapping(raw)
    name, step = _as_text(data.get("id"), 32), _as_count(data.get("step"))
    if parse_generation_id(name) < (0, 0) or step is None:
        return None
    tier = _as_text(data.get("tier"), 16)
    return ReportedRestore(
        id=name,
        step=step,
        tier=tier if tier in TIERS else "",
        seconds=_as_amount(data.get("seconds")),
        passed_over=_as_count(data.get("passedOver")) or 0,
        lost_steps=_as_count(data.get("lostSteps")),
    )


def _parse_checkpoint_request(raw: Any) -> RequestedCheckpoint | None:
    data = _as_mapping(raw)
    name = _as_text(data.get("id"), 64)
    return RequestedCheckpoint(name, _as_count(data.get("savedStep"))) if name else None


def _parse_outcome(raw: Any) -> LeaderOutcome | None:
    data = _as_mapping(raw)
    result = _as_text(data.get("result"), 32)
    if result not in RESULTS:
        return None
    failure = _as_text(data.get("failure"), 32)
    return LeaderOutcome(result, _as_integer(data.get("exitCode")), _as_text(data.get("message")), failure)


def _as_time(value: Any) -> float | None:
    """Return Unix seconds that a date can hold."""
    number = _as_number(value)
    return number if number is not None and 0 < number < MAX_TIME else None


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _as_list(value: Any, limit: int) -> list[Any]:
    return value[-limit:] if isinstance(value, list) else []


def _as_text(value: Any, limit: int = MAX_TEXT_CHARS) -> str:
    # JSON can spell half of a surrogate pair; such text is not UTF-8, and no status can hold it.
    return value[:limit].encode(errors="replace").decode() if isinstance(value, str) else ""


def _as_integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else None


def parse_ordinal(value: Any, default: int = 0) -> int:
    """Return an epoch, generation or index that was read, or `default` for what is none, or more than a charge holds.

    Args:
        value: An integer, or as labels have it its digits.
        default: Stands for anything else.
    """
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= len(str(MAX_ORDINAL)):
        return int(value)
    number = _as_count(value)
    return number if number is not None and number <= MAX_ORDINAL else default


def _as_count(value: Any) -> int | None:
    number = _as_integer(value)
    return number if number is not None and number >= 0 else None


def _as_amount(value: Any) -> float | None:
    amount = _as_number(value)  # a status with a negative one would be refused, the job stuck
    return amount if amount is None or amount >= 0 else None


def _as_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None
