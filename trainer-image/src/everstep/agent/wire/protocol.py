"""Messages between agents and their leader, as values. Whatever comes from the wire is bounded here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from .rank_checkpoint import RankCheckpoint

MESSAGE_CHARS = 1024
TAIL_LINES = 20
TAIL_CHARS = 400
MAX_GPUS = 64  # of a node; eight devices cut into seven slices each are 56
TAILS_PER_REPORT = 8  # a node may have a hundred ranks, and all of them may fail: the first ones tell why
WORDS_PER_REPORT = 640 * 1024  # bytes of messages and tails, encoded; a frame has room for 2,000 exits beside them
MAX_KNOWN_GENERATION = 999_000_000  # a leader goes on after it, and its ids have nine digits at most
MAX_INTEGER = 2**53  # JSON readers keep no more
RANKS_PER_BEAT = 32  # each may have 32 metrics with long names, which together are a third of a frame

# Causes of an ended generation.
APPLICATION = "Application"
OUT_OF_MEMORY = "OutOfMemory"
POD_LOST = "PodLost"
LEAVING = "Leaving"
STOPPED = "Stopped"
FENCED = "Fenced"
HANG = "Hang"

# Phases of the leader.
FORMING = "forming"
STARTING = "starting"
RUNNING = "running"
STOPPING = "stopping"
BACKOFF = "backoff"
ENDED = "ended"

# Results, of the job and of an agent's last word.
SUCCEEDED = "succeeded"
FAILED = "failed"
STOPPED_RESULT = "stopped"
LEFT = "left"
FENCED_RESULT = "fenced"
UNCLEAN = "unclean"


class ProcessExit(NamedTuple):
    """The end of one process that belongs to a generation. `rank` is None for the launcher and for a failed start."""

    rank: int | None
    exit_code: int
    signal: int | None = None
    oom: bool = False
    message: str = ""
    log_tail: tuple[str, ...] = ()
    launcher: bool = False
    echo: bool = False  # likely the consequence of another failure, by all of its words; not all of them are sent

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def status(self) -> int:
        """Return what a shell would say: the exit code, or 128 + signal."""
        return 128 + self.signal if self.signal else self.exit_code

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "exitCode": self.exit_code,
            "signal": self.signal,
            "oom": self.oom,
            "message": self.message[:MESSAGE_CHARS],
            "logTail": bounded_tail(self.log_tail),
            "launcher": self.launcher,
            "echo": self.echo,
        }

    def within(self, room: int, tail: bool) -> ProcessExit:
        """Return this exit with as much of its message and log tail as fits.

        Args:
            room: Bytes for both, encoded.
            tail: Whether it may have a log tail.
        """
        message, lines = self.message[:MESSAGE_CHARS], tuple(bounded_tail(self.log_tail))
        if lines and (not tail or _count_encoded_bytes(message) + _count_encoded_bytes(lines) > room):
            lines = ()
        while message and _count_encoded_bytes(message) + _count_encoded_bytes(lines) > room:
            message = message[: len(message) // 2]
        return self._replace(message=message, log_tail=lines)

    @property
    def words(self) -> int:
        """Bytes of its message and its log tail, encoded."""
        return _count_encoded_bytes(self.message) + _count_encoded_bytes(self.log_tail)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProcessExit:
        return cls(
            rank=_as_optional_count(data.get("rank")),
            exit_code=_as_integer(data.get("exitCode")),
            signal=_as_optional_integer(data.get("signal")),
            oom=data.get("oom") is True,
            message=_as_text(data.get("message")),
            log_tail=tuple(bounded_tail(data.get("logTail"))),
            launcher=data.get("launcher") is True,
            echo=data.get("echo") is True,
        )


class GenerationReport(NamedTuple):
    """All that a node knows of one generation: a snapshot, so that a lost or merged report loses nothing."""

    epoch: int
    generation: int
    started: int = 0  # ranks, ended ones included
    exits: tuple[ProcessExit, ...] = ()
    clean: bool = False  # nothing of the generation is left on the node
    unclean: str = ""  # why it cannot be made clean

    def to_json(self) -> dict[str, Any]:
        tails, room = 0, WORDS_PER_REPORT
        exits = []
        for end in self.exits:
            tail = not end.ok and tails < TAILS_PER_REPORT
            tails += tail
            told = end.within(room, tail)
            room -= told.words
            exits.append(told.to_json())
        return {
            "type": "report",
            "epoch": self.epoch,
            "generation": self.generation,
            "started": self.started,
            "exits": exits,
            "clean": self.clean,
            "unclean": self.unclean[:MESSAGE_CHARS],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> GenerationReport:
        return cls(
            epoch=_as_count(data.get("epoch")),
            generation=_as_count(data.get("generation")),
            started=_as_count(data.get("started")),
            exits=tuple(ProcessExit.from_json(e) for e in _as_objects(data.get("exits"))),
            clean=data.get("clean") is True,
            unclean=_as_text(data.get("unclean")),
        )


class Gpu(NamedTuple):
    """One device of a node, as its driver describes it."""

    uuid: str
    name: str
    problem: str = ""  # why it is not healthy

    def to_json(self) -> dict[str, Any]:
        return {"uuid": self.uuid[:64], "name": self.name[:64], "problem": self.problem[:128]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Gpu:
        return cls(
            _as_text(data.get("uuid"))[:64], _as_text(data.get("name"))[:64], _as_text(data.get("problem"))[:128]
        )


def gpus_to_json(gpus: tuple[Gpu, ...]) -> list[dict[str, Any]]:
    return [gpu.to_json() for gpu in gpus[:MAX_GPUS]]


def gpus_from_json(value: Any) -> tuple[Gpu, ...]:
    return tuple(Gpu.from_json(gpu) for gpu in _as_objects(value)[:MAX_GPUS])


@dataclass(frozen=True)
class Hello:
    """An agent's first word on a link."""

    index: int
    pod_uid: str
    address: str  # ip:port
    incarnation: str
    epoch: int = 0  # of the generation that it knows
    generation: int = 0
    clean: bool = True
    unclean: str = ""
    gpus: tuple[Gpu, ...] = ()  # empty, too, until the driver has answered: a beat tells then

    def to_json(self) -> dict[str, Any]:
        return {
            "type": "hello",
            "protocol": 1,
            "index": self.index,
            "podUid": self.pod_uid,
            "address": self.address,
            "incarnation": self.incarnation,
            "epoch": self.epoch,
            "generation": self.generation,
            "clean": self.clean,
            "unclean": self.unclean[:MESSAGE_CHARS],
            "gpus": gpus_to_json(self.gpus),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Hello:
        return cls(
            index=_as_count(data.get("index")),
            pod_uid=_as_text(data.get("podUid"))[:64],
            address=canonical_address(_as_text(data.get("address"))[:256]),
            incarnation=_as_text(data.get("incarnation"))[:64],
            epoch=_as_count(data.get("epoch")),
            generation=_as_count(data.get("generation")),
            clean=data.get("clean") is True,
            unclean=_as_text(data.get("unclean")),
            gpus=gpus_from_json(data.get("gpus", [])),
        )


class RankProgress(NamedTuple):
    rank: int
    step: int | None = None
    total: int | None = None
    phase: str = ""
    metrics: Mapping[str, float] = MappingProxyType({})
    checkpoint: RankCheckpoint | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "step": self.step,
            "total": self.total,
            "phase": self.phase[:32],
            "metrics": dict(list(self.metrics.items())[:32]),
            **({} if self.checkpoint is None else {"checkpoint": self.checkpoint.to_json()}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankProgress:
        metrics = data.get("metrics")
        items = list(metrics.items())[:32] if isinstance(metrics, dict) else []
        return cls(
            rank=_as_count(data.get("rank")),
            step=_as_optional_count(data.get("step")),
            total=_as_optional_count(data.get("total")),
            phase=_as_text(data.get("phase"))[:32],
            metrics={str(k)[:64]: float(v) for k, v in items if isinstance(v, (int, float)) and math.isfinite(v)},
            checkpoint=RankCheckpoint.from_json(data.get("checkpoint")),
        )


def split_beats(
    order: tuple[int, int], ranks: list[RankProgress], gpus: tuple[Gpu, ...] | None
) -> Iterator[dict[str, Any]]:
    """Return the messages of one heartbeat, of which each fits into a frame.

    Args:
        order: Epoch and generation of the ranks.
        ranks: Those that have something new to say.
        gpus: All devices of the node, if anything about them is new.
    """
    for first in range(0, max(1, len(ranks)), RANKS_PER_BEAT):
        told = [rank.to_json() for rank in ranks[first : first + RANKS_PER_BEAT]]
        beat = {"type": "beat", "epoch": order[0], "generation": order[1], "ranks": told}
        yield beat if gpus is None or first else {**beat, "gpus": gpus_to_json(gpus)}


@dataclass(frozen=True)
class EndedGeneration:
    """One generation that ended without success."""

    epoch: int
    generation: int
    cause: str
    index: int | None
    rank: int | None
    exit_code: int | None
    signal: int | None
    message: str
    log_tail: tuple[str, ...]
    started_at: float  # wall clock, seconds
    ended_at: float

    @property
    def id(self) -> str:
        return f"{self.epoch}.{self.generation}"

    @property
    def order(self) -> tuple[int, int]:
        return self.epoch, self.generation

    @property
    def application(self) -> bool:
        return self.cause in (APPLICATION, OUT_OF_MEMORY, HANG)

    @property
    def status(self) -> int:
        if self.signal:
            return 128 + self.signal
        return self.exit_code or 1

    def to_json(self, tail: bool) -> dict[str, Any]:
        return {
            "id": self.id,
            "cause": self.cause,
            "index": self.index,
            "rank": self.rank,
            "exitCode": self.exit_code,
            "signal": self.signal,
            "message": self.message,
            "logTail": list(self.log_tail) if tail else [],
            "startedAt": self.started_at,
            "endedAt": self.ended_at,
        }


class Outcome(NamedTuple):
    """An end of the job; it never changes again."""

    result: str
    exit_code: int
    message: str
    failure: str | None = None  # id of the entry

    def to_message(self) -> dict[str, Any]:
        """Return the leader's `end` message, the same for every node."""
        return {"type": "end", "result": self.result, "exitCode": self.exit_code, "message": self.message}

    def to_json(self) -> dict[str, Any]:
        return {
            "result": self.result,
            "exitCode": self.exit_code,
            "message": self.message,
            "failure": self.failure,
        }


def parse_order(message: Mapping[str, Any]) -> tuple[int, int]:
    """Return epoch and generation of a message.

    Raises:
        ValueError: One of them is missing, or not a number that an epoch or a generation can have.
    """
    return _as_count(message.get("epoch")), _as_count(message.get("generation"))


def parse_generation_id(text: str) -> tuple[int, int]:
    """Return a generation's id as (epoch, generation); (0, 0), which is before all, for an empty one."""
    if not text:
        return 0, 0
    epoch, _, generation = text.partition(".")
    if not (epoch.isdecimal() and generation.isdecimal()) or len(text) > 32:
        raise ValueError(f"not a generation's id: {text[:40]!r}")
    return int(epoch), int(generation)


def host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def canonical_address(address: str) -> str:
    """Return an ip:port as agents write it. Of an IPv6 address there are two spellings, and both must be the same
    place."""
    host, colon, port = address.rpartition(":")
    return f"[{host}]:{port}" if colon and ":" in host and not host.startswith("[") else address


def is_address(text: Any) -> bool:
    if not isinstance(text, str) or len(text) > 256:
        return False
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536


def bounded_tail(lines: Any) -> list[str]:
    if not isinstance(lines, (list, tuple)):
        return []
    return [str(line)[:TAIL_CHARS] for line in lines[-TAIL_LINES:]]


def _count_encoded_bytes(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def _as_text(value: Any) -> str:
    return value[:MESSAGE_CHARS] if isinstance(value, str) else ""


def _as_integer(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"not an integer: {str(value)[:40]!r}")
    if abs(value) > MAX_INTEGER:
        raise ValueError(f"an integer of {value.bit_length()} bits is too large")
    return value


def _as_count(value: Any) -> int:
    number = _as_integer(value)
    if number < 0:
        raise ValueError(f"a negative number where none can be: {number}")
    return number


def _as_optional_count(value: Any) -> int | None:
    return None if value is None else _as_count(value)


def _as_optional_integer(value: Any) -> int | None:
    return None if value is None else _as_integer(value)


def _as_objects(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
        raise ValueError("not a list of objects")
    return value
